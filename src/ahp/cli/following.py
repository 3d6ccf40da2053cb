"""What can be done next with a plan, by the engine that would run it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ahp.job import Job
from ahp.words import number_of

if TYPE_CHECKING:
    from rich.console import Console

RUNS = "ahp"
"""The engine whose plans ``ahp train`` runs."""


def default_data_words(job: Job) -> str | None:
    """That what runs next would train on the text that needs no download, where no data was named."""
    if job.data != Job.model_fields["data"].default:
        return None
    return (
        f"ahp train would run {number_of(job.steps, 'step')} on {job.data}, Python's own source code, which is for a trial; "
        "name your text with --job.data"
    )


def after(path: str, engine: str, *first: str) -> list[str]:
    """Commands about the plan in ``path``: ``first`` by their names, then what runs it, or writes it for the engine that does."""
    commands = [f"ahp {command} {shlex.quote(path)}" for command in first]
    if engine != RUNS:
        return [*commands, f"ahp export {engine} {shlex.quote(path)}"]
    if Path(path).is_dir():  # a run's: the others read the plan in it, and it goes on in that folder alone
        return [*commands, f"ahp train {shlex.quote(str(Path(path, 'plan.yaml')))} --run.folder {shlex.quote(path)}"]
    return [*commands, f"ahp train {shlex.quote(path)}"]


def next_words(commands: Sequence[str], width: int) -> str:
    """``Next:`` and the commands, on one line where they fit, else one below the other: none is broken where it would be copied."""
    lead, gap = "Next: ", " " * 4
    one_line = lead + gap.join(commands)
    if len(one_line) <= width:
        return one_line
    return "\n".join(f"{' ' * len(lead) if number else lead}{command}" for number, command in enumerate(commands))


def show_next(console: Console, commands: Sequence[str]) -> None:
    console.print(f"\n{next_words(commands, console.width)}", markup=False, soft_wrap=True)
