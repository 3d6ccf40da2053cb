"""A given order is priced as the pattern that it is; one that is found is faster, and fits."""

from __future__ import annotations

import random

import pytest

from ahp.cluster.model import Cluster
from ahp.errors import BadInput, NotExpressible
from ahp.forecast.found_order import FoundOrder, ToOrder
from ahp.forecast.memory import most_that_fits
from ahp.forecast.mixed import MixedPricer
from ahp.forecast.overlap import CONTENTION
from ahp.forecast.pricer import Pricer
from ahp.forecast.step import pricer
from ahp.graph.kept import analyze
from ahp.graph.operators import ModelGraph
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism
from ahp.schedule.legal import why_not
from ahp.schedule.makespan import makespan
from ahp.schedule.orders import given_order, order_text
from ahp.schedule.patterns import make

ONE = {"nodes": 1, "devices_per_node": 4, "device": "H100-SXM-80GB"}
MIXED = {
    "groups": [
        {"name": "a", "nodes": 1, "devices_per_node": 2, "device": "H100-SXM-80GB"},
        {"name": "b", "nodes": 1, "devices_per_node": 2, "device": "A100-SXM-80GB"},
    ]
}
JOB = Job(sequence_length=512, global_batch_size=16, precision="bf16")
PATTERNS = [("1F1B", 1), ("GPipe", 1), ("InterleavedZeroBubble", 1), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2)]


@pytest.fixture(scope="module")
def graph() -> ModelGraph:
    """A head that costs as much as some layers, as small models with large vocabularies have."""
    return analyze(
        {
            "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8,
            "num_attention_heads": 8, "vocab_size": 32_000,
        },
        JOB,
    )  # fmt: skip


def layout(name: str, v: int, **keys: object) -> Parallelism:
    return Parallelism(
        pipeline_parallel_degree=4,
        micro_batch_size=1,
        pipeline_parallel_schedule=name,
        virtual_stages_per_rank=v,
        **keys,
    )  # type: ignore[arg-type]


def found_order(prices: Pricer | MixedPricer, parallelism: Parallelism) -> FoundOrder | None:
    asked = ToOrder.of(prices, parallelism)
    return None if asked is None else asked.found()


@pytest.mark.parametrize("cluster", [ONE, MIXED], ids=["alike", "mixed"])
@pytest.mark.parametrize(("name", "v"), PATTERNS)
def test_an_order_is_priced_as_the_pattern_that_it_is(graph: ModelGraph, cluster: dict, name: str, v: int) -> None:
    price = pricer(graph, Cluster.from_dict(cluster), JOB, EngineChoice(compile=False)).price
    pattern = price(layout(name, v))
    order = price(layout("Synthesized", v, pipeline_parallel_order=order_text(make(name, 4, v, 16))))
    assert order.forecast.step_time_s == pytest.approx(pattern.forecast.step_time_s)
    assert order.forecast.memory == pattern.forecast.memory
    assert order.forecast.step == pytest.approx(pattern.forecast.step)
    assert order.timeline.makespan_s == pytest.approx(pattern.timeline.makespan_s)


@pytest.mark.parametrize("cluster", [ONE, MIXED], ids=["alike", "mixed"])
@pytest.mark.parametrize(("name", "v"), PATTERNS)
def test_what_is_found_is_faster_and_fits(graph: ModelGraph, cluster: dict, name: str, v: int) -> None:
    prices = pricer(graph, Cluster.from_dict(cluster), JOB, EngineChoice(compile=False))
    found = found_order(prices, layout(name, v))
    if found is None:  # the pattern is as fast as can be found
        assert name not in ("1F1B", "GPipe")
        return
    assert found.priced.parallelism.pipeline_parallel_schedule == "Synthesized"
    assert found.priced.forecast.step_time_s < found.before.forecast.step_time_s
    assert found.priced.forecast.fits
    assert why_not(found.found.schedule) is None
    again = prices.price(Parallelism.model_validate(found.priced.parallelism.model_dump()))
    assert again.forecast == found.priced.forecast
    assert f"less of a step than {name}" in found.words()


