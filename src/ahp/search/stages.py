"""Where to cut the layers into pipeline stages, so that the step is shortest and every rank fits in memory.

If there are few cuts, each gets a floor; those with the lowest floors get a bound, and are forecast in the order of bounds until none left
can win. If there are many, the search starts at the best of some cuts and moves one layer from a long stage to a short one as long as the
forecast gets shorter; a floor under every cut, by dynamic programming, limits how much better another cut can be.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise
from math import comb

import numpy as np

from ahp.arrays import Floats, Ints
from ahp.forecast.turns import least_share
from ahp.forecast.unit import Unit
from ahp.plan import Forecast, Parallelism
from ahp.schedule.orders import splits_backward
from ahp.schedule.registry import get
from ahp.schedule.stages import layers_of_stages
from ahp.search.problem import Problem

Cut = tuple[int, ...]
"""Layers of each stage in pipeline order."""

ALL_CUTS = 5_000
"""The most cuts that are all tried; a floor takes some microseconds, a bound some 0.2 ms, a forecast some milliseconds."""

MOST_FORECASTS = 200
"""The most forecasts of these cuts. More are needed only if memory is so tight that few cuts fit; then layers are moved instead."""

TOGETHER = 32
"""Cuts that are bounded at once."""

DONORS, TAKERS = 4, 8
"""A layer moves from one of the longest stages (this many donors) to one of the shortest (this many takers)."""

FORECASTS_A_ROUND, ROUNDS = 8, 12
"""Most moves that one round forecasts, and most rounds."""

WORTH_S = 1e-4
"""A move that shortens the step by less than this share does not count."""


@dataclass(frozen=True)
class BestCut:
    """The best cut found, and what is known about the others."""

    layers: Cut
    forecast: Forecast
    forecasts: int
    proven: bool
    """Whether every other cut takes at least as long, or does not fit."""
    floor_s: float
    """Every cut takes at least this long."""


def best_cut(num_layers: int, num_stages: int, costs: LayoutCosts, starts: Sequence[Cut]) -> BestCut | None:
    """The cut of ``num_layers`` into ``num_stages`` with the shortest step; None if no cut that was tried fits.

    ``starts``: cuts to move layers from, if there are too many cuts to try all or if trying them proves none the best.
    """
    found = None
    if num_cuts(num_layers, num_stages) <= ALL_CUTS:
        found = _of_all(list(cuts(num_layers, num_stages)), costs)
    if found is not None and found.proven:
        return found
    moved = _by_moves(starts, costs)
    both = [one for one in (found, moved) if one is not None]
    return min(both, key=lambda one: one.forecast.step_time_s, default=None)


def num_cuts(num_layers: int, num_stages: int) -> int:
    """Ways to give every stage at least one layer."""
    return comb(num_layers - 1, num_stages - 1)


def cuts(num_layers: int, num_stages: int) -> Iterator[Cut]:
    """Every way to give each stage at least one layer."""
    for inner in combinations(range(1, num_layers), num_stages - 1):
        edges = (0, *inner, num_layers)
        yield tuple(after - before for before, after in pairwise(edges))


def _of_all(found: Sequence[Cut], costs: LayoutCosts) -> BestCut | None:
    floors_s = costs.floors_s(found)
    order, looked = np.argsort(floors_s, kind="stable").tolist(), 0
    bounded: list[tuple[float, Cut]] = []
    best: tuple[float, Cut, Forecast] | None = None
    forecasts, lowest_s = 0, np.inf
    while forecasts < MOST_FORECASTS:
        floor_s = float(floors_s[order[looked]]) if looked < len(order) else np.inf
        lowest_s = min(floor_s, bounded[0][0] if bounded else np.inf)
        if lowest_s >= (np.inf if best is None else best[0]):
            break
        if floor_s == lowest_s:
            some = [found[at] for at in order[looked : looked + TOGETHER]]
            looked += len(some)
            for pair in zip(costs.bounds_s(some), some, strict=True):
                heapq.heappush(bounded, pair)
            continue
        _, cut = heapq.heappop(bounded)
        forecast = costs.price(cut)
        forecasts += 1
        if forecast is not None and (best is None or forecast.step_time_s < best[0]):
            best = forecast.step_time_s, cut, forecast
    if best is None:
        return None
    return BestCut(best[1], best[2], forecasts, proven=lowest_s >= best[0], floor_s=min(lowest_s, best[0]))


def _by_moves(starts: Sequence[Cut], costs: LayoutCosts) -> BestCut | None:
    seen: dict[Cut, Forecast | None] = {cut: costs.price(cut) for cut in dict.fromkeys(starts)}
    fitting = {cut: forecast for cut, forecast in seen.items() if forecast is not None}
    if not fitting:
        return None
    at = min(fitting, key=lambda cut: fitting[cut].step_time_s)
    best = fitting[at]
    for _ in range(ROUNDS):
        moved = _better(at, best, costs, seen)
        if moved is None:
            break
        at, best = moved
    floor_s = costs.floor_s()
    return BestCut(at, best, len(seen), proven=best.step_time_s <= floor_s * (1 + WORTH_S), floor_s=floor_s)


def _better(
    at: Cut, best: Forecast, costs: LayoutCosts, seen: dict[Cut, Forecast | None]
) -> tuple[Cut, Forecast] | None:
    """The first move, in the order of bounds, whose forecast is shorter."""
    found = [cut for cut in moves(at, costs.stage_s(at)) if cut not in seen]
    bounds = sorted(zip(costs.bounds_s(found), found, strict=True)) if found else []
    for bound_s, cut in bounds[:FORECASTS_A_ROUND]:
        if bound_s >= best.step_time_s * (1 - WORTH_S):
            return None
        forecast = seen[cut] = costs.price(cut)
        if forecast is not None and forecast.step_time_s < best.step_time_s * (1 - WORTH_S):
            return cut, forecast
    return None


def moves(cut: Cut, stage_s: Floats) -> Iterator[Cut]:
    """Cuts with one layer moved from one of the longest stages to one of the shortest."""
    order = np.argsort(-stage_s, kind="stable").tolist()
    for donor in order[:DONORS]:
        for taker in order[::-1][:TAKERS]:
            if donor != taker and cut[donor] > 1:
                moved = list(cut)
                moved[donor] -= 1
                moved[taker] += 1
                yield tuple(moved)


def longest_s(
    found: Sequence[Cut], before_s: Floats, work_s: Floats, first_s: float, last_s: float, rank_stages: Ints
) -> Floats:
    """[N] A lower bound of the fullest rank's time for each cut: its work, and with one stage per rank the wait for earlier stages too.

    ``rank_stages``: [p, v] the stages of each rank; the other arguments as in ``least_longest``.
    """
    edges = np.cumsum(np.pad(np.array(found, dtype=np.int64), ((0, 0), (1, 0))), axis=1)  # [N, S + 1]
    before, work = (np.concatenate([[0.0], np.cumsum(layers)]) for layers in (before_s, work_s))
    stages = np.diff(work[edges], axis=1)
    stages[:, 0] += first_s
    stages[:, -1] += last_s
    if rank_stages.shape[1] == 1:
        stages += before[edges[:, :-1]]
    return stages[:, rank_stages].sum(axis=-1).max(axis=1)


def least_longest(
    before_s: Floats, work_s: Floats, first_s: float, last_s: float, num_stages: int
) -> tuple[float, Cut]:
    """The cut whose longest stage is shortest, by dynamic programming: a stage takes its work and the wait for earlier layers.

    Args:
        before_s: [L] seconds of each layer that pass once before a later stage can start or end.
        work_s: [L] seconds of each layer over all micro-batches.
        first_s: seconds of the embedding over all micro-batches, on the first stage.
        last_s: seconds of the head over all micro-batches, on the last stage.
        num_stages: each has at least one layer.

    Returns:
        The longest stage of the best cut, in seconds, and the cut.
    """
    num_layers = len(work_s)
    before, work = (np.concatenate([[0.0], np.cumsum(layers)]) for layers in (before_s, work_s))
    longest = np.full(num_layers + 1, np.inf)
    longest[0] = 0.0
    every = np.arange(num_layers + 1)
    chosen = np.zeros((num_stages, num_layers + 1), dtype=np.int64)
    stage_s = before + (work[:, None] - work)  # [end, start]
    stage_s[every[:, None] <= every] = np.inf
    for stage in range(num_stages):
        ends = first_s * (stage == 0) + last_s * (stage == num_stages - 1)
        table = np.maximum(longest, stage_s + ends)
        chosen[stage] = table.argmin(axis=1)
        longest = table[every, chosen[stage]]
    edges = [num_layers]
    for stage in reversed(range(num_stages)):
        edges.append(int(chosen[stage][edges[-1]]))
    edges.reverse()
    return float(longest[num_layers]), tuple(after - start for start, after in pairwise(edges))


def with_cut(asked: Problem, layout: Parallelism, cut: Cut) -> Forecast | None:
    """The forecast of a layout with a cut; None if it does not fit or is refused."""
    forecast = asked.price_or_none(layout.model_copy(update={"layers_per_stage": cut}))
    return forecast if forecast is not None and forecast.fits else None


class LayoutCosts:
    """The times of one layout's cuts, by the forecast."""

    def __init__(self, asked: Problem, layout: Parallelism) -> None:
        self.asked, self.layout, self.pricer = asked, layout, asked.pricer
        self.m = layout.num_micro_batches(asked.job)

    def usual(self) -> Cut:
        """The cut that the layout has by default."""
        return layers_of_stages(self.layout, self.asked.graph.num_layers, ends=self.asked.stage_ends)

    def floors_s(self, found: Sequence[Cut]) -> Floats:
        """[N] Lower bound in seconds for each cut: the computation of its fullest rank."""
        of = self.layout
        own = get(of.pipeline_parallel_schedule).placement.rank_stages(
            of.pipeline_parallel_degree, of.virtual_stages_per_rank
        )
        return longest_s(found, *self._layers, own) * self._slowed

    def bounds_s(self, found: Sequence[Cut]) -> list[float]:
        """Lower bound in seconds for each cut."""
        return self.pricer.bounds_s(self.layout, self.pricer.stage_times(self.layout, found))

    def stage_s(self, cut: Cut) -> Floats:
        """[S] Seconds of each stage on one micro-batch, forward and backward."""
        return np.array(
            [times.forward_s + times.backward_s for times in self.pricer.stage_times(self.layout, [cut])[0]]
        )

    def price(self, cut: Cut) -> Forecast | None:
        """The forecast; None if the cut does not fit or is refused."""
        return with_cut(self.asked, self.layout, cut)

    def shorter(self) -> float:
        """The floor of all cuts as a share of the floor of the layout's own cut."""
        return float(self.floor_s() / self.floors_s([self.usual()])[0])

    def floor_s(self) -> float:
        """Lower bound of any cut in seconds: the longest stage, from the layers' own computation."""
        return self.longest[0] * self._slowed

    @cached_property
    def _slowed(self) -> float:
        """The least factor by which workers that take turns, and the slowest rank, lengthen computation."""
        return self.pricer.stretch * float(least_share(self.pricer.turns, self.layout.pipeline_parallel_degree))

    @cached_property
    def _layers(self) -> tuple[Floats, Floats, float, float]:
        """Seconds of each layer before a later stage can start or end, and over all micro-batches; then of the embedding and the head."""
        units = self.pricer.group.units(self.layout)
        layers = np.array([_work_s(units.blocks[kind]) for kind in units.layers])
        forward = np.array([units.blocks[kind].times.forward_s for kind in units.layers])
        before = forward if splits_backward(self.layout) else layers
        return before, self.m * layers, self.m * _work_s(units.embedding), self.m * _work_s(units.head)

    @cached_property
    def longest(self) -> tuple[float, Cut]:
        """The floor in seconds, and the cut with the shortest longest stage; with several stages per rank the floor is the mean over ranks."""
        seconds, cut = least_longest(*self._layers, self.layout.num_stages)
        if self.layout.virtual_stages_per_rank > 1:
            # A rank has stages from several places, so only the work of all ranks together is known.
            _, work, *ends = self._layers
            seconds = (float(work.sum()) + sum(ends)) / self.layout.pipeline_parallel_degree
        return seconds, cut


def _work_s(unit: Unit) -> float:
    """Device seconds of one micro-batch, without collectives and without recompute."""
    return unit.times.forward_s + unit.times.backward_s
