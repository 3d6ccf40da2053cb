"""What shows of the collectives within a replica: by engine, precision and what runs beside them."""

from dataclasses import replace

import pytest

from ahp.engines.registry import get
from ahp.forecast.axes import ALONE, axes_of
from ahp.forecast.communication import Network
from ahp.forecast.efficiency import Rates
from ahp.forecast.overlap import CONTENTION
from ahp.forecast.pricer import slowest_share
from ahp.forecast.rules import asynchronous
from ahp.forecast.states import (
    UNALIKE_CAST,
    UNALIKE_SUM,
    cast_bytes,
    gradient_copy_bytes,
    last_copy_bytes,
    update_bytes,
)
from ahp.forecast.step import price
from ahp.forecast.units import UnitPricer
from ahp.graph.kept import analyze
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism

from .conftest import make_cluster

SPLIT = Parallelism(tensor_parallel_degree=4, enable_sequence_parallel=True)


@pytest.fixture(scope="module")
def llama():
    keys = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2, "num_attention_heads": 8}
    return analyze(
        {"model_type": "llama", "num_key_value_heads": 4, "vocab_size": 512, **keys}, Job(sequence_length=256)
    )


def block(graph, engine, layout=SPLIT, precision="bf16", micro_batch=1, choice=None):
    nodes = make_cluster(per_node=layout.world_size).groups[0]
    asked = choice or EngineChoice(name=engine)
    traits = get(engine).traits(Job.model_validate({"precision": precision}), layout, asked)
    pricer = UnitPricer(graph, nodes, Network(nodes), precision)
    return pricer.units(micro_batch, axes_of(layout, nodes.devices_per_node), traits).blocks[0]


def collectives(graph, **kinds):
    """Seconds of so many collectives of each kind over four ranks, of the hidden states of one block."""
    network, layout = Network(make_cluster(per_node=4).groups[0]), SPLIT
    group = axes_of(layout, 4).tensor
    return sum(count * network.time_s(kind, graph.blocks[0].output.bytes, group) for kind, count in kinds.items())


@pytest.mark.slow
def test_megatron_gathers_inputs_again_and_torchtitan_does_not(llama):
    twice = collectives(llama, all_gather=2, reduce_scatter=2)
    megatron, torchtitan = block(llama, "megatron"), block(llama, "torchtitan")
    assert megatron.tensor.forward_s == pytest.approx(twice)
    assert megatron.tensor.backward_s == pytest.approx(twice + collectives(llama, all_gather=2))
    of_norm_s = Network(make_cluster(per_node=4).groups[0]).time_s("all_reduce", 512 * 2, axes_of(SPLIT, 4).tensor)
    assert torchtitan.tensor.backward_s == pytest.approx(torchtitan.tensor.forward_s + 2 * of_norm_s)


def test_a_second_run_sends_no_sum_that_nobody_reads(llama):
    once = collectives(llama, all_reduce=1)
    unit = block(llama, "ahp", Parallelism(tensor_parallel_degree=4))
    assert unit.tensor.forward_s == pytest.approx(2 * once)
    assert unit.tensor.again_s == pytest.approx(once)  # attention's; that of the last product is not asked for


@pytest.mark.parametrize(
    ("choice", "layout", "precision", "ends_early"),
    [
        ({}, {}, "bf16", True),
        ({"compile": True}, {}, "bf16", True),
        ({"compile": True}, {}, "fp8", True),
        (
            {"compile": True},
            {"data_parallel_shard_degree": 2, "expert_parallel_degree": 2},
            "bf16",
            False,
        ),  # several graphs
        ({"compile": True}, {"context_parallel_degree": 2, "context_parallel_method": "ring"}, "bf16", False),
        ({"compile": True}, {"context_parallel_degree": 2, "context_parallel_method": "all-to-all"}, "bf16", True),
        (
            {"compile": True},
            {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "InterleavedZeroBubble"},
            "bf16",
            True,
        ),
        ({}, {}, "fp8", False),
        ({}, {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "InterleavedZeroBubble"}, "bf16", False),
        ({"name": "torchtitan"}, {}, "bf16", False),
        ({"name": "torchtitan", "compile": True}, {}, "bf16", True),
        ({"name": "megatron"}, {}, "bf16", False),
    ],
)
def test_who_recomputes_no_more_than_what_is_read(choice, layout, precision, ends_early):
    layout, choice = Parallelism(activation_checkpoint="full", **layout), EngineChoice(**choice).decided()
    traits = get(choice.name).traits(Job.model_validate({"precision": precision}), layout, choice)
    assert traits.recompute.stops_at_last_read == ends_early


