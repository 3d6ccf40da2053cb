"""One HTML page about a run, a plan, or several runs side by side: one file that opens without a network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from ahp.errors import BadInput
from ahp.plan import Plan
from ahp.report import compared, curves, plan_sections, run_sections
from ahp.report.html_parts import cards, in_pairs, note, section
from ahp.report.plan_facts import Facts, facts_of
from ahp.report.run_sections import RunFiles
from ahp.run_files import Status
from ahp.whole_files import save


def write(source: str | Path, *, out: Path | None = None, every_s: int = 0) -> Path:
    """Draw the page of a run's folder or of a plan.

    Args:
        source: a run's folder, or a plan.
        out: the page; None = ``report.html`` in the run's folder, ``plan.html`` next to ``plan.yaml``.
        every_s: seconds after which an open page reloads itself; 0 = never.

    Raises BadInput if there is no plan, or if the page cannot be written.
    """
    source = Path(source).expanduser()
    out = out or place_of(source)
    if source.is_dir():
        return _save(out, f"Run {source.name}", _of_run(RunFiles.read(source)), every_s)
    if not source.exists():
        raise BadInput(f"report = {str(source)!r}: neither a run's folder nor a plan")
    return _save(out, f"Plan {source.name}", _of_plan(source), 0)


def place_of(source: Path) -> Path:
    """The page of a run's folder, or of a plan, if no other place is named."""
    return source / "report.html" if source.is_dir() else source.with_suffix(".html")


def write_compared(folders: Sequence[Path], out: Path) -> Path:
    """Draw several runs side by side. Raises BadInput for a folder without a plan, or if ``out`` cannot be written."""
    runs = [RunFiles.read(folder.expanduser()) for folder in folders]
    names = compared.names(folders)
    title = " beside ".join(names) if len(names) <= 3 else f"{len(names)} runs"
    return _save(out, title, compared.sections(title, names, runs), 0)


def _of_run(run: RunFiles) -> list[str]:
    plan, name = run.plan, run.folder.name
    sample = _text(run.folder / "sample.txt")
    measured = run_sections.figures(run)
    drawn = curves.charts([run.measured(name, _vocabulary(plan))])
    return [
        header(f"Run {name}", plan, run.status, run.steps_done),
        cards(measured or plan_sections.figures(plan)),
        *([in_pairs(drawn)] if drawn else []),
        *run_sections.history(run.starts),
        *run_sections.noticed(run.folder / "status.json"),
        *([section("A sample of its text", f"<pre>{escape(sample)}</pre>")] if sample else []),
        *_plan_parts(plan, facts_of(plan), _json(run.folder / "trace.json")),
    ]


def _of_plan(file: Path) -> list[str]:
    given = Plan.load(file)
    facts = facts_of(given.model_copy(update={"forecast": None}))
    plan = given if facts.forecast is None else given.model_copy(update={"forecast": facts.forecast})
    return [
        header(f"Plan {file.name}", plan, None, 0),
        cards(plan_sections.figures(plan)),
        *_plan_parts(plan, facts, None),
    ]


def _plan_parts(plan: Plan, facts: Facts, trace: Any) -> list[str]:
    missing = f"Timeline, memory of every rank and what binds are not shown: {facts.missing}."
    return [
        *([note(missing)] if facts.missing else []),
        *plan_sections.lost(plan),
        plan_sections.layout(plan),
        *plan_sections.costs(plan, facts),
        *plan_sections.binds(facts),
        *plan_sections.timeline(facts.trace if trace is None else trace),
        *plan_sections.schedules(facts),
        plan_sections.job(plan),
    ]


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><link rel="icon" href="data:,"><style>{style}</style><script>{script}</script></head>
<body data-every="{every_s}"><main>{body}</main></body></html>
"""


def _save(out: Path, title: str, sections: Sequence[str], every_s: int) -> Path:
    room = files("ahp.report")
    text = _PAGE.format(
        title=escape(f"{title} - AHP"),
        style=room.joinpath("page.css").read_text(encoding="utf-8"),
        script=room.joinpath("page.js").read_text(encoding="utf-8"),
        every_s=every_s,
        body="\n".join(sections),
    )
    save(out, text)
    return out


def header(title: str, plan: Plan, status: Status | None, steps_done: int) -> str:
    """What the page is about, and how far the run came."""
    model = plan.model if isinstance(plan.model, str) else str(plan.model.get("model_type", "model"))
    state = ""
    if status is not None:
        state = f"<span class='state {status.state}'>{status.state}, step {steps_done} of {plan.job.steps}</span>"
    cause = f"<p class='cause'>{escape(status.cause)}</p>" if status and status.cause else ""
    words = f"{escape(model)} on {escape(plan_sections.devices(plan))}: {escape(plan.parallelism.short())}"
    return f"<header><h1>{escape(title)} {state}</h1><p>{words}</p>{cause}</header>"


def _vocabulary(plan: Plan) -> int | None:
    """The vocabulary size in the model's own config, which is read as data."""
    from ahp.graph.catalogue import CATALOGUE
    from ahp.graph.models import read_keys

    model, keys = plan.model, {}
    if isinstance(model, dict):
        keys = model
    elif model in CATALOGUE:
        keys = CATALOGUE[model].config
    else:
        with suppress(BadInput):  # the model's folder has moved since, or it is code: the page does without one line
            keys = read_keys(Path(model).expanduser())
    size = keys.get("vocab_size")
    return size if type(size) is int and size > 0 else None


def _json(file: Path) -> Any:
    try:
        return json.loads(_text(file) or "null")
    except (ValueError, RecursionError):
        return None


def _text(file: Path) -> str | None:
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else None
