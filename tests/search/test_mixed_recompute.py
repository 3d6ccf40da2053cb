"""Mixed clusters where each stage recomputes as few layers as its device's memory asks for: against every choice there is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ahp.cluster.model import Cluster
from ahp.config import Constraints
from ahp.errors import AhpError, BadInput, NothingFits
from ahp.forecast import memory
from ahp.plan import Forecast, Parallelism, validated
from ahp.search.by_speed import ranking_by_speed
from ahp.search.choices import ScheduleChoice
from ahp.search.fewest import fewest
from ahp.search.method import Method
from ahp.search.mixed.balance import _cut
from ahp.search.mixed.several import SeveralTask
from ahp.search.mixed.solve import Task
from ahp.search.mixed.tables import StageCosts
from ahp.search.problem import Problem
from ahp.search.stages import cuts

from .test_mixed import (
    A100,
    H100,
    L4,
    ROUNDING,
    best_s,
    cluster_of,
    every_placement,
    floors_of,
    mixed,
    ranking_of,
)

PLAIN = {
    "micro_batch_size": 1, "tensor_parallel_degree": 1, "data_parallel_shard_degree": 1, "context_parallel_degree": 1,
}  # fmt: skip

MUCH = 40_000_000_000


def tight(
    *groups: tuple[str, int, int], share: float, roomy: tuple[str, ...] = (), batch: int = 4, **constraints: Any
) -> Problem:
    """Devices with memory for the whole model fully recomputed, and for so much of what recompute saves beside it; but for the roomy."""
    names = "abc"[: len(groups)]
    much = dict.fromkeys(names, MUCH)
    asked = mixed(cluster_of(*groups, gbps=100, memory=much), batch=batch, constraints={**PLAIN, **constraints})
    shares = [batch // len(groups)] * len(groups)
    shares[0] += batch % len(groups)
    alone = {"data_parallel_replicate_degree": len(groups), "micro_batches_per_replica": shares}
    stages = ({"group": tuple(names), "layers": asked.graph.num_layers},)
    needs = [
        sum(
            asked.price(
                Parallelism.model_validate({**alone, "stages": stages, "activation_checkpoint": kind})
            ).memory.values()
        )
        for kind in ("full", "none")
    ]
    capacity = round((needs[0] + share * (needs[1] - needs[0])) / memory.most_that_fits(1.0))
    return asked.on(cluster_of(*groups, gbps=100, memory={name: MUCH if name in roomy else capacity for name in names}))


def every_choice(asked: Problem) -> Iterator[Parallelism]:
    """Every placement with every number of recomputed layers of every stage of every replica."""
    free = replace(asked, constraints=validated(Constraints, PLAIN, "parallelism"))
    for layout in filter(asked.constraints.admits, every_placement(free)):
        if layout.activation_checkpoint == "none":
            yield layout
            continue
        replicas, stages = layout.data_parallel_replicate_degree, layout.stages or ()
        for numbers in product(*(product(range(stage.layers + 1), repeat=replicas) for stage in stages)):
            placed = tuple(
                stage.model_copy(update={"recomputed_layers": some})
                for stage, some in zip(stages, numbers, strict=True)
            )
            for kind in ("selective", "full"):
                yield layout.model_copy(update={"stages": placed, "activation_checkpoint": kind})


def equals_every_choice(asked: Problem) -> Parallelism:
    """The layout that was found."""
    best = float("inf")
    for layout in every_choice(asked):
        forecast = priced(asked, layout)
        if forecast is not None and forecast.fits:
            best = min(best, forecast.step_time_s)
    if best == float("inf"):
        with pytest.raises(NothingFits):
            ranking_of(asked)
        return Parallelism()
    ranking = ranking_of(asked)
    # ``best`` is that of fixed patterns; an order made for the stages may be faster than all patterns.
    assert ranking.certificate.found_s == pytest.approx(best, rel=1e-12)
    assert best_s(ranking) <= best * ROUNDING
    assert ranking.certificate.proven
    return ranking.best.parallelism


def priced(asked: Problem, layout: Parallelism) -> Forecast | None:
    try:
        return asked.price(layout)
    except AhpError:
        return None


REPLICAS = {"pipeline_parallel_degree": 1, "data_parallel_replicate_degree": 2}
STAGES = {"pipeline_parallel_degree": 2, "virtual_stages_per_rank": 1}
SEVERAL = {"pipeline_parallel_degree": 2, "virtual_stages_per_rank": 2}


@pytest.mark.parametrize(
    ("fixed", "share"),
    [
        pytest.param(REPLICAS, 0.5, id="replicas"),
        pytest.param(STAGES, -3.3, id="stages", marks=pytest.mark.slow),
        pytest.param(SEVERAL, -2.9, id="several", marks=pytest.mark.slow),
    ],
)
def test_the_best_is_the_best_of_every_choice(fixed: dict[str, Any], share: float) -> None:
    assert equals_every_choice(tight((H100, 1, 1), (A100, 1, 1), share=share, **fixed)).recomputed_layers() is not None


def test_devices_with_little_memory_may_hold_the_model_for_fewer_micro_batches() -> None:
    """One micro-batch is all that the small device has room for, and none can have the two of the other replica."""
    found = ranking_of(tight((H100, 1, 1), (A100, 1, 1), share=-0.2, roomy=("a",), batch=3, **REPLICAS)).best
    assert found.parallelism.micro_batches_per_replica == (2, 1)
    assert [stage.group for stage in found.parallelism.stages or ()] == [("a", "b")]


KINDS = [
    ({}, (1, 1), (-0.2, 1.2)),
    (REPLICAS, (1, 1), (-0.2, 1.2)),
    (STAGES, (2, 1), (-3.5, -1.5)),
    (SEVERAL, (1, 1), (-3.6, -2.6)),
]
"""What is fixed, devices of each group, and shares of memory between which recompute begins and ends."""


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(
    st.sampled_from([(H100, A100), (A100, L4), (H100, L4)]), st.sampled_from(KINDS), st.floats(0, 1),
    st.sampled_from(["", "a", "b"]),
)  # fmt: skip
def test_the_best_is_the_best_of_every_choice_on_other_devices(
    devices: tuple[str, str], kind: Any, at: float, roomy: str
) -> None:
    fixed, counts, (low, high) = kind
    groups = [(device, 1, count) for device, count in zip(devices, counts, strict=True)]
    equals_every_choice(tight(*groups, share=low + at * (high - low), roomy=tuple(roomy), batch=3, **fixed))


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(st.floats(-0.2, 1.2), st.sampled_from([(), ("a",)]), st.data())
def test_floors_are_under_every_choice(share: float, roomy: tuple[str, ...], data: st.DataObject) -> None:
    asked = tight((H100, 1, 2), (L4, 1, 2), share=share, roomy=roomy, batch=6)
    finder, floors = floors_of(asked)
    shapes = sorted(floors, key=str)
    for _ in range(4):
        shape = data.draw(st.sampled_from([shape for shape in shapes if shape.alike.recompute != "none"]))
        task = finder.task(shape)
        placements = list(task.all()) if task.few() else list(task.of_families())
        if not placements:
            continue
        placement = data.draw(st.sampled_from(placements))
        lightest = task._with_fewest(asked.price, placement)
        layouts = [placement.of(shape, finder.names), task._layout(lightest)]
        drawn = tuple(
            row._replace(recomputed=tuple(data.draw(st.integers(0, count)) for count in placement.layers))
            for row in placement.rows
        )
        layouts.append(replace(placement, rows=drawn).of(shape, finder.names))
        for layout, bound_s in zip(layouts, (placement.at_least_s, placement.at_least_s, 0.0), strict=True):
            try:
                forecast = asked.price(layout)
            except BadInput:
                continue
            assert bound_s <= forecast.step_time_s * ROUNDING, layout.short()
            if forecast.fits:  # so that each cell recomputes as many as the bound says, or more
                assert floors[shape] <= forecast.step_time_s * ROUNDING, layout.short()
                assert_fewest_hold(task, layout)


def assert_fewest_hold(task: Task, layout: Parallelism) -> None:
    shared = layout.micro_batches_per_replica or ()
    groups = [stage.groups(len(shared)) for stage in layout.stages or ()]
    kinds = np.array([[task.names.index(name) for name in names] for names in zip(*groups, strict=True)])
    tables = task.tables
    if isinstance(task, SeveralTask):
        tables = task.of_pipe(ScheduleChoice(layout.pipeline_parallel_schedule, layout.virtual_stages_per_rank))
    costs = tables.stages(kinds, layout.given_layers or (), np.array(shared))
    assert costs.fits.all()
    none = layout.activation_checkpoint == "none"
    for replica, at_least in enumerate(costs.recomputed.tolist()):
        some = (0,) * len(at_least) if none else layout.recomputed_layers(replica) or layout.given_layers or ()
        assert all(a <= b for a, b in zip(at_least, some, strict=True)), layout.short()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=5))
def test_the_fewest_of_every_cell(cells: list[tuple[int, int, int]]) -> None:
    """Each cell: below what the bound says it needs, by how much it needs more, and how many layers it has beyond that."""
    low, needs = [a for a, _, _ in cells], [a + more for a, more, _ in cells]
    high = [need + more for need, (_, _, more) in zip(needs, cells, strict=True)]
    asked = []

    def fits(counts: Any) -> list[bool]:
        asked.append(counts)
        return [count >= need for count, need in zip(counts, needs, strict=True)]

    assert fewest(fits, low, high) == tuple(needs)
    if needs == low:
        assert len(asked) <= 1


class Drawn:
    """Tables with the same times for whatever micro-batches."""

    def __init__(self, whole: Any) -> None:
        self.whole, self.num_layers = whole, whole.shape[-1]

    def by_layers(self, micro_batches: int) -> StageCosts:
        return StageCosts(self.whole, 0 * np.where(np.isfinite(self.whole), self.whole, 0.0), None, None)  # type: ignore[arg-type]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(3, 6), st.data())
def test_the_cut_is_the_one_whose_longest_stage_is_shortest(
    num_kinds: int, p: int, layers: int, data: st.DataObject
) -> None:
    steps = data.draw(st.lists(st.floats(0.1, 5.0), min_size=2 * p * layers, max_size=2 * p * layers))
    whole = np.cumsum(np.array(steps).reshape(2, p, layers), axis=2)
    for group, stage in product(range(2), range(p)):
        whole[group, stage, data.draw(st.integers(1, layers)) :] = np.inf
    kinds = np.array(
        data.draw(st.lists(st.lists(st.integers(0, 1), min_size=p, max_size=p), min_size=num_kinds, max_size=num_kinds))
    )
    fewest = np.array(data.draw(st.sampled_from(list(cuts(layers, p)))))
    fewest = np.maximum(fewest - data.draw(st.integers(0, layers)), 1)
    found = _cut(kinds, Drawn(whole), np.full(num_kinds, 2), np.zeros(num_kinds), fewest, splits=False)  # type: ignore[arg-type]

    def longest_s(cut: tuple[int, ...]) -> float:
        return max(float(whole[group, stage, cut[stage] - 1]) for kind in kinds for stage, group in enumerate(kind))

    best = min(longest_s(cut) for cut in cuts(layers, p) if all(cut >= fewest))
    if best == np.inf:
        assert found is None
        return
    assert found is not None
    assert sum(found) == layers
    assert all(found >= fewest)
    assert longest_s(found) == best


def test_small_devices_recompute_and_large_ones_do_not() -> None:
    asked = tight(
        (H100, 1, 1),
        (A100, 1, 1),
        share=0.5,
        roomy=("a",),
        **REPLICAS,
    )
    ranking = ranking_by_speed(asked, 10, None, Method())  # the fastest first, even if a simpler one is tied with it
    best = ranking.best.parallelism
    assert best.stages is not None
    on_a, on_b = (best.stages[0].recomputed(2)[best.stages[0].groups(2).index(name)] for name in "ab")
    assert on_a == 0
    assert 0 < on_b < 4
    told = " ".join(ranking.best.why)
    assert f"b: all stages (4 of 4 layers, {on_b} recomputed)" in told
    assert "than with all layers recomputed" in told
    kind = asked.constraints.model_copy(update={"activation_checkpoint": best.activation_checkpoint})
    assert best_s(ranking) < best_s(ranking_of(replace(asked, constraints=kind)))


def test_a_group_that_is_too_narrow_for_a_cell_counts_for_nothing() -> None:
    """One node alone has no network, which a cell of several nodes would ask for."""
    described = [
        {"name": "one", "device": H100, "nodes": 1, "devices_per_node": 2},
        {"name": "more", "device": A100, "nodes": 2, "devices_per_node": 2, "inter_node_gbps": 100},
    ]
    cluster = Cluster.from_dict({"groups": described, "links": [{"between": ["one", "more"], "gbps": 100}]})
    asked = mixed(cluster, batch=2, constraints={"micro_batch_size": 1, "context_parallel_degree": 4})
    for plan in ranking_of(asked):
        assert plan.parallelism.context_parallel_degree == 4


def test_a_group_that_is_too_narrow_for_experts_counts_for_nothing() -> None:
    """Nor has it for ranks that share experts."""
    groups = [
        {"name": name, "device": H100, "nodes": count, "devices_per_node": 2} for name, count in (("a", 1), ("b", 2))
    ]
    groups[1]["inter_node_gbps"] = 100
    cluster = Cluster.from_dict({"groups": groups, "links": [{"between": ["a", "b"], "gbps": 100}]})
    keys = {"micro_batch_size": 1, "data_parallel_shard_degree": 4, "zero_stage": 1, "activation_checkpoint": "none"}
    asked = mixed(cluster, model="experts", batch=4, constraints={**keys, "expert_parallel_degree": 4})
    finder, floors = floors_of(asked)
    assert len(floors) > 0
    assert not any(finder.space.cells(shape.alike.width)[0] for shape in floors)


def test_numbers_that_are_given_are_kept() -> None:
    asked = tight((H100, 1, 1), (A100, 1, 1), share=2.0, pipeline_parallel_degree=2, recomputed_layers_per_stage=(1, 0))
    for plan in ranking_of(asked):
        assert plan.parallelism.recomputed_layers() == (1, 0)
        assert plan.parallelism.activation_checkpoint in ("selective", "full")
    stages = [{"group": "b", "layers": 1}, {"group": "a", "layers": 3, "recomputed_layers": 2}]
    placed = tight((H100, 1, 1), (A100, 1, 1), share=2.0, pipeline_parallel_degree=2, stages=stages)
    assert ranking_of(placed).best.parallelism.recomputed_layers() == (1, 2)
