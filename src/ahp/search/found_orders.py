"""Schedules made for the best layouts' own stages, where removing the bubble of the fixed patterns pays or where the user asks for them.

The search compares layouts under the fixed patterns. Afterwards the layouts whose bubble is large enough get a schedule of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

from ahp.errors import BadInput
from ahp.plan import Forecast, Parallelism, Plan, Rejected
from ahp.schedule.orders import SYNTHESIZED, any_order, ranks_of_stages
from ahp.schedule.registry import PLAIN
from ahp.search import explain
from ahp.search.current import compared
from ahp.search.mixed import explain as mixed_explain
from ahp.search.problem import Problem
from ahp.search.result import OwnOrder, Ranking
from ahp.search.ties import TIED
from ahp.words import WORTH_TELLING, percent

if TYPE_CHECKING:
    from ahp.forecast.found_order import FoundOrder, ToOrder

WAITING = 12
"""How many layouts are examined: those whose steps would be shortest without their bubbles."""

LAYOUTS = 6
"""How many layouts get a schedule if the user leaves it open: in turns, one that could become the fastest and one that is fast without."""

MOST_ACTIONS = 30_000
"""Most actions in all orders that are searched for (about a second of processor time), and in one order (200 KB of plan.yaml)."""

TRIES = 300_000
"""Actions tried for one layout's order, one to two microseconds each (``synthesis.search.EFFORT``)."""


def with_own_orders(asked: Problem, ranking: Ranking, keep: int) -> Ranking:
    """The ranking with schedules made for its plans' own stages: for all pipelines if the user asks for it; for the first plan if the user
    leaves it open and such a schedule beats everything under a fixed pattern by more than the forecast can tell apart.

    The certificate stays a proof about fixed patterns. ``Ranking.own_order`` has what is known beyond that.
    """
    if asked.own_order:
        return _of_all(asked, ranking, keep)
    return _where_it_pays(asked, ranking, keep) if asked.constraints.pipeline_parallel_schedule is None else ranking


@dataclass(frozen=True)
class _Entry:
    """A plan of the ranking with its present layout and forecast."""

    plan: Plan
    layout: Parallelism
    forecast: Forecast
    words: str = ""
    """About its own schedule."""


def _where_it_pays(asked: Problem, ranking: Ranking, keep: int) -> Ranking:
    best, limit_s = ranking.best, _step_s(ranking.fastest) * (1 - TIED)
    waiting = [plan for plan in (*_different(ranking), *ranking.more) if _without_bubble_s(plan) < limit_s]
    waiting = sorted(waiting, key=_without_bubble_s)[:WAITING]
    if not waiting:
        return ranking
    if reason := replace(asked, engine=best.engine).refused(any_order()):
        return (
            ranking.with_reasons(f"no schedule made for its stages: {reason}", last=True)
            if best in waiting
            else ranking
        )
    able, reasons = _able(asked, waiting)
    found, left = [], MOST_ACTIONS
    for plan, to_order in _promising(able, limit_s):
        best_s = min([limit_s, *(order.priced.forecast.step_time_s for _, order in found)])
        if to_order.floor_s < best_s and (left := left - _actions(plan)) >= 0:
            # What the best plan's own order gains is reported even if that is little.
            order = to_order.found(effort=_effort(to_order), limit_s=inf if _stages(plan) == _stages(best) else best_s)
            found += [] if order is None else [(plan, order)]
    if not found:
        return ranking.with_reasons(reasons[0], last=True) if reasons and best in waiting else ranking
    plan, order = min(found, key=lambda one: one[1].priced.forecast.step_time_s)
    own = _own_order(order, _step_s(ranking.fastest))
    if own.gain <= TIED:
        return (
            replace(ranking, own_order=own).with_reasons(_less_than_tied(plan, own), last=True)
            if best in waiting
            else ranking
        )
    first = _entry(plan, order)
    others = [_Entry(other, other.parallelism, other.priced) for other in _different(ranking)]
    return _ranked(asked, replace(ranking, own_order=replace(own, leads=True)), [first, *others], keep)


