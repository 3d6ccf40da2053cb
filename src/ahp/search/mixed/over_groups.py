"""Search of a cluster of several groups of devices: layouts over some or all groups, and each group alone.

Layouts over several groups are placed cell by cell (``mixed.find``), with one or several stages per pipeline rank. Each group alone
is searched as a plain cluster, in the whole space of plain clusters, so the fastest plan here is never slower than the best of
one group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from time import perf_counter
from typing import Any

from ahp.cluster.cells import place
from ahp.errors import BadInput, NotExpressible, NothingFits
from ahp.forecast import mixed_rules
from ahp.plan import Parallelism, Plan
from ahp.search import explain, reasons
from ahp.search.certificate import Certificate, merged
from ahp.search.current import Current, compared, today_of, with_candidate
from ahp.search.mixed import explain as mixed_explain
from ahp.search.mixed.find import Budget, MixedOutcome, find_over
from ahp.search.mixed.misfit import nothing_fits_anywhere
from ahp.search.mixed.space import Shape, no_shape, shape_of, spaces_of
from ahp.search.mixed.widths import given_widths, may_differ, unlike_widths
from ahp.search.one_group import Fastest, fastest_on_one_group
from ahp.search.pairs import Pair, by_time
from ahp.search.problem import OF_PLACEMENTS, Problem
from ahp.search.result import Ranking
from ahp.search.ties import simplest_first
from ahp.words import percent, seconds

Plain = Callable[[Problem, int], Ranking]
"""Searches a plain cluster, for a ranking of so many plans."""

ROUNDING = 1e-9
"""The largest relative difference between sums added in another order."""

BRIEFLY = Budget(shapes=15, forecasts=4, exact=400, near=40, several=1)
"""[Empirical] A part of a full search, for questions about changes to a cluster whose best layout is known; the explanation of a plan asks
six. The best layout is mostly the same one or near it."""


@dataclass(frozen=True)
class MixedCertificate(Certificate):
    """Rows are shapes over several groups (degrees, stages and replicas, each with every placement), and the rows of each
    group alone."""

    num_groups: int = 2
    shapes: int = 0
    """How many rows are shapes over several groups."""
    placed: int = 0
    """Shapes whose placements were looked at."""
    own_order_s: float | None = None
    """The step of the first plan, where it has a schedule made for its stages."""
    unlike: int = 0
    """Layouts with stages of different width that were priced; they are not among the rows."""
    any_widths_s: float | None = None
    """No layout with stages of different width takes less; 0 where no bound is known, None where all stages have the same width."""

    @property
    def gap(self) -> float:
        """The most by which a layout with a bound can be faster, as a share of the time of the fastest that was found."""
        if self.lowest_bound_left_s is None or self.proven:
            return 0.0
        fastest_s = self.found_s if self.own_order_s is None else min(self.found_s, self.own_order_s)
        return max(1.0 - self.lowest_bound_left_s / fastest_s, 0.0)

    def led_by(self, step_s: float) -> MixedCertificate:
        """With its gap seen from the first plan."""
        return replace(self, own_order_s=step_s)

    def plain(self) -> dict[str, Any]:
        """As data for JSON."""
        return {**super().plain(), "gap": self.gap}

    def _searched(self) -> str:
        unlike = f", {self.unlike:,} of them with stages of unlike width" if self.unlike else ""
        over = f"{self.shapes:,} shapes over {self.num_groups} groups of devices and " if self.shapes else ""
        return (
            f"{over}{self.rows - self.shapes:,} layouts of one group alone, in {self.search_s:.1f} s; "
            f"{self.forecasts + self.unlike:,} forecast in full{unlike}"
        )

    def _left_out(self) -> list[tuple[int, str]]:
        """Without the count of rows left, which does not add up here because shapes have placements too."""
        return super()._left_out()[:-1]

    def _proven(self) -> str:
        if self.proven or self.lowest_bound_left_s is None:
            return super()._proven()
        bound = seconds(self.lowest_bound_left_s)
        within = f"the best is within {percent(self.gap)} of the optimum: no layout takes under {bound}"
        return f"{within}{self._other_choices()}"

    def _floors(self) -> list[tuple[float | None, str]]:
        return [*super()._floors(), (self.any_widths_s, "stages of unlike width")]


@dataclass(frozen=True)
class Alone:
    """One group searched as a plain cluster."""

    name: str
    problem: Problem
    ranking: Ranking | None
    refusal: str = ""
    """Why the group has no plan."""


def mixed_ranking(
    asked: Problem,
    keep: int,
    current: Parallelism | Mapping[str, Any] | None,
    plain: Plain,
    tied: float = 0.0,
    *,
    remedies: bool = True,
) -> Ranking:
    """Rank layouts over several groups and of each group alone: fastest first, except that the simplest layout within the share ``tied`` of
    the fastest leads.

    ``remedies``: whether the error names what would make something fit. Raises like ``ahp.search``.
    """
    start = perf_counter()
    alone = [_alone(asked, used, plain, 1) for used in _groups(asked)]
    found = [one.ranking.best for one in alone if one.ranking is not None]
    best_s = min((plan.priced.step_time_s for plan in found), default=float("inf"))
    seeds = [shape_of(plan.parallelism) for plan in found]
    over, refusal = _over_groups(asked, seeds, best_s, keep, Budget())
    if over is None and all(one.ranking is None for one in alone):
        assert refusal is not None, "without a shape there is a reason"
        each = (f"{one.name} alone: {one.refusal.splitlines()[0]}" for one in alone)
        raise type(refusal)("\n  ".join([str(refusal), *each]))
    today = today_of(asked, current)
    alike = with_candidate([] if over is None else explain.different(over.fitting), today, asked)
    times = [best_s, *(forecast.step_time_s for _, forecast in alike[:1])]
    unlike = unlike_widths(asked, alike, min(times))
    ranked = by_time([*alike, *unlike.fitting])
    alone = [_with_rivals(asked, one, plain, keep, ranked) for one in alone]
    plans = _merged(asked, ranked, alone)
    if not plans:
        raise nothing_fits_anywhere(asked, over, [(one.name, one.refusal) for one in alone], remedies=remedies)
    certificate = _certificate(
        asked, over, alone, [plan for plan, _ in plans], unlike.forecasts, perf_counter() - start
    )
    not_spread = () if over is not None else (f"no layout over several groups: {refusal}",)
    parts = mixed_rules.together(asked.cluster)
    limits = not_spread
    if over is not None and len(parts) > 1:
        limits = (f"no layout over all groups: {mixed_rules.apart(asked.cluster, parts[0][0], parts[1][0])}",)
    return _Found(asked, plans, ranked, alone, not_spread, limits).ranking(keep, tied, today, certificate)


@dataclass(frozen=True)
class _Found:
    """What was found over several groups and on each group alone."""

    asked: Problem
    plans: list[tuple[Plan, Problem]]
    """Plans, fastest first, each with its problem."""
    spread: list[Pair]
    """Layouts over several groups, fastest first."""
    alone: list[Alone]
    not_spread: tuple[str, ...]
    """Why there are no layouts over several groups."""
    limits: tuple[str, ...]
    """The same, or why there are none over all groups."""

    def ranking(self, keep: int, tied: float, today: Current | None, certificate: Certificate) -> Ranking:
        """The ranking: first the simplest of those tied with the fastest, each plan with its reason."""
        ordered = simplest_first([(plan.parallelism, plan.priced) for plan, _ in self.plans], tied)
        at = next(at for at, (plan, _) in enumerate(self.plans) if plan.parallelism is ordered.ranked[0][0])
        best, used = self.plans[at]
        others = [plan for plan, _ in (*self.plans[:at], *self.plans[at + 1 :])]
        notes = (*mixed_explain.idle(self.asked, best.parallelism, used.cluster), *self.limits)
        why = (explain.headline(ordered.title(), best.priced), *ordered.words(), *self._why(best, used), *notes)
        lost = tuple(explain.runner_up((plan.parallelism, plan.priced), best.priced) for plan in others)
        reasoned = [
            plan.model_copy(update={"why": (one.reason,), "rejected": ()})
            for plan, one in zip(others, lost, strict=True)
        ]
        now = None
        if today is not None:
            pair = None if today.forecast is None else (today.parallelism, today.forecast)
            of_best = self.asked if pair is None else mixed_explain.on_fullest(self.asked, pair)
            now = compared(today, (best.parallelism, best.priced), of_best)
        first = best.model_copy(update={"why": why, "rejected": lost[: keep - 1]})
        faster = None if ordered.first_is_fastest else reasoned[0]
        more = tuple(others[keep - 1 :])
        plans = (first, *reasoned[: keep - 1])
        return Ranking(plans, certificate, (), lost[keep - 1 :], notes, now, faster=faster, more=more)

    def _why(self, best: Plan, used: Problem) -> Iterator[str]:
        """The reasons for the best plan, decision by decision, without the headline."""
        pair = best.parallelism, best.priced
        if used.cluster.is_mixed:
            floors = dict.fromkeys((name for name, _ in reasons.CHOICES), float("inf"))
            rivals = [other for other in self.spread if other[0] != best.parallelism]
            of_fullest = mixed_explain.on_fullest(self.asked, pair)
            yield from islice(explain.why(of_fullest, [pair, *rivals], [], floors), 1, None)
            yield from mixed_explain.width(pair, self.spread)
            yield from mixed_explain.groups(self.asked, pair)
            yield from mixed_explain.recompute(self.asked, pair)
            yield from mixed_explain.links(self.asked, pair)
        else:
            yield from best.why[1:]
            if not self.not_spread:
                yield from mixed_explain.against_spread(used, self.spread, best.priced)
        for one in self.alone:
            if one.problem is not used:
                yield mixed_explain.of_alone(one.name, one.ranking, one.refusal, best.priced)


def fastest_of_groups(asked: Problem, ceiling_s: float, like: Parallelism | None = None) -> Fastest | None:
    """The layout with the shortest step over several groups or on one alone, without a ranking; None where none is legal.

    ``ceiling_s``: only layouts that take less are wanted. ``like``: a nearly best layout; then only layouts near it are searched, ``BRIEFLY``,
    and the bound holds for these alone. All layouts are searched if none near it fits and ``ceiling_s`` is infinite.
    """
    if like is not None:
        found = _fastest_near(asked, ceiling_s, like)
        if found is not None and (found.best is not None or ceiling_s < float("inf")):
            return found
    alone = _alone_below(asked, ceiling_s)
    pairs = [(one.best, one.problem) for one in alone if one.best is not None]
    best_s = min([ceiling_s, *(pair[1].step_time_s for pair, _ in pairs)])
    over, _ = _over_groups(asked, [shape_of(layout) for (layout, _), _ in pairs], best_s, 1, Budget())
    return _best_of(asked, over, alone, ceiling_s)


def _fastest_near(asked: Problem, ceiling_s: float, like: Parallelism) -> Fastest | None:
    """The same among layouts near ``like``, and those of each group alone."""
    over, _ = _over_groups(asked, [shape_of(like)], ceiling_s, 1, BRIEFLY, near=like)
    best_s = min([ceiling_s, *(pair[1].step_time_s for pair in ([] if over is None else over.fitting))])
    return _best_of(asked, over, _alone_below(asked, best_s), ceiling_s)


def _alone_below(asked: Problem, ceiling_s: float) -> list[Fastest]:
    """The best of each group alone below ``ceiling_s``; none for a cluster whose placements are given."""
    if any(key in asked.constraints.given for key in OF_PLACEMENTS):
        return []
    return [one for used in _groups(asked) if (one := fastest_on_one_group(used, ceiling_s)) is not None]


def _best_of(asked: Problem, over: MixedOutcome | None, alone: list[Fastest], ceiling_s: float) -> Fastest | None:
    if over is None and not alone:
        return None
    over = over or MixedOutcome()
    pairs = [(one.best, one.problem) for one in alone if one.best is not None]
    pairs += [(pair, asked) for pair in over.fitting if pair[1].step_time_s < ceiling_s]
    least_s = min([over.floor_s, *(one.at_least_s for one in alone), *(pair[1].step_time_s for pair, _ in pairs)])
    best, used = min(pairs, key=lambda pair: pair[0][1].step_time_s, default=(None, asked))
    return Fastest(used, best, least_s)


def _groups(asked: Problem) -> list[Problem]:
    """The problem on each group alone."""
    alone = [asked.cluster.with_groups([group]) for group in asked.cluster.groups]
    return [replace(asked, cluster=cluster, is_group_alone=True) for cluster in alone]


def _alone(asked: Problem, used: Problem, plain: Plain, keep: int) -> Alone:
    """The best plans of one group alone."""
    name = used.cluster.groups[0].name
    fixed = [key for key in OF_PLACEMENTS if key in asked.constraints.given]
    if fixed:
        return Alone(name, used, None, f"parallelism.{fixed[0]} is given")
    try:
        return Alone(name, used, plain(used, keep))
    except (BadInput, NotExpressible, NothingFits) as refusal:
        return Alone(name, used, None, str(refusal))


def _with_rivals(asked: Problem, one: Alone, plain: Plain, keep: int, spread: list[Pair]) -> Alone:
    """The same group with ``keep`` plans, where its best is among the fastest ``keep`` of all: then its next may be, too."""
    best = None if one.ranking is None else one.ranking.fastest.priced.step_time_s
    if best is None or (len(spread) >= keep and best > spread[keep - 1][1].step_time_s):
        return one
    return _alone(asked, one.problem, plain, keep)


def _over_groups(
    asked: Problem, seeds: list[Shape], best_s: float, keep: int, budget: Budget, near: Parallelism | None = None
) -> tuple[MixedOutcome | None, BadInput | NotExpressible | None]:
    """Layouts over several groups, or the reason why there are none. ``best_s``: the time found elsewhere, which they have to beat."""
    if (only := given_widths(asked)) is not None:
        return _priced_alone(asked, only)
    spaces = spaces_of(asked, near)
    if not spaces:
        return None, BadInput(str(mixed_rules.apart(asked.cluster, *asked.cluster.groups[:2])))
    if (says := spaces[0].refusal()) is not None:
        return None, NotExpressible(says)
    outcome = find_over(asked, spaces, budget, best_s, keep, seeds)
    return (outcome, None) if outcome.size else (None, no_shape(spaces))


def _priced_alone(asked: Problem, layout: Parallelism) -> tuple[MixedOutcome | None, BadInput | NotExpressible | None]:
    """The outcome of the one layout that the user gives in full, or the reason why it has none."""
    try:
        found = asked.priced(layout)
    except (BadInput, NotExpressible) as refusal:
        return None, refusal
    pair = found.parallelism, found.forecast
    outcome = MixedOutcome(size=1, placed=1, forecasts=1)
    (outcome.fitting if found.forecast.fits else outcome.misfits).append(pair)
    return outcome, None


def _merged(asked: Problem, spread: list[Pair], alone: list[Alone]) -> list[tuple[Plan, Problem]]:
    """Plans over several groups and of each group alone, fastest first, each with its problem."""
    found = [(explain.plan(asked, pair, ()), asked) for pair in spread if not _told_by_its_group(asked, pair, alone)]
    found += [(plan, one.problem) for one in alone if one.ranking is not None for plan in one.ranking.plans]
    return sorted(found, key=lambda pair: pair[0].priced.step_time_s)


def _told_by_its_group(asked: Problem, pair: Pair, alone: list[Alone]) -> bool:
    """Whether a layout lies on one group whose own search found one with as many devices that is no slower."""
    taken = place(asked.cluster, pair[0]).used
    for one in alone:
        best = None if one.ranking is None else one.ranking.fastest
        if best is not None and taken == {one.name: best.parallelism.world_size}:
            return best.priced.step_time_s <= pair[1].step_time_s * (1 + ROUNDING)
    return False


def _certificate(
    asked: Problem, over: MixedOutcome | None, alone: list[Alone], plans: list[Plan], unlike: int, search_s: float
) -> MixedCertificate:
    """``plans``: all that were found, fastest first; ``unlike``: the layouts priced with stages of different width."""
    of_groups = [one.ranking.certificate for one in alone if one.ranking is not None]
    over = over or MixedOutcome()
    floors = [over.floor_s, *(c.lowest_bound_left_s for c in of_groups if c.lowest_bound_left_s is not None)]
    floor_s, found_s = min(floors), plans[0].priced.step_time_s
    best_alike = next((plan for plan in plans if not plan.parallelism.has_unlike_widths), plans[0])
    return MixedCertificate(
        rows=over.size + over.broken + over.twins + sum(c.rows for c in of_groups),
        rules=merged([over.rules, *(c.rules for c in of_groups)]),
        broken=over.broken + sum(c.broken for c in of_groups),
        alike=over.twins + sum(c.alike for c in of_groups),
        not_fit=over.too_large + len(over.misfits) + sum(c.not_fit for c in of_groups),
        fit=len(over.fitting) + sum(c.fit for c in of_groups),
        left=over.left + sum(c.left for c in of_groups),
        forecasts=over.forecasts + sum(c.forecasts for c in of_groups),
        cuts=sum(c.cuts for c in of_groups),
        lightened=sum(c.lightened for c in of_groups),
        best_s=best_alike.priced.step_time_s,
        lowest_bound_left_s=floor_s if floor_s < float("inf") else None,
        proven=floor_s >= found_s,
        any_cut_s=None,
        any_part_s=None,
        found_s=found_s,
        search_s=search_s,
        num_groups=len(asked.cluster.groups),
        shapes=over.size + over.broken + over.twins,
        placed=over.placed,
        unlike=unlike,
        any_widths_s=_any_widths_s(asked, over),
    )


def _any_widths_s(asked: Problem, over: MixedOutcome) -> float | None:
    """As ``MixedCertificate.any_widths_s``. A given micro-batch is that of a replica here: wide stages divide it into smaller ones, which no shape
    has."""
    if over.any_widths_s == float("inf") or not may_differ(asked):
        return None
    return over.any_widths_s if asked.constraints.given.get("micro_batch_size", 1) == 1 else 0.0