def test_little_memory_is_kept_to(graph: ModelGraph) -> None:
    """On a device that holds what 1F1B keeps and not what GPipe does."""
    prices = pricer(graph, Cluster.from_dict(ONE), JOB, EngineChoice(compile=False))
    few, all_ = (prices.price(layout(name, 1)).forecast for name in ("1F1B", "GPipe"))
    between = (sum(few.memory.values()) + sum(all_.memory.values())) / 2
    tight = {**ONE, "device": {"base": "H100-SXM-80GB", "memory_bytes": int(1.1 * between)}}
    prices = pricer(graph, Cluster.from_dict(tight), JOB, EngineChoice(compile=False))
    found = found_order(prices, layout("GPipe", 1))
    assert found is not None
    assert found.priced.forecast.fits
    assert not found.before.forecast.fits
    assert found.priced.forecast.memory_allocated_bytes < found.before.forecast.memory_allocated_bytes


def tight(cluster: dict, named: dict[str, float]) -> Cluster:
    """The cluster with devices of so many bytes, by the group's name."""
    own = {**cluster, "groups": [dict(group) for group in cluster["groups"]]}
    for group in own["groups"]:
        group["device"] = {"base": group["device"], "memory_bytes": int(named[group["name"]])}
    return Cluster.from_dict(own)


@pytest.mark.parametrize("seed", [1, 3, 5, 7, 15, 20, 22, 24])
def test_a_pattern_that_fits_is_no_faster_than_its_floor(graph: ModelGraph, seed: int) -> None:
    """Whatever its replicas recompute on devices that are nearly full, and where the gradients take the place of one micro-batch."""
    draw = random.Random(seed)
    name, v = draw.choice([*PATTERNS, ("1F1B", 1)])
    if draw.random() < 0.5:
        name, v = "GPipe", 1  # the one that goes with a single micro-batch
    size, count = draw.choice((1, 8)), draw.choice((1, 1, 4)) if name == "GPipe" else 4
    job = JOB.model_copy(update={"global_batch_size": 2 * size * count, "sequence_length": draw.choice((16, 512))})
    of_ranks = draw.choice([(("a", "b"), ("b", "a")), (("a", "a"), ("b", "b"))])
    ranks = [0, 1, 1, 0] if name == "ZBVZeroBubble" else [0, 1] * v
    stages = [
        {"group": of_ranks[rank], "layers": 4 // v, "recomputed_layers": [draw.randint(0, 4 // v) for _ in range(2)]}
        for rank in ranks
    ]
    asked = Parallelism.model_validate({
        "data_parallel_replicate_degree": 2, "pipeline_parallel_degree": 2, "micro_batch_size": size, "pipeline_parallel_schedule": name,
        "virtual_stages_per_rank": v, "activation_checkpoint": "full", "stages": stages,
    })  # fmt: skip
    ample = pricer(graph, Cluster.from_dict(MIXED), job, EngineChoice(compile=False))
    assert isinstance(ample, MixedPricer)
    most = dict.fromkeys("ab", 0.0)
    for place in ample.memory_of_places(ample.price(asked)):
        group = "a" if "H100" in place.device else "b"
        most[group] = max(most[group], float(place.memory.total))
    prices = pricer(
        graph,
        tight(MIXED, {group: 1.001 * used / most_that_fits(1.0) for group, used in most.items()}),
        job,
        EngineChoice(compile=False),
    )
    to_order = ToOrder.of(prices, asked)
    assert to_order is not None
    assert to_order.before.forecast.fits
    assert to_order.floor_s <= to_order.before.forecast.step_time_s * (1 + 1e-9)
    span = to_order.as_order.span
    assert to_order.bound.seconds <= span.makespan_s * (1 + 1e-9)
    found = to_order.found(effort=0.1)
    assert found is None or found.priced.forecast.fits


def test_one_stage_has_no_order_to_find(graph: ModelGraph) -> None:
    prices = pricer(graph, Cluster.from_dict({**ONE, "devices_per_node": 1}), JOB, EngineChoice(compile=False))
    assert found_order(prices, Parallelism()) is None


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (("0F0,0B0", "1F0,1B0", "2F0,2B0", "3F0,3B0"), "made for 1 micro-batches, there are 16"),
        (tuple(order_text(make("1F1B", 4, 1, 16)))[::-1], "the first 4 on ranks 0 to 3"),
        (("0B0,0F0", "1F0,1B0", "2F0,2B0", "3F0,3B0"), "it never ends"),
    ],
)
def test_an_order_that_does_not_go_is_refused(graph: ModelGraph, order: tuple[str, ...], words: str) -> None:
    prices = pricer(graph, Cluster.from_dict(ONE), JOB, EngineChoice(compile=False))
    with pytest.raises(BadInput) as refused:
        prices.price(layout("Synthesized", 1, pipeline_parallel_order=order))
    assert words in str(refused.value)


