"""Clusters of several kinds of devices: the search finds what pricing every placement finds, and its floors hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ahp.cluster.cells import cells_of
from ahp.cluster.model import Cluster
from ahp.errors import AhpError, BadInput, NotExpressible, NothingFits
from ahp.plan import Parallelism, StagePlace
from ahp.search.mixed_find import Budget, Finder
from ahp.search.mixed_space import Alike, MixedSpace, Shape, layout_of
from ahp.search.problem import Problem, problem
from ahp.search.ranking import Ranking, search
from ahp.search.space import divisors
from ahp.search.stages import cuts

from .small import SEQUENCE, graph

ROUNDING = 1 + 1e-9
H100, A100, L4 = "H100-SXM-80GB", "A100-SXM-40GB", "L4-24GB"


def cluster_of(
    *groups: tuple[str, int, int], gbps: float | None = None, memory: dict[str, int] | None = None
) -> Cluster:
    """Groups of (device, nodes, devices a node), named a, b, c; ``gbps`` between them; ``memory`` by name."""
    described = [
        {"name": name, "device": device, "nodes": nodes, "devices_per_node": each, "inter_node_gbps": 100}
        for name, (device, nodes, each) in zip("abc", groups, strict=False)
    ]
    names = [group["name"] for group in described]
    links = [] if gbps is None else [
        {"between": [one, other], "gbps": gbps} for at, one in enumerate(names) for other in names[at + 1 :]
    ]  # fmt: skip
    cluster = Cluster.from_dict({"groups": described, "links": links})
    changed = [
        group
        if memory is None or group.name not in memory
        else group.model_copy(
            update={
                "device": group.device.model_copy(
                    update={"memory_bytes": memory[group.name], "reserved_memory_bytes": 0}
                )
            }
        )
        for group in cluster.groups
    ]
    return cluster.model_copy(update={"groups": tuple(changed)})


def mixed(cluster: Cluster, *, model: str = "llama", batch: int = 4, constraints: Any = None) -> Problem:
    job = {"sequence_length": SEQUENCE, "global_batch_size": batch}
    return problem(graph(model), cluster, job, constraints)


def ranking_of(asked: Problem, **more: Any) -> Ranking:
    return search(asked.graph, asked.cluster, asked.job, constraints=asked.constraints, engine=asked.engine, **more)


def best_s(ranking: Ranking) -> float:
    assert ranking.best.forecast is not None
    return ranking.best.forecast.step_time_s


def sums(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Ways to share ``total`` micro-batches, one each at least."""
    if parts == 1:
        yield (total,)
    else:
        for first in range(1, total - parts + 2):
            yield from ((first, *rest) for rest in sums(total - first, parts - 1))


def every_alike(asked: Problem) -> Iterator[Alike]:
    """What the ahp engine can give all cells, written out without the search's own rules."""
    fixed = asked.constraints.given
    for tensor, sequence, shard, size, kind in product(
        [1, 2, 4], [False, True], [1, 2, 3, 4], divisors(asked.job.global_batch_size), ["none", "full"]
    ):
        for zero in [1, 2, 3] if shard > 1 else [0]:
            alike = Alike(tensor, sequence, 1, 1, size, shard, zero, kind)
            layout = layout_of(alike, 1)
            if all(getattr(layout, key) == value for key, value in fixed.items()):
                yield alike


def every_placement(asked: Problem) -> Iterator[Parallelism]:
    """Every matrix of cells in every order, every cut, every sharing of the micro-batches; legal or not."""
    groups, layers = asked.cluster.groups, asked.graph.num_layers
    for alike in every_alike(asked):
        total, rest = divmod(asked.job.global_batch_size, alike.shard * alike.micro_batch)
        have = {group.name: cells_of(group, alike.width) for group in groups}
        for p, r in product(range(1, layers + 1), range(1, total + 1)):
            if rest or p * r > sum(have.values()):
                continue
            for names in product(have, repeat=p * r):
                if any(count > have[name] for name, count in Counter(names).items()):
                    continue
                columns = [names[s * r : (s + 1) * r] for s in range(p)]
                for cut, shares in product(cuts(layers, p), sums(total, r)):
                    stages = tuple(StagePlace(group=c, layers=n) for c, n in zip(columns, cut, strict=True))
                    for schedule in ("1F1B", "InterleavedZeroBubble", "GPipe") if p > 1 else ("1F1B",):
                        yield (
                            Shape(alike, p, r, schedule)
                            .layout()
                            .model_copy(update={"stages": stages, "micro_batches_per_replica": shares})
                        )


def brute_force_s(asked: Problem) -> tuple[float, int]:
    """The best over all placements and each group alone; infinite where nothing fits. And how many were priced."""
    best, priced = float("inf"), 0
    for group in asked.cluster.groups:
        try:
            alone = search(asked.graph, Cluster(groups=(group,)), asked.job, constraints=asked.constraints, keep=1)
            best = min(best, best_s(alone))
        except AhpError:
            continue
    for layout in every_placement(asked):
        try:
            forecast = asked.price(layout)
        except (BadInput, NotExpressible):
            continue
        priced += 1
        if forecast.fits:
            best = min(best, forecast.step_time_s)
    return best, priced


def equals_brute_force(asked: Problem) -> None:
    best, priced = brute_force_s(asked)
    assert priced > 0
    if best == float("inf"):
        with pytest.raises(NothingFits):
            ranking_of(asked)
        return
    ranking = ranking_of(asked)
    assert best_s(ranking) == pytest.approx(best, rel=1e-12)
    assert ranking.certificate.proven
    for plan in ranking.plans:
        assert plan.cluster is not None
        used = asked.on(Cluster.resolve(plan.cluster))
        assert used.price(plan.parallelism) == plan.forecast


