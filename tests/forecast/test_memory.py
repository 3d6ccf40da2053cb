"""Bytes of a rank: activations from the graph, states by ZeRO stage, and the probability that all of it fits."""

import importlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ahp.engines.ahp import AhpEngine
from ahp.engines.megatron import MegatronEngine
from ahp.engines.registry import get
from ahp.engines.traits import KernelTraits
from ahp.forecast.activations import ActivationLiveness, SegmentMemory
from ahp.forecast.assembly import num_groups
from ahp.forecast.division import Division
from ahp.forecast.kernels import kernels
from ahp.forecast.memory import Outside, Peak, device_bytes, fit_probability, pooled_bytes, ranks_memory, while_training
from ahp.forecast.split import split
from ahp.forecast.stage_memory import kept_beside_layers
from ahp.forecast.stage_table import StageTable
from ahp.forecast.states import Shards, UnitBytes, Weights, state_bytes, unit_bytes, update_bytes
from ahp.forecast.step import pricer
from ahp.graph.kept import analyze
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism

from .conftest import make_cluster


def held(segment, division, fusion="traced", **how) -> SegmentMemory:
    return ActivationLiveness(segment, kernels(segment, KernelTraits(fusion)), division.split).on(division, **how)


def of_rank(segment, **axes):
    return held(segment, Division(split(segment, "block"), **axes))


def test_a_block_by_hand(mlp_block):
    memory = of_rank(mlp_block)
    x, wide = 64 * 32 * 2, 64 * 128 * 2
    assert memory.saved == x + 2 * wide  # norm's output, up's and relu's
    assert memory.saved_in_chains == x + wide
    # Forward: down's output and the sum stand beside them.
    assert memory.forward_extra == 2 * x
    # Backward peak: gradient of the output and of both sides of relu, before anything saved is freed.
    assert memory.backward_extra == x + 2 * wide
    halved = of_rank(mlp_block, tensor=2)
    assert halved.saved == x + wide
    assert halved.backward_extra == x + wide
    assert of_rank(mlp_block, tensor=2, sequence_parallel=True).saved == x / 2 + wide
    assert of_rank(mlp_block, context=4).saved == memory.saved / 4


def test_what_sequence_parallelism_gathers_is_kept_whole_or_gathered_again(mlp_block):
    def kept(**how):
        division = Division(split(mlp_block, "block"), tensor=4, sequence_parallel=True)
        return held(mlp_block, division, **how)

    x = 64 * 32 * 2  # the norm's output, which the column product reads
    again, whole = kept(), kept(keeps_gathered=True)
    assert whole.saved - again.saved == x * 3 / 4
    assert whole.saved_in_chains - again.saved_in_chains == x * 3 / 4
    alone = Division(split(mlp_block, "block"), tensor=4)
    assert alone.gathered_bytes == 0


def test_what_is_kept_is_what_autograd_saves(tiny):
    for segment in tiny.segments():
        assert of_rank(segment).saved == segment.saved_bytes


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_split_loss_has_as_many_copies_as_its_engine_makes(precision):
    head = analyze("tiny", Job(sequence_length=256, precision=precision)).head
    logits, parts = 256 * 2048 * 4, split(head, "head")
    alone = held(head, Division(parts), loss_copies=3)
    assert alone == held(head, Division(parts))  # one rank has torch's loss: both gradients beside what is kept
    assert alone.backward_extra == pytest.approx(2 * logits, rel=1e-3)
    for copies in (0.5, 1, 3):
        divided = held(head, Division(parts, tensor=4), loss_copies=copies)
        assert divided.forward_extra == divided.backward_extra == copies * logits / 4
        assert divided.saved == held(head, Division(parts, tensor=4)).saved
    block = analyze("tiny", Job(sequence_length=256, precision=precision)).blocks[0]
    by_columns = Division(split(block, "block"), tensor=4)
    assert held(block, by_columns, loss_copies=3) == held(block, by_columns)


