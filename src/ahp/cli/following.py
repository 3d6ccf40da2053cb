"""The next commands for a plan, depending on the engine that would run it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ahp.job import Job
from ahp.words import number_of

if TYPE_CHECKING:
    from rich.console import Console

    from ahp.plan import Plan

RUNS = "ahp"
"""The engine whose plans ``ahp train`` runs."""


def default_data_words(job: Job) -> str | None:
    """A note that the next run would train on text that needs no download, if no data was named; else None."""
    if job.data != Job.model_fields["data"].default:
        return None
    return (
        f"ahp train would run {number_of(job.steps, 'step')} on {job.data}, Python's own source code, which is for a trial; "
        "name your text with --job.data"
    )


def after(path: str, engine: str, *first: str) -> list[str]:
    """Commands for the plan in ``path``: those named in ``first``, then the one that runs it, or exports it for its engine."""
    commands = [f"ahp {command} {shlex.quote(path)}" for command in first]
    if engine != RUNS:
        return [*commands, f"ahp export {engine} {shlex.quote(path)}"]
    if Path(path).is_dir():  # a run's folder: other commands read its plan, and only there the run goes on
        return [*commands, f"ahp train {shlex.quote(str(Path(path, 'plan.yaml')))} --run.folder {shlex.quote(path)}"]
    return [*commands, f"ahp train {shlex.quote(path)}"]


def refused_export(plan: Plan, path: str) -> str | None:
    """A note that ``ahp export`` refuses a plan for another engine, such as for a model whose arguments it does not know; else None."""
    from ahp.errors import AhpError
    from ahp.export.registry import TARGETS
    from ahp.export.target import Source

    if plan.engine.name == RUNS:
        return None
    target = TARGETS[plan.engine.name]
    try:
        target.write(Source(Path(path), plan=plan), target.options())
    except AhpError as refusal:
        return f"ahp export {plan.engine.name} refuses the first plan: {refusal}"
    return None


def can_follow(plan: Plan, path: str, *first: str) -> list[str]:
    """Like ``after`` for the plan in ``path``, without an export that would be refused."""
    commands = after(path, plan.engine.name, *first)
    return commands[:-1] if refused_export(plan, path) else commands


def next_words(commands: Sequence[str], width: int) -> str:
    """``Next:`` and the commands, on one line if they fit, else one below the other: no command is broken, so that it can be copied."""
    lead, gap = "Next: ", " " * 4
    one_line = lead + gap.join(commands)
    if len(one_line) <= width:
        return one_line
    return "\n".join(f"{' ' * len(lead) if number else lead}{command}" for number, command in enumerate(commands))


def show_next(console: Console, commands: Sequence[str]) -> None:
    console.print(f"\n{next_words(commands, console.width)}", markup=False, soft_wrap=True)
