"""Plans of one problem, the shortest step first: the certificate, and why the others lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

from ahp.errors import BadInput, NotExpressible, NothingFits, bad_input
from ahp.plan import Parallelism, Plan
from ahp.search import explain, families
from ahp.search.bounds.space_bounds import Bounds
from ahp.search.certificate import Certificate, certified
from ahp.search.compiled import ways, why_compiled, why_eager
from ahp.search.current import compared, today_of, with_candidate
from ahp.search.exact import Outcome, Place
from ahp.search.feasible_space import legal_rows
from ahp.search.lighten import Lightened, lighten, ways_of
from ahp.search.method import Method, find
from ahp.search.misfit import nothing_fits
from ahp.search.mixed.misfit import that_fits
from ahp.search.mixed.over_groups import mixed_ranking
from ahp.search.nearby import Nearby
from ahp.search.one_group import Fastest, fastest_on_one_group, fastest_row
from ahp.search.problem import Problem
from ahp.search.recut import Pair, Recut, recut
from ahp.search.result import Ranking
from ahp.search.space import Space
from ahp.search.ties import simplest_first


def ranking_with_any_kernels(
    asked: Problem, keep: int, current: Parallelism | Mapping[str, Any] | None, by: Method, tied: float = 0.0
) -> Ranking:
    """``ranking_by_speed``, with compiled blocks or with eager ones where that is left open."""
    several = ways(asked)
    if len(several.problems) == 1:
        return _because(ranking_by_speed(several.problems[0], keep, current, by, tied), several.reason)
    compiled, eager = several.problems
    try:
        ranking = ranking_by_speed(compiled, keep, current, by, tied)
    except (BadInput, NotExpressible, NothingFits) as refusal:
        if not _has_a_plan(eager):
            raise
        try:
            ranking = ranking_by_speed(eager, keep, current, by, tied, remedies=False)
        except (BadInput, NotExpressible, NothingFits):
            raise refusal from None
        return _because(ranking, f"eager blocks: compiled, {str(refusal).splitlines()[0]}")
    reason, best = why_compiled(ranking.best, compiled), ranking.fastest.forecast
    assert best is not None, "plans of a search have one"
    if asked.cluster.is_mixed or by.name != "exact":
        return _because(ranking, f"{reason}; other layouts with eager blocks are not searched here")
    rival, certificate = _rival(eager, best.step_time_s)
    if rival.best is None or rival.best[1].step_time_s >= best.step_time_s:
        return _because(ranking, reason, certificate)
    slower, ranking = ranking, ranking_by_speed(eager, keep, current, by, tied)
    return _because(ranking, why_eager(ranking.fastest, slower.fastest), slower.certificate)


def _has_a_plan(asked: Problem) -> bool:
    """Whether something fits, as far as a brief look tells on a mixed cluster."""
    if asked.cluster.is_mixed:
        return that_fits(asked) is not None
    found = fastest_on_one_group(asked)
    return found is not None and found.best is not None


def _rival(asked: Problem, ceiling_s: float) -> tuple[Fastest, Certificate]:
    """The fastest with other kernels, where that may take less than the ceiling; and what was looked at."""
    start = perf_counter()
    table = legal_rows(asked)
    used, space = table.problem, table.space
    bounds = Bounds(used, space, ceiling_s)
    best, found, tried = fastest_row(used, space, bounds, ceiling_s)
    any_cut_s = None if used.constraints.layers_per_stage is not None else bounds.any_cut_s(ceiling_s)
    any_part_s = None if (parts := ways_of(used)) is None else bounds.any_part_s(parts, ceiling_s)
    certificate = certified(space, found, tried, ceiling_s, (any_cut_s, any_part_s), perf_counter() - start)
    return best, certificate


def _because(ranking: Ranking, reason: str, other: Certificate | None = None) -> Ranking:
    """The ranking with the reason for the kernels of its plans, and with what was looked at of other kernels."""
    if other is not None:
        ranking = replace(ranking, certificate=ranking.certificate.beside(other))
    first, *rest = ranking.best.why
    return ranking.told((first, *filter(None, [reason]), *rest))


def ranking_by_speed(
    asked: Problem,
    keep: int,
    current: Parallelism | Mapping[str, Any] | None,
    by: Method,
    tied: float = 0.0,
    *,
    remedies: bool = True,
) -> Ranking:
    """All devices, the shortest step first, but for the simplest of those that take at most the share ``tied`` longer.

    ``remedies``: whether to say what would make it fit, where nothing does.
    """
    if asked.cluster.is_mixed:
        plain = partial(ranking_by_speed, keep=keep, current=None, by=by)
        return mixed_ranking(asked, keep, current, by, plain, remedies=remedies)
    start = perf_counter()
    table = legal_rows(asked)
    used, space = table.problem, table.space
    today, bounds = today_of(used, current), Bounds(used, space)
    found = find(used, bounds, space, by, keep)
    if not found.fitting:
        raise _nothing_found(used, by, found, remedies)
    better = _improved(used, bounds, space, found, families_too=bool(by.name == "exact" and tied))
    certificate = _certificate(used, bounds, space, found, better, start, by.name)
    ordered = simplest_first(with_candidate(better.pairs, today, used), tied)
    ranked, (layout, best) = ordered.ranked, ordered.ranked[0]
    nearby = Nearby(bounds, space, found, better.place_of(layout, used, found), ordered.fastest[1].step_time_s)
    misfits = [(space.layout(*place), forecast) for place, forecast in found.misfits]
    misfits += explain.priced(used, space, nearby.misfits_to_price())
    large = explain.too_large(misfits, ordered.fastest[1], used.capacity_bytes)
    lost = tuple(explain.runner_up(pair, best) for pair in ranked[1:])
    first, *reasons = explain.why(used, ranked, misfits, nearby.floors(), what=ordered.title())
    why = (first, *ordered.words(), *reasons, *better.words_of(layout), *table.notes)

    def told_of(pair: Pair) -> Plan:
        return explain.plan(used, pair, (explain.runner_up(pair, best).reason,))

    always = [ordered.fastest[0], *([] if today is None else [today.parallelism])]
    of_each = families.best_of_each(ranked, always)
    return Ranking(
        (explain.plan(used, ranked[0], why, (*lost[: keep - 1], *large)), *map(told_of, ranked[1:keep])),
        certificate,
        large,
        (*large, *lost[keep - 1 :]),
        table.notes,
        None if today is None else compared(today, ranked[0], used),
        faster=None if ordered.first_is_fastest else told_of(ordered.fastest),
        families=tuple(map(told_of, of_each[1:])),
        twins=len(ranked) - len(of_each),
    )


@dataclass(frozen=True)
class _Improved:
    """The best rows, cut into stages better than as even as can be and with as few layers recomputed as fit, and the best of the families that
    are always looked for."""

    pairs: list[Pair]
    """The fastest first."""
    recut: Recut
    lighter: Lightened
    others: families.Found
    places: dict[Parallelism, Place]
    """Of each row."""

    def place_of(self, layout: Parallelism, used: Problem, found: Outcome) -> Place:
        """The row that a layout comes from; the best row's, of one that comes from none."""
        keys = "layers_per_stage", "recomputed_layers_per_stage"
        row = layout.model_copy(update={key: getattr(used.constraints, key) for key in keys})
        return self.others.places.get(layout) or self.places.get(row, found.fitting[0][0])

    def words_of(self, layout: Parallelism) -> Iterable[str]:
        """What its cut into stages and its recomputed layers are worth."""
        own = self.recut.words(layout), self.lighter.words(layout)
        return self.others.words.get(layout) or filter(None, own)


