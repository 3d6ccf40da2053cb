"""Times of operators: closed forms, measured tables, and what division and fusion change."""

from types import SimpleNamespace
from typing import Any, get_args

import pytest

from ahp.cluster.model import (
    AttentionSample,
    Cluster,
    ElementWiseSample,
    MatmulSample,
    Measurements,
    MemorySample,
    ProductPhase,
)
from ahp.engines.traits import KernelTraits
from ahp.forecast.compute import BACKWARD_LAUNCHES, Launched, is_causal
from ahp.forecast.division import Division, product_phase
from ahp.forecast.efficiency import CPU_ATTENTION, Rates
from ahp.forecast.kernels import Kernels, kernels
from ahp.forecast.operator_times import Computing, operator_s, reads_mask
from ahp.forecast.segment import recomputed
from ahp.forecast.split import TensorSplit, split
from ahp.graph.kept import analyze
from ahp.job import Job

from .conftest import make_cluster, op, spec

DEVICE = make_cluster().groups[0].device
NOTHING_SPLIT = TensorSplit(*(frozenset(),) * 5, (), ())
SAMPLES = Measurements(
    matmul=tuple(
        MatmulSample(m=m, n=n, k=k, dtype="float32", workers=w, seconds=2 * m * n * k / (rate / w))
        for w in (1, 4)
        for (m, n, k), rate in {
            (64, 64, 64): 1e9,
            (512, 512, 512): 8e9,
            (512, 64, 64): 2e9,
            (64, 512, 512): 4e9,
        }.items()
    ),
    memory=(MemorySample(workers=1, bytes_per_s=9e9), MemorySample(workers=4, bytes_per_s=3e9)),
)


def test_measured_products_come_back_as_measured():
    for workers, share in ((1, 1), (4, 4), (3, 4)):  # 3 workers: the nearest table is that of 4
        rates = Rates(DEVICE, SAMPLES, workers)
        assert rates.matmul_s(1, 512, 512, 512, "fp32") == pytest.approx(2 * 512**3 / (8e9 / share))
        assert rates.bytes_per_s == (9e9 if workers == 1 else 3e9)
    between = Rates(DEVICE, SAMPLES, 1).matmul_s(1, 200, 200, 200, "fp32")
    assert 2 * 200**3 / 8e9 < between < 2 * 200**3 / 1e9


def test_gradients_come_back_as_measured_and_else_as_forward_products():
    shape = (256, 128, 512)
    slow = MatmulSample(phase="input_gradient", m=256, n=128, k=512, dtype="fp32", workers=1, seconds=1.0)
    rates = Rates(DEVICE, SAMPLES.model_copy(update={"matmul": (*SAMPLES.matmul, slow)}), 1)
    forward_s = rates.matmul_s(1, *shape, "fp32")
    assert rates.matmul_s(1, *shape, "fp32", phase="input_gradient") == pytest.approx(1.0)
    assert rates.matmul_s(1, *shape, "fp32", phase="weight_gradient") == forward_s < 1.0
    assert rates.matmul_s(1, *shape, "bf16", phase="input_gradient") == rates.matmul_s(1, *shape, "bf16")


def test_no_product_is_faster_than_the_fastest_of_any_phase():
    fast = MatmulSample(phase="weight_gradient", m=8, n=8, k=8, dtype="fp32", workers=1, seconds=2 * 8**3 / 9e10)
    rates = Rates(DEVICE, SAMPLES.model_copy(update={"matmul": (*SAMPLES.matmul, fast)}), 1)
    assert rates.fastest("fp32", attention=False) == pytest.approx(9e10)


def test_each_product_of_a_block_has_its_phase():
    block = analyze("tiny", Job(precision="fp32")).blocks[0]
    products = [op for op in block.operators if op.flops and "attention" not in op.name]
    phases = {phase: [op for op in products if product_phase(op) == phase] for phase in get_args(ProductPhase)}
    assert len(phases["forward"]) == len(phases["input_gradient"]) == len(phases["weight_gradient"]) == 7
    assert all(op.phase == "forward" for op in phases["forward"])


def whole(segment, degree=1):
    """What ``operator_s`` needs beside the operator: the kernels as traced, and the division of one rank."""
    return Computing(kernels(segment, KernelTraits("traced"))), Division(split(segment, "block"), degree)


