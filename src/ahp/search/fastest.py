"""The fastest layout of a problem without the ranking and its reasons, for questions that ask for it again and again."""

from __future__ import annotations

from dataclasses import dataclass

from ahp.errors import BadInput, NotExpressible, NothingFits
from ahp.plan import Forecast, Parallelism
from ahp.search.bounds.space_bounds import Bounds
from ahp.search.lighten import lighten
from ahp.search.method import Method, find
from ahp.search.problem import Problem
from ahp.search.recut import recut
from ahp.search.space import build

Pair = tuple[Parallelism, Forecast]


@dataclass(frozen=True)
class Fastest:
    """The answer for one problem."""

    problem: Problem
    best: Pair | None
    """None where nothing fits, or nothing that can take less than the ceiling."""
    at_least_s: float
    """Seconds that no layout goes below with stages as even as can be and blocks recomputed alike; infinite where none fits."""


def fastest(asked: Problem, ceiling_s: float = float("inf")) -> Fastest | None:
    """The layout with the shortest step; None where no layout is legal on all of the problem's devices.

    ``ceiling_s``: layouts that take as long are not wanted, which makes the search short where there is none below it.
    """
    if asked.cluster.is_mixed:
        return _over_groups(asked)
    try:
        space = build(asked)
    except BadInput:
        return None
    if not len(space.blocks):
        return None
    found = find(asked, Bounds(asked), space, Method(), 1, ceiling_s)
    left_s = float("inf") if found.lowest_bound_left_s is None else found.lowest_bound_left_s
    if not found.fitting:
        return Fastest(asked, None, left_s)
    pairs = [(space.layout(*place), forecast) for place, forecast in found.fitting]
    best = lighten(asked, recut(asked, pairs).ranked).ranked[0]
    return Fastest(asked, best, min(left_s, pairs[0][1].step_time_s))


def _over_groups(asked: Problem) -> Fastest | None:
    """Of a cluster of several kinds of devices, which has a search of its own."""
    from ahp.search.ranking import search  # a ranking asks for the fastest on fewer devices itself

    arguments = asked.graph, asked.cluster, asked.job
    try:
        found = search(*arguments, constraints=asked.constraints, engine=asked.engine, keep=1)
    except (BadInput, NotExpressible):
        return None
    except NothingFits:
        return Fastest(asked, None, float("inf"))
    best, left_s = found.best, found.certificate.lowest_bound_left_s
    assert best.forecast is not None, "plans of a search have one"
    least_s = best.forecast.step_time_s if left_s is None else min(left_s, best.forecast.step_time_s)
    return Fastest(asked, (best.parallelism, best.forecast), least_s)
