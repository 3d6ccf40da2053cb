"""The stage cut: against every cut there is, by the simulation of the schedule."""

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ahp.plan import Parallelism
from ahp.schedule.makespan import makespan
from ahp.schedule.registry import get
from ahp.schedule.simulate import StageTimes
from ahp.schedule.stages import layers_of_stages
from ahp.search import stages
from ahp.search.stages import best_cut, cuts, least_longest, longest_s, num_cuts
from tests.lower_bounds import lower_bound_s


class Made:
    """Layers with given seconds, on a schedule; a stage holds bytes, and has room for so many."""

    def __init__(self, layers: list[float], p: int, v: int, m: int, *, ends: tuple[float, float], most: float) -> None:
        self.layers, self.p, self.v, self.m, self.ends, self.most = layers, p, v, m, ends, most
        self.name = "Interleaved1F1B" if v > 1 else "1F1B"
        self.priced = 0

    def times(self, cut: stages.Cut) -> list[StageTimes]:
        edges = np.cumsum([0, *cut])
        found = [sum(self.layers[a:b]) for a, b in itertools.pairwise(edges)]
        found[0] += self.ends[0]
        found[-1] += self.ends[1]
        return [StageTimes(forward_s=s, backward_s=2 * s, input_gradient_s=s, weight_gradient_s=s) for s in found]

    def floors_s(self, found: Sequence[stages.Cut]) -> Any:
        layers, (first, last) = np.array(self.layers), self.ends
        own = get(self.name).placement.rank_stages(self.p, self.v)
        return longest_s(found, layers, 3 * self.m * layers, 3 * self.m * first, 3 * self.m * last, own)

    def bounds_s(self, found: Sequence[stages.Cut]) -> list[float]:
        return [lower_bound_s(self.name, self.p, self.v, self.m, self.times(cut)) for cut in found]

    def stage_s(self, cut: stages.Cut) -> Any:
        return np.array([t.forward_s + t.backward_s for t in self.times(cut)])

    def step_s(self, cut: stages.Cut) -> float:
        return makespan(self.name, self.p, self.v, self.m, self.times(cut)).makespan_s

    def fits(self, cut: stages.Cut) -> bool:
        return max(cut) <= self.most

    def price(self, cut: stages.Cut) -> Any:
        self.priced += 1
        return SimpleNamespace(step_time_s=self.step_s(cut)) if self.fits(cut) else None

    def floor_s(self) -> float:
        work = 3 * self.m * np.array(self.layers)
        if self.v > 1:
            return float(work.sum() / self.p)
        first, last = (3 * self.m * end for end in self.ends)
        return least_longest(np.array(self.layers), work, first, last, self.p)[0]


made = st.builds(
    Made,
    st.lists(st.sampled_from([1.0, 1.5, 4.0]), min_size=6, max_size=9),
    st.sampled_from([2, 3]),
    st.just(1),
    st.integers(3, 8),
    ends=st.tuples(st.floats(0, 2), st.floats(0, 5)),
    most=st.integers(3, 9),
)


@pytest.mark.slow
@given(made)
@settings(max_examples=60, deadline=None)
def test_the_cut_is_the_best_of_all(costs: Made) -> None:
    num_stages = costs.p * costs.v
    every = [cut for cut in cuts(len(costs.layers), num_stages) if costs.fits(cut)]
    found = best_cut(len(costs.layers), num_stages, costs, [])
    if not every:
        assert found is None
        return
    assert found is not None
    assert found.proven
    assert found.forecast.step_time_s == pytest.approx(min(map(costs.step_s, every)), rel=1e-12)
    assert sum(found.layers) == len(costs.layers)
    assert costs.fits(found.layers)
    assert costs.floor_s() <= found.forecast.step_time_s * (1 + 1e-12)


@given(made)
@settings(max_examples=60, deadline=None)
def test_where_few_fit_no_more_are_forecast_than_are_worth_it(costs: Made) -> None:
    costs.most = min(costs.most, 4)
    every = [costs.step_s(cut) for cut in cuts(len(costs.layers), costs.p) if costs.fits(cut)]
    with mock.patch("ahp.search.stages.MOST_FORECASTS", 3):
        found = best_cut(len(costs.layers), costs.p, costs, [])
    assert costs.priced <= 3
    if found is not None:
        assert found.floor_s <= min(every) * (1 + 1e-12)
        assert not found.proven or found.forecast.step_time_s == pytest.approx(min(every), rel=1e-12)


@given(made)
@settings(max_examples=60, deadline=None)
def test_moves_never_end_above_their_start_nor_under_the_floor(costs: Made) -> None:
    start = layers_of_stages(Parallelism(pipeline_parallel_degree=costs.p), len(costs.layers))
    found = stages._by_moves([start], costs)
    if not costs.fits(start):
        assert found is None
        return
    assert found is not None
    assert costs.floor_s() <= found.forecast.step_time_s <= costs.step_s(start)
    assert found.forecast.step_time_s == costs.step_s(found.layers)


def test_a_heavy_head_takes_layers_from_the_last_stage() -> None:
    costs = Made([1.0] * 62, 8, 1, 32, ends=(0.0, 3.0), most=62)
    even = layers_of_stages(Parallelism(pipeline_parallel_degree=8), 62)
    _, longest = least_longest(np.full(62, 1.0), np.full(62, 96.0), 0.0, 288.0, 8)
    found = best_cut(62, 8, costs, [even, longest])
    assert found is not None
    assert found.layers[-1] == 5
    assert set(found.layers[:-1]) <= {8, 9}
    assert found.forecast.step_time_s < 0.92 * costs.step_s(even)
    assert found.forecast.step_time_s < 1.02 * found.floor_s or not found.proven


def test_of_many_virtual_stages_each_rank_gets_the_same_work() -> None:
    costs = Made([1.0] * 40, 4, 3, 8, ends=(0.5, 2.0), most=40)
    even = layers_of_stages(Parallelism(pipeline_parallel_degree=4, virtual_stages_per_rank=3), 40)
    found = best_cut(40, 12, costs, [even])
    assert found is not None
    assert found.forecast.step_time_s < costs.step_s(even)
    per_rank = np.array(found.layers).reshape(3, 4).sum(axis=0)
    assert per_rank[3] == per_rank.min()
    assert costs.priced <= 1 + stages.ROUNDS * stages.FORECASTS_A_ROUND


@given(st.lists(st.floats(0.1, 5), min_size=3, max_size=8), st.integers(1, 3), st.floats(0, 3), st.floats(0, 3))
@settings(max_examples=60, deadline=None)
def test_least_longest_is_that_of_every_cut(layers: list[float], num_stages: int, first: float, last: float) -> None:
    work, before = np.array(layers) * 7, np.array(layers)

    def longest(cut: stages.Cut) -> float:
        edges = np.cumsum([0, *cut])
        found = [before[:a].sum() + work[a:b].sum() for a, b in itertools.pairwise(edges)]
        found[0] += first
        found[-1] += last
        return max(found)

    seconds, cut = least_longest(before, work, first, last, num_stages)
    assert seconds == pytest.approx(min(longest(one) for one in cuts(len(layers), num_stages)))
    assert longest(cut) == pytest.approx(seconds)


def test_number_of_cuts() -> None:
    assert num_cuts(9, 3) == len(set(cuts(9, 3))) == 28
    assert list(cuts(3, 3)) == [(1, 1, 1)]