def test_operators_take_the_longer_of_both(mlp_block):
    rates = Rates(DEVICE, None, 8)
    relu, norm, up = mlp_block.operators[2], mlp_block.operators[0], mlp_block.operators[1]
    assert operator_s(relu, *whole(mlp_block), rates) == pytest.approx(rates.element_wise_s(relu.bytes_read * 2, 0, ""))
    assert operator_s(relu, *whole(mlp_block, 4), rates) == pytest.approx(
        rates.element_wise_s(relu.bytes_read * 2 / 4, 0, "")
    )
    assert operator_s(norm, *whole(mlp_block, 4), rates) == operator_s(norm, *whole(mlp_block), rates)
    assert operator_s(up, *whole(mlp_block), rates) >= (up.bytes_read + up.bytes_written) / rates.bytes_per_s
    view = op(11, "aten.view", [spec(4, 4)], [spec(16)])
    assert operator_s(view, *whole(mlp_block), rates) == 0.0


def test_a_cpu_waits_for_the_launch_of_each_operator_a_gpu_does_not(mlp_block):
    run, division = whole(mlp_block)
    relu = mlp_block.operators[2]
    for name, more_s in (("toy", 0.0), ("cpu", 1e-3)):
        slow, fast = (Rates(make_cluster(name=name, launch_s=s).groups[0].device, None, 8) for s in (1e-3, 0.0))
        found = operator_s(relu, run, division, slow) - operator_s(relu, run, division, fast)
        assert found == pytest.approx(more_s)


def test_causal_attention_does_half():
    rates = Rates(DEVICE, None, 8)
    attention = op(0, "aten._flash_attention_forward", [spec(1, 8, 512, 64)] * 3, [spec(1, 8, 512, 64)], flops=10**12)
    run = Kernels({0: 1.0}, frozenset({0}), {}, 0.0)
    division = Division(NOTHING_SPLIT)
    causal, whole_square = (operator_s(attention, Computing(run, c), division, rates) for c in (True, False))
    assert whole_square / 2 <= causal < whole_square


def test_attention_on_a_cpu_follows_its_own_products():
    cpu = make_cluster(name="cpu").groups[0].device
    measured, catalogue = Rates(cpu, SAMPLES, 1), Rates(cpu, None, 1)
    assert measured.attention_s(1e9, 256, 64, "fp32", backward=False) == pytest.approx(
        1e9 / (CPU_ATTENTION["fp32"] * 8e9)
    )
    assert catalogue.attention_s(1e9, 256, 64, "fp32", backward=True) == pytest.approx(
        1e9 / (CPU_ATTENTION["fp32"] * 2e13)
    )


def test_measured_attention_comes_back_as_measured():
    cpu = make_cluster(name="cpu").groups[0].device
    samples = tuple(
        AttentionSample(heads=8, sequence=s, head_dim=d, dtype="bf16", workers=1, phase=phase, seconds=seconds)
        for s, d, phase, seconds in (
            (256, 32, "forward", 1e-3), (1024, 64, "forward", 1e-2), (256, 32, "backward", 4e-3),
        )
    )  # fmt: skip
    rates = Rates(cpu, Measurements(attention=samples), 1)
    flops = 2 * 2 * 8 * 256**2 * 32 / 2
    assert rates.attention_s(flops, 256, 32, "bf16", backward=False) == pytest.approx(1e-3, rel=1e-3)
    assert rates.attention_s(2.5 * flops, 256, 32, "bf16", backward=True) == pytest.approx(4e-3, rel=1e-3)
    between = rates.attention_s(flops, 512, 32, "bf16", backward=False)
    larger = 2 * 2 * 8 * 1024**2 * 64 / 2
    assert min(1e-3, 1e-2 * flops / larger) < between < max(1e-3, 1e-2 * flops / larger)
    # Another precision was not measured: the share of its products.
    assert rates.attention_s(1e9, 256, 32, "fp32", backward=False) == pytest.approx(
        1e9 / (CPU_ATTENTION["fp32"] * 2e13)
    )


def test_element_wise_follows_size_dtype_and_exponentials():
    cpu = make_cluster(name="cpu").groups[0].device
    samples = tuple(
        ElementWiseSample(kind=kind, elements=n, dtype="bf16", workers=w, seconds=w * n * each_s)
        for w in (1, 2)
        for kind, n, each_s in (
            ("add", 1000, 1e-9),
            ("add", 100_000, 4e-9),
            ("silu", 1000, 2e-9),
            ("silu", 100_000, 9e-9),
        )
    )
    rates = Rates(cpu, Measurements(element_wise=samples), 1)
    assert rates.element_wise_s(6 * 1000, 0, "bfloat16") == pytest.approx(1e-6)
    assert rates.element_wise_s(6 * 100, 0, "bfloat16") == pytest.approx(1e-7)
    assert rates.element_wise_s(6 * 10**7, 0, "bfloat16") == pytest.approx(4e-2)
    assert 1e-6 < rates.element_wise_s(6 * 10_000, 0, "bfloat16") < 4e-4
    assert rates.element_wise_s(4 * 1000, 1000, "bfloat16") == pytest.approx(2e-6)
    assert Rates(cpu, Measurements(element_wise=samples), 2).element_wise_s(6000, 0, "bfloat16") == pytest.approx(2e-6)
    assert rates.element_wise_s(4e9, 0, "float32") == pytest.approx(4e9 / rates.bytes_per_s)


