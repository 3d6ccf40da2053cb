"""Floors of mixed clusters: what each level knows of the time of shapes, and what stages have room for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment, linprog

from ahp.errors import BadInput, NotExpressible
from ahp.forecast.cell_columns import BETWEEN
from ahp.forecast.stage_memory import received_bytes
from ahp.forecast.stage_room import ANYWHERE, Positions, StageRoom
from ahp.graph.kept import analyze
from ahp.job import Job
from ahp.plan import StagePlace
from ahp.schedule.bounds import in_flight
from ahp.schedule.patterns import make, stage_ranks
from ahp.schedule.registry import get
from ahp.schedule.simulate import StageTimes, simulate
from ahp.search.mixed.capacity import Kind, of_several
from ahp.search.mixed.find import Budget, Finder
from ahp.search.mixed.floors import whole_micro_batches_s
from ahp.search.mixed.replicas import FINE, NEVER, ROUGH, longest_s, mixes, most
from ahp.search.mixed.space import Alike, MixedSpace, layout_of, shape_of
from ahp.search.problem import problem

from .small import SHORT, TRAINED
from .test_mixed import A100, H100, ROUNDING, cluster_of, pipes, sums

LEVELS = [
    (TRAINED, 4096, {"work": 0.745, "replicas": 0.77, "closely": 0.78, "placement": 0.815}),
    (SHORT, 256, {"work": 0.82, "replicas": 0.845, "closely": 0.85, "placement": 0.98}),
]
"""The least share that each level of floors must reach of the time of a shape's best placement found, as the median over shapes: for layers of a
size that is trained, on devices that hold few layers; and for layers whose kernels are shorter than their launches."""


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "sequence_length", "least"), LEVELS)
def test_each_level_of_floors_is_worth_something(
    sizes: dict[str, int], sequence_length: int, least: dict[str, float]
) -> None:
    job = Job(sequence_length=sequence_length, global_batch_size=64, precision="bf16")
    model = analyze({"model_type": "llama", "num_hidden_layers": 16, "vocab_size": 32000, **sizes}, job)
    asked = problem(model, cluster_of((H100, 1, 8), (A100, 1, 8), gbps=100), job, None, {"compile": False})
    finder = Finder(asked, MixedSpace(asked), Budget(), float("inf"))
    floors, shares = finder.floors, []
    for kind in ("piped", "several"):
        rough = floors.by_work(kind, 6.0)
        at = {shape: at for at in range(len(rough.rows)) for shape in floors.shapes(kind, rough, at)}
        # The same shapes whatever the closer floors are: ordered by them, others would come up.
        near = sorted(at, key=repr)
        near = near[:: max(1, len(near) // 24)]
        levels = [rough.where(np.array([at[shape] for shape in near]))]
        levels.append(floors.by_replicas(levels[-1], 6.0))
        levels.append(floors.by_replicas(levels[-1], 6.0, closely=True))
        for shape, *floors_s in zip(near, *(of.floor_s.tolist() for of in levels), strict=True):
            task = finder.task(shape)
            found = task.promising()
            solved = task.first_that_fits(asked.price, found)
            if solved.best is not None:
                best_s = solved.best[1].step_time_s
                shares.append([one / best_s for one in (*floors_s, found[0].at_least_s)])
                assert shares[-1][0] <= shares[-1][1] <= shares[-1][2] <= ROUNDING
    medians = dict(zip(least, np.median(shares, axis=0).tolist(), strict=True))
    assert all(medians[level] >= floor for level, floor in least.items()), medians


@cache
def _of_twelve_layers() -> Finder:
    """Pipelines of a small model on two unlike groups, with the same ranks in every cell."""
    job = Job(sequence_length=4096, global_batch_size=12, precision="bf16")
    model = analyze({"model_type": "llama", "num_hidden_layers": 12, "vocab_size": 32000, **TRAINED}, job)
    fixed = {
        "micro_batch_size": 1,
        "tensor_parallel_degree": 1,
        "context_parallel_degree": 1,
        "data_parallel_shard_degree": 1,
    }
    asked = problem(model, cluster_of((H100, 1, 6), (A100, 1, 6), gbps=400), job, fixed, {"compile": False})
    return Finder(asked, MixedSpace(asked), Budget(), float("inf"))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_close_floors_are_under_every_cut_and_schedule(data: st.DataObject) -> None:
    """Of random placements, and of those with the layers and micro-batches divided evenly, whose floors are the closest."""
    finder = _of_twelve_layers()
    asked, floors = finder.asked, finder.floors
    p, r = data.draw(st.sampled_from([(2, 1), (2, 2), (3, 1), (3, 2), (3, 3), (4, 1), (4, 2), (4, 3)]))
    pipe = data.draw(st.sampled_from(list(pipes(p, 12))))
    stages, names = p * pipe.virtual, st.sampled_from("ab")
    columns = [tuple(data.draw(names) for _ in range(r)) for _ in range(p)]
    more = Counter(data.draw(st.integers(0, stages - 1)) for _ in range(12 - stages))
    cut = [1 + more[stage] for stage in range(stages)]
    if data.draw(st.booleans()):
        columns = [columns[0]] * p
        cut = [12 // stages + (stage < 12 % stages) for stage in range(stages)]
    shares = [12 // r] * r if data.draw(st.booleans()) else data.draw(st.sampled_from(list(sums(12, r))))
    layout = layout_of(Alike(1, False, 1, 1, 1, 1, 0, data.draw(st.sampled_from(["none", "full"]))), p, r).model_copy(update={
        "pipeline_parallel_schedule": pipe.schedule, "virtual_stages_per_rank": pipe.virtual,
        "stages": tuple(StagePlace(group=columns[at], layers=n) for at, n in zip(stage_ranks(pipe.schedule, p, pipe.virtual), cut, strict=True)),
        "micro_batches_per_replica": tuple(shares),
    })  # fmt: skip
    try:
        forecast = asked.price(layout)
    except (BadInput, NotExpressible):
        return
    shape, kind = shape_of(layout), "several" if pipe.virtual > 1 else "piped"
    rough = floors.by_work(kind, 1e3)
    there = np.flatnonzero((rough.pipeline == p) & (rough.replicas == r)).tolist()
    mine = {shape, replace(shape, alike=shape.alike._replace(recompute="full"))}  # which may recompute no layer too
    at = [at for at in there if mine & set(floors.shapes(kind, rough, at))]
    assert at
    for limit_s in (1.001 * forecast.step_time_s, 2 * forecast.step_time_s):
        found = floors.by_replicas(rough.where(np.array(at)), limit_s, closely=True)
        if forecast.fits:
            assert found.floor_s.min() <= forecast.step_time_s * ROUNDING, layout.short()


@st.composite
def rooms(draw: st.DrawFn) -> StageRoom:
    """Of one layout on one group, for stages that keep 1 to 3 micro-batches."""
    figure = st.floats(0.1, 10.0)
    kept = draw(figure)
    free = np.array([[[draw(st.floats(-5.0, 100.0)) for _ in range(3)]]])
    held, states, dropped = np.array([1, 2, 3]), draw(figure), draw(st.floats(0.0, 1.0)) * kept
    most = np.maximum(free / (states + held * (kept - dropped)), 0.0)
    layer_s, again_s = (np.full((1, 1, 1), of) for of in (draw(figure), draw(figure) * (dropped > 0)))
    return StageRoom(
        layer_s, again_s, free, held, np.full((1, 1, 1), states), np.full((1, 1, 1), kept), most, np.zeros((1, 1, 1))
    )


@settings(max_examples=60, deadline=None)
@given(rooms(), st.floats(0.1, 200.0), st.floats(0.0, 1.0))
def test_rooms_are_concave_and_rates_fall(room: StageRoom, seconds: float, part: float) -> None:
    layers, fewer = (room.layers(np.array([of])) for of in (seconds, part * seconds))
    assert (fewer <= layers * ROUNDING).all()
    assert (fewer >= part * layers / ROUNDING - 1e-9).all()
    takes = room.seconds(layers)
    assert ((takes <= seconds * ROUNDING) | (layers == 0)).all()
    assert np.isinf(room.seconds(room.most + 0.1)).all()


@settings(max_examples=60, deadline=None)
@given(rooms(), st.lists(st.integers(1, 4), min_size=3, max_size=3), st.integers(1, 12))
def test_no_stages_have_all_layers_in_less(room: StageRoom, count: list[int], num_layers: int) -> None:
    least_s = float(room.least_s(num_layers, np.array(count))[0])
    if np.isfinite(least_s):
        held = (room.layers(np.array([least_s * 0.999])) * count).sum()
        assert held <= num_layers * ROUNDING
    else:
        assert (room.most * count).sum() <= num_layers * ROUNDING


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.5, 8.0), st.integers(0, 3)), min_size=1, max_size=3),
    st.integers(1, 7),
    st.integers(1, 5),
)
def test_whole_micro_batches_on_each_replica(groups: list[tuple[float, int]], total: int, replicas: int) -> None:
    seconds, cells = (np.array([of]) for of in zip(*groups, strict=True))
    found = whole_micro_batches_s(seconds, cells, np.array([total]), np.array([replicas]))[0]
    fastest = sorted(s for s, count in groups for _ in range(count))[:replicas]
    if len(fastest) < replicas or replicas > total:
        assert np.isinf(found)
        return
    best = min(max(s * m for s, m in zip(fastest, shares, strict=True)) for shares in sums(total, replicas))
    assert found <= best * ROUNDING
    assert found >= best / ROUNDING or found >= max(fastest) / ROUNDING


def test_more_micro_batches_never_leave_more_room() -> None:
    asked = problem(
        analyze({"model_type": "llama", "num_hidden_layers": 4, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
                 "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}, Job(sequence_length=64)),
        cluster_of((H100, 1, 2), (A100, 1, 2), gbps=100), Job(sequence_length=64, global_batch_size=8), None, {"compile": False},
    )  # fmt: skip
    columns = Finder(asked, MixedSpace(asked), Budget(), float("inf")).floors.columns
    rows = np.arange(len(columns.same))
    of = Positions(np.array([1, 2]), np.array([2, 0]), np.array([1, 1]))
    most = [StageRoom.of(columns, rows, of, m).most for m in (1, 2, 3, 8)]
    for more, fewer in zip(most[1:], most, strict=False):
        assert (more <= fewer * ROUNDING).all()


@pytest.mark.parametrize("family_size", [pytest.param(2, marks=pytest.mark.slow), 5])
def test_a_family_has_room_wherever_one_of_its_layouts_has(family_size: int) -> None:
    job = Job(sequence_length=4096, global_batch_size=64, precision="bf16")
    model = analyze({"model_type": "llama", "num_hidden_layers": 16, "vocab_size": 32000, **TRAINED}, job)
    asked = problem(model, cluster_of((H100, 1, 8), (A100, 1, 8), gbps=100), job, None, {"compile": False})
    columns = Finder(asked, MixedSpace(asked), Budget(), float("inf")).floors.columns
    rows = np.arange(len(columns.same[0]))
    family = (
        np.random.default_rng(family_size).permutation(rows) // family_size
    )  # any layouts, though those of a family have more in common
    least = columns.least_of(family)
    assert (least.copied_most_s[:, family] >= columns.copied_most_s).all()
    for place, m in product(([2, 0, 1], [ANYWHERE] * 3), (1, 2, 8)):
        at = Positions(np.array([1, 2, 3]), np.array(place), np.array([1, 2, 1]))
        room, together = StageRoom.of(columns, rows, at, m), StageRoom.of(least, family, at, m)
        assert (room.most <= together.most * ROUNDING).all()
        for seconds in (1e-3, 0.1, 1.0, 30.0):
            each_s = np.full(len(rows), seconds)
            assert (room.layers(each_s) <= together.layers(each_s) * ROUNDING).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.lists(st.tuples(*(st.floats(0.0, 5.0),) * 3), min_size=2, max_size=5))
def test_a_split_backward_takes_as_long_as_its_way_and_what_lies_between(
    m: int, stages: list[tuple[float, float, float]]
) -> None:
    """The formula of ``capacity``, of every stage."""
    p, way_s = len(stages), sum(forward + inputs for forward, inputs, _ in stages)
    times = [StageTimes(forward, inputs + weights, inputs, weights) for forward, inputs, weights in stages]
    makespan_s = simulate(make("InterleavedZeroBubble", p, 1, m), times).makespan_s
    for s, (forward, inputs, weights) in enumerate(stages):
        between_s = (m - 1) * inputs + (m - min(p - s, m)) * forward + (m - min(s + 1, m)) * weights
        assert way_s + between_s <= makespan_s * ROUNDING + 1e-9
        ahead_s = (p - 1) * max(forward, weights), (m - 1) * (forward + weights)
        assert (m - 1) * (forward + inputs + weights) - min(ahead_s) <= between_s * ROUNDING + 1e-9


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=3), st.integers(1, 4), st.integers(1, 4), st.data())
def test_no_replicas_do_more_together(cells: list[int], p: int, replicas: int, data: st.DataObject) -> None:
    """The simplex method of many shapes at once against scipy's of one."""
    mix = mixes(p, tuple(min(p, count) for count in cells))
    if mix is None:
        assert sum(min(p, count) for count in cells) < p
        return
    worth = st.one_of(st.integers(1, 20).map(float), st.just(NEVER))
    gain = np.array([[data.draw(worth) for _ in mix] for _ in range(2)])
    there = np.array([cells] * 2), np.array([replicas] * 2)
    found = most(gain, mix, *there, np.full(2, -np.inf))
    for one, bound in zip(gain, found.tolist(), strict=True):
        best = linprog(
            -one, A_ub=mix.T, b_ub=cells, A_eq=np.ones((1, len(mix))), b_eq=[replicas], bounds=(0, None), method="highs"
        )
        if best.status != 0 or -best.fun < 0:  # a replica, or a part of one, is left out or cannot be
            assert bound < 0
        else:
            assert bound == pytest.approx(-best.fun, rel=1e-9, abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(rooms(), rooms(), st.integers(3, 9), st.integers(1, 2), st.sampled_from([None, 2, 3, 4, 6]), st.booleans())
def test_replicas_of_a_mix_have_all_layers_in_no_less(
    one: StageRoom, other: StageRoom, num_layers: int, fewest: int, most_layers: int | None, head: bool
) -> None:
    """Whichever cell has the head, and with so many layers in the largest stage."""
    both = [
        np.concatenate(pair, axis=1)
        for pair in zip(*(vars(of.mapped(lambda of: of)).values() for of in (one, other)), strict=True)
    ]
    room, mix = StageRoom(*both), mixes(3, (3, 3))
    assert mix is not None
    at = Positions(
        np.array([1, 2, 3]), np.full(3, BETWEEN), np.ones(3, dtype=np.int64), head=head & (np.arange(3) == 0)
    )
    largest, head_s = None if most_layers is None else np.array([most_layers]), np.array([[[1.0]], [[3.0]]]) * at.head
    rough, fine = (
        longest_s(room, at, mix, num_layers, fewest, head_s.reshape(1, 2, 3), times, largest, alike=True)[0]
        for times in (ROUGH, FINE)
    )

    def have(seconds: float, count: list[int]) -> bool:
        left_s = np.maximum(seconds - head_s.reshape(1, 2, 3), 0.0)
        layers = np.floor(room.layers(left_s)[0] + 1e-9)
        ways = set(permutations([group for group, number in enumerate(count) for _ in range(number)]))
        each = [layers[list(way), range(3)] for way in ways]
        if most_layers is not None:
            each = [np.minimum(of, most_layers) for of in each if of.max() >= most_layers]
        return any(of.min() >= fewest and of.sum() >= num_layers for of in each)

    for longest, count in zip([*rough.tolist(), *fine.tolist()], 2 * mix.tolist(), strict=True):
        if np.isfinite(longest):
            assert not have(longest * (1 - 1e-6), count)
        else:
            assert not have(1e6, count)


@pytest.mark.parametrize("p", [2, 3, 5, 8])
def test_ranks_with_several_stages_keep_and_receive_no_less(p: int) -> None:
    """Of every schedule, and of cuts that keep little."""
    rng = np.random.default_rng(p)
    choices = [
        ("Interleaved1F1B", 2),
        ("Interleaved1F1B", 4),
        ("InterleavedZeroBubble", 3),
        ("ZBVZeroBubble", 2),
        ("DualPipeV", 2),
    ]
    kinds: dict[str, Kind] = {"InterleavedZeroBubble": "split", "ZBVZeroBubble": "V", "DualPipeV": "V"}
    for (name, v), m in ((choice, m) for choice in choices for m in range(1, 4 * p)):
        if not get(name).runs(p, v, np.array([m]), in_torch=False)[0]:
            continue
        counts = in_flight(name, p, v, m)
        received = received_bytes(get(name).placement.rank_stages(p, v), p, 1, m, "all")
        heavy = np.zeros((p, v), dtype=np.int64)
        heavy[np.arange(p), counts.argmin(axis=1)] = 5
        for cut in (np.ones((p, v)), 1 + heavy, rng.integers(1, 4, (p, v))):
            layers, keeps = cut.sum(axis=1), (counts * cut).sum(axis=1)
            last = next(rank for rank in range(p) if p * v - 1 in get(name).placement.rank_stages(p, v)[rank])
            for fewer, kind in product({1, m // 2 or 1, m}, (None, kinds.get(name, "loops"))):
                held, beside, outside, times = of_several(p, fewer, kind)
                enough = keeps[:, None] >= layers[:, None] * held + beside
                enough &= counts.sum(axis=1)[:, None] >= held + outside
                enough &= received[:, None] >= times * 2 * m  # a stage between others receives from either side
                if kind is not None:  # the rank with the head counts as the first
                    enough[last, 1:] = False
                assert enough[linear_sum_assignment(~enough)].all(), (name, v, m, cut, kind)
