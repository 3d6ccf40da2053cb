"""The verb ``ahp.search``: plans best first, the certificate, and why the others lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from ahp.cluster.model import Cluster
from ahp.config import Constraints
from ahp.errors import BadInput, NotExpressible, NothingFits, bad_input
from ahp.graph.operators import ModelGraph
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism, Plan, Rejected
from ahp.search import telling
from ahp.search.bounds.space_bounds import Bounds
from ahp.search.certificate import Certificate, certified
from ahp.search.compiled import ways, why_compiled, why_eager
from ahp.search.counts import Choice, choose, of_size
from ahp.search.current import Current, compared, today_of, with_candidate
from ahp.search.fastest import Fastest, fastest, fastest_row
from ahp.search.garbage import among_new_objects
from ahp.search.lighten import lighten, ways_of
from ahp.search.method import Method, MethodName, find
from ahp.search.misfit import nothing_fits
from ahp.search.nearby import Nearby
from ahp.search.objective import Objective, ObjectiveName, Scale, Worth, objective_of
from ahp.search.problem import Problem, problem
from ahp.search.recut import recut
from ahp.search.rows import legal_rows

SPEED = Objective()


@dataclass(frozen=True)
class Ranking:
    """Plans best first, with what the search can say about them."""

    plans: tuple[Plan, ...]
    certificate: Certificate
    too_large: tuple[Rejected, ...]
    """Layouts that would be faster but do not fit."""
    losers: tuple[Rejected, ...]
    """Every layout that was priced and is not in ``plans``, each with its one reason; those too large first."""
    notes: tuple[str, ...] = ()
    """What the user should know beside: devices that are left over."""
    current: Current | None = None
    """What the user runs today, where it was given."""
    objective: Objective = SPEED
    worth: tuple[Worth, ...] = ()
    """Of each plan, by the objective."""
    choice: Choice | None = None
    """Of the number of devices, where the objective leaves it open; the plans are then the best of each number."""

    @property
    def best(self) -> Plan:
        return self.plans[0]

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    def __len__(self) -> int:
        return len(self.plans)


@among_new_objects()
def search(
    graph: ModelGraph,
    cluster: Cluster | Mapping[str, Any] | str,
    job: Job | Mapping[str, Any],
    *,
    constraints: Constraints | Parallelism | Mapping[str, Any] | None = None,
    engine: EngineChoice | Mapping[str, Any] | str | None = None,
    keep: int = 10,
    current: Parallelism | Mapping[str, Any] | None = None,
    method: Method | MethodName = "exact",
    objective: Objective | Mapping[str, Any] | ObjectiveName = "speed",
) -> Ranking:
    """Rank every legal layout that fits by its forecast step time, or the numbers of devices by another objective.

    Args:
        graph: from ``ahp.analyze`` with the same job.
        cluster: a Cluster, its plain form, a path, or a short form such as ``8x8xH100-SXM-80GB``.
        job: what must not change.
        constraints: the keys of the layout that are fixed; the others are searched.
        engine: what will run the plan. Where it leaves ``compile`` open, both are searched on GPUs, and the best has the faster.
        keep: plans of the ranking, one at least.
        current: what runs today; priced beside the winner whether it fits or not, and a candidate where it is admitted.
        method: exact, which proves the best; anneal or evolve, which stop after a budget of forecasts (``Method``).
        objective: speed; or cost, tokens-per-day, fewest-devices, which may use fewer devices (``Objective``).

    Returns:
        At most ``keep`` plans, fastest first. Devices are left over only where no layout can use all of them and
        the user has fixed no degree; ``notes`` and the plans' ``why`` then say so. By another objective the best plan of
        each number of devices, the best number first.

    Raises:
        BadInput: arguments or constraints that contradict each other, the model or the cluster.
        NotExpressible: the engine cannot run what is fixed, or is not there yet.
        NothingFits: legal layouts there are, but none fits; with the nearest miss and checked remedies.
    """
    keep = max(keep, 1)
    by = method if isinstance(method, Method) else Method(method)
    aim = objective_of(objective)
    asked = problem(graph, cluster, job, constraints, engine)
    if not aim.may_use_fewer:
        ranking = _with_any_kernels(asked, keep, current, by)
        scale = Scale(aim, asked)
        return replace(ranking, objective=aim, worth=tuple(_worth(scale, plan) for plan in ranking.plans))
    if by.name != "exact":
        raise bad_input("method", by.name, f"the objective {aim.name} is searched exactly", ["exact"])
    return _by_objective(asked, aim, keep, current)


def _by_objective(
    asked: Problem, aim: Objective, keep: int, current: Parallelism | Mapping[str, Any] | None
) -> Ranking:
    """The best number of devices searched in full, then the best plans of the other numbers."""
    choice = choose(asked, aim, keep)
    scale, used = choice.scale, choice.first.found.problem
    ranking = _by_speed(used, keep, None, Method())
    first = _worth(scale, ranking.best)
    rivals = [(one, one.found.best, one.worth) for one in choice.others if one.found.best and one.worth]
    others = tuple(
        Rejected(
            parallelism=pair[0],
            reason=f"{worth.devices} devices: {scale.compared(worth, first)}",
            step_time_s=pair[1].step_time_s,
        )
        for _, pair, worth in rivals
    )
    kernels = (why_compiled(ranking.best, used),) if asked.engine.compile is None and used.engine.compile else ()
    why = (*scale.why(first), choice.words(), *kernels, *ranking.best.why)
    best = ranking.best.model_copy(update={"why": why, "rejected": (*others, *ranking.best.rejected)})
    plans = [telling.plan(one.found.problem, pair, (scale.compared(worth, first),)) for one, pair, worth in rivals]
    return replace(
        ranking,
        plans=(best, *plans),
        objective=aim,
        worth=(first, *(worth for _, _, worth in rivals)),
        choice=choice,
        current=_today(scale, ranking, first, current),
    )


def _today(
    scale: Scale, ranking: Ranking, first: Worth, current: Parallelism | Mapping[str, Any] | None
) -> Current | None:
    """What runs today on as many devices as it needs, beside the first."""
    asked = replace(scale.asked, engine=ranking.best.engine)
    everything = today_of(asked, current)
    if everything is None:
        return None
    used = asked.on(of_size(scale.asked.cluster, everything.parallelism.world_size) or asked.cluster)
    today, best = today_of(used, everything.parallelism), ranking.best
    assert today is not None, "a layout is given"
    assert best.forecast is not None, "plans of a search have one"
    worth = None if today.forecast is None else scale.worth(used.cluster, today.forecast.step_time_s)
    if worth is None or worth.devices == first.devices or not (today.forecast and today.forecast.fits):
        return compared(today, (best.parallelism, best.forecast), used)
    return replace(today, against_best=f"{worth.devices} devices: {scale.compared(worth, first)}")


def _worth(scale: Scale, plan: Plan) -> Worth:
    assert plan.forecast is not None, "plans of a search have one"
    assert plan.cluster is not None, "plans of a search have one"
    return scale.worth(Cluster.resolve(plan.cluster), plan.forecast.step_time_s)


def _with_any_kernels(
    asked: Problem, keep: int, current: Parallelism | Mapping[str, Any] | None, by: Method
) -> Ranking:
    """``_by_speed``, with compiled blocks or with eager ones where that is left open."""
    several = ways(asked)
    if len(several.problems) == 1:
        return _because(_by_speed(several.problems[0], keep, current, by), several.reason)
    compiled, eager = several.problems
    try:
        ranking = _by_speed(compiled, keep, current, by)
    except (BadInput, NotExpressible, NothingFits) as refusal:
        rival = fastest(eager)
        if rival is None or rival.best is None:
            raise
        return _because(_by_speed(eager, keep, current, by), f"eager blocks: compiled, {str(refusal).splitlines()[0]}")
    reason, best = why_compiled(ranking.best, compiled), ranking.best.forecast
    assert best is not None, "plans of a search have one"
    if asked.cluster.is_mixed or by.name != "exact":
        return _because(ranking, f"{reason}; other layouts with eager blocks are not searched here")
    rival, certificate = _rival(eager, best.step_time_s)
    if rival.best is None or rival.best[1].step_time_s >= best.step_time_s:
        return _because(ranking, reason, certificate)
    slower, ranking = ranking, _by_speed(eager, keep, current, by)
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


def _by_speed(asked: Problem, keep: int, current: Parallelism | Mapping[str, Any] | None, by: Method) -> Ranking:
    """All devices, the shortest step first."""
    if asked.cluster.is_mixed:
        from ahp.search.mixed.over_groups import mixed_ranking

        return mixed_ranking(asked, keep, current, by, lambda used: _by_speed(used, keep, None, by))
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
    better = recut(used, telling.different(zip(places, (forecast for _, forecast in found.fitting), strict=True)))
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
    misfits += telling.priced(used, space, nearby.misfits_to_price())
    large = telling.too_large(misfits, best, used.capacity_bytes)
    lost = tuple(telling.runner_up(pair, best) for pair in ranked[1:])
    why = (
        *telling.why(used, ranked, misfits, certificate.words(), nearby.floors()),
        *filter(None, [better.words, lighter.words]),
        *table.notes,
    )
    plans = [telling.plan(used, ranked[0], why, (*lost[: keep - 1], *large))]
    plans += [
        telling.plan(used, pair, (loser.reason,)) for pair, loser in zip(ranked[1:keep], lost[: keep - 1], strict=True)
    ]
    losers = (*large, *lost[keep - 1 :])
    told = None if today is None else compared(today, ranked[0], used)
    return Ranking(tuple(plans), certificate, large, losers, table.notes, told)
