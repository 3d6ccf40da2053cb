"""Clusters of several kinds of devices: the search finds what pricing every placement finds, and its floors hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, permutations, product
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ahp.cluster.cells import cells_of
from ahp.cluster.model import Cluster
from ahp.errors import AhpError, BadInput, NotExpressible, NothingFits
from ahp.forecast import rules
from ahp.plan import Parallelism, StagePlace
from ahp.schedule.patterns import stage_ranks
from ahp.schedule.registry import SCHEDULES
from ahp.search.by_speed import ranking_by_speed
from ahp.search.choices import ScheduleChoice, divisors
from ahp.search.fastest import fastest
from ahp.search.lost import one_lost
from ahp.search.method import Method
from ahp.search.mixed import explain, lowest
from ahp.search.mixed.balance import share
from ahp.search.mixed.by_replicas import AT_LIMIT
from ahp.search.mixed.find import Budget, Finder, MixedOutcome
from ahp.search.mixed.lowest import lowest_floor_s
from ahp.search.mixed.matrices import families, matrices
from ahp.search.mixed.misfit import that_fits
from ahp.search.mixed.over_groups import BRIEFLY
from ahp.search.mixed.queue import Queue
from ahp.search.mixed.shapes import Shapes
from ahp.search.mixed.solve import Row, distinct_orders
from ahp.search.mixed.space import SEVERAL, Alike, MixedSpace, Shape, layout_of, shape_of
from ahp.search.problem import Problem, problem
from ahp.search.ranking import search
from ahp.search.result import Ranking
from ahp.search.stages import cuts
from ahp.search.ties import TIED, complexity
from tests.marks import cases

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
    return problem(graph(model), cluster, job, constraints, {"compile": False})


def ranking_of(asked: Problem, **more: Any) -> Ranking:
    return search(asked.graph, asked.cluster, asked.job, constraints=asked.constraints, engine=asked.engine, **more)


def best_s(ranking: Ranking) -> float:
    return ranking.fastest.priced.step_time_s


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
    shared = [(1, None), (2, "ring"), (2, "all-to-all")]
    for tensor, sequence, shard, size, kind, (context, method) in product(
        [1, 2, 4], [False, True], [1, 2, 3, 4], divisors(asked.job.global_batch_size), ["none", "full"], shared
    ):
        for zero in [1, 2, 3] if shard > 1 else [0, 1, 2, 3] if context > 1 else [0]:
            alike = Alike(tensor, sequence, context, 1, size, shard, zero, kind, method)  # type: ignore[arg-type]
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
                for pipe, shares in product(pipes(p, layers), sums(total, r)):
                    for cut in cuts(layers, p * pipe.virtual):
                        ranks = stage_ranks(pipe.schedule, p, pipe.virtual)
                        stages = tuple(
                            StagePlace(group=columns[rank], layers=n) for rank, n in zip(ranks, cut, strict=True)
                        )
                        yield layout_of(alike, p, r).model_copy(
                            update={
                                "pipeline_parallel_schedule": pipe.schedule,
                                "virtual_stages_per_rank": pipe.virtual,
                                "stages": stages,
                                "micro_batches_per_replica": shares,
                            }
                        )


def pipes(p: int, layers: int) -> Iterator[ScheduleChoice]:
    """Every schedule of p ranks, with every number of stages on each."""
    if p == 1:
        yield ScheduleChoice("1F1B", 1)
        return
    yield from (ScheduleChoice(name, 1) for name in ("1F1B", "InterleavedZeroBubble", "GPipe"))
    for v in range(2, layers // p + 1):
        yield from (ScheduleChoice(name, v) for name in ("Interleaved1F1B", "InterleavedZeroBubble"))
        yield from (ScheduleChoice(name, v) for name in ("ZBVZeroBubble", "DualPipeV") if v == 2)


def brute_force_s(asked: Problem) -> tuple[float, int]:
    """The best over all placements and each group alone; infinite where nothing fits. And how many were priced."""
    best, priced = float("inf"), 0
    for group in asked.cluster.groups:
        try:
            alone = search(
                asked.graph,
                Cluster(groups=(group,)),
                asked.job,
                constraints=asked.constraints,
                engine=asked.engine,
                keep=1,
            )
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
    # ``best`` is that of fixed patterns; an order made for the stages may be faster than all patterns.
    assert ranking.certificate.found_s == pytest.approx(best, rel=1e-12)
    assert best_s(ranking) <= best * ROUNDING
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
    without_switch = "A100-SXM-64GB"
    first, second = draw(st.sampled_from([(H100, A100), (A100, L4), (H100, L4), (without_switch, L4)]))
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


@pytest.mark.slow
@pytest.mark.parametrize("batch", cases([2, 6], fast=[2]))
@pytest.mark.parametrize("memory", cases(MEMORIES, fast=MEMORIES[-1:]))
def test_the_best_is_the_best_of_every_placement(batch: int, memory: dict[str, int] | None) -> None:
    fixed = {"micro_batch_size": 1, "activation_checkpoint": "full"}
    equals_brute_force(
        mixed(cluster_of((H100, 1, 2), (A100, 1, 1), gbps=1, memory=memory), batch=batch, constraints=fixed)
    )


@pytest.mark.slow
@pytest.mark.parametrize("memory", MEMORIES)
def test_the_fastest_is_that_of_the_ranking(memory: dict[str, int] | None) -> None:
    fixed = {"micro_batch_size": 1, "activation_checkpoint": "full"}
    asked = mixed(cluster_of((H100, 1, 2), (A100, 1, 1), gbps=400, memory=memory), batch=6, constraints=fixed)
    best, found = best_s(ranking_of(asked)), fastest(asked)
    assert found is not None
    assert found.best is not None
    layout, forecast = found.best
    assert forecast.step_time_s == pytest.approx(best, rel=1e-12)
    assert found.at_least_s <= best
    assert found.problem.priced(layout).forecast == forecast


def test_nothing_at_the_ceiling_is_wanted_and_near_a_known_layout_is_looked_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fixed = {"micro_batch_size": 1, "activation_checkpoint": "none"}
    asked = mixed(cluster_of((H100, 1, 2), (A100, 1, 1), gbps=400), constraints=fixed)
    known = fastest(asked)
    assert known is not None
    assert known.best is not None
    layout, forecast = known.best
    searched: list[tuple[float, Budget, list[Shape]]] = []
    run = Finder.run

    def spy(self: Finder, keep: int, seeds: list[Shape]) -> MixedOutcome:
        searched.append((self.best_s, self.budget, seeds))
        return run(self, keep, seeds)

    monkeypatch.setattr(Finder, "run", spy)
    for part, like in ((0.99, None), (0.99, layout), (0.01, None)):
        found = fastest(asked, part * forecast.step_time_s, like)
        assert found is not None
        assert found.best is None
        ceiling_s, budget, seeds = searched.pop()
        assert ceiling_s == part * forecast.step_time_s
        assert (budget, seeds) == ((Budget(), []) if like is None else (BRIEFLY, [shape_of(layout)]))


def test_the_fastest_where_nothing_fits_or_one_group_does() -> None:
    fixed = {"micro_batch_size": 1, "activation_checkpoint": "full"}
    for memory, fits in (({"a": 10**6, "b": 10**6}, False), ({"b": 10**6}, True)):
        asked = mixed(cluster_of((H100, 1, 1), (A100, 1, 1), gbps=100, memory=memory), batch=2, constraints=fixed)
        found = fastest(asked)
        assert found is not None
        if fits:
            assert found.best is not None
            assert found.best[1].step_time_s == best_s(ranking_of(asked))
            assert found.problem.cluster.num_devices == 1
        else:
            assert (found.best, found.at_least_s) == (None, float("inf"))


@pytest.mark.wide
@settings(max_examples=12, deadline=None)
@given(problems(most_cells=4))
def test_the_best_is_the_best_of_every_placement_on_more_cells(asked: Problem) -> None:
    equals_brute_force(asked)


LONG_S = 1e3
"""Longer than any step here."""


def floors_of(asked: Problem) -> tuple[Finder, dict[Shape, float]]:
    """The floor of every shape that the memory does not rule out."""
    finder = Finder(asked, MixedSpace(asked), Budget(), float("inf"))
    return finder, known_floors(finder, LONG_S)


def known_floors(finder: Finder, limit_s: float) -> dict[Shape, float]:
    """Those below a limit, as close as they are known."""
    found, floors = dict[Shape, float](), finder.floors
    for kind in floors.kinds:
        if kind == "alone":
            found |= {shape: floor_s for floor_s, shape in Queue(floors, kind, limit_s).popped(limit_s)}
            continue
        some = floors.by_memory(kind, floors.by_work(kind, limit_s))
        some = floors.by_replicas(some.where(some.floor_s < limit_s), limit_s)
        some = floors.by_replicas(some.where(some.floor_s < limit_s), limit_s, closely=True)
        for at in np.flatnonzero(some.floor_s < limit_s).tolist():
            found |= dict.fromkeys(floors.shapes(kind, some, at), float(some.floor_s[at]))
    return found


@pytest.mark.slow
def test_floors_never_fall_from_one_shape_to_the_next() -> None:
    asked = mixed(cluster_of((H100, 1, 4), (A100, 1, 4)))
    finder = Finder(asked, MixedSpace(asked), Budget(), float("inf"))
    for kind in finder.floors.kinds:
        floors_s = [floor_s for floor_s, _ in Queue(finder.floors, kind, float("inf")).popped(float("inf"))]
        assert floors_s
        assert floors_s == sorted(floors_s)


@dataclass(frozen=True)
class _Levels:
    """Shapes that are numbers, whose floors get higher from level to level: by work, by all replicas, closely."""

    levels: np.ndarray[Any, Any]
    """[3, n]"""

    def by_work(self, kind: str, limit_s: float) -> Shapes:
        number = np.arange(self.levels.shape[1])
        found = Shapes(number, number, number, number, np.ones(len(number)), self.levels[0])
        return found.where(found.floor_s < limit_s).sorted()

    def by_memory(self, kind: str, of: Shapes) -> Shapes:
        return of

    def by_replicas(self, of: Shapes, limit_s: float, *, closely: bool = False) -> Shapes:
        return of._replace(floor_s=np.maximum(of.floor_s, np.minimum(self.levels[1 + closely, of.rows], limit_s)))

    def shapes(self, kind: str, of: Shapes, at: int) -> list[int]:
        return [int(of.rows[at])]


@given(st.lists(st.tuples(*[st.floats(0.0, 3.0)] * 3, st.booleans()), min_size=1, max_size=30), st.floats(5.0, 12.0))
def test_the_lowest_floor_is_the_least_of_all_that_may_win(
    drawn: list[tuple[float, float, float, bool]], best_s: float
) -> None:
    """Whatever floors rise from level to level, and in whatever parts they are looked at."""
    levels = np.cumsum([one[:3] for one in drawn], axis=1).T + 4.0
    may_win = [at for at, one in enumerate(drawn) if one[3]]
    least_s = min((float(levels[2, at]) for at in may_win), default=float("inf"))
    with mock.patch.object(lowest, "TOGETHER", 3):
        found_s = lowest_floor_s(_Levels(levels), "piped", best_s, best_s, may_win.__contains__)  # type: ignore[arg-type]
    assert found_s == pytest.approx(least_s if least_s < best_s * AT_LIMIT else float("inf"), rel=1e-8)


class _AtTheLimit:
    """Floors of one shape: a low one by work, and by all replicas whatever is asked for, less one rounding error."""

    calls = 0

    def by_work(self, kind: str, limit_s: float) -> Shapes:
        number = np.array([0])
        return Shapes(number, number, number + 2, number + 1, np.array([1.12]), np.array([10.0]))

    def by_memory(self, kind: str, of: Shapes) -> Shapes:
        return of

    def by_replicas(self, of: Shapes, limit_s: float, *, closely: bool = False) -> Shapes:
        self.calls += 1
        assert self.calls < 20, "the same floor again and again"
        return of._replace(floor_s=np.maximum(of.floor_s, np.nextafter(limit_s, 0.0)))


@pytest.mark.parametrize("limit_s", [10.1, 12.0, 20.551424261575367])
def test_the_proof_ends_where_a_floor_is_a_rounding_error_below_the_limit(limit_s: float) -> None:
    """Three groups of 256 devices were searched for ever: such a floor was computed again and again."""
    assert lowest_floor_s(_AtTheLimit(), "piped", limit_s, limit_s, lambda shape: True) == float("inf")  # type: ignore[arg-type]


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(problems(most_cells=6), st.data())
def test_floors_are_under_the_forecast(asked: Problem, data: st.DataObject) -> None:
    finder, floors = floors_of(asked)
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
        assert placement.at_least_s <= forecast.step_time_s * ROUNDING, placement
        if not forecast.fits:
            continue
        assert floors[shape] <= forecast.step_time_s * ROUNDING, shape
        for limit_s in (
            1.01 * forecast.step_time_s,
            2 * forecast.step_time_s,
        ):  # nor where the search knows how far to look
            assert known_floors(finder, limit_s)[shape] <= forecast.step_time_s * ROUNDING, shape


@pytest.mark.slow
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
        shape = shape_of(layout)
        while finder.space.is_twin(shape.alike):  # runs as one of a lower ZeRO stage
            shape = replace(shape, alike=shape.alike._replace(zero=shape.alike.zero - 1))
        known = [s for s in floors if s == shape]
        replicas = layout.data_parallel_replicate_degree
        over_groups = len({name for stage in layout.stages or () for name in stage.groups(replicas)}) > 1
        if forecast.fits and over_groups:  # a group alone is searched as a cluster of its own
            assert known, layout.short()
            assert finder.columns_hold(finder.task(known[0]))


@pytest.mark.slow
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


def on_two(**constraints: Any) -> Problem:
    cluster = cluster_of((H100, 1, 2), (A100, 1, 1), gbps=100)
    return mixed(cluster, batch=6, constraints={"micro_batch_size": 1, **constraints})


FEW = (((H100, 2, 1), (A100, 1, 1)), 1, 12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("groups", "gbps", "batch"),
    cases([(((H100, 1, 2), (A100, 1, 2)), 10, 8), FEW], fast=[FEW]),
)
def test_the_simplest_of_the_tied_leads(groups: Any, gbps: float, batch: int) -> None:
    """As on a cluster of one kind; everything else of the ranking is as if the fastest led."""
    asked = mixed(cluster_of(*groups, gbps=gbps), batch=batch)
    ranking, fastest_first = ranking_of(asked), ranking_by_speed(asked, 10, None, Method())
    assert ranking.fastest.parallelism == fastest_first.best.parallelism
    assert ranking.certificate.best_s == fastest_first.certificate.best_s
    every = [*fastest_first.plans, *fastest_first.more]
    tied = [plan for plan in every if plan.priced.step_time_s <= best_s(ranking) * (1 + TIED)]
    assert complexity(ranking.best.parallelism) == min(complexity(plan.parallelism) for plan in tied)
    others = [plan.parallelism for plan in every if plan.parallelism != ranking.best.parallelism]
    assert [plan.parallelism for plan in (*ranking.plans[1:], *ranking.more)] == others
    words = " ".join(ranking.best.why)
    assert (ranking.faster is None) == ("fastest of the layouts that fit" in words) == ("tied with" not in words)


def test_what_is_fixed_is_kept() -> None:
    stages = [{"group": "b", "layers": 1}, {"group": "a", "layers": 3}]
    best = ranking_of(on_two(pipeline_parallel_degree=2, stages=stages)).best.parallelism
    assert [(stage.group, stage.layers) for stage in best.stages or ()] == [("b", 1), ("a", 3)]
    shares = ranking_of(on_two(data_parallel_replicate_degree=3, micro_batches_per_replica=[1, 4, 1])).best.parallelism
    assert shares.micro_batches_per_replica == (1, 4, 1)
    cut = ranking_of(on_two(pipeline_parallel_degree=2, layers_per_stage=[3, 1])).best.parallelism
    assert cut.given_layers == (3, 1)


def test_a_schedule_for_which_there_are_too_few_micro_batches() -> None:
    fixed = {"pipeline_parallel_schedule": "DualPipeV", "activation_checkpoint": "none", "tensor_parallel_degree": 1}
    ranking = ranking_of(mixed(cluster_of((H100, 1, 2), (A100, 1, 2)), batch=2, constraints=fixed))
    assert ranking.best.parallelism.pipeline_parallel_degree == 1


def test_a_layout_on_one_group_is_told_once() -> None:
    fixed = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 1, "activation_checkpoint": "none"}
    fixed |= {"pipeline_parallel_schedule": "GPipe", "micro_batch_size": 2}
    ranking = ranking_of(mixed(cluster_of((H100, 1, 2), (A100, 1, 2)), batch=2, constraints=fixed))
    told = [plan.forecast for plan in ranking]
    assert all(one not in told[:at] for at, one in enumerate(told))
    assert ranking.best.parallelism.stages is None, "of the group alone"


@pytest.mark.slow
def test_zero_stages_that_cost_the_same_are_one_row() -> None:
    """As on clusters of one kind."""
    ranking = ranking_of(mixed(cluster_of((H100, 1, 4), (A100, 1, 4)), batch=8))
    found: dict[object, list[int]] = {}
    for plan in (*ranking, *ranking.more):
        without = plan.parallelism.model_copy(update={"zero_stage": 0})
        cost = plan.priced.step_time_s, plan.priced.needed_bytes
        found.setdefault((without, cost), []).append(plan.parallelism.zero_stage)
    assert all(len(stages) == 1 for stages in found.values())
    assert any(stages > [1] for stages in found.values())


@pytest.mark.parametrize(("group", "spread"), [("a", False), (("a", "a"), False), (("a", "b"), True)])
def test_all_stages_on_one_group_are_none_over_several(group: str | tuple[str, ...], spread: bool) -> None:
    """With them the best of one group was said to be as fast as itself."""
    stages = (StagePlace(group=group, layers=4),)
    assert explain._is_spread(Parallelism(data_parallel_replicate_degree=2, stages=stages)) == spread


def test_the_faster_device_gets_more() -> None:
    ranking = ranking_of(on_two(pipeline_parallel_degree=1, data_parallel_shard_degree=1, tensor_parallel_degree=1))
    shared: Counter[str] = Counter()
    best = ranking.best.parallelism
    assert best.stages is not None
    groups = best.stages[0].groups(best.data_parallel_replicate_degree)
    for group, m in zip(groups, best.micro_batches(on_two().job), strict=True):
        shared[group] += m
    assert shared["a"] > shared["b"]
    told = " ".join(ranking.best.why)
    assert "a: all stages (4 of 4 layers) of 2 of 3 replicas" in told
    assert "a alone:" in told
    assert "of the work on" in told


def test_what_runs_today_is_priced_beside_the_best() -> None:
    slow = {"data_parallel_replicate_degree": 3, "stages": [{"group": ["a", "a", "b"], "layers": 4}]}
    today = ranking_of(on_two(), current={**slow, "micro_batches_per_replica": [1, 1, 4]}).current
    assert today is not None
    assert today.forecast is not None
    assert "slower" in today.words()


def test_an_engine_that_cannot_place_stages_uses_one_group() -> None:
    asked = on_two()
    ranking = search(asked.graph, asked.cluster, asked.job, engine={"name": "megatron"})
    assert all(plan.cluster is not None and len(plan.cluster["groups"]) == 1 for plan in ranking.plans)
    assert "no layout over several groups" in " ".join(ranking.notes)
    stages = [{"group": "b", "layers": 1}, {"group": "a", "layers": 3}]
    with pytest.raises(NotExpressible, match="stages"):
        search(
            asked.graph, asked.cluster, asked.job, engine={"name": "megatron"},
            constraints={"pipeline_parallel_degree": 2, "stages": stages},
        )  # fmt: skip


def test_devices_without_the_precision_are_left_out() -> None:
    cluster, fixed = cluster_of(("V100-SXM-32GB", 1, 1), (A100, 1, 2), gbps=100), {"micro_batch_size": 1}
    asked = mixed(cluster, constraints=fixed)
    there, options = (asked.graph, cluster, asked.job), {"constraints": fixed, "engine": asked.engine}
    ranking = search(*there, **options)
    assert "a is left out: V100-SXM-32GB has no units for precision bf16" in ranking.notes
    plain = search(asked.graph, "2xA100-SXM-40GB", asked.job, **options)
    assert [plan.parallelism for plan in ranking] == [plan.parallelism for plan in plain], (
        "the simplest of the tied first"
    )
    assert one_lost(asked, ranking.best).what == "one of 2 devices", "of those that can compute"
    search(*there, **options, objective={"name": "cost", "price_per_device_hour": {"V100-SXM-32GB": 1.0, A100: 2.0}})


def test_groups_that_no_library_joins_are_named() -> None:
    cluster = cluster_of((H100, 1, 1), (A100, 1, 1), ("MI300X", 1, 2), gbps=100)
    told = ranking_of(mixed(cluster, constraints={"micro_batch_size": 1})).notes
    assert any(note.startswith("no layout over all groups: cluster.groups = ['a', 'c']: ") for note in told)


@pytest.mark.slow
def test_where_nothing_fits_every_group_says_why() -> None:
    asked = mixed(cluster_of((H100, 1, 1), (A100, 1, 1), gbps=100, memory={"a": 10**6, "b": 10**6}), batch=2)
    with pytest.raises(NothingFits) as refusal:
        ranking_of(asked)
    words = str(refusal.value)
    assert "a alone:" in words
    assert "b alone:" in words
    assert "over several groups" in words
    assert "does not fit either" in words or "would fit" in words


def test_what_would_fit_is_looked_for_without_a_bound_of_what_is_left() -> None:
    """Nobody reads it, and it takes minutes where pipelines are many."""
    fixed = {"pipeline_parallel_degree": 2, "micro_batch_size": 1}
    asked = mixed(cluster_of((H100, 1, 2), (A100, 1, 2), gbps=100, memory={"b": 10**8}), batch=8, constraints=fixed)
    with mock.patch("ahp.search.mixed.find.lowest_floor_s", return_value=0.0) as bound:
        that_fits(asked, asked)
    bound.assert_not_called()


def test_annealing_is_refused() -> None:
    with pytest.raises(BadInput, match="method"):
        ranking_of(on_two(), method="anneal")


@pytest.mark.slow
def test_a_gap_is_told_where_placements_are_many() -> None:
    fixed = {"micro_batch_size": 1, "activation_checkpoint": "full", "tensor_parallel_degree": 1}
    asked = mixed(cluster_of((H100, 1, 8), (A100, 1, 8), gbps=100), batch=64, constraints=fixed)
    ranking = ranking_of(asked)
    floor_s = ranking.certificate.lowest_bound_left_s
    assert floor_s is not None
    assert floor_s <= best_s(ranking)
    assert ranking.certificate.proven or "within" in ranking.proof[2]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.floats(0.1, 3.0), st.floats(0.0, 2.0)), min_size=1, max_size=3),
    st.integers(1, 7),
)
def test_no_sharing_has_a_faster_slowest_replica(kinds: list[tuple[int, float, float]], total: int) -> None:
    counts = [count for count, _, _ in kinds]
    times = [np.asarray(start + each * np.arange(1, total + 1), dtype=np.float64) for _, each, start in kinds]
    found = share(counts, total, 1, times)
    owners = [kind for kind, count in enumerate(counts) for _ in range(count)]
    if sum(counts) > total:
        assert found is None
        return
    assert found is not None
    assert [len(each) for each in found] == counts
    assert sum(map(sum, found)) == total
    longest = max(times[kind][m - 1] for kind, each in enumerate(found) for m in each)
    best = min(
        max(times[kind][m - 1] for kind, m in zip(owners, shared, strict=True)) for shared in sums(total, len(owners))
    )
    assert longest == pytest.approx(best)


def test_every_matrix_once() -> None:
    found = list(matrices((2, 3), 2, 2))
    assert len(found) == len(set(found))
    ordered = {
        tuple(sorted((names[:2], names[2:])))
        for names in product((0, 1), repeat=4)
        if names.count(0) <= 2 and names.count(1) <= 3
    }
    assert {tuple(kind for kind, count in matrix for _ in range(count)) for matrix in found} == ordered
    members = families((2, 3), 2, 2, (0, 1))
    assert set(members) <= set(found)
    assert len(members) > 2


@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble", "GPipe"])
def test_allowed_micro_batches_are_those_of_the_rules(schedule: str) -> None:
    space = MixedSpace(on_two())
    for p in (2, 3, 5):
        legal = [rules.schedule(schedule, p, 1, m, in_torch=False) is None for m in range(1, 24)]
        assert space.allowed(p, schedule, 23).tolist() == [False, *legal]


def test_of_several_stages_on_a_rank_some_schedule_allows_the_micro_batches() -> None:
    space = MixedSpace(on_two())
    assert {pipe.schedule for pipe in space.pipes(2)} == {s.name for s in SCHEDULES.values() if s.most_virtual != 1}
    assert space.pipes(3) == ()  # of four layers
    for p in (2, 3, 5):
        for pipe in space.pipes(2):
            legal = [rules.schedule(*pipe[:1], p, pipe.virtual, m, in_torch=False) is None for m in range(1, 24)]
            assert space.legal_pipe(pipe, p, np.arange(24)).tolist() == [False, *legal]
    either = [space.legal_pipe(pipe, 2, np.arange(8)) for pipe in space.pipes(2)]
    assert space.allowed(2, SEVERAL, 7).tolist() == np.any(either, axis=0).tolist()


def test_orders_of_many_replicas_that_are_alike_come_once_each() -> None:
    """Two kinds of devices with dozens of replicas: the search tried all orders of the replicas, also equal ones, and never ended."""
    a, b, c = (Row((kind,), kind + 1) for kind in range(3))
    for rows in ((a, a, b), (b, a, b, c), (a,), (c, b, a, a, b)):
        found = list(distinct_orders(rows))
        assert len(set(found)) == len(found)
        assert set(found) == set(permutations(rows))
    many = (a,) * 24 + (b,) * 12
    first, *others = islice(distinct_orders(many), 24)
    assert first == many
    assert len({first, *others}) == 24
    assert all(sorted(order) == sorted(many) for order in others)


@pytest.mark.slow
def test_what_runs_today_on_one_device_may_be_the_best() -> None:
    """It names no layers: they are as the layout's own cut has them."""
    asked = mixed(cluster_of((H100, 1, 2), (A100, 1, 1), gbps=0.01), batch=1)
    ranking = ranking_of(asked, current={"micro_batch_size": 1})
    assert ranking.best.parallelism.world_size == 1
    assert any("all stages (4 of 4 layers)" in reason for reason in ranking.best.why)
