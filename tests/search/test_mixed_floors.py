"""Floors of mixed clusters: what each level knows of the time of shapes, and what stages have room for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ahp.forecast.stage_room import Positions, StageRoom
from ahp.graph.trace import analyze
from ahp.job import Job
from ahp.schedule.patterns import make
from ahp.schedule.simulate import StageTimes, simulate
from ahp.search.mixed.capacity import _priced
from ahp.search.mixed.find import Budget, Finder, Queue
from ahp.search.mixed.floors import whole_micro_batches_s
from ahp.search.mixed.space import MixedSpace
from ahp.search.problem import problem

from .test_mixed import A100, H100, ROUNDING, cluster_of, sums

LEVELS = {"work": 0.77, "memory": 0.775, "placement": 0.83}
"""What each level of floors knows at least of the time of a shape's best placement that was found, as the median over shapes."""


@pytest.mark.slow
def test_each_level_of_floors_is_worth_something() -> None:
    """Layers of a size that is trained, on devices that hold few of them."""
    sizes = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
    }
    job = Job(sequence_length=4096, global_batch_size=64, precision="bf16")
    model = analyze({"model_type": "llama", "num_hidden_layers": 16, "vocab_size": 32000, **sizes}, job)
    asked = problem(model, cluster_of((H100, 1, 8), (A100, 1, 8), gbps=100), job, None, {"compile": False})
    finder = Finder(asked, MixedSpace(asked), Budget(), float("inf"))
    floors, shares = finder.floors, []
    for kind in ("piped", "several"):
        queue, rough = Queue(floors, kind, 6.0), floors.by_work(kind, 6.0)
        work_s = {
            shape: float(rough.floor_s[at]) for at in range(len(rough.rows)) for shape in floors.shapes(kind, rough, at)
        }
        # The same shapes whatever the floors are: ordered by them, other floors would give others.
        near = sorted(queue.popped(6.0), key=lambda of: repr(of[1]))
        for floor_s, shape in near[:: max(1, len(near) // 12)]:
            task = finder.task(shape)
            found = task.promising()
            solved = task.first_that_fits(asked.price, found)
            if solved.best is not None:
                best_s = solved.best[1].step_time_s
                shares.append([one / best_s for one in (work_s[shape], floor_s, found[0].at_least_s)])
                assert shares[-1][1] <= ROUNDING
    medians = dict(zip(LEVELS, np.median(shares, axis=0).tolist(), strict=True))
    assert all(medians[level] >= floor for level, floor in LEVELS.items()), medians


@st.composite
def rooms(draw: st.DrawFn) -> StageRoom:
    """Of one layout on one group, for stages that keep 1 to 3 micro-batches."""
    figure = st.floats(0.1, 10.0)
    kept = draw(figure)
    free = np.array([[[draw(st.floats(-5.0, 100.0)) for _ in range(3)]]])
    held, states, dropped = np.array([1, 2, 3]), draw(figure), draw(st.floats(0.0, 1.0)) * kept
    most = np.maximum(free / (states + held * (kept - dropped)), 0.0)
    layer_s, again_s = (np.full((1, 1, 1), of) for of in (draw(figure), draw(figure) * (dropped > 0)))
    return StageRoom(layer_s, again_s, free, held, np.full((1, 1, 1), states), np.full((1, 1, 1), kept), most)


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
    st.lists(st.lists(st.floats(0.0, 9.0), min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(1, 6),
    st.floats(0.0, 3.0),
)
def test_no_choice_of_cells_is_worth_more(worth: list[list[float]], count: int, light: float) -> None:
    """Of the cells of each group, so many in all, each worth as much as one does at least."""
    each = sorted((max(one, light) for of in worth for one in of), reverse=True)[:count]
    all_, best = (np.array([[of(group) for group in worth]]) for of in (sum, max))
    assert sum(each) <= _priced(all_, best, np.array([float(count)]), light)[0] * ROUNDING + 1e-9


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
