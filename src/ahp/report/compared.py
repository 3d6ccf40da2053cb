"""Several runs side by side: what each reached, and their curves in the same charts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from ahp.report import curves
from ahp.report.differences import differences
from ahp.report.html_parts import Html, in_pairs, section, table
from ahp.report.run_sections import RunFiles
from ahp.run_history import effect
from ahp.words import gib, percent, seconds


def names(folders: Sequence[Path]) -> list[str]:
    """The last parts of the folders' paths, as many as make them different."""
    paths = [folder.expanduser().resolve() for folder in folders]
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        short = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(short)) == len(set(paths)):
            return short
    return [str(path) for path in paths]


def sections(title: str, called: Sequence[str], runs: Sequence[RunFiles]) -> list[str]:
    """A table of all runs, then a chart for each quantity."""
    measured = [run.measured(name) for name, run in zip(called, runs, strict=True)]
    return [
        f"<header><h1>{escape(title)}</h1></header>",
        section("Runs", _table(called, runs)),
        in_pairs(curves.charts(measured)),
        section("What differs", _differences(called, runs)),
    ]


def _table(called: Sequence[str], runs: Sequence[RunFiles]) -> str:
    head = (
        "",
        "run",
        "layout",
        "state",
        "steps",
        "last loss",
        "step",
        "predicted",
        "tokens/s",
        "MFU",
        "predicted",
        "peak memory",
        "starts",
        "time that counts",
    )
    return table(head, (_row(number, name, run) for number, (name, run) in enumerate(zip(called, runs, strict=True))))


def _row(number: int, name: str, run: RunFiles) -> tuple[object, ...]:
    forecast, step_s, reached = run.plan.forecast, run.median_s, effect(run.starts)
    return (
        Html(f"<i class='key c{number % curves.COLOURS}' style='display:inline-block'></i>"),
        name,
        run.plan.parallelism.short(),
        run.status.state if run.status else "?",
        f"{run.steps_done} of {run.plan.job.steps}",
        f"{run.losses[-1]:.4f}" if run.losses else None,
        seconds(step_s) if step_s else None,
        seconds(forecast.step_time_s) if forecast else None,
        f"{run.plan.job.tokens_per_step / step_s:,.0f}" if step_s else None,
        percent(run.mfu) if run.mfu is not None else None,
        percent(forecast.mfu) if forecast else None,
        gib(run.peak_bytes) if run.peak_bytes is not None else None,
        len(run.starts) or None,
        percent(reached.share) if reached else None,
    )


def _differences(called: Sequence[str], runs: Sequence[RunFiles]) -> str:
    """The keys of model, cluster, job, layout and engine that are not the same in all runs."""
    different = [(key, *values) for key, values in differences([run.plan for run in runs])]
    if not different:
        return "<p>Nothing: job, model, cluster, layout and engine are the same.</p>"
    return table(("", *called), different)
