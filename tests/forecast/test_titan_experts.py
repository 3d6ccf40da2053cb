"""How torchtitan orders the tokens of experts and sums their results, by torch's own kernels."""

import pytest

from ahp.cluster.model import Cluster
from ahp.engines.registry import get
from ahp.engines.traits import ExpertTraits
from ahp.forecast.axes import axes_of
from ahp.forecast.communication import Network
from ahp.forecast.dispatch import sorted_s
from ahp.forecast.efficiency import Rates
from ahp.forecast.group import Group
from ahp.forecast.titan_experts import (
    ADDED_ADDRESSES,
    ATOMIC_BYTES,
    BATCHED_ADDRESSES,
    PUT_ADDRESSES,
    SCALED_BYTES,
    moved_by_torch,
)
from ahp.forecast.units import UnitPricer
from ahp.graph.kept import analyze
from ahp.graph.operators import Operator, TensorSpec
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism

TOKENS, TOP, HIDDEN = 2048, 2, 512
COPIES = TOKENS * TOP * HIDDEN
QWEN = {
    "model_type": "qwen3_moe", "hidden_size": HIDDEN, "intermediate_size": 1024, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64, "vocab_size": 512, "moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": TOP,
    "max_position_embeddings": TOKENS,
}  # fmt: skip


@pytest.fixture(scope="module")
def qwen():
    return analyze(QWEN, Job(sequence_length=TOKENS))


def of_phase(segment, found):
    """By phase: (sum of bytes, addresses in order), in copies of all tokens."""
    phases = {"forward": [], "backward": []}
    for index, count in found.addresses.items():
        phases[segment.operators[index].phase].append(count / COPIES)
    return sum(found.more_bytes.values()) / COPIES, phases["forward"], phases["backward"]


@pytest.mark.slow
def test_a_scatter_adds_the_results_and_a_compiler_makes_the_rest(qwen):
    segment = qwen.blocks[0]
    moved, forward, backward = of_phase(segment, moved_by_torch(segment, "scattered", compiled=True))
    assert (moved, forward, backward) == (SCALED_BYTES[0], [ADDED_ADDRESSES], [])
    moved, forward, backward = of_phase(segment, moved_by_torch(segment, "scattered", compiled=False))
    assert (moved, forward, backward) == (SCALED_BYTES[1], [ADDED_ADDRESSES], [ADDED_ADDRESSES])


def test_a_batched_product_is_slow_in_the_backward_pass(qwen):
    segment = qwen.blocks[0]
    _, forward, backward = of_phase(segment, moved_by_torch(segment, "batched", compiled=False))
    assert forward == [PUT_ADDRESSES]
    assert sorted(backward) == [ADDED_ADDRESSES, BATCHED_ADDRESSES]


def test_with_deepep_both_sums_are_atomic(qwen):
    segment = qwen.blocks[0]
    assert of_phase(segment, moved_by_torch(segment, "atomic", compiled=True)) == (ATOMIC_BYTES[0], [], [])
    assert of_phase(segment, moved_by_torch(segment, "atomic", compiled=False)) == (
        ATOMIC_BYTES[1],
        [PUT_ADDRESSES],
        [PUT_ADDRESSES],
    )


def test_a_segment_without_experts_has_none_of_it(qwen):
    assert moved_by_torch(qwen.head, "batched", compiled=False) == ({}, {})


def test_releases_of_torchtitan_differ(qwen):
    nodes = Cluster.parse("1x8xB200-SXM").groups[0]

    def seconds(version, **choice):
        engine = EngineChoice(version=version, compile=True, **choice)
        traits = get("torchtitan").traits(Job(), Parallelism(), engine)
        times = UnitPricer(qwen, nodes, Network(nodes), "bf16").units(1, axes_of(Parallelism(), 8), traits)
        return times.blocks[0].times.forward.device_s + times.blocks[0].times.backward_s

    batched, scattered, compiled = (seconds(day) for day in ("2026-04-05", "2026-04-10", "2026-04-20"))
    assert batched > scattered > compiled


def test_rows_that_arrive_are_put_and_added_one_element_at_a_time():
    rates = Rates(Cluster.parse("1xB200-SXM").groups[0].device, None, 1)
    tensors = TensorSpec((196608, 2048), "bfloat16"), TensorSpec((16, 2048, 1536), "bfloat16")
    grouped = Operator(0, "aten._grouped_mm", "", "forward", tensors, (), (), (), 1, 0, 0)
    by_memory = ExpertTraits(sorts_arrived=True)
    least = sorted_s(grouped, 1.0, Group(2, 2, 1), by_memory, rates)
    found = sorted_s(grouped, 1.0, Group(2, 2, 1), by_memory._replace(sorts_by_torch=True), rates)
    # 1.848 ms of pytorch/ao pull request 4623 in the backward pass, and a kernel in the forward pass that puts each element once
    kernels_s = (1.848e-3 + 1.848e-3 / ADDED_ADDRESSES) / 2
    assert found - least / 2 == pytest.approx(kernels_s, rel=0.01)
