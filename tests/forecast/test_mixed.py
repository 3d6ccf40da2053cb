"""Mixed clusters: what a group of other devices changes, and what must not change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ahp.cluster.cells import Cell, cells_of, place
from ahp.cluster.model import Cluster, GroupLink, Link, NodeGroup
from ahp.errors import BadInput, NotExpressible
from ahp.forecast import timeline
from ahp.forecast.assembly import band_s
from ahp.forecast.constants import margins
from ahp.forecast.mixed_network import MixedNetwork, Spread
from ahp.forecast.nccl import Nccl
from ahp.forecast.priced import Priced
from ahp.forecast.step import price, simulate
from ahp.graph.kept import analyze
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism
from tests.lower_bounds import lower_bound_s

from .conftest import make_cluster

JOB = Job(sequence_length=64, global_batch_size=32, precision="bf16")
TORCHTITAN, MEGATRON = EngineChoice(name="torchtitan"), EngineChoice(name="megatron")
NETWORK = Link(bandwidth_bytes_per_s=4e11, latency_s=4e-6)
"""Between the nodes of ``make_cluster``."""


def group(called: str, nodes: int, per_node: int, *, network: Link = NETWORK, **device: Any) -> NodeGroup:
    """A group of ``make_cluster``'s nodes, with figures of its device changed."""
    found = make_cluster(nodes=nodes, per_node=per_node).groups[0]
    changed = found.device.model_copy(update=device)
    return found.model_copy(update={"name": called, "device": changed, "inter_node": network})


def mixed(*groups: NodeGroup, link: Link = NETWORK) -> Cluster:
    names = [g.name for g in groups]
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    return Cluster(groups=groups, links=tuple(GroupLink(between=pair, link=link) for pair in pairs))


def faster(times: float, precision: str = "bf16") -> dict[str, Any]:
    """Figures of ``make_cluster``'s device that computes and streams so many times as fast."""
    return {
        "peak_flops_per_s": {"bf16": times * 1e14, "fp32": times * 2e13},
        "memory_bandwidth_bytes_per_s": times * 1e12,
    }


DEGREES = st.sampled_from([1, 2, 4])


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Parallelism, EngineChoice]:
    """Layouts of every axis that make_cluster's nodes hold whole, under an engine that has it."""
    engine = draw(st.sampled_from([EngineChoice(), TORCHTITAN, MEGATRON]))
    shard, pipeline = draw(DEGREES), draw(DEGREES)
    virtual = draw(st.sampled_from([1, 2])) if pipeline == 2 else 1
    kind, some = draw(st.sampled_from(["none", "full", "auto"])), None
    if kind == "full" and engine.name == "ahp":
        some = tuple(draw(st.lists(st.integers(0, 1), min_size=pipeline * virtual, max_size=pipeline * virtual)))
    layout = Parallelism(
        data_parallel_replicate_degree=draw(DEGREES),
        data_parallel_shard_degree=shard,
        zero_stage=draw(st.sampled_from([1, 2, 3] if shard > 1 else [0])),
        tensor_parallel_degree=draw(st.sampled_from([1, 2])),
        context_parallel_degree=draw(st.sampled_from([1, 2])) if engine.name != "ahp" else 1,
        pipeline_parallel_degree=pipeline,
        virtual_stages_per_rank=virtual,
        activation_checkpoint=kind,
        recomputed_layers_per_stage=some,
    )
    return layout, engine