MEMORIES: list[dict[str, int] | None] = [None, {"b": 2_003_000_000}, {"a": 2_003_000_000, "b": 2_001_800_000}]
"""Devices that hold everything, and some that hold a part of the model."""


@st.composite
def problems(draw: st.DrawFn, *, most_cells: int = 4) -> Problem:
    """Two kinds of devices, few of either; uneven counts, memories and links."""
    sizes = [(n, k) for n, k in product([1, 2, 3], repeat=2) if n + k <= most_cells]
    one, other = draw(st.sampled_from(sizes))
    first, second = draw(st.sampled_from([(H100, A100), (A100, L4), (H100, L4)]))
    cluster = cluster_of(
        (first, 1, one),
        (second, 1, other),
        gbps=draw(st.sampled_from([1, 400])),
        memory=draw(st.sampled_from(MEMORIES)),
    )
    fixed = {
        "micro_batch_size": draw(st.sampled_from([1, 2])),
        "activation_checkpoint": draw(st.sampled_from(["none", "full"])),
    }
    batch = draw(st.sampled_from([2, 4, 6]))
    return mixed(cluster, model=draw(st.sampled_from(["llama", "experts"])), batch=batch, constraints=fixed)


@pytest.mark.parametrize("batch", [2, 6])
@pytest.mark.parametrize("memory", MEMORIES)
def test_the_best_is_the_best_of_every_placement(batch: int, memory: dict[str, int] | None) -> None:
    fixed = {"micro_batch_size": 1, "activation_checkpoint": "full"}
    equals_brute_force(
        mixed(cluster_of((H100, 1, 2), (A100, 1, 1), gbps=1, memory=memory), batch=batch, constraints=fixed)
    )


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(problems(most_cells=4))
def test_the_best_is_the_best_of_every_placement_on_more_cells(asked: Problem) -> None:
    equals_brute_force(asked)


def floors_of(asked: Problem) -> tuple[Finder, dict[Shape, float]]:
    """The floor of every shape that the memory does not rule out."""
    space = MixedSpace(asked)
    finder = Finder(asked, space, Budget(), float("inf"))
    return finder, {shape: floor for alike in space.alike for floor, shape in finder.floors(alike)}


@settings(max_examples=5, deadline=None)
@given(problems(most_cells=6), st.data())
def test_floors_are_under_the_forecast(asked: Problem, data: st.DataObject) -> None:
    finder, floors = floors_of(asked)
    for alike in {shape.alike for shape in floors}:
        assert finder.least_s(alike) <= min(floor for shape, floor in floors.items() if shape.alike == alike) * ROUNDING
    shapes = sorted(floors, key=str)
    for _ in range(4):
        shape = data.draw(st.sampled_from(shapes))
        task = finder.task(shape)
        placements = list(task.all()) if task.few() else list(task.of_families())
        if not placements:
            continue
        placement = data.draw(st.sampled_from(placements))
        try:
            forecast = asked.price(placement.of(shape, finder.names))
        except BadInput:
            continue
        assert floors[shape] <= forecast.step_time_s * ROUNDING, shape
        assert placement.at_least_s <= forecast.step_time_s * ROUNDING, placement


@settings(max_examples=4, deadline=None)
@given(problems(most_cells=5), st.data())
def test_what_does_not_fit_by_the_bound_does_not_fit(asked: Problem, data: st.DataObject) -> None:
    finder, floors = floors_of(asked)
    layouts = list(every_placement(asked))
    for _ in range(12):
        layout = data.draw(st.sampled_from(layouts))
        try:
            forecast = asked.price(layout)
        except AhpError:
            continue
        known = [
            s
            for s in floors
            if s.layout() == layout.model_copy(update={"stages": None, "micro_batches_per_replica": None})
        ]
        if forecast.fits:
            assert known, layout.short()
            assert finder.columns_hold(finder.task(known[0]))


@settings(max_examples=3, deadline=None)
@given(problems(most_cells=3), st.sampled_from(["group", "device", "link"]))
def test_more_generous_hardware_is_never_slower(asked: Problem, kind: str) -> None:
    try:
        before = best_s(ranking_of(asked, keep=1))
    except NothingFits:
        return
    cluster = asked.cluster
    if kind == "group":
        third = cluster_of((L4, 1, 1), (L4, 1, 1), (A100, 1, 1)).groups[2]
        links = cluster_of((H100, 1, 1), (A100, 1, 1), (A100, 1, 1)).links
        mine = {frozenset(link.between) for link in cluster.links}
        more = (link for link in links if frozenset(link.between) not in mine)
        cluster = cluster.model_copy(update={"groups": (*cluster.groups, third), "links": (*cluster.links, *more)})
    elif kind == "device":
        device = cluster.groups[1].device
        faster = {precision: 2 * peak for precision, peak in device.peak_flops_per_s.items()}
        group = cluster.groups[1].model_copy(update={"device": device.model_copy(update={"peak_flops_per_s": faster})})
        cluster = cluster.model_copy(update={"groups": (cluster.groups[0], group)})
    else:
        links = tuple(
            link.model_copy(
                update={
                    "link": link.link.model_copy(update={"bandwidth_bytes_per_s": 4 * link.link.bandwidth_bytes_per_s})
                }
            )
            for link in cluster.links
        )
        cluster = cluster.model_copy(update={"links": links})
    assert best_s(ranking_of(asked.on(cluster), keep=1)) <= before * ROUNDING