def test_torchtitan_copies_what_it_scatters_and_what_it_gathers_of_several_sequences(llama):
    copy_s = [block(llama, "torchtitan", micro_batch=count).tensor.forward_s for count in (1, 2)]
    bare_s = [block(llama, "megatron", micro_batch=count).tensor.forward_s for count in (1, 2)]
    one, several = copy_s[0] - bare_s[0], copy_s[1] - bare_s[1]
    assert 0 < 2 * one < several  # twice as many copies, each of twice the bytes, and all take time to start


def test_fp8_halves_what_is_gathered_and_hides_it_beside_the_products(llama):
    layout = SPLIT.model_copy(update={"enable_sequence_parallel": False})
    assert block(llama, "megatron", layout, "fp8").tensor.forward_s == block(llama, "megatron", layout).tensor.forward_s
    plain, fp8 = block(llama, "megatron"), block(llama, "megatron", precision="fp8")
    products_s = fp8.times.products.device_s

    assert plain.tensor.forward_s - products_s < fp8.tensor.forward_s + 1e-12 < plain.tensor.forward_s
    # One of four pieces has nothing to run beside, however long the products take.
    assert fp8.tensor.forward_s > plain.tensor.forward_s / 8


@pytest.mark.parametrize("engine", ["torchtitan", "megatron"])
def test_async_tensor_parallelism_hides_all_pieces_but_one(llama, engine):
    def waits_s(asked, precision="bf16"):
        choice = EngineChoice(name=engine, compile=engine == "torchtitan", enable_async_tensor_parallel=asked)
        assert get(engine).refuses(Job(precision=precision), SPLIT, choice) is None
        return block(llama, engine, SPLIT, precision, choice=choice).tensor.forward_s

    hidden_s = waits_s(False) - waits_s(True)
    assert waits_s(None) == waits_s(False)
    assert 0.0 < hidden_s <= (1.0 - CONTENTION) * 3 / 4 * waits_s(False)
    assert waits_s(None, "fp8") == waits_s(engine == "megatron", "fp8")  # in 8 bits NVIDIA's recipes have it


def test_async_tensor_parallelism_needs_sequence_parallelism():
    choice = EngineChoice(name="megatron", enable_async_tensor_parallel=True)
    reason = asynchronous(Parallelism(tensor_parallel_degree=4), choice)
    assert reason is not None
    assert reason.startswith("enable_sequence_parallel = False: ")
    assert reason.endswith("(engine.enable_async_tensor_parallel) (valid: True)")
    assert asynchronous(Parallelism(), choice) is asynchronous(SPLIT, choice) is None


def test_a_ring_hides_keys_and_values_behind_attention(llama):
    layout = Parallelism(context_parallel_degree=4)
    ring, gathered = block(llama, "megatron", layout), block(llama, "deepspeed", layout)
    assert 0 < ring.context.forward_s < gathered.context.forward_s
    assert gathered.context.forward_s - ring.context.forward_s <= 0.75 * ring.times.attention.device_s + 1e-12
    assert gathered.context.backward_s == 2 * gathered.context.forward_s


@pytest.mark.parametrize(("compiled", "joined", "added"), [(True, 10, 10), (False, 38, 18)])
def test_torch_gathers_keys_of_all_queries_and_sends_gradients_in_fp32_after_each_round(llama, compiled, joined, added):
    nodes, layout, ranks = make_cluster(per_node=4).groups[0], Parallelism(context_parallel_degree=4), 4
    queries, keys = 256 * 8 * 64, 256 * 4 * 64
    rates = Rates(nodes.device, None, 1)

    def by_hand_s(times_keys):
        gather_s = Network(nodes).time_s("all_gather", 2 * times_keys * keys * 2, axes_of(layout, 4).context)
        # Each rank joins the results of three rounds with its first one, and sends gradients twice as wide after each of four.
        forward_s = gather_s + 3 * rates.element_wise_s(joined * queries / ranks, 0, "float32")
        gradients = queries + 2 * times_keys * keys
        backward_s = gather_s * (1 + 2 * ranks / 3) + 4 * rates.element_wise_s(added * gradients / ranks, 0, "float32")
        return forward_s, backward_s

    for version, times_keys in (("2026-01-26", 2), ("2026-01-27", 1)):  # keys were repeated for each query until then
        choice = EngineChoice(name="torchtitan", version=version, compile=compiled)
        found = block(llama, "torchtitan", layout, choice=choice).context
        assert (found.forward_s, found.backward_s) == pytest.approx(by_hand_s(times_keys))
        assert found.again_s == found.forward_s
    accelerate = block(llama, "accelerate", layout, choice=EngineChoice(name="accelerate", compile=compiled)).context
    assert (accelerate.forward_s, accelerate.backward_s) == pytest.approx(by_hand_s(1))


