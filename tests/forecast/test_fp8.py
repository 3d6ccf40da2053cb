"""Products in 8 bits as the native engine computes them: what they save, and what their casts cost."""

from dataclasses import replace

import pytest

from ahp.cluster.model import Cluster
from ahp.engines.fp8 import EAGER_TORCHAO_FP8, FUSED_TORCHAO_FP8
from ahp.engines.registry import get
from ahp.forecast.axes import ALONE, axes_of
from ahp.forecast.communication import Network
from ahp.forecast.data_parallel import CommUnit, DataParallel
from ahp.forecast.division import is_weight_gradient
from ahp.forecast.group import Group
from ahp.forecast.operator_times import inputs_cast_before
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


@pytest.mark.slow
def test_compiled_casts_leave_a_gain_and_eager_ones_cost_it(llama):
    fused = seconds(block(llama, "bf16", compile=True)[0]) - seconds(block(llama, "fp8", compile=True)[0])
    eager = seconds(block(llama, "bf16")[0]) - seconds(block(llama, "fp8")[0])
    assert fused > 0
    assert eager < fused / 2


def test_casts_move_what_the_recipe_says(llama):
    eager, rates = block(llama, "fp8")
    products = [op for op in llama.blocks[0].phase("forward") if is_weight_product(op)]
    inputs, weights = (sum(op.inputs[at].numel for op in products) for at in (0, 1))
    eager_bytes = (inputs + weights) * EAGER_TORCHAO_FP8.forward_cast_bytes[0]
    # A compiler casts once what queries, keys and values read, and what gate and up read: three times the hidden states less.
    inputs -= 3 * 4096 * 4096
    fused_bytes = (inputs + weights) * FUSED_TORCHAO_FP8.forward_cast_bytes[0]
    pricer_s = eager.times.products.device_s
    fused_s = block(llama, "fp8", compile=True)[0].times.products.device_s
    assert pricer_s - fused_s == pytest.approx((eager_bytes - fused_bytes) / rates.bytes_per_s, rel=1e-6)


def test_gradients_of_weights_read_what_was_cast_once(llama):
    segment = llama.blocks[0]
    again = [segment.operators[i] for i in sorted(inputs_cast_before(segment))]
    forward = ["self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj"]
    assert [op.module for op in again if op.phase == "forward"] == forward
    backward = [op for op in again if op.phase == "backward"]
    assert [op.module for op in backward] == ["mlp.gate_proj", "self_attn.k_proj", "self_attn.q_proj"]
    assert all(is_weight_gradient(op) for op in backward)


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


def test_torchtitan_casts_before_it_gathers(llama):
    """Inputs on a rank's part of the sequence, weights on its shard."""
    sequence = SPLIT.model_copy(update={"enable_sequence_parallel": True})
    nodes = Cluster.parse("2x4xH100-SXM-80GB").groups[0]

    def forward_s(layout):
        traits = get("torchtitan").traits(Job.model_validate({"precision": "fp8"}), layout, EngineChoice(compile=True))
        pricer = UnitPricer(llama, nodes, Network(nodes), "fp8")
        priced = pricer.units(1, axes_of(layout, 4), traits).blocks[0].times.products.device_s
        late = replace(FUSED_TORCHAO_FP8, gathers_in_8_bits=True)
        return pricer.units(1, axes_of(layout, 4), replace(traits, fp8=late)).blocks[0].times.products.device_s - priced

    bytes_per_s = block(llama, "fp8")[1].bytes_per_s
    hidden, weights = 4096 * 4096, 4096 * (4096 + 1024 + 3 * 14336) + 1024 * 4096 + 4096 * 4096
    # Two inputs of products by columns: three quarters of each are cast on other ranks.
    assert forward_s(sequence) == pytest.approx(5 * 2 * hidden * 3 / 4 / bytes_per_s, rel=1e-6)
    sharded = sequence.model_copy(update={"data_parallel_shard_degree": 2, "zero_stage": 3})
    more = 5 * weights / 4 / bytes_per_s
    assert forward_s(sharded) == pytest.approx(5 * 2 * hidden * 3 / 4 / bytes_per_s + more, rel=1e-6)


def test_torchtitan_gathers_weights_in_8_bits_but_for_experts():
    layout = Parallelism(data_parallel_shard_degree=8, zero_stage=3)
    nodes = Cluster.parse("2x4xH100-SXM-80GB").groups[0]
    over = Group(8, 4, 2), ALONE

    def seconds_of(precision, unit):
        traits = get("torchtitan").traits(Job.model_validate({"precision": precision}), layout, EngineChoice())
        return DataParallel.on(nodes, traits, data=over, experts=over).gather_s(unit, Network(nodes))

    dense, stacked = CommUnit(10**8, in_block=True), CommUnit(0, 10**8, in_block=True)
    assert seconds_of("fp8", dense) < 0.6 * seconds_of("bf16", dense)
    assert seconds_of("fp8", stacked) == seconds_of("bf16", stacked)