def test_policies_keep_results_of_products(mlp_block):
    x, wide = 64 * 32 * 2, 64 * 128 * 2
    memory = of_rank(mlp_block)
    assert memory.beside_products.kept == wide + x  # up's and down's
    assert memory.beside_products.made_again == x + wide  # norm's and relu's
    assert memory.every_second_product.kept == wide  # up's
    assert memory.every_second_product.made_again == memory.beside_products.made_again  # nothing needs down's
    assert of_rank(mlp_block, tensor=2).beside_products.kept == wide / 2 + x  # down's sum is whole on every rank


def test_a_compiler_keeps_of_a_policys_results_those_that_are_asked_for(mlp_block):
    x, wide = 64 * 32 * 2, 64 * 128 * 2
    division = Division(split(mlp_block, "block"))
    memory = held(mlp_block, division, "fused")
    assert memory.beside_products.kept == wide  # up's, which relu is made of; down's goes into the residual sum alone
    assert of_rank(mlp_block).beside_products.kept == wide + x


def traits(zero, precision="bf16", **kwargs):
    layout = Parallelism(zero_stage=zero, data_parallel_shard_degree=4 if zero else 1, **kwargs)
    return AhpEngine().traits(Job(precision=precision), layout, EngineChoice())


WEIGHTS = Weights(total=1000, largest_block=100, outside_blocks=200, head=120)
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
NO_UNITS = UnitBytes(*[0.0] * 6)


def state(zero, precision="bf16", micro_batches=4, **kwargs):
    shards = 4 if zero else 1
    return state_bytes(WEIGHTS, traits(zero, precision, **kwargs), Shards.among(shards), micro_batches)


@pytest.mark.parametrize(
    ("zero", "parameters", "states", "gathered", "gradients"),
    [
        (0, 4000, 8000, 2000, 4000),
        (1, 1000, 2000, 2000, 4000),
        (2, 1000, 2000, 2000, 1000),
        (3, 1000, 2000, 0, 1000),
    ],
)
def test_zero_divides_what_it_says(zero, parameters, states, gathered, gradients):
    parts = state(zero)
    assert parts["parameters"] == parameters
    assert parts["optimizer_states"] == states
    assert parts["gathered_weights"] == gathered
    assert parts["gradients"] == gradients


def units(zero, precision="bf16", micro_batches=4, **kwargs):
    return unit_bytes(WEIGHTS, traits(zero, precision, **kwargs), Shards.among(4 if zero else 1), micro_batches)


def test_units_of_zero_3_are_there_while_they_are_needed():
    found = units(3)
    assert found.at_head == 2 * 120
    assert found.gathered == 2 * 100
    assert found.reduced == 4 * 120 + 2 * 100  # the head's sums, and the gradients of the layer behind it
    assert found.last == (4 + 2) * 120
    assert units(2) == found._replace(at_head=0, gathered=0)  # all units stay


def test_units_of_one_rank_are_not_gathered_and_those_of_buckets_not_reduced():
    assert units(0, micro_batches=1).pooled == 0
    assert units(0, "fp32", data_parallel_replicate_degree=2) == NO_UNITS
    assert units(1, "fp32").reduced == 4 * 120 + 4 * 100


@pytest.mark.parametrize("name", ["ahp", "accelerate"])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_nothing_is_kept_for_reductions_where_no_rank_shares_weights(name, micro_batches):
    """Gradients counted twice, and layouts that fit were refused: fp32 with tensor and pipeline parallelism alone."""
    layout = Parallelism(tensor_parallel_degree=2)
    of = get(name).traits(Job(precision="fp32"), layout, EngineChoice(name=name))
    assert unit_bytes(WEIGHTS, of, Shards.among(1), micro_batches) == NO_UNITS
    parts = state_bytes(WEIGHTS, of, Shards.among(1), micro_batches)
    assert (parts["gradients"], parts["gathered_weights"], parts["reduce_buffers"]) == (4000, 0, 0)


