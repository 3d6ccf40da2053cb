"""status.json and metrics.jsonl of a run's folder, read as files that a crash, a disk or a person may have changed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

State = Literal["running", "done", "failed", "interrupted"]


@dataclass(frozen=True)
class Status:
    """status.json: how far a run came, and why it stopped where it did."""

    state: State
    step: int
    """Optimizer steps completed."""
    cause: str | None = None
    exit_code: int | None = None
    """None while it runs."""


def read_status(file: Path) -> Status | None:
    """What status.json says, None when there is none that can be read."""
    found = _object(file)
    values: list[Any] = [found.get(key) for key in ("state", "step", "cause", "exit_code")]
    state, step, cause, exit_code = values
    good = state in get_args(State) and _is_count(step) and isinstance(cause, str | None)
    return Status(*values) if good and (exit_code is None or type(exit_code) is int) else None


def read_saved_step(file: Path) -> int | None:
    """Step of the newest checkpoint that was ever complete, as status.json says; 0 for none, None where it cannot be read."""
    found = _object(file)
    # Files of before this key came say where the run stopped, which is no earlier.
    step = found.get("checkpoint", found.get("step"))
    return step if _is_count(step) else None


def read_metrics(file: Path, needs: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The steps of metrics.jsonl; what is no line of a run (half of one, or damaged) is left out. ``needs``: keys that must be numbers."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError:
        return []
    found = (read_record(line) for line in lines)
    return [one for one in found if one is not None and all(one.get(key) is not None for key in needs)]


def read_record(line: bytes) -> dict[str, Any] | None:
    """One line of metrics.jsonl; None for what no run has written: it has a step, and its values are numbers, yes or no, or null."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not _is_count(found.get("step")):
        return None
    return found if all(isinstance(value, int | float | None) for value in found.values()) else None


def _object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