def _promising(able: list[tuple[Plan, ToOrder]], limit_s: float) -> list[tuple[Plan, ToOrder]]:
    """Of the plans that an order can bring below ``limit_s``, those with the lowest floors and those that are fastest already, in turns, up to
    ``LAYOUTS``."""
    by_floor = sorted((one for one in able if one[1].floor_s < limit_s), key=lambda one: one[1].floor_s)
    by_time = sorted(by_floor, key=lambda one: _step_s(one[0]))
    in_turns = {id(one): one for both in zip(by_floor, by_time, strict=True) for one in both}
    return list(in_turns.values())[:LAYOUTS]


def _of_all(asked: Problem, ranking: Ranking, keep: int) -> Ranking:
    """All pipelines with orders of their own; of plans with the same stages on the same ranks only the first, as their order would be the same."""
    plans = _different(ranking)
    able, reasons = _able(asked, plans)
    orders = {id(plan): to_order.found(effort=_effort(to_order) / 2) for plan, to_order in able}
    entries = [_Entry(plan, plan.parallelism, plan.priced) for plan in plans if not _has_pipeline(plan)]
    for plan, to_order in able:
        order = orders[id(plan)]
        entries.append(_under_own_pattern(plan, to_order) if order is None else _entry(plan, order))
    if not entries:
        raise BadInput(f"parallelism.pipeline_parallel_schedule = {SYNTHESIZED!r}: {reasons[0]}")
    entries.sort(key=lambda entry: entry.forecast.step_time_s)
    first = orders.get(id(entries[0].plan))
    if first is not None:
        own = _own_order(first, _step_s(ranking.fastest))
        ranking = replace(ranking, own_order=replace(own, leads=True))
    return _ranked(asked, replace(ranking, notes=(*ranking.notes, *dict.fromkeys(reasons))), entries, keep)


def _able(asked: Problem, plans: list[Plan]) -> tuple[list[tuple[Plan, ToOrder]], list[str]]:
    """The plans to find an order for, the first with each placement of stages; and the reasons for those with too many actions."""
    from ahp.forecast.found_order import ToOrder  # here, as most searches do not need it

    found: dict[object, tuple[Plan, ToOrder]] = {}
    reasons = []
    for plan in plans:
        key = _stages(plan)
        if key in found or not _has_pipeline(plan):
            continue
        if (actions := _actions(plan)) > MOST_ACTIONS:
            reasons.append(f"no schedule made for its stages: {actions:,} actions, more than {MOST_ACTIONS:,}")
        elif (to_order := ToOrder.of(asked.of_plan(plan).any_pricer, plan.parallelism)) is not None:
            found[key] = plan, to_order
    return list(found.values()), reasons


def _stages(plan: Plan) -> tuple[tuple[int, ...], Parallelism]:
    """The rank of each stage and the layout without its pattern: plans in which both are equal get the same order."""
    layout = plan.parallelism
    any_pattern = {"pipeline_parallel_schedule": PLAIN, "pipeline_parallel_order": None}
    return ranks_of_stages(layout), layout.model_copy(update=any_pattern)


def _effort(to_order: ToOrder) -> float:
    """The effort that keeps the tries of both kinds of backward below ``TRIES``."""
    return min(1.0, TRIES / (2 * to_order.tried))


def _own_order(order: FoundOrder, fastest_s: float) -> OwnOrder:
    gain = 1 - order.priced.forecast.step_time_s / fastest_s
    return OwnOrder(max(gain, 0.0), order.gap, order.bound.reason)


def _entry(plan: Plan, order: FoundOrder) -> _Entry:
    return _Entry(plan, order.priced.parallelism, order.priced.forecast, order.words())


def _under_own_pattern(plan: Plan, to_order: ToOrder) -> _Entry:
    """A plan with the order of its fixed pattern, as no faster order was found."""
    name, priced = plan.parallelism.pipeline_parallel_schedule, to_order.as_order
    return _Entry(
        plan,
        priced.parallelism,
        priced.forecast,
        f"no schedule was found that is faster than {name}, whose order it has",
    )


