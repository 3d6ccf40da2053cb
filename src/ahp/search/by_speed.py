"""Plans of one problem, the shortest step first: the certificate, and why the others lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any

from ahp.errors import BadInput, NotExpressible, NothingFits, bad_input
from ahp.plan import Parallelism
from ahp.search import explain
from ahp.search.bounds.space_bounds import Bounds
from ahp.search.certificate import Certificate, certified
from ahp.search.compiled import ways, why_compiled, why_eager
from ahp.search.current import compared, today_of, with_candidate
from ahp.search.feasible_space import legal_rows
from ahp.search.lighten import lighten, ways_of
from ahp.search.method import Method, find
from ahp.search.misfit import nothing_fits
from ahp.search.mixed.over_groups import mixed_ranking
from ahp.search.nearby import Nearby
from ahp.search.one_group import Fastest, fastest_on_one_group, fastest_row
from ahp.search.problem import Problem
from ahp.search.recut import recut
from ahp.search.result import Ranking


def ranking_with_any_kernels(
    asked: Problem, keep: int, current: Parallelism | Mapping[str, Any] | None, by: Method
) -> Ranking:
    """``_by_speed``, with compiled blocks or with eager ones where that is left open."""
    several = ways(asked)
    if len(several.problems) == 1:
        return _because(ranking_by_speed(several.problems[0], keep, current, by), several.reason)
    compiled, eager = several.problems
    try:
        ranking = ranking_by_speed(compiled, keep, current, by)
    except (BadInput, NotExpressible, NothingFits) as refusal:
        rival = None if eager.cluster.is_mixed else fastest_on_one_group(eager)
        if not eager.cluster.is_mixed and (rival is None or rival.best is None):
            raise
        try:
            ranking = ranking_by_speed(eager, keep, current, by)
        except (BadInput, NotExpressible, NothingFits):
            raise refusal from None
        return _because(ranking, f"eager blocks: compiled, {str(refusal).splitlines()[0]}")
    reason, best = why_compiled(ranking.best, compiled), ranking.best.forecast
    assert best is not None, "plans of a search have one"
    if asked.cluster.is_mixed or by.name != "exact":
        return _because(ranking, f"{reason}; other layouts with eager blocks are not searched here")
    rival, certificate = _rival(eager, best.step_time_s)
    if rival.best is None or rival.best[1].step_time_s >= best.step_time_s:
        return _because(ranking, reason, certificate)
    slower, ranking = ranking, ranking_by_speed(eager, keep, current, by)
    return _because(ranking, why_eager(ranking.best, slower.best), slower.certificate)


def _rival(asked: Problem, ceiling_s: float) -> tuple[Fastest, Certificate]:
    """The fastest with other kernels, where that may take less than the ceiling; and what was looked at."""
    start = perf_counter()
    table = legal_rows(asked)
    used, space = table.problem, table.space
    bounds = Bounds(used)
    best, found, tried = fastest_row(used, space, bounds, ceiling_s)
    any_cut_s = None if used.constraints.layers_per_stage is not None else bounds.any_cut_s(space)
    any_part_s = None if (parts := ways_of(used)) is None else bounds.any_part_s(space, parts)
    certificate = certified(space, found, tried, ceiling_s, (any_cut_s, any_part_s), perf_counter() - start)
    return best, certificate


def _because(ranking: Ranking, reason: str, other: Certificate | None = None) -> Ranking:
    """The ranking with the reason for the kernels of its plans, and with what was looked at of other kernels."""
    if not reason:
        return ranking
    told, certificate = ranking.certificate.words(), ranking.certificate
    if other is not None:
        certificate = certificate.beside(other)
    first, *rest = (certificate.words() if line == told else line for line in ranking.best.why)
    best = ranking.best.model_copy(update={"why": (first, reason, *rest)})
    return replace(ranking, plans=(best, *ranking.plans[1:]), certificate=certificate)


def ranking_by_speed(asked: Problem, keep: int, current: Parallelism | Mapping[str, Any] | None, by: Method) -> Ranking:
    """All devices, the shortest step first."""
    if asked.cluster.is_mixed:
        return mixed_ranking(asked, keep, current, by, lambda used: ranking_by_speed(used, keep, None, by))
    start = perf_counter()
    table = legal_rows(asked)
    used, space = table.problem, table.space
    today = today_of(used, current)
    bounds = Bounds(used)
    found = find(used, bounds, space, by, keep)
    if not found.fitting:
        if by.name != "exact" and found.left:
            rule = f"none of the {found.priced} layouts that it priced fits; raise budget, or search exactly"
            raise bad_input("method", by.name, rule)
        raise nothing_fits(used)
    places = {space.layout(*place): place for place, _ in found.fitting}
    better = recut(used, explain.different(zip(places, (forecast for _, forecast in found.fitting), strict=True)))
    lighter = lighten(used, better.ranked)
    ranked = with_candidate(lighter.ranked, today, used)
    best = ranked[0][1]
    ways = ways_of(used)
    any_cut_s = None if used.constraints.layers_per_stage is not None else bounds.any_cut_s(space)
    any_part_s = None if ways is None else bounds.any_part_s(space, ways)
    tried = better.forecasts, lighter.forecasts
    found_s = lighter.ranked[0][1].step_time_s
    certificate = certified(space, found, tried, found_s, (any_cut_s, any_part_s), perf_counter() - start)
    misfits = [(space.layout(*place), forecast) for place, forecast in found.misfits]
    row = ranked[0][0].model_copy(
        update={key: getattr(used.constraints, key) for key in ("layers_per_stage", "recomputed_layers_per_stage")}
    )
    nearby = Nearby(bounds, space, found, places.get(row, found.fitting[0][0]), best.step_time_s)
    misfits += explain.priced(used, space, nearby.misfits_to_price())
    large = explain.too_large(misfits, best, used.capacity_bytes)
    lost = tuple(explain.runner_up(pair, best) for pair in ranked[1:])
    why = (
        *explain.why(used, ranked, misfits, certificate.words(), nearby.floors()),
        *filter(None, [better.words, lighter.words]),
        *table.notes,
    )
    plans = [explain.plan(used, ranked[0], why, (*lost[: keep - 1], *large))]
    plans += [
        explain.plan(used, pair, (loser.reason,)) for pair, loser in zip(ranked[1:keep], lost[: keep - 1], strict=True)
    ]
    losers = (*large, *lost[keep - 1 :])
    told = None if today is None else compared(today, ranked[0], used)
    return Ranking(tuple(plans), certificate, large, losers, table.notes, told)
