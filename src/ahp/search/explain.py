"""Turns priced rows into plans, each with its forecast, its reasons, and the layouts that lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from ahp.about import __version__
from ahp.cluster.domains import joined
from ahp.plan import Forecast, Parallelism, Plan, Rejected
from ahp.search import reasons
from ahp.search.exact import Place
from ahp.search.nearby import NUM_TOO_LARGE
from ahp.search.pairs import Pair
from ahp.search.problem import Problem
from ahp.search.reasons import TIE
from ahp.search.space import Space
from ahp.words import count, of_gib, percent, seconds


def plan(used: Problem, pair: Pair, why: tuple[str, ...], rejected: tuple[Rejected, ...] = ()) -> Plan:
    """One layout as a plan of the problem."""
    return Plan(
        model=used.graph.model if used.graph.model is not None else used.graph.name,
        job=used.job,
        cluster=used.cluster.plain(),
        engine=used.engine,
        parallelism=used.decided(pair[0]),
        fixed=used.constraints.model_dump(mode="json", exclude_none=True),
        forecast=pair[1],
        why=why,
        rejected=rejected,
        versions=versions(),
    )


def different(pairs: Iterable[Pair]) -> list[Pair]:
    """Of layouts that differ only in the ZeRO stage and cost the same the one with the lowest stage, in the place of the first."""
    found: dict[tuple[Parallelism, float, int], Pair] = {}
    for layout, forecast in pairs:
        stageless = layout.model_copy(update={"zero_stage": 0})
        key = stageless, forecast.step_time_s, forecast.needed_bytes
        if key not in found or layout.zero_stage < found[key][0].zero_stage:
            found[key] = layout, forecast
    return list(found.values())


def runner_up(pair: Pair, best: Forecast) -> Rejected:
    """A layout that fits and lost."""
    return Rejected.of(*pair, reasons.slower_because(pair[1], best))


def too_large(misfits: list[Pair], best: Forecast, capacity_bytes: int) -> tuple[Rejected, ...]:
    """The layouts that would be faster but do not fit, those that need the least memory first."""
    faster = [pair for pair in misfits if pair[1].step_time_s < best.step_time_s]
    faster.sort(key=lambda pair: (pair[1].needed_bytes, pair[1].step_time_s))
    return tuple(
        Rejected.of(layout, forecast, reasons.does_not_fit(forecast, capacity_bytes))
        for layout, forecast in faster[:NUM_TOO_LARGE]
    )


def priced(used: Problem, space: Space, places: list[Place]) -> Iterator[Pair]:
    """Layouts and forecasts of rows, without rows that are refused after all."""
    for place in places:
        layout = space.layout(*place)
        if (forecast := used.price_or_none(layout)) is not None:
            yield layout, forecast


def headline(what: str, best: Forecast) -> str:
    """A plan's step time and speed, after ``what`` it is."""
    return (
        f"{what}: {seconds(best.step_time_s)} a step "
        f"({seconds(best.step_time_low_s)} .. {seconds(best.step_time_high_s)}), "
        f"{best.tokens_per_s_per_device:,.0f} tokens/s per device, MFU {percent(best.mfu)}"
    )


def memory_words(best: Forecast, capacity_bytes: int) -> str:
    """How full the fullest rank is."""
    return (
        f"memory: {of_gib(best.needed_bytes, capacity_bytes)} on the fullest rank, "
        f"fits with probability {best.fit_words}"
    )


def adapter_words(used: Problem) -> str:
    """How many parameters are trained, and that the others have no gradients or optimizer states."""
    total, share = used.graph.num_parameters, used.graph.trained_share
    held = "fp32" if used.job.precision == "fp32" else "16 bits"
    return (
        f"job.lora: {count(share * total)} of {count(total)} parameters are trained; the others are held in {held}, "
        "without gradients and optimizer states"
    )


def why(
    used: Problem,
    ranked: list[Pair],
    misfits: list[Pair],
    at_least_s: dict[str, float],
    what: str = "fastest of the layouts that fit",
) -> Iterator[str]:
    """The reasons for the first of ``ranked``: what it costs, then decision by decision.

    ``what``: words for the first layout; ``at_least_s``: from ``Nearby.floors``, given if no layout with another decision was priced.
    """
    layout, best = ranked[0]
    yield headline(what, best)
    yield memory_words(best, used.capacity_bytes)
    if used.job.lora is not None:
        yield adapter_words(used)
    if same := used.stages_alike(layout):
        others = " and ".join(f"ZeRO-{stage}" for stage in same)
        yield f"ZeRO-{layout.zero_stage} costs the same as {others} here: one row stands for these stages"
    if layout.mesh_order is not None:
        yield f"mesh order {' > '.join(layout.axes)}: {reasons.on_a_node(layout, joined(used.cluster.groups[0]).devices_per_node)}"
    for name, keys in reasons.CHOICES:
        if not reasons.decides(layout, name):
            continue
        words = reasons.choice_words(layout, name)
        others = (pair for pair in ranked if _differs(pair[0], layout, keys) and reasons.decides(pair[0], name))
        rival = next((p for p in others if name != "order" or set(p[0].axes) == set(layout.axes)), None)
        if rival is not None:
            lost = reasons.is_slower_because(rival[1], best)
            yield f"{words}: the best with {reasons.choice_words(rival[0], name)} {lost}"
        elif at_least_s[name] < float("inf"):
            more = at_least_s[name] / best.step_time_s - 1
            than = f", {percent(more)} more" if more >= TIE else ""
            even = " with evenly cut stages" if name in ("pipeline", "schedule") else ""
            yield f"{words}: any other choice takes at least {seconds(at_least_s[name])}{even}{than}"
        unfit = next((pair for pair in misfits if _differs_only(pair[0], layout, keys)), None)
        if unfit is not None and unfit[1].step_time_s < best.step_time_s:
            lost = reasons.does_not_fit(unfit[1], used.capacity_bytes)
            yield f"{words}: the same with {reasons.choice_words(unfit[0], name)} {lost}"


def _differs(one: Parallelism, other: Parallelism, keys: tuple[str, ...]) -> bool:
    return any(getattr(one, key) != getattr(other, key) for key in keys)


def _differs_only(one: Parallelism, other: Parallelism, keys: tuple[str, ...]) -> bool:
    rest = tuple(key for key in Parallelism.model_fields if key not in keys)
    return _differs(one, other, keys) and not _differs(one, other, rest)


def versions() -> dict[str, str]:
    """Versions of the packages that the plan was made with."""
    found = {package: _version(package) for package in ("torch", "transformers")}
    return {"ahp": __version__, **{package: number for package, number in found.items() if number is not None}}


@cache
def _version(package: str) -> str | None:
    """Version of an installed package, read once: every plan of a ranking has it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
