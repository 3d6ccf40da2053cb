"""The fastest layout on a cluster of one group of devices, without the ranking and its reasons."""

from __future__ import annotations

from dataclasses import dataclass

from ahp.errors import BadInput
from ahp.search.bounds.space_bounds import Bounds
from ahp.search.lighten import lighten
from ahp.search.method import Method, find
from ahp.search.pairs import Improved, Pair
from ahp.search.problem import Problem
from ahp.search.recut import recut
from ahp.search.space import build


@dataclass(frozen=True)
class Fastest:
    """The answer for one problem."""

    problem: Problem
    """The problem as asked, with the best layout's kind of blocks if that was left open."""
    best: Pair | None
    """None if nothing fits, or nothing that takes less than the ceiling."""
    at_least_s: float
    """Lower bound in seconds of layouts with even stages and all layers recomputed in one way; infinite if none fits."""


def fastest_on_one_group(asked: Problem, ceiling_s: float = float("inf"), slack: float = 0.0) -> Fastest | None:
    """The layout with the shortest step; None if no layout is legal on all of the problem's devices."""
    try:
        space = build(asked)
    except BadInput:
        return None
    if not len(space.blocks):
        return None
    found = find(asked, Bounds(asked, space), Method(), 1, ceiling_s, slack=slack)
    left_s = float("inf") if found.lowest_bound_left_s is None else found.lowest_bound_left_s
    if not found.fitting:
        return Fastest(asked, None, left_s)
    pairs = [(space.layout(*place), forecast) for place, forecast in found.fitting]
    used = asked.with_blocks(pairs[0][0]) if asked.either_blocks else asked
    alike = [pair for pair in pairs if used is asked or asked.with_blocks(pair[0]) is used]
    lighter = lighten(used, recut(used, Improved(alike)))
    return Fastest(used, lighter.ranked[0], min(left_s, pairs[0][1].step_time_s))