def test_streams_keep_what_they_got():
    gathering = 2 * (120 + 100) * 5 / 4
    single = units(3, micro_batches=1)
    assert (single.pooled, single.grown) == (gathering, 1000)
    assert pooled_bytes(single, 10**6) == gathering + 1000  # all gradients, which come when the activations go
    assert pooled_bytes(single, 400) == gathering + 400  # the gradients are the larger: what the activations had
    assert (
        units(3).pooled == gathering + 4 * 120 / 4
    )  # of several the gradients are counted, and the next one's come beside them
    assert units(1).pooled == gathering + 1000  # whole gradients wait elsewhere
    assert units(0).pooled == 4000
    for name in ("megatron", "deepspeed"):
        of = get(name).traits(Job(precision="bf16"), Parallelism(data_parallel_shard_degree=4), EngineChoice(name=name))
        assert unit_bytes(WEIGHTS, of, Shards.among(4), 1) == NO_UNITS


def test_the_peak_is_at_the_head_or_in_the_layers():
    states = {"optimizer_states": 0.0, "gathered_weights": 0.0, "gradients": 40.0, "reduce_buffers": 0.0}
    found = UnitBytes(at_head=5.0, gathered=7.0, reduced=11.0, last=200.0, pooled=0.0, grown=0.0)

    def parts(in_layers, at_head, activations=300.0):
        one = while_training(states, found, activations, Peak.of(found, in_layers, at_head), 0.0, micro_batches=4)
        return {name: float(one[name]) for name in ("temporaries", "gathered_weights", "reduce_buffers", "activations")}

    assert parts(10.0, 30.0) == {"temporaries": 30, "gathered_weights": 5, "reduce_buffers": 0, "activations": 300}
    assert parts(20.0, 30.0) == {"temporaries": 20, "gathered_weights": 7, "reduce_buffers": 11, "activations": 300}
    # The last unit needs more than all that is gone by then: 100 and 20 and 7 + 11.
    assert parts(20.0, 30.0, activations=100.0)["reduce_buffers"] == 11 + 200 - 138


def test_a_gap_counts_where_it_is_larger_than_the_usual_share():
    gpu = make_cluster().groups[0].device

    def reserved(**more):
        return ranks_memory({"parameters": 1000}, Outside.of(gpu, 0), **more).of(0).reserved

    assert reserved(gap=20.0) == reserved() == 1038
    assert reserved(gap=50.0) == 1050
    assert reserved(gap=50.0, pooled=7.0) == 1057


def test_processors_have_no_streams_to_keep_memory_for():
    cpu = Outside.of(make_cluster(name="cpu").groups[0].device, 0)
    one = ranks_memory({"parameters": 1000}, cpu, gap=50.0, pooled=7.0).of(0)
    assert one.reserved == ranks_memory({"parameters": 1000}, cpu).of(0).reserved
    assert device_bytes(1000.0, cpu, gap=50.0, pooled=7.0) == one.total


def test_the_head_leaves_a_gap_where_its_logits_are_cast(mlp_block):
    x, wide = 64 * 32 * 2, 64 * 128 * 2
    memory = of_rank(mlp_block)
    assert memory.freed == x  # down's result, beside which up's stands; up's is the largest
    assert of_rank(mlp_block, tensor=2).freed == x
    assert wide > x


