"""The fastest layout of a problem without the ranking and its reasons, for questions that ask for it again and again."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ahp.errors import BadInput, NotExpressible, NothingFits
from ahp.plan import Forecast, Parallelism
from ahp.search.bounds.space_bounds import Bounds
from ahp.search.compiled import ways
from ahp.search.exact import Outcome
from ahp.search.lighten import lighten
from ahp.search.method import Method, find
from ahp.search.problem import Problem
from ahp.search.recut import recut
from ahp.search.space import Space, build

Pair = tuple[Parallelism, Forecast]


@dataclass(frozen=True)
class Fastest:
    """The answer for one problem."""

    problem: Problem
    """As asked, with the kernels of the best where they were left open."""
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
    if asked.engine.compile is None:
        return _of_several(ways(asked).problems, ceiling_s)
    try:
        space = build(asked)
    except BadInput:
        return None
    return fastest_row(asked, space, Bounds(asked), ceiling_s)[0] if len(space.blocks) else None


def fastest_row(
    asked: Problem, space: Space, bounds: Bounds, ceiling_s: float
) -> tuple[Fastest, Outcome, tuple[int, int]]:
    """``fastest`` in a space that has legal rows; with what was looked at, and the forecasts of other cuts into stages and of fewer
    layers recomputed."""
    found = find(asked, bounds, space, Method(), 1, ceiling_s)
    left_s = float("inf") if found.lowest_bound_left_s is None else found.lowest_bound_left_s
    if not found.fitting:
        return Fastest(asked, None, left_s), found, (0, 0)
    pairs = [(space.layout(*place), forecast) for place, forecast in found.fitting]
    better = recut(asked, pairs)
    lighter = lighten(asked, better.ranked)
    at_least_s = min(left_s, pairs[0][1].step_time_s)
    return Fastest(asked, lighter.ranked[0], at_least_s), found, (better.forecasts, lighter.forecasts)


def _of_several(problems: tuple[Problem, ...], ceiling_s: float) -> Fastest | None:
    """The fastest of the same layouts with several kernels."""
    first: Fastest | None = None
    for asked in problems:
        found = fastest(asked, ceiling_s)
        if found is None:
            continue
        if first is not None:
            better = (
                found if found.best is not None and (first.best is None or _step_s(found) < _step_s(first)) else first
            )
            found = replace(better, at_least_s=min(first.at_least_s, found.at_least_s))
        first = found
        ceiling_s = min(ceiling_s, _step_s(first))
    return first


def _step_s(found: Fastest) -> float:
    return float("inf") if found.best is None else found.best[1].step_time_s


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
    return Fastest(replace(asked, engine=best.engine), (best.parallelism, best.forecast), least_s)