def _improved(used: Problem, bounds: Bounds, space: Space, found: Outcome, *, families_too: bool) -> _Improved:
    places = {space.layout(*place): place for place, _ in found.fitting}
    better = recut(used, explain.different(zip(places, (forecast for _, forecast in found.fitting), strict=True)))
    lighter = lighten(used, better.ranked)
    others = families.asked_for(used, bounds, space, found) if families_too else families.Found()
    pairs = sorted([*lighter.ranked, *others.pairs], key=lambda pair: pair[1].step_time_s)
    return _Improved(pairs, better, lighter, others, places)


def _certificate(
    used: Problem, bounds: Bounds, space: Space, found: Outcome, better: _Improved, start: float, method: str
) -> Certificate:
    """``start``: by ``perf_counter``."""
    ways = ways_of(used)
    tried, best_s = (better.recut.forecasts, better.lighter.forecasts), better.pairs[0][1].step_time_s
    any_cut_s = None if used.constraints.layers_per_stage is not None else bounds.any_cut_s(best_s)
    any_part_s = None if ways is None else bounds.any_part_s(ways, best_s)
    return certified(space, found, tried, best_s, (any_cut_s, any_part_s), perf_counter() - start, method)


def _nothing_found(used: Problem, by: Method, found: Outcome, remedies: bool) -> Exception:
    if by.name != "exact" and found.left:
        rule = f"none of the {found.priced} layouts that it priced fits; raise budget, or search exactly"
        return bad_input("method", by.name, rule)
    return nothing_fits(used, remedies=remedies)
