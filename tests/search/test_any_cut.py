"""Bounds of layouts whose layers are cut into stages in any way, and recomputed in any part."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from ahp.arrays import Floats
from ahp.cluster.model import Cluster
from ahp.graph.kept import analyze
from ahp.job import Job
from ahp.schedule.makespan import makespan
from ahp.schedule.patterns import illegal
from ahp.schedule.registry import SCHEDULES
from ahp.schedule.simulate import StageTimes
from ahp.search.bounds.mixes import _game, _ways, _weights, least_layers, mixes, own_stages
from ahp.search.bounds.space_bounds import Bounds
from ahp.search.choices import ScheduleChoice
from ahp.search.lighten import ways_of
from ahp.search.problem import Problem
from ahp.search.ranking import search
from ahp.search.space import build
from tests.examples import many

from .small import TRAINED, problems

ROUNDING = 1 + 1e-9


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[ScheduleChoice, int, int]:
    """A schedule, its ranks and micro-batches."""
    name, p = draw(st.sampled_from(sorted(SCHEDULES))), draw(st.integers(2, 6))
    legal = [(v, m) for v in (1, 2, 3) for m in range(1, 25) if illegal(name, p, v, m) is None]
    v, m = draw(st.sampled_from(legal))
    return ScheduleChoice(name, v), p, m


@pytest.mark.slow
@settings(max_examples=many(150), deadline=None)
@given(pipelines(), st.booleans(), st.data())
def test_no_cut_takes_less_than_a_mix(
    drawn: tuple[ScheduleChoice, int, int], ends_hold: bool, data: st.DataObject
) -> None:
    pipe, p, m = drawn
    base = least_layers(pipe, p, ends_hold)
    layers = base + data.draw(st.lists(st.integers(0, 4), min_size=len(base), max_size=len(base)))
    seconds = st.floats(0.1, 4.0)
    forward, inputs, weights, once, last = (data.draw(seconds) for _ in range(5))
    ends = [data.draw(seconds) for _ in range(2)]
    outside = np.zeros(len(base))
    outside[0], outside[-1] = ends[0], outside[-1] + ends[1]
    times = [
        StageTimes(
            n * forward + end / 3, n * (inputs + weights) + 2 * end / 3, n * inputs + end / 3, n * weights + end / 3,
            first_forward_extra_s=n * once, last_backward_extra_s=n * last,
        )
        for n, end in zip(layers, outside, strict=True)
    ]  # fmt: skip
    span_s = makespan(pipe.schedule, p, pipe.virtual, m, times).makespan_s
    mix = mixes((pipe,), p, m, ends_hold, int(layers.sum()), 1.0)
    each = np.array([forward, inputs + weights, inputs, once, last, 0.0])
    more = (layers - base)[own_stages(pipe, p)].sum(axis=1)
    found = mix.base[0] @ each + (mix.ranks[0] @ each) @ more + mix.embedding[0] * ends[0] + mix.head[0] * ends[1]
    assert (found <= span_s * ROUNDING).all(), (found, span_s)


@settings(max_examples=20, deadline=None)
@given(pipelines(), st.integers(0, 12))
def test_weights_are_about_the_best(drawn: tuple[ScheduleChoice, int, int], head: int) -> None:
    pipe, p, m = drawn
    base = least_layers(pipe, p, True)
    game = _game(_ways(pipe, p, m), base, 3 * len(base), float(head))
    (weights,) = _weights([game])
    assert np.isclose(weights.sum(), 1.0)
    assert (weights >= 0).all()
    assert (weights @ game).min() >= 0.85 * _value(game)


def _value(game: Floats) -> float:
    """The most that the least column can be made, by linear programming."""
    ways, stages = game.shape
    least = np.hstack([-game.T, np.ones((stages, 1))])
    found = linprog(
        [*np.zeros(ways), -1.0], A_ub=least, b_ub=np.zeros(stages), A_eq=[[*np.ones(ways), 0.0]], b_eq=[1.0]
    )
    return -float(found.fun)


@pytest.mark.slow
@settings(max_examples=many(6), deadline=None)
@given(problems(), st.data())
def test_no_cut_of_a_layout_takes_less(asked: Problem, data: st.DataObject) -> None:
    space, layers, ways = build(asked), asked.graph.num_layers, ways_of(asked)
    if asked.constraints.layers_per_stage is not None or not len(space.blocks):
        return
    bounds = Bounds(asked, space)
    for _ in range(4):
        block = data.draw(st.integers(0, len(space.blocks) - 1))
        layout = space.layout(block, data.draw(st.integers(0, int(space.blocks.rows[block]) - 1)))
        if layout.num_stages > layers:
            continue
        cut = np.ones(layout.num_stages, dtype=int)
        np.add.at(
            cut,
            data.draw(st.lists(st.integers(0, len(cut) - 1), min_size=layers - len(cut), max_size=layers - len(cut))),
            1,
        )
        if len(cut) > 1:
            layout = layout.model_copy(update={"layers_per_stage": tuple(cut.tolist())})
        if asked.refused(layout) is None and (whole := asked.price(layout)).fits:
            assert bounds.of_any_cut([block])[block] <= whole.step_time_s * ROUNDING, layout.short()
        if ways is None or layout.activation_checkpoint == "none":
            continue
        some = tuple(data.draw(st.integers(0, int(count))) for count in cut)
        part = layout.model_copy(update={"recomputed_layers_per_stage": some})
        if asked.refused(part) is None and (forecast := asked.price(part)).fits:
            assert bounds.of_any_part([block], ways)[block] <= forecast.step_time_s * ROUNDING, part.short()


@pytest.mark.slow
def test_the_bound_of_any_cut_is_worth_something() -> None:
    job = Job(sequence_length=4096, global_batch_size=64, precision="bf16")
    model = analyze({"model_type": "llama", "num_hidden_layers": 24, "vocab_size": 32000, **TRAINED}, job)
    certificate = search(model, Cluster.parse("2x8xH100-SXM-80GB"), job, engine="torchtitan").certificate
    assert certificate.any_cut_s is not None
    assert certificate.any_cut_s >= 0.95 * certificate.found_s
