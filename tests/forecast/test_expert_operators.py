"""What of a block works on the tokens of experts, and what it takes where kernels are fused."""

from dataclasses import replace

import pytest

from ahp.cluster.catalogue import find
from ahp.engines.fp8 import NVIDIAS_FP8
from ahp.engines.traits import KernelTraits
from ahp.forecast.compute import Launched
from ahp.forecast.division import GROUPED, Division, is_weight_gradient
from ahp.forecast.efficiency import Rates
from ahp.forecast.expert_operators import ExpertOperators
from ahp.forecast.kernels import kernels
from ahp.forecast.operator_times import Computing
from ahp.forecast.split import split
from ahp.graph.kept import analyze
from ahp.job import Job

RATES = Rates(find("GB200").device, None, 8)


@pytest.fixture(scope="module")
def block():
    keys = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 8}
    keys |= {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 4, "vocab_size": 512}
    return analyze({"model_type": "mixtral", **keys}, Job(sequence_length=1024)).blocks[0]


def times(block, *, fused_permutation=False, **recipe):
    fp8 = replace(NVIDIAS_FP8, **recipe)
    how = Computing(kernels(block, KernelTraits("fused")), causal=True, fp8=fp8, accumulates=True)
    run = Launched(block, how, fused_permutation=fused_permutation)
    return run.times(Division(split(block, "block"), expert=8), RATES)


@pytest.mark.slow
def test_activations_lie_between_products_and_copies_around_them(block):
    found, by_index = (
        ExpertOperators.of(block, kernels(block, KernelTraits("fused"))),
        {op.index: op for op in block.operators},
    )
    assert not found.between & found.permuting
    assert any("silu" in by_index[i].name for i in found.between)
    assert any("index" in by_index[i].name for i in found.permuting if by_index[i].phase == "forward")
    assert all(by_index[i].flops == 0 for i in found.between | found.permuting)
    grouped = [op for op in block.operators if op.name in GROUPED]
    reads = [op for op in grouped if op.index in found.after_chains]
    assert [op.phase for op in reads] == ["forward", "backward"]  # down, and the input gradient of gate with up
    assert not any(is_weight_gradient(op) for op in reads)
    assert found.stashed_bytes > 0


def test_tokens_come_back_as_they_went(block):
    indexed, fused = times(block), times(block, fused_permutation=True)
    assert fused.forward == indexed.forward
    assert fused.input_gradient.device_s < indexed.input_gradient.device_s
    assert fused.input_gradient.launches < indexed.input_gradient.launches


def test_a_fused_kernel_of_experts_leaves_their_activation_and_half_of_the_casts_out(block):
    apart, fused = times(block, fused_permutation=True), times(block, fused_permutation=True, fused_experts=True)
    assert fused.products.device_s < apart.products.device_s
    assert fused.weight_gradient.device_s <= apart.weight_gradient.device_s
    without = times(block, fused_permutation=True, experts=False)
    assert without.products.device_s > apart.products.device_s  # 16 bits


@pytest.mark.slow
def test_attention_in_8_bits_is_faster_and_casts_what_it_reads(block):
    half, eight = times(block), times(block, attention=True)
    assert 0 < eight.attention.device_s != half.attention.device_s
    long = analyze(
        {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 1, "num_attention_heads": 16,
         "num_key_value_heads": 16, "vocab_size": 512, "max_position_embeddings": 8192}, Job(sequence_length=8192)
    ).blocks[0]  # fmt: skip
    assert times(long, attention=True).attention.device_s < times(long).attention.device_s
    assert times(long, attention=True).attention_backward.device_s < times(long).attention_backward.device_s