def _ranked(asked: Problem, ranking: Ranking, entries: list[_Entry], keep: int) -> Ranking:
    """The ranking with these entries, in their order."""
    first, old, today = entries[0], ranking.best, ranking.current
    used = asked.of_plan(first.plan)
    holding = mixed_explain.on_fullest(used, (first.layout, first.forecast))
    lost = [explain.runner_up((entry.layout, entry.forecast), first.forecast) for entry in entries[1:]]
    large = tuple(one for one in ranking.too_large if (one.step_time_s or 0.0) < first.forecast.step_time_s)
    rest = tuple(
        loser.model_copy(update={"reason": f"under fixed patterns, {loser.reason}"})
        for loser in ranking.losers
        if loser not in ranking.too_large
    )
    why = (
        explain.headline("a schedule made for its stages" if first.words else "as it is", first.forecast),
        *filter(None, [first.words]),
        explain.memory_words(first.forecast, holding.capacity_bytes),
        f"under torch's fixed patterns {old.parallelism.short()} would be the first, for these reasons:",
        *old.why,
    )
    fixed = {**old.fixed, **({"pipeline_parallel_schedule": SYNTHESIZED} if asked.own_order else {})}

    def plan_of(entry: _Entry, why: tuple[str, ...], rejected: tuple[Rejected, ...] = ()) -> Plan:
        updated = {"parallelism": entry.layout, "forecast": entry.forecast, "fixed": fixed}
        return entry.plan.model_copy(update={**updated, "why": why, "rejected": rejected})

    others = [plan_of(entry, (one.reason,)) for entry, one in zip(entries[1:], lost, strict=True)]
    best = plan_of(first, why, (*lost[: keep - 1], *large))
    if today is not None and today.forecast is not None:
        used = mixed_explain.on_fullest(used, (today.parallelism, today.forecast))
    return replace(
        ranking,
        plans=(best, *others[: keep - 1]),
        certificate=ranking.certificate.led_by(_step_s(best)),
        too_large=large,
        losers=(*large, *lost[keep - 1 :], *rest),
        current=None if today is None else compared(today, (first.layout, first.forecast), used),
        faster=None,
        families=_families(ranking, entries[1:], others),
    )


def _families(ranking: Ranking, entries: list[_Entry], others: list[Plan]) -> tuple[Plan, ...]:
    """The former best plan and the best of each family, with the schedules that they have now."""
    if not ranking.families:
        return ()
    rows = [plan.parallelism for plan in (ranking.best, *ranking.families)]
    return tuple(plan for entry, plan in zip(entries, others, strict=True) if entry.plan.parallelism in rows)


def _different(ranking: Ranking) -> list[Plan]:
    """The different plans of the ranking, fastest first."""
    found: dict[Parallelism, Plan] = {}
    for plan in (*ranking.plans, ranking.fastest, *ranking.families):
        found.setdefault(plan.parallelism, plan)
    return sorted(found.values(), key=_step_s)


def _less_than_tied(plan: Plan, own: OwnOrder) -> str:
    if own.gain < WORTH_TELLING:
        return "no schedule made for these stages was found that is faster than a fixed pattern"
    return (
        f"{plan.parallelism.short()} with a schedule made for its stages takes {percent(own.gain)} less, which the forecast cannot tell "
        f"apart (parallelism.pipeline_parallel_schedule {SYNTHESIZED} asks for it)"
    )


def _without_bubble_s(plan: Plan) -> float:
    """Seconds of a plan's step without the last rank's waits: for other ranks, for weights, and for gradients that its other stages could hide."""
    forecast = plan.priced
    of_mean_s = forecast.step_time_s - forecast.step.get("slowest_rank", 0.0)
    hidden = ("bubble", "weight_gather", *(["gradient_reduce"] if plan.parallelism.virtual_stages_per_rank > 1 else []))
    waits_s = sum(forecast.step.get(part, 0.0) for part in hidden)
    return forecast.step_time_s * (1 - waits_s / of_mean_s) if _has_pipeline(plan) else forecast.step_time_s


def _actions(plan: Plan) -> int:
    """Actions of an order with two-part backwards, or of one order per replica if their numbers of micro-batches differ."""
    counts = plan.parallelism.micro_batches(plan.job)
    return 3 * plan.parallelism.num_stages * (counts[0] if len(set(counts)) == 1 else sum(counts))


def _has_pipeline(plan: Plan) -> bool:
    return plan.parallelism.pipeline_parallel_degree > 1


def _step_s(plan: Plan) -> float:
    return plan.priced.step_time_s
