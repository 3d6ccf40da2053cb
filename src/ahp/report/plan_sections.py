"""The sections of a page about a plan: its layout, what it costs and why, what lost, the job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from html import escape
from typing import Any

from ahp.cluster.model import Cluster
from ahp.cluster.plain_groups import plain_groups
from ahp.cluster.sources import stands_on
from ahp.errors import AhpError, BadInput
from ahp.plan import Plan
from ahp.report import candidates, lanes, rank_memory, upgrades
from ahp.report.bars import one_bar
from ahp.report.binding import Binding
from ahp.report.html_parts import note, plain_words, section, table
from ahp.report.plan_facts import Facts
from ahp.report.tables import capacity_bytes
from ahp.report.trace_lanes import lanes_of_trace
from ahp.violations import shortened
from ahp.words import gib, number_of, of_gib, percent, seconds


def figures(plan: Plan) -> list[tuple[str, str, str]]:
    """(name, value, note) of what a plan is forecast to cost."""
    forecast = plan.forecast
    if forecast is None:
        return []
    band = f"{seconds(forecast.step_time_low_s)} to {seconds(forecast.step_time_high_s)}"
    limit, used = fullest_device_bytes(plan), forecast.needed_bytes
    return [
        ("step time, predicted", seconds(forecast.step_time_s), band),
        ("tokens per second", f"{forecast.tokens_per_s_per_device:,.0f}", "per device"),
        ("MFU, predicted", percent(forecast.mfu), "against " + forecast.mfu_peak.partition(";")[0]),
        (
            "memory",
            of_gib(used, limit) if limit else gib(used),
            f"fits with probability {forecast.fit_words}",
        ),
    ]


def layout(plan: Plan) -> str:
    """The degrees next to the reasons."""
    rows: list[tuple[str, Any]] = [("engine", plan.engine.words())]
    rows += [
        (key.replace("_", " "), value)
        for key, value in plan.parallelism.model_dump(exclude={"pipeline_parallel_order"}).items()
        if value not in (None, False)
    ]
    why = "".join(f"<li>{escape(reason)}</li>" for reason in plan.why)
    reasons = section("Why this one", f"<ul>{why}</ul>") if why else ""
    return f"<div class='two'>{section('The layout', table((), rows))}{reasons}</div>"


def costs(plan: Plan, facts: Facts) -> list[str]:
    """Where the time of a step and the bytes of the ranks go."""
    forecast = plan.forecast
    if forecast is None:
        return []
    peak = note(f"{_stands_on(plan)}MFU is against {forecast.mfu_peak}.")
    time = section("Where the step goes (forecast, slowest rank)", one_bar(forecast.step, seconds), peak)
    if facts.places:
        memory = section("Memory of every rank (forecast)", rank_memory.picture(forecast, facts.places))
    else:
        memory = section("Memory (forecast)", rank_memory.of_fullest(forecast, fullest_device_bytes(plan)))
    return [time, memory]


def _stands_on(plan: Plan) -> str:
    """A sentence on where the figures of the plan's cluster come from; empty if it cannot be read."""
    if plan.cluster is not None:
        with suppress(AhpError):
            return f"The forecast stands on: {stands_on(Cluster.resolve(plan.cluster))}. "
    return ""


def binds(facts: Facts) -> list[str]:
    """What binds, what would relieve it, and what better hardware would bring."""
    found = facts.binding
    if found is None:
        return []
    words = f"<p>{escape(found.sentence)}</p>" + (
        f"<p>Memory: {escape(found.memory)}.</p>" if found.part != "memory" else ""
    )
    neighbours = f"<h3>Neighbouring layouts</h3>{_neighbours(found)}" if found.neighbours else ""
    return [section("What binds", words, neighbours), *_more_of_each(facts.upgrades)]


def _more_of_each(found: Sequence[upgrades.Upgrade]) -> list[str]:
    """What more of each resource would bring, while the layout stays."""
    if not found:
        return []
    text = f"<p>{escape(upgrades.sentence(found))}</p>"
    rows = table(("change", "forecast"), ((one.change, one.words) for one in found))
    again = note(
        "The layout stays as it is here. ahp explain PLAN searches for the best layout on each of these clusters."
    )
    return [section("What 10 % more would bring", text, rows, again)]


