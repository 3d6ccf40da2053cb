"""The verb ``ahp.search``: plans best first, the certificate, and why the others lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ahp.cluster.model import Cluster
from ahp.config import Constraints
from ahp.engines.registry import get
from ahp.errors import bad_input, whole_number
from ahp.forecast.open_switch import open_switch
from ahp.graph.operators import ModelGraph
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism, Plan, Rejected
from ahp.schedule.orders import SYNTHESIZED
from ahp.search import explain
from ahp.search.by_speed import ranking_by_speed, ranking_with_any_kernels
from ahp.search.compiled import why_compiled
from ahp.search.counts import choose
from ahp.search.current import Current, compared, today_of
from ahp.search.feasible_space import refuse_too_many
from ahp.search.found_orders import with_own_orders
from ahp.search.gc_pause import among_new_objects
from ahp.search.method import Method, MethodName
from ahp.search.objective import Objective, ObjectiveName, Scale, Worth, objective_of
from ahp.search.problem import Problem, problem, with_devices
from ahp.search.result import Ranking
from ahp.search.ties import TIED
from ahp.words import number_of


@among_new_objects()
def search(
    graph: ModelGraph,
    cluster: Cluster | Mapping[str, Any] | str | Path,
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
        engine: what will run the plan. If it leaves ``compile`` open, both are searched on GPUs, and the best plan has the faster.
        keep: number of plans in the ranking, at least one.
        current: the layout that runs today; compared with the winner whether it fits or not, and a candidate if constraints admit it.
        method: exact, which proves the best; anneal or evolve, which stop after a budget of forecasts (``Method``).
        objective: speed; or cost, tokens-per-day, fewest-devices, which may use fewer devices (``Objective``).

    Returns:
        At most ``keep`` plans, fastest first, except that the simplest of those that the forecast cannot tell from the fastest
        leads (``Ranking.fastest`` has the fastest). Devices are left over only if no layout can use all devices and
        the user has fixed no degree; ``notes`` and the plans' ``why`` then say so. For another objective: the best plan of
        each number of devices, the best number first.

    Raises:
        BadInput: arguments or constraints that contradict each other, the model or the cluster.
        NotExpressible: the engine cannot run what is fixed, or does not exist yet.
        NothingFits: there are legal layouts, but none fits; with the nearest miss and checked remedies.

    Example:
        >>> import ahp
        >>> job = ahp.Job(sequence_length=1024, global_batch_size=64)
        >>> ranking = ahp.search(ahp.analyze("gpt2", job), "8xH100-SXM-80GB", job)
        >>> ranking.best.parallelism.world_size, ranking.certificate.proven
        (8, True)
        >>> ranking.best.save("plan.yaml")
    """
    keep = whole_number("keep", keep, 1)
    by = method if isinstance(method, Method) else Method(method)
    aim = objective_of(objective)
    asked = problem(graph, cluster, job, constraints, engine)
    refuse_too_many(asked)
    if by.name != "exact" and asked.cluster.is_mixed:
        raise bad_input("method", by.name, "a cluster of several groups is searched by its own method", ["exact"])
    if not aim.may_use_fewer:
        ranking = with_own_orders(asked, ranking_with_any_kernels(asked, keep, current, by, TIED), keep)
        ranking = ranking.with_reasons(*ranking.proof)
        scale = Scale(aim, asked)
        ranking = replace(ranking, objective=aim, worth=tuple(_worth(scale, plan) for plan in ranking.plans))
        return _beside_today(_with_refused_export(_with_remarks(asked, ranking)))
    if asked.own_order:
        rule = f"the objective {aim.name} compares layouts under fixed patterns"
        raise bad_input("parallelism.pipeline_parallel_schedule", SYNTHESIZED, rule, [None])
    if by.name != "exact":
        raise bad_input("method", by.name, f"the objective {aim.name} is searched exactly", ["exact"])
    return _beside_today(_with_refused_export(_with_remarks(asked, _by_objective(asked, aim, keep, current))))