@pytest.mark.slow
@given(
    layouts(),
    st.sampled_from([1, 2, 4]),
    st.lists(st.integers(1, 3), min_size=2, max_size=4),
    st.sampled_from(["toy", "H100-toy", "cpu"]),
)
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_groups_of_one_kind_are_one_cluster(hand_graph, drawn, per_node, sizes, device):
    layout, engine = drawn
    width = layout.world_size // (layout.data_parallel_replicate_degree * layout.pipeline_parallel_degree)
    unit = max(1, width // per_node)
    nodes = layout.world_size // per_node // unit
    assume(nodes * unit * per_node == layout.world_size and 2 <= nodes <= sum(sizes))
    parts, left = [], nodes
    for i, size in enumerate(sizes):
        part = min(size, left) if i < len(sizes) - 1 else left
        if part:
            parts.append(group(f"g{i}", part * unit, per_node, name=device))
        left -= part
    assume(len(parts) > 1)
    try:
        plain = price(hand_graph, make_cluster(nodes=nodes * unit, per_node=per_node, name=device), JOB, layout, engine)
    except (BadInput, NotExpressible):
        assume(False)
        return
    same = price(hand_graph, mixed(*parts), JOB, layout, engine)
    expected, found = plain.forecast.model_dump(), same.forecast.model_dump()
    assert device in found.pop("mfu_peak")
    expected.pop("mfu_peak")
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-9), key
    assert same.parallelism == plain.parallelism
    assert place(mixed(*parts), layout).workers == list(range(layout.world_size))
    assert same.span.ends_s == pytest.approx(plain.span.ends_s, rel=1e-9)


OLD = group("old", 2, 4)
ROWS = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 4}
"""Two replicas of one stage each, one on either group."""
PIPES = {**ROWS, "pipeline_parallel_degree": 2}
"""Two replicas of two stages."""
ACROSS = {"stages": [{"group": "old", "layers": 1}, {"group": "new", "layers": 3}]}
"""Each replica goes over both groups."""
FULL = {"activation_checkpoint": "full"}
BESIDE = {"stages": [{"group": ["old", "new"], "layers": 2}, {"group": ["old", "new"], "layers": 2}]}
"""Each replica lies on one."""


def stages_on(*groups: Any, schedule: str = "Interleaved1F1B") -> dict[str, Any]:
    """Of a layer each, two on every rank."""
    stages = [{"group": group, "layers": 1} for group in groups]
    return {"pipeline_parallel_schedule": schedule, "virtual_stages_per_rank": 2, "stages": stages}


def layout(**keys: Any) -> Parallelism:
    return Parallelism.model_validate(keys)


def two_kinds(times: float = 2.0, *, link: Link = NETWORK, **device: Any) -> Cluster:
    """Two nodes of four of the usual devices, and two of others."""
    return mixed(OLD, group("new", 2, 4, name="newer", **(faster(times) | device)), link=link)


@pytest.mark.parametrize("stages", [ACROSS, BESIDE], ids=["stages apart", "replicas apart"])
def test_parts_add_up_and_no_bound_is_above(hand_graph, stages):
    cluster, parallelism = two_kinds(), layout(**PIPES, **stages)
    priced = price(hand_graph, cluster, JOB, parallelism)
    found = priced.forecast
    assert sum(found.step.values()) == pytest.approx(found.step_time_s)
    assert min(found.step.values()) > 0
    error = (margins.value("step_error_catalogue") ** 2 + margins.value("step_error_mixed") ** 2) ** 0.5
    assert (found.step_time_low_s, found.step_time_high_s) == pytest.approx(band_s(found.step_time_s, error))
    peak = 8 * 1e14 + 8 * 2e14
    assert found.mfu == pytest.approx(3 * hand_graph.flops("forward") * 32 / (found.step_time_s * peak))
    for replica, micro_batches in enumerate(parallelism.micro_batches(JOB)):
        times = priced.replicas[replica].span.times
        assert lower_bound_s("1F1B", 2, 1, micro_batches, times) <= priced.span.makespan_s * (1 + 1e-12)
        assert priced.span.makespan_s >= priced.replicas[replica].span.makespan_s


@pytest.mark.parametrize("stages", [{}, ACROSS, BESIDE], ids=["ranks in order", "stages apart", "replicas apart"])
def test_a_faster_device_or_link_is_never_slower(hand_graph, stages):
    def step_s(times: float, gbps: float) -> float:
        link = Link(bandwidth_bytes_per_s=gbps * 1e9 / 8, latency_s=1e-5)
        return price(hand_graph, two_kinds(times, link=link), JOB, layout(**PIPES, **stages)).forecast.step_time_s

    by_device = [step_s(times, 100) for times in (0.25, 0.5, 1, 2, 4)]
    by_link = [step_s(2, gbps) for gbps in (1, 10, 100, 800)]
    assert by_device == sorted(by_device, reverse=True)
    assert by_link == sorted(by_link, reverse=True)
    assert by_device[0] > by_device[-1]
    assert by_link[0] > by_link[-1]