def _neighbours(found: Binding) -> str:
    rows = ((one.change, one.verdict) for one in found.neighbours)
    return table(("change", "what it would do"), rows)


def lost(plan: Plan) -> list[str]:
    """The candidates as a picture, or as a table if their memory was not kept."""
    rows = candidates.candidates_of(plan)
    if len(rows) > 1:
        return [section("The candidates", candidates.picture(rows, device_limits(plan)))]
    if not plan.rejected:
        return []
    cells = (
        (one.parallelism.short(), seconds(one.step_time_s) if one.step_time_s is not None else "", one.reason)
        for one in plan.rejected
    )
    again = note(
        "This plan was made by a version of AHP that did not write the memory of candidates. Plan again for a chart."
    )
    return [section("What lost, and why", table(("layout", "step", "reason"), cells), again)]


def schedules(facts: Facts) -> list[str]:
    """A schedule made for the plan's own stages, next to the best fixed pattern."""
    found = facts.schedules
    if found is None:
        return []
    whole_s = max(timeline.makespan_s for timeline in found.timelines.values())
    drawn = "".join(
        f"<h3>{escape(name)}: {seconds(timeline.makespan_s)}</h3>{lanes.picture(lanes.lanes_of(timeline), whole_s)}"
        for name, timeline in found.timelines.items()
    )
    return [section("Its schedule beside a fixed pattern", f"<p>{escape(found.words)}</p>", drawn)]


def timeline(trace: Any) -> list[str]:
    """The step rank by rank."""
    drawn = lanes_of_trace(trace)
    if not drawn:
        return []
    return [section("The step as forecast, rank by rank", lanes.picture(drawn))]


def job(plan: Plan) -> str:
    """The job, and the versions that planned it."""
    rows: list[tuple[str, Any]] = [
        (key.replace("_", " "), value) for key, value in plan.job.model_dump().items() if key != "optimizer"
    ]
    rows.append(("optimizer", plan.job.optimizer.model_dump()))
    rows += [(f"version of {name}", value) for name, value in plan.versions.items()]
    return section("The job", table((), _said(rows)))


def _said(rows: Iterable[tuple[str, Any]]) -> Iterable[tuple[str, str]]:
    """Keys and values in plain words, without keys that have no value."""
    return ((key, plain_words(value)) for key, value in rows if value is not None)


def devices(plan: Plan) -> str:
    """``64 x H100-SXM-80GB``."""
    groups = (f"{nodes * each} x {name}" for nodes, each, name, _ in _groups(plan))
    return " + ".join(groups) or number_of(plan.parallelism.world_size, "device")


def fullest_device_bytes(plan: Plan) -> int | None:
    """Memory of the device that holds the fullest rank; None if the plan does not have it."""
    if plan.forecast is None or not _groups(plan):
        return None
    with suppress(AhpError):
        return capacity_bytes(plan)
    return None


def device_limits(plan: Plan) -> dict[str, int]:
    """Memory of each type of device, in bytes."""
    return {name: memory for _, _, name, memory in _groups(plan)}


def _groups(plan: Plan) -> list[tuple[int, int, str, int]]:
    """(nodes, devices per node, device name, device memory) of each group of the cluster. Raises BadInput if the plan has another form."""
    given = plain_groups(plan.cluster)
    found: list[tuple[int, int, str, int]] | None = None
    with suppress(TypeError, KeyError, IndexError):
        found = [(g["nodes"], g["devices_per_node"], g["device"]["name"], g["device"]["memory_bytes"]) for g in given]
    if found is None or not all(tuple(map(type, group)) == (int, int, str, int) for group in found):
        rule = "each must have nodes, devices_per_node, and a device with name and memory_bytes; plan again"
        raise BadInput(f"cluster.groups = {shortened(given)}: {rule}")
    return found