@pytest.mark.parametrize("engine", ["torchtitan", "megatron", "deepspeed"])
def test_other_engines_have_their_own_schedules(graph: ModelGraph, engine: str) -> None:
    prices = pricer(graph, Cluster.from_dict(ONE), JOB, EngineChoice(name=engine))  # type: ignore[arg-type]
    with pytest.raises(NotExpressible, match="Synthesized"):
        prices.price(layout("Synthesized", 1, pipeline_parallel_order=order_text(make("1F1B", 4, 1, 16))))


SHARDED = {"nodes": 2, "devices_per_node": 4, "device": "H100-SXM-80GB", "inter_node_gbps": 25}


@pytest.mark.parametrize(("name", "v"), PATTERNS)
def test_weights_are_gathered_while_the_pipeline_fills(graph: ModelGraph, name: str, v: int) -> None:
    """Shards lie on two nodes: under 1F1B and GPipe each stage gathers when its first micro-batch is there, one after the other."""
    prices = pricer(graph, Cluster.from_dict(SHARDED), JOB, EngineChoice(compile=False))
    sharded = {"data_parallel_shard_degree": 2, "zero_stage": 2, "mesh_order": ("dp_shard", "pp")}
    pattern = prices.price(layout(name, v, **sharded))
    order = prices.price(layout("Synthesized", v, pipeline_parallel_order=order_text(make(name, 4, v, 8)), **sharded))
    if name in ("1F1B", "GPipe"):
        assert order.forecast.step_time_s < pattern.forecast.step_time_s
    else:
        assert order.forecast.step_time_s == pytest.approx(pattern.forecast.step_time_s)
        assert order.forecast.step == pytest.approx(pattern.forecast.step)
    assert order.forecast.memory == pattern.forecast.memory
    assert sum(order.forecast.step.values()) == pytest.approx(order.forecast.step_time_s)
    gathered = [times.gathered_s for times in order.span.times]
    assert order.timeline.starts_s[0][0] == gathered[0] > 0.0
    for rank, spans in enumerate(order.timeline.ranks):
        for span in spans:
            assert span.start_s >= gathered[span.action.stage]
        assert 0.0 <= order.timeline.gathering_s[rank] <= order.timeline.makespan_s - order.timeline.busy_s[rank]
    found = found_order(prices, layout(name, v, **sharded))
    if found is None:
        assert name not in ("1F1B", "GPipe")
    else:
        assert found.priced.forecast.step_time_s < pattern.forecast.step_time_s


SLOW = {
    "alike": {**SHARDED, "inter_node_gbps": 5},
    "mixed": {
        "groups": [
            {"name": "a", "nodes": 4, "devices_per_node": 1, "device": "H100-SXM-80GB", "inter_node_gbps": 5},
            {"name": "b", "nodes": 4, "devices_per_node": 1, "device": "A100-SXM-80GB", "inter_node_gbps": 5},
        ],
    },
}


