"""Plans of one problem, the shortest step first, with the certificate and why the others lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

from ahp.errors import BadInput, NotExpressible, NothingFits, bad_input
from ahp.plan import Parallelism, Plan
from ahp.search import explain, families
from ahp.search.bounds.space_bounds import Bounds
from ahp.search.certificate import Certificate
from ahp.search.compiled import compiling, why_compiled, why_eager
from ahp.search.current import compared, today_of, with_candidate
from ahp.search.exact import Outcome, Place
from ahp.search.feasible_space import legal_rows
from ahp.search.lighten import lighten, ways_of
from ahp.search.method import Method, find
from ahp.search.misfit import nothing_fits
from ahp.search.nearby import Nearby
from ahp.search.one_group import fastest_on_one_group
from ahp.search.pairs import Improved, Pair
from ahp.search.problem import Problem
from ahp.search.recut import recut
from ahp.search.result import Ranking
from ahp.search.space import Space
from ahp.search.ties import simplest_first
from ahp.search.uneven import with_uneven_rows


def ranking_with_any_kernels(
    asked: Problem, keep: int, current: Parallelism | Mapping[str, Any] | None, by: Method, tied: float = 0.0
) -> Ranking:
    """``ranking_by_speed``, with compiled blocks or with eager ones where that is left open."""
    either, reason = compiling(asked)
    if not either.either_blocks:
        return ranking_by_speed(either, keep, current, by, tied).with_reasons(reason)
    compiled, eager = either.compiled, either.eager
    looked = None
    try:
        if asked.cluster.is_mixed or by.name != "exact":
            ranking = ranking_by_speed(compiled, keep, current, by, tied)
        else:
            looked = _look(either, keep, by)
            ranking = _ranked(looked, keep, current, by, tied)
    except (BadInput, NotExpressible, NothingFits) as refusal:
        if not _has_a_plan(eager):
            raise
        try:
            ranking = ranking_by_speed(eager, keep, current, by, tied, remedies=False)
        except (BadInput, NotExpressible, NothingFits):
            raise refusal from None
        return ranking.with_reasons(f"eager blocks: compiled, {str(refusal).splitlines()[0]}")
    reason = why_compiled(ranking.best, compiled)
    if looked is None:
        return ranking.with_reasons(f"{reason}; other layouts with eager blocks are not searched here")
    if looked.eager.fastest_s >= ranking.fastest.priced.step_time_s:
        return ranking.with_reasons(reason)
    slower, ranking = ranking.fastest, ranking_by_speed(eager, keep, current, by, tied)
    ranking = replace(ranking, certificate=replace(ranking.certificate, either_blocks=True))
    return ranking.with_reasons(why_eager(ranking.fastest, slower))


def _has_a_plan(asked: Problem) -> bool:
    """Whether some layout fits; on a mixed cluster only a brief search looks for one."""
    if asked.cluster.is_mixed:
        from ahp.search.mixed.misfit import that_fits  # here, as most searches do not need it

        return that_fits(asked) is not None
    found = fastest_on_one_group(asked)
    return found is not None and found.best is not None


def ranking_by_speed(
    asked: Problem,
    keep: int,
    current: Parallelism | Mapping[str, Any] | None,
    by: Method,
    tied: float = 0.0,
    *,
    remedies: bool = True,
    other_cuts: bool = True,
) -> Ranking:
    """Plans on all devices, the shortest step first, except that the simplest plan at most the share ``tied`` slower leads.

    ``remedies``: whether to say what would help if nothing fits. ``other_cuts``: whether to look for rows that only another cut into stages
    makes fast, and whether the certificate bounds the time of other cuts and of other numbers of recomputed layers.
    """
    if asked.cluster.is_mixed:
        from ahp.search.mixed.over_groups import mixed_ranking

        plain = partial(ranking_by_speed, current=None, by=by, remedies=False, other_cuts=False)
        return mixed_ranking(asked, keep, current, plain, tied, remedies=remedies)
    return _ranked(_look(asked, keep, by), keep, current, by, tied, remedies=remedies, other_cuts=other_cuts)


@dataclass(frozen=True)
class _EagerRows:
    """Forecasts with eager blocks for rows that were priced with compiled blocks and, by a lower bound, may be faster with eager ones."""

    fastest_s: float = float("inf")
    """The shortest step of those that fit."""
    forecasts: int = 0
    alone: int = 0
    """Number of rows among them that compiled blocks cannot run."""

    @classmethod
    def of(cls, asked: Problem, space: Space, found: Outcome) -> _EagerRows:
        """``asked`` has ``either_blocks``, like the bounds: rows whose bound is above the fastest time are slower with either kind of blocks."""
        if not found.fitting:  # a search for eager blocks alone follows
            return cls()
        best_s = found.fitting[0][1].step_time_s
        priced = (place for place, _ in (*found.fitting, *found.misfits, *found.refused))
        rows = [(block, row) for block, row in priced if found.opened[block][row] < best_s]
        rivals = {place: asked.faster_eager(space.layout(*place)) for place in rows}
        bounds_s = {rival: asked.eager.bound_or_none(rival) for of_row in rivals.values() for rival in of_row}
        close = [rival for rival, bound_s in bounds_s.items() if bound_s is not None and bound_s < best_s]
        forecasts = [*filter(None, map(asked.eager.price_or_none, close))]
        fastest_s = min((one.step_time_s for one in forecasts if one.fits), default=float("inf"))
        alone = sum(any(bounds_s[rival] is not None for rival in rivals.get(place, ())) for place, _ in found.refused)
        return cls(fastest_s, len(forecasts), alone)


@dataclass(frozen=True)
class _Looked:
    """One search: its rows, their bounds and what was found."""

    used: Problem
    """The problem that prices the rows."""
    bounds: Bounds
    found: Outcome
    eager: _EagerRows
    notes: tuple[str, ...]
    """That devices are left over, and why."""
    start: float
    """When the search began, by ``perf_counter``."""


def _look(asked: Problem, keep: int, by: Method) -> _Looked:
    """Search one problem. With ``either_blocks``, forecasts have compiled blocks, and lower bounds hold for both kinds."""
    start = perf_counter()
    table = legal_rows(asked)
    bounds = Bounds(table.problem, table.space)
    used = table.problem.compiled if asked.either_blocks else table.problem
    found = find(used, bounds, by, keep)
    eager = _EagerRows.of(table.problem, table.space, found) if asked.either_blocks else _EagerRows()
    return _Looked(used, bounds, found, eager, table.notes, start)


def _ranked(
    looked: _Looked,
    keep: int,
    current: Parallelism | Mapping[str, Any] | None,
    by: Method,
    tied: float,
    *,
    remedies: bool = True,
    other_cuts: bool = True,
) -> Ranking:
    used, bounds, found, notes = looked.used, looked.bounds, looked.found, looked.notes
    space, today = bounds.space, today_of(used, current)
    if not found.fitting:
        legal_rows(used)  # with compiled blocks alone no row may be legal: then this raises that reason
        raise _nothing_found(used, by, found, remedies)
    better = _improved(looked, families_too=bool(by.name == "exact" and tied), other_cuts=other_cuts)
    certificate = _certificate(looked, better, by.name, other_cuts=other_cuts)
    ordered = simplest_first(with_candidate(better.ranked, today, used), tied)
    ranked, (layout, best) = ordered.ranked, ordered.ranked[0]
    nearby = Nearby(bounds, found, _place_of(layout, better, looked), ordered.fastest[1].step_time_s)
    misfits = [(space.layout(*place), forecast) for place, forecast in found.misfits]
    misfits += explain.priced(used, space, nearby.misfits_to_price())
    large = explain.too_large(misfits, ordered.fastest[1], used.capacity_bytes)
    lost = tuple(explain.runner_up(pair, best) for pair in ranked[1:])
    first, *reasons = explain.why(used, ranked, misfits, nearby.floors(), what=ordered.title())
    why = (first, *ordered.words(), *reasons, *filter(None, [better.words.get(layout)]), *notes)

    def with_reason(pair: Pair) -> Plan:
        return explain.plan(used, pair, (explain.runner_up(pair, best).reason,))

    always = [ordered.fastest[0], *([] if today is None else [today.parallelism])]
    of_each = families.best_of_each(ranked, always)
    return Ranking(
        (explain.plan(used, ranked[0], why, (*lost[: keep - 1], *large)), *map(with_reason, ranked[1:keep])),
        certificate,
        large,
        (*large, *lost[keep - 1 :]),
        notes,
        None if today is None else compared(today, ranked[0], used),
        faster=None if ordered.first_is_fastest else with_reason(ordered.fastest),
        families=tuple(map(with_reason, of_each[1:])),
        twins=len(ranked) - len(of_each),
    )


def _improved(looked: _Looked, *, families_too: bool, other_cuts: bool) -> Improved:
    """The best rows, with better cuts and fewer layers recomputed, and the best rows of the families that are always searched for."""
    used, bounds, found = looked.used, looked.bounds, looked.found
    space = bounds.space
    places = {space.layout(*place): place for place, _ in found.fitting}
    rows = Improved(explain.different(zip(places, (forecast for _, forecast in found.fitting), strict=True)), places)
    if other_cuts:
        rows = with_uneven_rows(used, bounds, rows)
    better = lighten(used, recut(used, rows))
    return families.with_families(used, bounds, found, better) if families_too else better


def _place_of(layout: Parallelism, better: Improved, looked: _Looked) -> Place:
    """The place of the row that a layout was made from; that of the best row if there is none."""
    keys = "layers_per_stage", "recomputed_layers_per_stage"
    row = layout.model_copy(update={key: getattr(looked.used.constraints, key) for key in keys})
    return better.places.get(row, looked.found.fitting[0][0])


def _certificate(looked: _Looked, better: Improved, method: str, *, other_cuts: bool) -> Certificate:
    used, space, found, eager = looked.used, looked.bounds.space, looked.found, looked.eager
    ways, best_s = ways_of(used), better.ranked[0][1].step_time_s
    cut_given = used.constraints.layers_per_stage is not None
    floors_s = (
        looked.bounds.any_cut_s(best_s) if other_cuts and not cut_given else None,
        looked.bounds.any_part_s(ways, best_s) if other_cuts and ways is not None else None,
    )
    any_cut_s, any_part_s = (None if floor_s == float("inf") else floor_s for floor_s in floors_s)
    return Certificate(
        rows=space.size,
        rules=space.rules,
        broken=space.size - space.num_legal - space.num_alike + len(found.refused) - eager.alone,
        alike=space.num_alike,
        not_fit=found.too_large + len(found.misfits),
        fit=len(found.fitting),
        left=found.left + eager.alone,
        forecasts=found.priced + eager.forecasts,
        cuts=better.cuts,
        lightened=better.lightened,
        best_s=found.fitting[0][1].step_time_s,
        lowest_bound_left_s=found.lowest_bound_left_s,
        proven=found.proven,
        any_cut_s=any_cut_s,
        any_part_s=any_part_s,
        found_s=best_s,
        search_s=perf_counter() - looked.start,
        solver=method,
        either_blocks=looked.bounds.problem.either_blocks,
    )


def _nothing_found(used: Problem, by: Method, found: Outcome, remedies: bool) -> Exception:
    if by.name != "exact" and found.left:
        rule = f"none of the {found.priced} layouts that it priced fits; raise budget, or search exactly"
        return bad_input("method", by.name, rule)
    return nothing_fits(used, remedies=remedies)