@pytest.mark.slow
def test_memory_that_fsdp2_needed_on_an_h100(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    forecast = importlib.import_module("gpu_ranks").forecast
    for row in json.loads((BENCHMARKS / "ranks_h100.json").read_text()):
        found = forecast(row)
        assert found.memory_allocated_bytes == pytest.approx(row["allocated_bytes"], rel=0.012), row
        assert found.memory_reserved_bytes == pytest.approx(row["reserved_bytes"], rel=0.025), row


def test_muon_keeps_one_state_of_a_matrix_in_a_block_and_two_of_the_rest():
    job = Job.model_validate({"optimizer": "muon"})
    muon = AhpEngine().traits(job, Parallelism(data_parallel_shard_degree=4), EngineChoice())
    assert state_bytes(WEIGHTS, muon, Shards.among(4), 4)["optimizer_states"] == (4 * 800 + 8 * 200) / 4
    experts = Weights(total=1000, largest_block=100, outside_blocks=200, experts=400)
    parts = state_bytes(experts, muon, Shards.among(4, 2), 4)
    assert parts["optimizer_states"] == (4 * 400 + 8 * 200) / 4 + 8 * 400 / 2


def test_fp32_alone_needs_no_second_copy():
    assert state(0, "fp32")["gathered_weights"] == 0
    assert sum(state(0, "fp32").values()) - state(0, "fp32")["reduce_buffers"] == 16 * 1000


@pytest.mark.parametrize(("engine", "gradients"), [("ahp", [2, 2, 0.5, 0.5]), ("torchtitan", [2, 4, 0.5, 0.5])])
def test_states_in_16_bits_take_eight_bytes_a_parameter(engine, gradients):
    """torchtitan reduces in fp32, and what waits whole for its reduction is in that type."""
    for zero, gradient in enumerate(gradients):
        layout = Parallelism(zero_stage=zero, data_parallel_shard_degree=4 if zero else 1)
        of = get(engine).traits(Job(dtype="bf16"), layout, EngineChoice(name=engine))
        parts, shards = state_bytes(WEIGHTS, of, Shards.among(4 if zero else 1), 4), 4 if zero else 1
        assert (parts["parameters"], parts["optimizer_states"]) == (2000 / shards, 4000 / shards)
        assert parts["gradients"] == gradient * 1000
        assert parts["gathered_weights"] == (2000 if zero in (1, 2) else 0)
        # Weight, gradient and both moments are read, weight and moments written; the norm reads the gradient, the scale reads and writes it.
        assert update_bytes(Job(dtype="bf16"), of, on_cpu=False) == 2 * 6 + of.gradients.element_bytes + 3 * 2


def test_only_what_is_sent_or_cast_is_copied():
    assert state(0, "fp32")["reduce_buffers"] == 0
    assert state(0, "fp32", data_parallel_replicate_degree=2)["reduce_buffers"] == 4 * 1000  # all that fits in a bucket
    assert state(0, "bf16")["reduce_buffers"] == state(2, "fp32")["reduce_buffers"] == 0  # units, one by one
    assert units(0, "fp32").reduced == 0


@pytest.mark.parametrize(
    ("zero", "total", "elements"),
    [(0, 10**9, 5 * 10**8), (1, 10**9, 2 * 5 * 10**8), (1, 10**8, 5 * 10**8 + 10**8), (3, 10**9, 2 * 5 * 10**8)],
)
def test_deepspeed_collects_gradients_in_a_bucket_and_copies_what_it_sends(zero, total, elements):
    layout = Parallelism(**{f"data_parallel_{'shard' if zero else 'replicate'}_degree": 4}, zero_stage=zero)
    traits = get("deepspeed").traits(Job(precision="fp16"), layout, EngineChoice(name="deepspeed"))
    weights = Weights(total=total, largest_block=100, outside_blocks=200)
    shards = 4 if zero else 1
    assert state_bytes(weights, traits, Shards.among(shards), 4)["reduce_buffers"] == 2 * elements
    alone = get("deepspeed").traits(Job(precision="fp16"), Parallelism(), EngineChoice(name="deepspeed"))
    assert state_bytes(weights, alone, Shards.among(1), 4)["reduce_buffers"] == 0


@pytest.mark.parametrize(("zero", "total", "elements"), [(2, 10**10, 10**10), (3, 10**10, 10**9), (3, 10**8, 10**8)])
def test_deepspeed_gathers_a_thousand_million_weights_ahead(zero, total, elements):
    layout = Parallelism(data_parallel_shard_degree=4, zero_stage=zero)
    traits = get("deepspeed").traits(Job(precision="bf16"), layout, EngineChoice(name="deepspeed"))
    weights = Weights(total=total, largest_block=100, outside_blocks=200)
    assert state_bytes(weights, traits, Shards.among(4), 1)["gathered_weights"] == 2 * elements


@pytest.mark.parametrize(("precision", "pipeline", "each_bytes"), [("bf16", 2, 2 + 4), ("bf16", 1, 2), ("fp16", 2, 2)])
def test_deepspeed_adds_gradients_up_in_fp32_in_a_pipeline_in_bf16(precision, pipeline, each_bytes):
    layout = Parallelism(data_parallel_shard_degree=4, zero_stage=1, pipeline_parallel_degree=pipeline)
    traits = get("deepspeed").traits(Job(precision=precision), layout, EngineChoice(name="deepspeed"))
    weights = Weights(total=10**9, largest_block=100, outside_blocks=200)
    held = state_bytes(weights, traits, Shards.among(4), 4)
    assert held["gradients"] == each_bytes * 10**9
    collected = 0 if each_bytes == 6 else 5 * 10**8
    assert held["reduce_buffers"] == traits.reduce.element_bytes * (5 * 10**8 + collected)
    assert traits.reduce.element_bytes == max(2, each_bytes - 2)


@pytest.mark.parametrize(
    ("precision", "zero", "pipeline", "flat_bytes"),
    [
        ("fp16", 1, 2, 4 * 10**9 / 4),
        ("fp16", 0, 2, 4 * 10**9),
        ("fp16", 3, 1, 0),
        ("bf16", 1, 2, 2 * 10**9),
        ("fp32", 1, 1, 0),
    ],
)
def test_deepspeeds_flat_copies_fit_into_nothing_that_is_free(precision, zero, pipeline, flat_bytes):
    layout = Parallelism(
        data_parallel_shard_degree=4 if zero else 1, zero_stage=zero, pipeline_parallel_degree=pipeline
    )
    traits = get("deepspeed").traits(Job(precision=precision), layout, EngineChoice(name="deepspeed"))
    weights = Weights(total=10**9, largest_block=100, outside_blocks=200)
    assert state_bytes(weights, traits, Shards.of(layout), 4)["flat_copies"] == flat_bytes


def test_no_other_engine_has_any():
    for name in ("ahp", "torchtitan", "megatron", "accelerate"):
        traits = get(name).traits(Job(precision="bf16"), Parallelism(), EngineChoice(name=name))
        states = state_bytes(Weights(total=10**9), traits, Shards.among(1), 4)
        assert states["flat_copies"] == 0
        assert "flat_copies" not in while_training(states, NO_UNITS, 0.0, Peak(0.0, 0.0, 0.0), 0.0, micro_batches=4)


def test_buckets_of_distributed_data_parallel_lie_beside_the_gradients():
    weights = Weights(total=10**9, largest_block=100, outside_blocks=200)

    def buffers(**degrees):
        layout = Parallelism(**degrees)
        traits = get("accelerate").traits(Job(precision="fp32"), layout, EngineChoice(name="accelerate"))
        shards = Shards.among(layout.weight_shards)
        return state_bytes(weights, traits, shards, 4)["reduce_buffers"], unit_bytes(weights, traits, shards, 4).last

    assert buffers(data_parallel_replicate_degree=2) == (4 * 10**9, 0)
    assert buffers(data_parallel_shard_degree=2, zero_stage=3) == (0, (4 + 4) * 200)


def test_experts_that_one_rank_has_alone_are_neither_gathered_nor_sent():
    weights = Weights(total=1000, largest_block=400, outside_blocks=200, experts=320, largest_without_experts=80)

    def gathered(zero, precision, shards, replicas=1):
        layout = Parallelism(
            zero_stage=zero,
            data_parallel_shard_degree=shards,
            data_parallel_replicate_degree=replicas,
            expert_parallel_degree=2,
        )
        traits = AhpEngine().traits(Job(precision=precision), layout, EngineChoice())
        among = Shards.among(shards, 2)
        units = unit_bytes(weights, traits, among, 4)
        return state_bytes(weights, traits, among, 4)["gathered_weights"] + units.gathered, units.reduced

    assert gathered(1, "fp32", 2) == (4 * (1000 - 320), 8 * 80)
    assert gathered(3, "fp32", 2) == (4 * 80, 8 * 80)
    for shared in (gathered(1, "fp32", 4), gathered(1, "fp32", 2, replicas=2)):
        assert shared == (4 * 1000, 8 * 400)
    assert gathered(1, "bf16", 2) == (2 * 1000, 6 * 400)


def test_fused_accumulation_asks_for_one_empty_gradient_of_each_shape():
    traits = MegatronEngine().traits(Job(precision="bf16"), Parallelism(), EngineChoice(name="megatron"))
    weights = Weights(total=1000, largest_block=400, outside_blocks=200, head=90, experts=320, shapes=120)
    parts = state_bytes(weights, traits, Shards.among(1), 4)
    assert parts["reduce_buffers"] == 2 * (120 + 90)


def test_one_micro_batch_never_waits_whole():
    assert state(1, micro_batches=1)["gradients"] == 1000
    assert state(3, micro_batches=8, pipeline_parallel_degree=2)["gradients"] == 4000


def test_the_rest_of_the_device():
    gpu, cpu = make_cluster().groups[0].device, make_cluster(name="cpu").groups[0].device
    used = ranks_memory({"parameters": 1000}, Outside.of(gpu, 3)).of(0)
    assert used.allocated == 1000
    assert used.reserved == 1038
    assert used.total == sum(used.parts.values()) == 1038 + 3 * 600_000_000
    assert ranks_memory({"parameters": 1000}, Outside.of(cpu, 3)).parts["communicators"] == 0


@pytest.mark.parametrize(
    ("keys", "groups"),
    [
        ({}, 0),
        ({"data_parallel_replicate_degree": 4}, 2),  # the replicas and all ranks
        ({"data_parallel_shard_degree": 4, "data_parallel_replicate_degree": 2}, 3),
        ({"tensor_parallel_degree": 4, "pipeline_parallel_degree": 2, "data_parallel_shard_degree": 2}, 4),
        (
            {"context_parallel_degree": 4, "data_parallel_shard_degree": 2},
            3,
        ),  # attention's ranks beside the eight that shard
        (
            {"data_parallel_shard_degree": 8, "expert_parallel_degree": 4},
            4,
        ),  # who shares experts, and who shards the same ones
        ({"data_parallel_replicate_degree": 8, "zero_stage": 0, "expert_parallel_degree": 4}, 4),
        ({"data_parallel_shard_degree": 8, "expert_parallel_degree": 8}, 3),
    ],
)
def test_communicators_are_those_of_the_mesh(keys, groups):
    assert num_groups(Parallelism(**keys)) == groups


@given(st.floats(1e6, 1e12), st.floats(1e6, 1e12), st.floats(1.001, 2))
def test_probability_falls_with_the_need(capacity, need, more):
    assert 0 <= fit_probability(need * more, capacity) <= fit_probability(need, capacity) <= 1
    assert fit_probability(capacity, capacity) == pytest.approx(0.5)


@pytest.mark.parametrize(("engine", "kept"), [("torchtitan", 1), ("megatron", 0)])
def test_megatron_frees_what_a_stage_has_sent(tiny, engine, kept):
    layout = Parallelism(pipeline_parallel_degree=2)
    job = Job(sequence_length=tiny.sequence_length, global_batch_size=4, precision="bf16")
    found = pricer(tiny, make_cluster(per_node=2), job, EngineChoice(name=engine, compile=False)).group.units(layout)
    stages = StageTable.of(tiny.layers, len(tiny.blocks), [(1, 1, False, False), (1, 1, False, True)])
    middle, last = kept_beside_layers(found, stages).tolist()
    assert middle == kept * found.hidden_bytes
    assert last == found.head.memory.saved