def test_each_cell_is_judged_against_its_own_memory(hand_graph):
    parallelism = layout(**PIPES, **ACROSS)
    roomy = price(hand_graph, two_kinds(), JOB, parallelism).forecast
    small = price(hand_graph, two_kinds(memory_bytes=roomy.memory_reserved_bytes // 2), JOB, parallelism).forecast
    assert roomy.fits
    assert not small.fits
    assert place(two_kinds(), parallelism).group_of(small.fullest_rank) == "new"
    # The same cell on the group that kept its memory fits.
    other = layout(**PIPES, stages=[{"group": "old", "layers": 3}, {"group": "old", "layers": 1}])
    assert price(
        hand_graph, mixed(group("old", 4, 4), group("new", 1, 4, memory_bytes=10**6)), JOB, other
    ).forecast.fits


def test_each_cell_recomputes_its_own_number_of_layers(hand_graph):
    """One replica lies on small devices: only its second stage has to recompute, and the other replica does not wait longer."""

    def priced(*some: Any) -> Priced:
        stages = [{"group": ["old", "new"], "layers": 2, "recomputed_layers": count} for count in some]
        return price(hand_graph, two_kinds(0.25), JOB, layout(**PIPES, **FULL, stages=stages))

    none, every, slow = priced(0, 0), priced(2, 2), priced(0, (0, 1))
    assert priced(None, None).forecast == every.forecast
    assert none.forecast.step_time_s < slow.forecast.step_time_s < every.forecast.step_time_s
    assert slow.replicas[0].stages == none.replicas[0].stages
    assert slow.replicas[1].stages[0] == none.replicas[1].stages[0]
    kept = [one.replicas[1].memory.kept[1] for one in (none, slow, every)]
    assert 2 * kept[1] == kept[0] + kept[2]
    fast = priced(0, (1, 0))
    assert fast.forecast.step_time_s == none.forecast.step_time_s
    assert fast.parallelism.short().endswith("full(0 1|0)")


def test_the_slowest_replica_is_the_step(hand_graph):
    """Twice the work on devices twice as fast: nobody waits, and more on the slow ones is worse."""
    cluster = mixed(group("old", 1, 1, **faster(1e-4)), group("new", 1, 1, **faster(3e-4)))
    job = JOB.model_copy(update={"global_batch_size": 8})
    rows = {"data_parallel_replicate_degree": 2}

    def step_s(*counts: int) -> float:
        return price(hand_graph, cluster, job, layout(**rows, micro_batches_per_replica=counts)).forecast.step_time_s

    steps = {count: step_s(count, 8 - count) for count in range(1, 8)}
    assert min(steps, key=steps.__getitem__) == 2
    assert steps[2] < steps[4]
    assert all(steps[count] < steps[count + 1] for count in range(2, 7))
    priced = price(hand_graph, cluster, job, layout(**rows, micro_batches_per_replica=(2, 6)))
    assert [replica.span.m for replica in priced.replicas] == [2, 6]
    assert step_s(4, 4) == price(hand_graph, cluster, job, layout(**rows)).forecast.step_time_s


def test_uneven_micro_batches_on_a_plain_cluster_wait_for_the_most(hand_graph):
    cluster = make_cluster(per_node=8)
    uneven = price(hand_graph, cluster, JOB, layout(**ROWS, micro_batches_per_replica=(2, 6))).forecast
    as_most = price(hand_graph, cluster, JOB.model_copy(update={"global_batch_size": 48}), layout(**ROWS)).forecast
    assert uneven.step == as_most.step
    assert uneven.tokens_per_s_per_device == pytest.approx(as_most.tokens_per_s_per_device * 32 / 48)


def test_workers_go_through_the_groups_in_order_and_ranks_through_the_mesh():
    cluster = mixed(group("a", 1, 4), group("b", 2, 4))
    by_stage = layout(pipeline_parallel_degree=2, tensor_parallel_degree=2, data_parallel_replicate_degree=2, stages=[
        {"group": "b", "layers": 2}, {"group": "a", "layers": 2},
    ])  # fmt: skip
    assert place(cluster, by_stage).used == {"a": 4, "b": 4}
    assert place(cluster, by_stage).workers == [4, 5, 6, 7, 0, 1, 2, 3]
    assert [place(cluster, by_stage).group_of(rank) for rank in (0, 3, 4, 7)] == ["b", "b", "a", "a"]
    three = layout(data_parallel_replicate_degree=3, tensor_parallel_degree=2)
    assert [row[0].group for row in place(cluster, three).cells] == ["a", "a", "b"]
    assert [cells_of(group("g", 3, 4), width) for width in (1, 2, 3, 4, 6, 8, 12, 16)] == [12, 6, 3, 3, 0, 1, 1, 0]


def test_old_and_new_devices_reduce_as_the_oldest():
    for name, other, oldest in (
        ("A100", "A100-SXM-40GB", "ampere"),
        ("H100", "B200", "hopper"),
        ("H100", "A100", "ampere"),
    ):
        assert Nccl(group("g", 2, 4, name=name), others=(other,)).generation == oldest
    alike, unlike = (mixed(group("a", 1, 4, name="A100"), group("b", 1, 4, name=name)) for name in ("A100", "H100"))
    times = []
    for cluster in (alike, unlike):
        spread = MixedNetwork(cluster).replicas([Cell(name, 4, 4, 0, 0, 0) for name in "ab"], 1, 4)
        assert isinstance(spread, Spread)
        times.append(MixedNetwork(cluster).spread_s("all_reduce", (1e6,) * len(spread.sides), spread))
    assert times[0] == times[1]


CELLS = {"data_parallel_replicate_degree": 4, "data_parallel_shard_degree": 4}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({**PIPES, "stages": [{"group": "odl", "layers": 2}, {"group": "new", "layers": 2}]}, ["stages.group = 'odl'", "valid: old, new"]),
        ({**PIPES, "stages": [{"group": "old", "layers": 1}, {"group": "new", "layers": 2}]}, ["stages.layers = [1, 2]", "4 layers"]),
        ({**PIPES, "stages": [{"group": "old", "layers": 4}]}, ["1 stages", "needs 2", "pipeline_parallel_degree 2"]),
        ({**PIPES, "stages": [{"group": ["old"], "layers": 2}, {"group": "new", "layers": 2}]}, ["stages.group = ['old']", "degree is 2"]),
        ({**PIPES, **ACROSS, "layers_per_stage": [1, 3]}, ["layers_per_stage = [1, 3]", "stages has the layers"]),
        ({**PIPES, **ACROSS, "virtual_stages_per_rank": 2}, ["2 stages", "needs 4", "2 x virtual_stages_per_rank 2"]),
        ({**PIPES, **stages_on("old", "new", "new", "old")}, ["stages.group = 'new'", "stage 3 ", "as stage 1", "valid: old"]),
        ({**PIPES, **stages_on(["old", "new"], "new", "old", "new")}, ["stages.group = 'old'", "valid: ['old', 'new']"]),
        ({**CELLS, "stages": [{"group": "old", "layers": 4}]}, ["stages.group = 'old'", "4 cells of 4", "at most 2"]),
        ({**CELLS, "data_parallel_replicate_degree": 5}, ["replicate 5 x pipeline 1", "2 on old, 2 on new"]),
        ({"data_parallel_replicate_degree": 10**30}, ["data_parallel_replicate_degree = 1000", "the cluster has 16 devices"]),
        ({**PIPES, **ACROSS, "data_parallel_replicate_degree": 10**30}, ["data_parallel_replicate_degree = 1000", "16 devices"]),
        ({"data_parallel_shard_degree": 16}, ["cells of 16 devices", "0 on old, 0 on new"]),
        ({**ROWS, "micro_batches_per_replica": [5, 4]}, ["[5, 4]", "= 36 sequences", "global_batch_size is 32", "sum to 8"]),
        ({**ROWS, "micro_batches_per_replica": [8]}, ["micro_batches_per_replica = [8]", "degree is 2"]),
        ({**ROWS, "micro_batches_per_replica": [8, 0]}, ["micro_batches_per_replica = [8, 0]", "at least one"]),
        ({**ROWS, **FULL, "stages": [{"group": "new", "layers": 4, "recomputed_layers": 5}]}, ["the stage has 4 layers", "0 to 4"]),
        ({**ROWS, **FULL, "stages": [{"group": "new", "layers": 4, "recomputed_layers": [1]}]}, ["[1]: 1 numbers", "one for each replica"]),
        ({**ROWS, "stages": [{"group": "old", "layers": 4, "recomputed_layers": 1}]}, ["recomputed_layers = 1", "selective or full"]),
        ({**PIPES, **FULL, **ACROSS, "recomputed_layers_per_stage": [1, 1]}, ["[1, 1]", "stages.recomputed_layers"]),
        ({**PIPES, **FULL, "recomputed_layers_per_stage": [1, 3]}, ["[1, 3]", "the stages have [2, 2] layers"]),
        (
            {**PIPES, "micro_batches_per_replica": [7, 1], "pipeline_parallel_schedule": "DualPipeV", "virtual_stages_per_rank": 2},
            ["micro_batches_per_replica = [7, 1]", "DualPipeV needs", "there are 1"],
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_the_users_words(hand_graph, keys, words):
    with pytest.raises(BadInput) as refusal:
        simulate(model=hand_graph, cluster=two_kinds(), job=JOB, parallelism=keys)
    assert all(word in str(refusal.value) for word in words), refusal.value


@pytest.mark.parametrize(
    ("schedule", "groups"),
    [
        ("Interleaved1F1B", ["old", "new", "old", "new"]),
        ("InterleavedZeroBubble", ["old", "new", "old", "new"]),
        ("ZBVZeroBubble", ["old", "new", "new", "old"]),
    ],
)
def test_stages_of_a_rank_lie_together(hand_graph, schedule, groups):
    """Placed as the groups are filled anyhow, and the other way round."""
    keys = {**PIPES, **stages_on(*groups, schedule=schedule)}
    named = simulate(model=hand_graph, cluster=two_kinds(), job=JOB, parallelism=keys)
    filled = simulate(model=hand_graph, cluster=two_kinds(), job=JOB, parallelism={**keys, "stages": None})
    assert named == filled
    turned = {**PIPES, **stages_on(*("new" if name == "old" else "old" for name in groups), schedule=schedule)}
    found = price(hand_graph, two_kinds(), JOB, layout(**turned))
    assert [cell.group for cell in found.replicas[0].cells] == ["new", "old"]
    assert found.forecast.step_time_s != named.step_time_s


def test_groups_that_cannot_work_together_are_refused(hand_graph):
    def refused(*groups: NodeGroup, keys: dict[str, Any] = ROWS, link: bool = True) -> str:
        cluster = mixed(*groups)
        with pytest.raises(BadInput) as refusal:
            price(hand_graph, cluster if link else Cluster(groups=groups), JOB, layout(**keys))
        return str(refusal.value)

    one = group("a", 1, 4)
    assert "NCCL" in refused(one, group("b", 1, 4, name="cpu"))
    assert "between: [a, b]" in refused(one, group("b", 1, 4), link=False)
    assert "precision = 'bf16'" in refused(one, group("b", 1, 4, name="T4", peak_flops_per_s={"fp32": 1e13}))
    assert "own name" in refused(one, one)
    with pytest.raises(BadInput, match=r"stages = .*one group"):
        price(
            hand_graph, make_cluster(per_node=4), JOB, layout(data_parallel_shard_degree=4, stages=ACROSS["stages"][:1])
        )
    for keys in ({"stages": BESIDE["stages"]}, {"micro_batches_per_replica": (3, 5)}):
        with pytest.raises(NotExpressible, match="torchtitan"):
            price(hand_graph, two_kinds(), JOB, layout(**PIPES, **keys), TORCHTITAN)


def test_a_group_that_takes_no_part_does_not_matter(hand_graph):
    unlike = group("b", 3, 4, name="cpu", peak_flops_per_s={"fp32": 1e9}, memory_bytes=1000)
    alone = price(hand_graph, make_cluster(per_node=8), JOB, layout(**ROWS)).forecast
    beside = price(hand_graph, mixed(group("a", 1, 8), unlike), JOB, layout(**ROWS)).forecast
    assert beside.step_time_s == pytest.approx(alone.step_time_s)
    assert beside.fit_probability == alone.fit_probability


def test_one_track_for_each_cell(hand_graph):
    priced = price(hand_graph, two_kinds(), JOB, layout(**PIPES, **BESIDE))
    trace = timeline.chrome_trace(priced)
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert len(names) == 4
    assert sum("on old" in name for name in names) == sum("on new" in name for name in names) == 2
    ends = [e["ts"] + e["dur"] for e in trace["traceEvents"] if e["ph"] == "X"]
    assert max(ends) == pytest.approx(priced.forecast.step_time_s * 1e6)
    arrows = [e["id"] for e in trace["traceEvents"] if e["ph"] == "s"]
    assert len(arrows) == len(set(arrows)) > 0
    everyone = timeline.chrome_trace(priced, all_ranks=True)
    assert {e["pid"] for e in everyone["traceEvents"]} == set(range(16))


def test_plain_dicts(hand_graph):
    groups = [
        {"name": "new", "nodes": 1, "devices_per_node": 4, "device": "H100-SXM-80GB"},
        {"name": "old", "nodes": 1, "devices_per_node": 4, "device": "A100-SXM-40GB"},
    ]
    found = simulate(
        model=hand_graph,
        cluster={"groups": groups, "links": [{"between": ["old", "new"], "gbps": 100}]},
        job={"sequence_length": 64, "global_batch_size": 8},
        parallelism={
            "data_parallel_shard_degree": 4,
            "pipeline_parallel_degree": 2,
            "stages": [{"group": "new", "layers": 3}, {"group": "old", "layers": 1}],
            "micro_batches_per_replica": [2],
        },
    )
    assert found.fits
    assert "4 x H100-SXM-80GB" in found.mfu_peak
    assert "4 x A100-SXM-40GB" in found.mfu_peak


def test_muon_exchanges_parts_within_the_nodes_of_a_cell():
    """Cells of three on a node of eight: numbered through the whole layout some would lie on two nodes, and there is one."""
    job = Job.model_validate({"sequence_length": 64, "global_batch_size": 12, "precision": "bf16", "optimizer": "muon"})
    graph = analyze("tiny", job)
    keys = {
        "data_parallel_replicate_degree": 2,
        "data_parallel_shard_degree": 3,
        "zero_stage": 1,
        "pipeline_parallel_degree": 2,
    }
    stages = [{"group": "h100", "layers": graph.num_layers - 1}, {"group": "a100", "layers": 1}]
    on_one = price(graph, Cluster.parse("8xH100-SXM-80GB+8xA100-SXM-80GB"), job, layout(**keys, stages=stages)).forecast
    on_two = price(
        graph, Cluster.parse("2x8xH100-SXM-80GB+2x8xA100-SXM-80GB"), job, layout(**keys, stages=stages)
    ).forecast
    assert on_one.step["optimizer"] == pytest.approx(on_two.step["optimizer"])


def test_adapters_leave_the_tied_weights_as_they_are(hand_graph):
    """Without adapters the first and the last stage, which lie on two groups, sum the gradient of these weights over the link."""
    tied = replace(hand_graph, tied=(("embed.weight", "lm_head.weight"),), head=replace(hand_graph.head, parameters=()))
    slow = Link(bandwidth_bytes_per_s=1e6, latency_s=1e-3)

    def reduced_s(link: Link, lora: dict[str, int] | None) -> float:
        job = Job.model_validate({**JOB.model_dump(), "lora": lora})
        return price(tied, two_kinds(link=link), job, layout(**PIPES, **ACROSS)).forecast.step["gradient_reduce"]

    assert reduced_s(slow, None) > 10 * reduced_s(NETWORK, None)
    assert reduced_s(slow, {"r": 8}) <= reduced_s(NETWORK, {"r": 8})
