"""The fastest layout of a problem without the ranking and its reasons, for questions that ask for it again and again."""

from __future__ import annotations

from dataclasses import replace

from ahp.errors import BadInput, NotExpressible, NothingFits
from ahp.search.by_speed import ranking_with_any_kernels
from ahp.search.compiled import ways
from ahp.search.method import Method
from ahp.search.one_group import Fastest, fastest_on_one_group
from ahp.search.problem import Problem


def fastest(asked: Problem, ceiling_s: float = float("inf")) -> Fastest | None:
    """The layout with the shortest step; None where no layout is legal on all of the problem's devices.

    ``ceiling_s``: layouts that take as long are not wanted, which makes the search short where there is none below it.
    """
    if asked.cluster.is_mixed:
        return _over_groups(asked)
    if asked.engine.compile is None:
        return _of_several(ways(asked).problems, ceiling_s)
    return fastest_on_one_group(asked, ceiling_s)


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
    try:
        found = ranking_with_any_kernels(asked, 1, None, Method())
    except (BadInput, NotExpressible):
        return None
    except NothingFits:
        return Fastest(asked, None, float("inf"))
    best, left_s = found.best, found.certificate.lowest_bound_left_s
    assert best.forecast is not None, "plans of a search have one"
    least_s = best.forecast.step_time_s if left_s is None else min(left_s, best.forecast.step_time_s)
    return Fastest(replace(asked, engine=best.engine), (best.parallelism, best.forecast), least_s)
