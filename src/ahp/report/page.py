"""One HTML page about a run or a plan, in one file that opens without a network."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from ahp.errors import BadInput
from ahp.plan import Plan
from ahp.report import figures, schedules
from ahp.run_files import LARGEST, Status, judge_status, read_metrics, read_noticed
from ahp.run_history import effect, starts
from ahp.violations import shortened
from ahp.words import gib, of_gib, percent, seconds

DRAWN = ("step_time_s", "memory_bytes")
"""Numbers that a line of metrics.jsonl must have to be drawn."""


def write(source: str | Path) -> Path:
    """Draw the page of a run's folder (``report.html`` in it) or of a plan (``plan.yaml`` -> ``plan.html`` beside it).

    Raises BadInput when there is no plan, NoPlotly (with what to install) when the extra [report] is missing.
    """
    source = Path(source).expanduser()
    if source.is_dir():
        plan = Plan.load(source / "plan.yaml")
        return _save(source / "report.html", f"Run {source.name}", plan, source)
    if not source.exists():
        raise BadInput(f"report = {str(source)!r}: neither a run's folder nor a plan")
    return _save(source.with_suffix(".html"), f"Plan {source.name}", Plan.load(source), None)


def _save(out: Path, title: str, plan: Plan, run: Path | None) -> Path:
    script = figures.script()
    metrics = read_metrics(run / "metrics.jsonl", DRAWN) if run is not None else []
    metrics = [record for record in metrics if "loss" in record and record["step_time_s"] > 0]
    status = judge_status(run / "status.json") if run is not None else None
    trace = _json(run / "trace.json") if run is not None else None
    sample = _text(run / "sample.txt") if run is not None else None
    sections = [
        _header(title, plan, status, metrics),
        _cards(plan, metrics),
        *_curves(plan, metrics),
        _layout(plan),
        *_forecast(plan),
        *_schedules(plan),
        *_timeline(trace),
        *(_noticed(run) if run is not None else []),
        *(_history(run) if run is not None else []),
        *([_section("A sample of its text", f"<pre>{escape(sample)}</pre>")] if sample else []),
        _rejected(plan),
        _job(plan),
    ]
    text = _PAGE.format(
        title=escape(f"{title} - AHP"),
        style=files("ahp.report").joinpath("page.css").read_text(),
        script=script,
        body="\n".join(sections),
    )
    aside = out.with_name(out.name + ".tmp")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(out)
    finally:
        aside.unlink(missing_ok=True)
    return out


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style><script>{script}</script></head>
<body><main>{body}</main></body></html>
"""


def _header(title: str, plan: Plan, status: Status | None, metrics: Sequence[dict[str, Any]]) -> str:
    model = plan.model if isinstance(plan.model, str) else str(plan.model.get("model_type", "model"))
    state = ""
    if status is not None:
        # A heartbeat lies up to ten seconds behind.
        step = max([status.step, *(m["step"] for m in metrics[-1:])])
        state = f"<span class='state {status.state}'>{status.state}, step {step} of {plan.job.steps}</span>"
    cause = f"<p class='cause'>{escape(status.cause)}</p>" if status and status.cause else ""
    words = f"{escape(model)} on {escape(_devices(plan))}: {escape(plan.parallelism.short())}"
    return f"<header><h1>{escape(title)} {state}</h1><p>{words}</p>{cause}</header>"