LOST_UPDATES = "job.dtype bf16: weights have 8 significant bits, so updates below about 1/500 of a weight are lost"
"""Half a unit in the last place of bf16 is 2^-9 to 2^-8 of the number. torchtune's page on memory says the same of stability and accuracy
(docs.pytorch.org/torchtune/0.3, memory_optimizations, Model Precision)."""


def _with_remarks(asked: Problem, ranking: Ranking) -> Ranking:
    """The ranking with a note for each group of devices that cannot run the job, for what the job's types cost, and for what the first plan
    assumes about the cluster."""
    left_out = (
        f"{group.name} is left out: {group.device.name} has no units for precision {asked.job.precision}"
        for group in asked.left_out
    )
    assumed = open_switch(asked.cluster, ranking.best.parallelism)
    notes = (*left_out, *([LOST_UPDATES] if asked.job.dtype == "bf16" else []), *filter(None, [assumed]))
    return replace(ranking.with_reasons(*notes, last=True), notes=(*notes, *ranking.notes))


def _with_refused_export(ranking: Ranking) -> Ranking:
    """The ranking with a note if no configuration file can express the first plan: the user has fixed the key at fault."""
    best = ranking.best
    reason = get(best.engine.name).no_key_for(best.job, best.parallelism, best.engine)
    if reason is None:
        return ranking
    return replace(ranking, notes=(*ranking.notes, f"ahp export {best.engine.name} refuses the first plan: {reason}"))


def _beside_today(ranking: Ranking) -> Ranking:
    """The ranking with today's layout stored in the first plan, for whoever opens it later."""
    if ranking.current is None:
        return ranking
    best = ranking.best.model_copy(update={"current": ranking.current.lost()})
    return replace(ranking, plans=(best, *ranking.plans[1:]))


def _by_objective(
    asked: Problem, aim: Objective, keep: int, current: Parallelism | Mapping[str, Any] | None
) -> Ranking:
    """The best number of devices searched in full, then the best plans of the other numbers."""
    choice = choose(asked, aim, keep)
    scale, used = choice.scale, choice.first.found.problem
    ranking = ranking_by_speed(used, keep, None, Method())
    ranking = ranking.with_reasons(*ranking.proof)
    first = _worth(scale, ranking.best)
    rivals = [(one, one.found.best, one.worth) for one in choice.others if one.found.best and one.worth]
    others = tuple(
        Rejected.of(*pair, f"{number_of(worth.devices, 'device')}: {scale.compared(worth, first)}")
        for _, pair, worth in rivals
    )
    kernels = (why_compiled(ranking.best, used),) if asked.engine.compile is None and used.engine.compile else ()
    why = (*scale.why(first), choice.words(), *kernels, *ranking.best.why)
    best = ranking.best.model_copy(update={"why": why, "rejected": (*others, *ranking.best.rejected)})
    plans = [explain.plan(one.found.problem, pair, (scale.compared(worth, first),)) for one, pair, worth in rivals]
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
    """Today's layout, on as many devices as it needs, compared with the first plan."""
    asked = replace(scale.asked, engine=ranking.best.engine)
    everything = today_of(asked, current)
    if everything is None:
        return None
    part = None if asked.cluster.is_mixed else with_devices(asked.cluster, everything.parallelism.world_size)
    used = asked.on(part or asked.cluster)
    today, best = today_of(used, everything.parallelism), ranking.best
    assert today is not None, "a layout is given"
    worth = None if today.forecast is None else scale.worth(used.cluster, today.forecast.step_time_s)
    if worth is None or worth.devices == first.devices or not (today.forecast and today.forecast.fits):
        return compared(today, (best.parallelism, best.priced), used)
    return replace(today, against_best=f"{number_of(worth.devices, 'device')}: {scale.compared(worth, first)}")


def _worth(scale: Scale, plan: Plan) -> Worth:
    return scale.worth(scale.asked.of_plan(plan).cluster, plan.priced.step_time_s)
