"""``ahp plan --measure``: a ranking whose first plans are ordered by their step time as measured on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ahp.errors import HardwareMismatch
from ahp.plan import Plan, Rejected
from ahp.words import number_of, slower

if TYPE_CHECKING:
    from ahp.cluster.model import Cluster
    from ahp.runtime.check.measure import Measured
    from ahp.search.current import Current
    from ahp.search.problem import Problem
    from ahp.search.result import Ranking


def require_here(cluster: Cluster, measure: int) -> None:
    """Raises HardwareMismatch if plans for the cluster cannot be measured on this machine, before the search, which can take a while."""
    from ahp.runtime.ranks.device import device_for, num_gpus

    try:
        device_for(Plan(cluster=cluster.plain()), cluster.num_devices)
    except HardwareMismatch:
        names = ", ".join(dict.fromkeys(group.device.name for group in cluster.groups))
        raise HardwareMismatch(
            f"--measure = {measure}: plans are measured on this machine, which has {number_of(num_gpus(), 'GPU')}, and the cluster has "
            f"{cluster.num_devices} of {names}; leave it out, or plan for this machine: ahp plan MODEL local --measure {measure}"
        ) from None


def by_measurement(ranking: Ranking, results: Sequence[Measured], used: Problem) -> Ranking:
    """The ranking with its first plans as in ``results``, the fastest first; all others, today's layout too, are compared with the fastest.

    ``used``: the problem on the devices of the plans.
    """
    best, *others = results
    today, first = _today(ranking, results, used), best.plan
    why = first.why
    if first is not ranking.best:
        why = (
            f"the forecast had {ranking.best.parallelism.short()} first; compared with that plan this one is {first.why[0]}",
        )
    slower = [one.plan.model_copy(update={"why": (one.words(against=best),)}) for one in others]
    rest = [_unmeasured(plan, first) for plan in ranking.plans[len(results) :]]
    ranked = [plan.parallelism for plan in ranking.plans]
    rejected = (
        *map(_lost, slower),
        *map(_lost, rest),
        *(_beside(loser, first) for loser in ranking.best.rejected if loser.parallelism not in ranked),
    )
    update = {"why": (best.words(), *why), "rejected": rejected, "current": None if today is None else today.lost()}
    plans = (first.model_copy(update=update), *slower, *rest)
    worth = dict(zip((plan.parallelism for plan in ranking.plans), ranking.worth, strict=True))
    return replace(
        ranking, plans=plans, worth=tuple(worth[plan.parallelism] for plan in plans), families=(), current=today
    )


def _today(ranking: Ranking, results: Sequence[Measured], used: Problem) -> Current | None:
    """The layout that runs today, compared with the fastest: as measured if it was measured, else by the forecast."""
    from ahp.search.current import compared

    today, best = ranking.current, results[0]
    if today is None or today.forecast is None:
        return today
    alike = (today.parallelism, used.first_alike(today.parallelism))
    for one in results:
        if used.decided(one.plan.parallelism) in alike:
            return replace(today, against_best="it is the best" if one is best else one.words(against=best))
    by_forecast = compared(today, (best.plan.parallelism, best.plan.priced), used).against_best
    return replace(today, against_best=f"not measured; {by_forecast}")


def _unmeasured(plan: Plan, first: Plan) -> Plan:
    from ahp.search.reasons import slower_because

    return plan.model_copy(update={"why": (f"not measured; {slower_because(plan.priced, first.priced)}",)})


def _beside(loser: Rejected, first: Plan) -> Rejected:
    """A rejected layout with a new reason: its own is about the forecast's first plan. A layout that does not fit keeps its own."""
    if loser.step_time_s is None or not loser.fits:
        return loser
    words = slower(loser.step_time_s / first.priced.step_time_s)
    return loser.model_copy(update={"reason": f"not measured; {words} by the forecast"})


def _lost(plan: Plan) -> Rejected:
    return Rejected.of(plan.parallelism, plan.priced, plan.why[0])