@pytest.mark.parametrize("cluster", SLOW)
@pytest.mark.parametrize(("name", "v"), PATTERNS)
def test_gradients_are_reduced_beside_other_stages(graph: ModelGraph, cluster: str, name: str, v: int) -> None:
    """Replicas lie on two nodes. A rank with one stage has nothing to compute meanwhile."""
    prices = pricer(graph, Cluster.from_dict(SLOW[cluster]), JOB, EngineChoice(compile=False))
    replicated = {"data_parallel_replicate_degree": 2, "mesh_order": ("dp_replicate", "pp")}
    if cluster == "mixed":
        del replicated["mesh_order"]
    pattern = prices.price(layout(name, v, **replicated))
    lines = order_text(make(name, 4, v, 8))
    order = prices.price(layout("Synthesized", v, pipeline_parallel_order=lines, **replicated))
    assert order.forecast.step_time_s == pytest.approx(pattern.forecast.step_time_s)
    assert order.forecast.step == pytest.approx(pattern.forecast.step)
    assert sum(order.forecast.step.values()) == pytest.approx(order.forecast.step_time_s)
    assert order.forecast.memory == pattern.forecast.memory
    span, timeline = order.span, order.timeline
    assert timeline.makespan_s == span.makespan_s == max(span.ends_s)
    if v == 1:
        assert not any(times.reduce_s for times in span.times)
        return
    each_s = [times.reduce_s for times in span.times]
    assert min(each_s) > 0.0
    for rank, spans in enumerate(timeline.ranks):
        own = [s for s, place in enumerate(timeline.schedule.stage_rank) if place == rank]
        most_s = sum(each_s[s] for s in own)
        assert min(each_s[s] for s in own) * (1 - 1e-9) <= timeline.reducing_s[rank] <= most_s * (1 + 1e-9)
        assert span.ends_s[rank] == spans[-1].end_s + timeline.reducing_s[rank]
        assert 0.0 <= timeline.slowed_s[rank] <= CONTENTION * most_s
    waited = [one._replace(last_backward_extra_s=one.reduce_s, reduce_s=0.0) for one in span.times]
    waited_s = makespan(name, 4, v, 8, waited).makespan_s
    assert span.makespan_s < (waited_s if name == "Interleaved1F1B" else waited_s * (1 + 1e-12))
    found = ToOrder.of(prices, layout(name, v, **replicated))
    assert found is not None
    assert found.floor_s <= order.forecast.step_time_s
    assert found.bound.seconds <= span.makespan_s


def test_on_processor_cores_reductions_are_waited_for(graph: ModelGraph) -> None:
    cluster = {"nodes": 2, "devices_per_node": 4, "device": "cpu", "inter_node_gbps": 5}
    job = JOB.model_copy(update={"precision": "fp32"})  # the cores are this machine's, and may have no units for bf16
    prices = pricer(graph, Cluster.from_dict(cluster), job, EngineChoice(compile=False))
    keys = {"data_parallel_replicate_degree": 2, "pipeline_parallel_order": order_text(make("ZBVZeroBubble", 4, 2, 8))}
    assert not any(times.reduce_s for times in prices.price(layout("Synthesized", 2, **keys)).span.times)


@pytest.mark.parametrize("engine", ["torchtitan", "megatron"])
def test_other_engines_wait_or_have_buckets(graph: ModelGraph, engine: str) -> None:
    prices = pricer(graph, Cluster.from_dict(SLOW["alike"]), JOB, EngineChoice(name=engine))  # type: ignore[arg-type]
    span = prices.price(layout("Interleaved1F1B", 2, data_parallel_replicate_degree=2)).span
    assert not any(times.reduce_s for times in span.times)


def test_replicas_with_unlike_micro_batches_have_an_order_each(graph: ModelGraph) -> None:
    prices = pricer(graph, Cluster.from_dict(MIXED), JOB, EngineChoice(compile=False))
    uneven = Parallelism(
        data_parallel_replicate_degree=2,
        pipeline_parallel_degree=2,
        micro_batch_size=1,
        micro_batches_per_replica=(10, 6),
        stages=({"group": ("a", "b"), "layers": 4}, {"group": ("a", "b"), "layers": 4}),  # type: ignore[arg-type]
    )
    found = found_order(prices, uneven)
    assert found is not None
    lines = found.priced.parallelism.pipeline_parallel_order
    assert lines is not None
    assert len(lines) == 4
    for replica, count in enumerate((10, 6)):
        order = given_order(found.priced.parallelism, replica)
        assert order is not None
        assert order.num_micro_batches == count
        assert found.priced.replicas[replica].span.makespan_s <= found.before.span.makespan_s
    assert found.priced.forecast.step_time_s < found.before.forecast.step_time_s
    few = found.priced.parallelism.model_copy(update={"pipeline_parallel_order": lines[:2]})
    with pytest.raises(BadInput, match="made for 10 micro-batches, there are 6"):
        prices.price(few)