def times(segment, fusion="eager", rates=None, **axes):
    division = Division(split(segment, "block"), **axes)
    how = Computing(kernels(segment, KernelTraits(fusion)), causal=True)
    return Launched(segment, how).times(division, rates or Rates(DEVICE, None, 8))


@pytest.mark.slow
def test_tensor_parallelism_divides_products(tiny):
    # With operators large enough, what is inside a block takes a half on two ranks, and the rest as long as before.
    block = tiny.at(64).blocks[0]
    one, two, with_sequence = times(block), times(block, tensor=2), times(block, tensor=2, sequence_parallel=True)
    assert one.forward_s > two.forward_s > with_sequence.forward_s > one.forward_s / 2.05
    assert one.backward_s > two.backward_s > with_sequence.backward_s > one.backward_s / 2.05


def test_context_parallelism_divides_everything(tiny):
    block = tiny.at(1024).blocks[0]
    one, two = times(block), times(block, context=2)
    assert two.forward_s == pytest.approx(one.forward_s / 2, rel=0.1)
    assert two.backward_s == pytest.approx(one.backward_s / 2, rel=0.1)


def test_fusion_saves_traffic_but_no_arithmetic(tiny):
    block = tiny.at(64).blocks[0]
    eager, fused = times(block), times(block, "fused")
    products_only = eager.forward_s - eager.element_wise.device_s
    assert products_only < fused.forward_s < eager.forward_s
    assert fused.forward_s - fused.element_wise.device_s == pytest.approx(products_only)
    assert fused.backward_s < eager.backward_s
    assert fused.forward.launches < eager.forward.launches


def test_autograd_launches_the_backward_pass_with_less_than_modules(mlp_block):
    found = times(mlp_block)
    assert found.forward.launches == 5
    assert found.input_gradient.launches == pytest.approx(4 * BACKWARD_LAUNCHES)
    assert found.weight_gradient.launches == pytest.approx(2 * BACKWARD_LAUNCHES)


def test_the_parts_of_the_backward_pass_are_the_whole(tiny):
    found = times(tiny.at(64).blocks[0])
    assert found.weight_gradient.device_s > 0
    assert found.backward_s == pytest.approx(found.input_gradient.device_s + found.weight_gradient.device_s)
    assert found.core_attention.device_s == 0  # fused attention is one operator


def test_a_second_run_ends_before_the_last_product(mlp_block, tiny):
    found = times(mlp_block)
    assert found.read.launches == 3  # norm, up and relu: backward reads nothing of down or of the residual sum
    block = times(tiny.at(64).blocks[0])
    cost = {kind: recomputed(SimpleNamespace(times=block), kind).device_s for kind in ("none", "read", "full")}
    assert cost["none"] == 0 < cost["read"] == block.read.device_s < 0.9 * cost["full"]
    assert cost["full"] == block.forward_s


def test_a_shifted_loss_means_causal(tiny, hand_graph):
    assert is_causal(tiny)
    assert not is_causal(hand_graph)


@pytest.mark.slow
def test_a_kernel_that_reads_a_mask_computes_all_scores():
    """transformers gives a sliding window to torch's attention as a mask, if the sequence is longer than the window."""
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    model = {"model_type": "mistral", "num_hidden_layers": 2, "num_key_value_heads": 4, **sizes}
    job = Job(sequence_length=128, global_batch_size=2, precision="bf16")
    windows, whole = (analyze({**model, "sliding_window": window}, job) for window in (64, 256))
    rates = Rates(Cluster.parse("1xA100-SXM-80GB").groups[0].device, None, 1)

    def seconds(graph, phase):
        block = graph.blocks[0]
        attention = next(one for one in block.operators if "attention" in one.name and one.phase == phase)
        assert reads_mask(attention) == (graph is windows)
        how = Computing(kernels(block, KernelTraits("modules")), causal=True)
        return operator_s(attention, how, Division(split(block, "block")), rates)

    for phase in ("forward", "backward"):
        alike: dict[str, Any] = {"sequence": 128, "head_dim": 64, "precision": "bf16", "backward": phase == "backward"}
        flops = (2 if phase == "forward" else 5) * 2 * 4 * 128 * 128 * 64
        assert seconds(windows, phase) == rates.attention_s(flops, **alike, kernel="masked", causal=False)
        assert seconds(whole, phase) == rates.attention_s(flops / 2, **alike, causal=True)
