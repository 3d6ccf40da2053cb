"""The fastest layout on a cluster of one group of devices, without the ranking and its reasons."""

from __future__ import annotations

from dataclasses import dataclass

from ahp.errors import BadInput
from ahp.search.bounds.space_bounds import Bounds
from ahp.search.exact import Outcome
from ahp.search.lighten import lighten
from ahp.search.method import Method, find
from ahp.search.pairs import Pair
from ahp.search.problem import Problem
from ahp.search.recut import recut
from ahp.search.space import Space, build


@dataclass(frozen=True)
class Fastest:
    """The answer for one problem."""

    problem: Problem
    """As asked, with the kernels of the best where they were left open."""
    best: Pair | None
    """None where nothing fits, or nothing that can take less than the ceiling."""
    at_least_s: float
    """Seconds that no layout goes below with stages as even as can be and blocks recomputed alike; infinite where none fits."""


def fastest_on_one_group(asked: Problem, ceiling_s: float = float("inf"), slack: float = 0.0) -> Fastest | None:
    """The layout with the shortest step; None where no layout is legal on all of the problem's devices."""
    try:
        space = build(asked)
    except BadInput:
        return None
    return fastest_row(asked, space, Bounds(asked, space), ceiling_s, slack)[0] if len(space.blocks) else None


def fastest_row(
    asked: Problem, space: Space, bounds: Bounds, ceiling_s: float, slack: float = 0.0
) -> tuple[Fastest, Outcome, tuple[int, int]]:
    """The fastest in a space that has legal rows; with what was looked at, and the forecasts of other cuts into stages and of fewer
    layers recomputed."""
    found = find(asked, bounds, space, Method(), 1, ceiling_s, slack=slack)
    left_s = float("inf") if found.lowest_bound_left_s is None else found.lowest_bound_left_s
    if not found.fitting:
        return Fastest(asked, None, left_s), found, (0, 0)
    pairs = [(space.layout(*place), forecast) for place, forecast in found.fitting]
    better = recut(asked, pairs)
    lighter = lighten(asked, better.ranked)
    at_least_s = min(left_s, pairs[0][1].step_time_s)
    return Fastest(asked, lighter.ranked[0], at_least_s), found, (better.forecasts, lighter.forecasts)
