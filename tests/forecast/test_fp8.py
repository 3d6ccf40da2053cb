"""Products in 8 bits as the native engine computes them: what they save, and what their casts cost."""

import pytest

from ahp.cluster.model import Cluster
from ahp.engines.fp8 import EAGER_TORCHAO_FP8, FUSED_TORCHAO_FP8
from ahp.engines.registry import get
from ahp.forecast.axes import axes_of
from ahp.forecast.communication import Network
from ahp.forecast.split import is_weight_product
from ahp.forecast.units import UnitPricer
from ahp.graph.kept import analyze
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism

ONE, SPLIT = Parallelism(), Parallelism(tensor_parallel_degree=4)


@pytest.fixture(scope="module")
def llama():
    keys = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 2, "num_attention_heads": 32}
    return analyze(
        {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 512, **keys}, Job(sequence_length=4096)
    )


def block(graph, precision, layout=ONE, **choice):
    nodes = Cluster.parse(f"1x{layout.world_size}xH100-SXM-80GB").groups[0]
    traits = get("ahp").traits(Job.model_validate({"precision": precision}), layout, EngineChoice(**choice).decided())
    pricer = UnitPricer(graph, nodes, Network(nodes), precision)
    return pricer.units(1, axes_of(layout, nodes.devices_per_node), traits).blocks[0], pricer.rates


def seconds(unit):
    return unit.times.forward.device_s + unit.times.backward_s


def test_compiled_casts_leave_a_gain_and_eager_ones_cost_it(llama):
    fused = seconds(block(llama, "bf16", compile=True)[0]) - seconds(block(llama, "fp8", compile=True)[0])
    eager = seconds(block(llama, "bf16")[0]) - seconds(block(llama, "fp8")[0])
    assert fused > 0
    assert eager < fused / 2


def test_casts_move_what_the_recipe_says(llama):
    eager, rates = block(llama, "fp8")
    products = [op for op in llama.blocks[0].phase("forward") if is_weight_product(op)]
    elements = sum(op.inputs[0].numel + op.inputs[1].numel for op in products)
    fused_bytes = elements * FUSED_TORCHAO_FP8.forward_cast_bytes[0]
    eager_bytes = elements * EAGER_TORCHAO_FP8.forward_cast_bytes[0]
    pricer_s = eager.times.products.device_s
    fused_s = block(llama, "fp8", compile=True)[0].times.products.device_s
    assert pricer_s - fused_s == pytest.approx((eager_bytes - fused_bytes) / rates.bytes_per_s, rel=1e-6)


def test_memory_is_that_of_bf16_and_what_a_cast_takes(llama):
    plain, fp8 = (block(llama, precision)[0].memory for precision in ("bf16", "fp8"))
    assert fp8.saved == plain.saved
    largest = 4096 * 14336  # as many tokens as columns
    assert fp8.forward_extra - plain.forward_extra == EAGER_TORCHAO_FP8.temporary_bytes * largest


def test_ranks_agree_on_scales_and_gather_in_16_bits(llama):
    sequence = SPLIT.model_copy(update={"enable_sequence_parallel": True})
    for layout in (SPLIT, sequence):
        (plain, _), (fp8, _) = block(llama, "bf16", layout), block(llama, "fp8", layout)
        network, group = Network(Cluster.parse("1x4xH100-SXM-80GB").groups[0]), axes_of(layout, 4).tensor
        scale_s = network.time_s("all_reduce", 4, group)
        # Five products by columns, two by rows: their weights; the inputs of the two; in backward the gradients of the five.
        assert fp8.tensor.forward_s - plain.tensor.forward_s == pytest.approx(9 * scale_s)
        assert fp8.tensor.backward_s - plain.tensor.backward_s == pytest.approx(5 * scale_s)


def test_torchtitan_gathers_in_8_bits_and_keeps_what_no_element_wise_kernel_makes(llama):
    sequence = SPLIT.model_copy(update={"enable_sequence_parallel": True})
    nodes = Cluster.parse("1x4xH100-SXM-80GB").groups[0]

    def unit(precision, *, compiled=True):
        traits = get("torchtitan").traits(
            Job.model_validate({"precision": precision}), sequence, EngineChoice(compile=compiled)
        )
        return UnitPricer(llama, nodes, Network(nodes), precision).units(1, axes_of(sequence, 4), traits).blocks[0]

    plain, fp8 = unit("bf16"), unit("fp8")
    assert fp8.tensor.gather_s < 0.7 * plain.tensor.gather_s
    # Of 4096 tokens on four ranks, in 16 bits: what two norms and the activation give.
    assert plain.memory.saved - fp8.memory.saved == 4096 * (2 * 4096 + 14336) * 2 / 4
    assert unit("fp8", compiled=False).memory.saved == unit("bf16", compiled=False).memory.saved