def test_a_ring_of_the_runtime_joins_rounds_in_fp32_besides_what_it_hides(llama):
    layout = Parallelism(context_parallel_degree=4, context_parallel_method="ring")
    rates = Rates(make_cluster(per_node=4).groups[0].device, None, 1)
    found = block(llama, "ahp", layout).context
    joined_s = 3 * rates.element_wise_s(18 * 256 * 8 * 64 / 4, 0, "float32")
    added_s = 4 * rates.element_wise_s(10 * 256 * (8 + 4 + 4) * 64 / 4, 0, "float32")
    gather_s = Network(make_cluster(per_node=4).groups[0]).time_s(
        "all_gather", 2 * 256 * 4 * 64 * 2, axes_of(layout, 4).context
    )
    assert found.forward_s + found.hidden_forward_s > gather_s + joined_s
    assert found.forward_s - joined_s < gather_s
    assert added_s < found.backward_s < added_s + gather_s * (1 + 2 * 4 / 3)


def test_selective_recompute_sends_again_by_all_to_all_and_not_around_a_ring(llama):
    ring, heads = (
        block(llama, "ahp", Parallelism(context_parallel_degree=4, context_parallel_method=method), micro_batch=4)
        for method in ("ring", "all-to-all")
    )
    assert ring.context.again_s == 0 < ring.context.forward_s
    assert heads.context.again_s == heads.context.forward_s > 0


@pytest.mark.parametrize(("ranks", "times_sent"), [(4, 1), (8, 2)])
def test_all_to_all_of_heads_is_the_closed_form(llama, ranks, times_sent):
    # 64 sequences of 256 tokens: queries and results have 8 heads of 64, keys and values 4, which 8 ranks hold twice.
    def message_us(sent):
        wire = sent * (ranks - 1) / ranks / (0.719 * 400e3)  # of NVLink with 400 GB/s, in bytes/us
        latency = 30.9 + 8.4 + 3.4 + (ranks - 1) * 0.6  # start, base, hop, peers
        return wire + latency + 0.26 * wire / (1 + wire / 1840)  # filling

    def copies_us(sent):
        return 2 * (1.7 + 2 * sent / (0.86 * 1e6))  # before and after: read and written, of 1 TB/s

    queries, keys = 64 * 256 * 8 * 64 * 2 / ranks, 64 * 256 * 4 * 64 * 2 / ranks
    layout = Parallelism(context_parallel_degree=ranks, context_parallel_method="all-to-all")
    found = block(llama, "ahp", layout, micro_batch=64)
    keys *= times_sent
    by_hand_us = message_us(queries + 2 * keys) + message_us(queries) + 2 * copies_us(queries) + 2 * copies_us(keys)
    assert found.context.forward_s == pytest.approx(by_hand_us * 1e-6, rel=1e-6)
    assert found.context.backward_s == found.context.forward_s  # their gradients go the same ways
    nodes = make_cluster(per_node=ranks).groups[0]
    traits = get("ahp").traits(Job(precision="bf16"), layout, EngineChoice())
    apart = replace(traits, context=traits.context._replace(packs_heads=False))
    units = UnitPricer(llama, nodes, Network(nodes), "bf16").units(64, axes_of(layout, ranks), apart)
    by_hand_us += message_us(queries) + 2 * message_us(keys) - message_us(queries + 2 * keys)
    assert units.blocks[0].context.forward_s == pytest.approx(by_hand_us * 1e-6, rel=1e-6)


def test_the_slowest_of_many_is_the_expected_maximum():
    assert slowest_share(1) == 0
    for ranks, expected in (
        (2, 0.5642),
        (8, 1.4236),
        (100, 2.5076),
        (1000, 3.2414),
    ):  # of the standard normal, tabulated
        assert slowest_share(ranks) / slowest_share(8) == pytest.approx(expected / 1.4236, rel=0.05)