def _cards(plan: Plan, metrics: Sequence[dict[str, Any]]) -> str:
    cards: list[tuple[str, str, str]] = []
    forecast = plan.forecast
    if metrics:
        times = sorted(m["step_time_s"] for m in metrics[1:] or metrics)
        median = times[len(times) // 2]
        losses = [m["loss"] for m in metrics if m["loss"] is not None]
        if losses:
            left_out = len(metrics) - len(losses)
            more = f", {left_out} steps left out" if left_out else ""
            cards.append(("loss", f"{losses[-1]:.3f}", f"from {losses[0]:.3f}{more}"))
        versus = f"predicted {seconds(forecast.step_time_s)}" if forecast else "median"
        cards.append(("step time", seconds(median), versus))
        cards.append(("tokens per second", f"{plan.job.tokens_per_step / median:,.0f}", "all devices together"))
        peak = max(m.get("memory_reserved_bytes") or m["memory_bytes"] for m in metrics)
        expected = f"predicted {gib(forecast.memory_reserved_bytes)}" if forecast else "fullest rank"
        cards.append(("peak memory", gib(peak), expected))
        cards += _shares(metrics)
    elif forecast:
        band = f"{seconds(forecast.step_time_low_s)} to {seconds(forecast.step_time_high_s)}"
        cards.append(("step time, predicted", seconds(forecast.step_time_s), band))
        cards.append(("tokens per second", f"{forecast.tokens_per_s_per_device:,.0f}", "per device"))
        limit = _device_memory(plan)
        full = of_gib(forecast.memory_reserved_bytes, limit) if limit else gib(forecast.memory_reserved_bytes)
        cards.append(("memory", full, f"fits with probability {percent(forecast.fit_probability)}"))
    if forecast:
        cards.append(("MFU, predicted", percent(forecast.mfu), "against " + forecast.mfu_peak.partition(";")[0]))
    items = (
        f"<div><b>{escape(name)}</b><strong>{escape(value)}</strong><i>{escape(note)}</i></div>"
        for name, value, note in cards
    )
    return f"<div class='cards'>{''.join(items)}</div>"


def _shares(metrics: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """What of the peak was reached, and what of the time was waited for data and checkpoints, where the run wrote it down."""
    cards = []
    reached = sorted(m["mfu"] for m in metrics if m.get("mfu") is not None)
    if reached:
        cards.append(("MFU", percent(reached[len(reached) // 2]), "median; the forecast's FLOPs and peak"))
    waits_s = [sum(m.get(key) or 0.0 for m in metrics) for key in ("data_wait_s", "checkpoint_wait_s")]
    if any("data_wait_s" in m for m in metrics):
        share = percent(sum(waits_s) / sum(m["step_time_s"] for m in metrics))
        cards.append(("waiting", share, f"data {seconds(waits_s[0])}, checkpoints {seconds(waits_s[1])}"))
    return cards


def _history(run: Path) -> list[str]:
    """Every start of the workers, where there was more than one: its plan, how far it came, what was lost, why it ended."""
    found = starts(run / "starts.jsonl")
    if len(found) < 2:
        return []
    rows = (
        (
            start.began,
            start.plan,
            start.workers,
            f"{start.first_step} to {'?' if start.last_step is None else start.last_step}",
            "?" if start.steps_lost is None else start.steps_lost,
            "?" if start.seconds is None else seconds(start.seconds),
            "?" if start.seconds_lost is None else seconds(start.seconds_lost),
            start.why or "",
        )
        for start in found
    )
    table = _table(("began", "layout", "workers", "steps", "steps lost", "took", "of it lost", "ended because"), rows)
    reached = effect(found)
    note = ""
    if reached is not None:
        note = (
            f"<p>{percent(reached.share)} of that time went into steps that count: {reached.tokens_per_day:,.0f} tokens a day, "
            f"{reached.tokens_per_day_without_failures:,.0f} if nothing had failed.</p>"
        )
    return [_section("Starts", table + note)]


def _noticed(run: Path) -> list[str]:
    """Slow ranks and spikes of the loss, where there are any."""
    found = read_noticed(run / "status.json")
    parts = []
    if slow := found.get("slow_ranks"):
        keys = "rank", "host", "ratio", "reason", "why", "since_step"
        rows = []
        for one in slow:
            planned = one.get("plan")
            words = planned.get("words", planned.get("error", "")) if isinstance(planned, dict) else ""
            rows.append((*(str(one.get(key, "?")) for key in keys), str(words)))
        parts.append(_section("Slow ranks", _table((*keys[:-1], "since step", "what another plan would gain"), rows)))
    if spikes := found.get("loss_spikes"):
        keys = "step", "of", "value", "median"
        rows = [tuple(str(one.get(key, "?")) for key in keys) for one in spikes]
        parts.append(_section("Spikes", _table((*keys[:-1], "median before"), rows)))
    return parts


def _curves(plan: Plan, metrics: Sequence[dict[str, Any]]) -> list[str]:
    if not metrics:
        return []
    return [
        _section("Loss", figures.html(figures.loss(metrics, _vocabulary(plan)))),
        _section("Step time, measured against predicted", figures.html(figures.step_time(metrics, plan.forecast))),
    ]


def _layout(plan: Plan) -> str:
    rows = [("engine", plan.engine.words())]
    rows += [
        (key.replace("_", " "), value)
        for key, value in plan.parallelism.model_dump(exclude={"pipeline_parallel_order"}).items()
        if value not in (None, False)
    ]
    why = "".join(f"<li>{escape(reason)}</li>" for reason in plan.why)
    reasons = f"<div><h3>Why this one</h3><ul>{why}</ul></div>" if why else ""
    return _section("The layout", f"<div class='two'><div>{_table((), rows)}</div>{reasons}</div>")


def _forecast(plan: Plan) -> list[str]:
    if plan.forecast is None:
        return []
    time = figures.html(figures.step_parts(plan.forecast))
    memory = figures.html(figures.memory(plan.forecast, _device_memory(plan)))
    note = f"<p class='note'>MFU is against {escape(plan.forecast.mfu_peak)}.</p>"
    return [
        _section("Where the step goes (forecast, slowest rank)", time + note),
        _section(f"Where the bytes go (forecast, rank {plan.forecast.fullest_rank})", memory),
    ]


def _schedules(plan: Plan) -> list[str]:
    """A schedule made for the plan's own stages, beside the best fixed pattern."""
    found = schedules.of_plan(plan)
    if found is None:
        return []
    figure = figures.html(figures.schedules(found.timelines))
    return [_section("Its schedule beside a fixed pattern", f"<p>{escape(found.words)}</p>{figure}")]


def _timeline(trace: Any) -> list[str]:
    events = trace.get("traceEvents") if isinstance(trace, dict) else trace
    drawn = [event for event in events if _is_event(event)] if isinstance(events, list) else []
    if not drawn:
        return []
    return [_section("The step as forecast, rank by rank", figures.html(figures.timeline(drawn)))]


def _is_event(event: Any) -> bool:
    """Whether an event of a trace is what ``figures.timeline`` draws, or a name of a rank or a thread."""
    if not isinstance(event, dict):
        return False
    if not all(isinstance(event.get(key), kind) for key, kind in {"name": str, "pid": int}.items()):
        return False
    if event.get("ph") == "M":
        named = isinstance(event.get("args"), dict) and isinstance(event["args"].get("name"), str)
        return named and (event["name"] == "process_name" or isinstance(event.get("tid"), int))
    numbers = [event.get(key) for key in ("ts", "dur", "tid")]
    return event.get("ph") == "X" and all(isinstance(n, int | float) and abs(n) < LARGEST for n in numbers)


def _rejected(plan: Plan) -> str:
    if not plan.rejected:
        return ""
    rows = (
        (loser.parallelism.short(), seconds(loser.step_time_s) if loser.step_time_s is not None else "", loser.reason)
        for loser in plan.rejected
    )
    return _section("What lost, and why", _table(("layout", "step", "reason"), rows))


def _job(plan: Plan) -> str:
    rows = [(key.replace("_", " "), value) for key, value in plan.job.model_dump().items() if key != "optimizer"]
    optimizer = plan.job.optimizer.model_dump()
    rows.append(("optimizer", ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in optimizer.items())))
    rows += [(f"version of {name}", value) for name, value in plan.versions.items()]
    return _section("The job", _table((), rows))


def _section(title: str, inside: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{inside}</section>"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    top = f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>" if head else ""
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{top}{body}</table>"


def _devices(plan: Plan) -> str:
    groups = (f"{nodes * devices} x {name}" for nodes, devices, name, _ in _groups(plan))
    return " + ".join(groups) or f"{plan.parallelism.world_size} devices"


def _device_memory(plan: Plan) -> int | None:
    return min((memory for *_, memory in _groups(plan)), default=None)


def _groups(plan: Plan) -> list[tuple[int, int, str, int]]:
    """Of each group of the cluster: nodes, devices of a node, their name and memory. Raises BadInput where a plan has another form."""
    given = (plan.cluster or {}).get("groups", [])
    found: list[tuple[int, int, str, int]] | None = None
    with suppress(TypeError, KeyError, IndexError):
        found = [(g["nodes"], g["devices_per_node"], g["device"]["name"], g["device"]["memory_bytes"]) for g in given]
    if found is None or not all(tuple(map(type, group)) == (int, int, str, int) for group in found):
        rule = "each must have nodes, devices_per_node, and a device with name and memory_bytes; plan again"
        raise BadInput(f"cluster.groups = {shortened(given)}: {rule}")
    return found


def _vocabulary(plan: Plan) -> int | None:
    from ahp.graph.models import load_config

    try:
        size = getattr(load_config(plan.model), "vocab_size", None)
    except BadInput:
        return None  # the model's folder has moved since; the page does without one line
    return size if type(size) is int and size > 0 else None


def _json(file: Path) -> Any:
    try:
        return json.loads(_text(file) or "null")
    except (ValueError, RecursionError):
        return None


def _text(file: Path) -> str | None:
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else None