PIPELINE = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"}
CAST_AND_SUM = 6 * UNALIKE_CAST + 12


@pytest.mark.parametrize(
    ("engine", "precision", "layout", "first", "later"),
    [
        ("megatron", "bf16", {}, 0, 0),  # products add to fp32 by themselves
        ("megatron", "fp16", {}, 6, 6),  # a hook adds the first, too, to zeros: it reads two and writes one
        # the first is added to zeros, too, after a cast by itself
        (
            "deepspeed",
            "bf16",
            {**PIPELINE, "data_parallel_shard_degree": 2, "zero_stage": 1},
            CAST_AND_SUM,
            CAST_AND_SUM,
        ),
        ("torchtitan", "bf16", {"data_parallel_shard_degree": 2, "zero_stage": 1}, 6 * UNALIKE_CAST, 10 * UNALIKE_SUM),
        ("ahp", "fp32", {}, 0, 12),
    ],
)
def test_bytes_moved_to_keep_a_gradient(engine, precision, layout, first, later):
    traits = get(engine).traits(
        Job.model_validate({"precision": precision}), Parallelism(**layout), EngineChoice(name=engine)
    )
    for count in (1, 4):
        assert gradient_copy_bytes(traits, ALONE.size, count) == pytest.approx((first + (count - 1) * later) / count)


ADAMW = 4 + 2 * 12  # reads an fp32 gradient; reads and writes the weight and both moments
NORM_AND_CLIP = 4 + 8


@pytest.mark.parametrize(
    ("engine", "precision", "layout", "passes", "update"),
    [
        # Set to zero and divided by the ranks. To fp32, unscaled; the weight is written in 16 bits.
        (
            "megatron",
            "fp16",
            {"data_parallel_replicate_degree": 2},
            3 * 2,
            (2 + 4) + 8 + NORM_AND_CLIP + ADAMW + (4 + 2),
        ),
        ("megatron", "fp16", {}, 2, (2 + 4) + 8 + NORM_AND_CLIP + ADAMW + (4 + 2)),
        ("megatron", "bf16", {"data_parallel_shard_degree": 2, "zero_stage": 1}, 4, NORM_AND_CLIP + ADAMW),
        # Copied into a bucket and divided. Joined, to fp32; a gather writes the weight in 16 bits.
        (
            "deepspeed",
            "fp16",
            {"data_parallel_shard_degree": 2, "zero_stage": 1},
            2 * 2 + 2 * 2,
            (2 + 2) + (2 + 4) + NORM_AND_CLIP + ADAMW,
        ),
        ("ahp", "fp32", {}, 0, NORM_AND_CLIP + ADAMW),
    ],
)
def test_bytes_moved_once_a_step(engine, precision, layout, passes, update):
    job, layout = Job.model_validate({"precision": precision}), Parallelism(**layout)
    traits = get(engine).traits(job, layout, EngineChoice(name=engine))
    assert last_copy_bytes(traits, 4) == passes
    assert update_bytes(job, traits, on_cpu=False) == update


@pytest.mark.parametrize(("engine", "copied"), [("megatron", 0), ("deepspeed", 0), ("ahp", 4), ("torchtitan", 4)])
def test_weights_are_copied_out_of_a_gathered_buffer_where_they_are_not_parts_of_it(engine, copied):
    layout = Parallelism(data_parallel_shard_degree=2, zero_stage=1)
    traits = get(engine).traits(Job(precision="bf16"), layout, EngineChoice(name=engine))
    assert cast_bytes(traits, 2) == (4 + 2) / 2 + copied


def test_only_the_first_stage_waits_for_weights_that_all_ranks_gather_at_once(llama):
    layout = Parallelism(data_parallel_shard_degree=2, zero_stage=1, pipeline_parallel_degree=2)
    job = Job(sequence_length=256, global_batch_size=8)

    def waits_s(engine):
        stages = price(llama, make_cluster(per_node=4), job, layout, EngineChoice(name=engine)).stages
        return [stage.first_forward["weight_gather"] for stage in stages]

    assert waits_s("megatron")[0] > 0 == waits_s("megatron")[1]
    assert min(waits_s("torchtitan")) > 0
