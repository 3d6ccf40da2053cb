"""status.json and metrics.jsonl of a run's folder, read as files that a crash, a disk or a person may have changed."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

State = Literal["running", "done", "failed", "interrupted", "dead"]
"""``dead`` is in no file: a reader concludes it about a run whose file says running."""
HEARTBEAT_S = 10.0
"""[Empirical] Seconds between two writes of status.json while a run goes on: seldom enough for any shared disk."""
SILENT_S = 120.0
"""[Empirical] Twelve heartbeats: a process that works for seconds without letting its threads run is not taken for dead."""

LARGEST = 1e300
"""Values must be below this: some larger whole numbers fit no float, and NaN is below nothing."""


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
    """The status in status.json; None when it is missing or cannot be read."""
    found = _object(file)
    values: list[Any] = [found.get(key) for key in ("state", "step", "cause", "exit_code")]
    state, step, cause, exit_code = values
    good = state in get_args(State)[:-1] and _is_count(step) and isinstance(cause, str | None)
    return Status(*values) if good and (exit_code is None or type(exit_code) is int) else None


def written(status: Status, saved_step: int | None) -> dict[str, Any]:
    """The content of status.json: the status, who writes it, and when."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    who = {"pid": os.getpid(), "host": socket.gethostname(), "heartbeat": now}
    return {**asdict(status), "checkpoint": saved_step, **who}


def read_heartbeat(file: Path) -> str | None:
    """When status.json was last written, in ISO 8601; None if it does not say."""
    found = _object(file).get("heartbeat")
    return found if isinstance(found, str) else None


NOTICED = ("slow_ranks", "loss_spikes")
"""Lists in status.json of what was noticed in a run's steps (docs/train/run-folder.md)."""


def read_noticed(file: Path) -> dict[str, list[dict[str, Any]]]:
    """What was noticed in the steps according to status.json: lists of objects; anything else is left out."""
    found = _object(file)
    lists = {key: found[key] for key in NOTICED if isinstance(found.get(key), list)}
    return {key: [one for one in values if isinstance(one, dict)] for key, values in lists.items()}


def is_by_this_process(file: Path) -> bool:
    """Whether this process wrote status.json last."""
    found = _object(file)
    return (found.get("pid"), found.get("host")) == (os.getpid(), socket.gethostname())


def judge_status(file: Path) -> Status | None:
    """Like ``read_status``, but ``dead`` if the file says running and the process that wrote it is gone, or has long been silent."""
    status, found = read_status(file), _object(file)
    if status is None or status.state != "running":
        return status
    pid, host = found.get("pid"), found.get("host")
    try:
        silent_s = (datetime.now(UTC) - datetime.fromisoformat(found["heartbeat"])).total_seconds()
    except (KeyError, TypeError, ValueError):
        return status  # from before these keys existed
    why = None
    if host == socket.gethostname() and type(pid) is int and not _is_alive(pid):
        why = f"process {pid} on {host} has gone without a word; it was last heard of {silent_s:.0f} s ago"
    elif silent_s > SILENT_S:
        why = (
            f"process {pid} on {host} was not heard of for {silent_s:.0f} s: it has ended, it hangs, or it cannot write"
        )
    if why is not None and not os.access(file, os.W_OK):  # a disk that has become read-only keeps the last status
        why += f"; {file} cannot be written"
    return status if why is None else replace(status, state="dead", cause=why)


def read_saved_step(file: Path) -> int | None:
    """Step of the newest checkpoint that was ever complete, as status.json says; 0 for none, None if it cannot be read."""
    found = _object(file)
    # Files from before this key existed say where the run stopped, which is no earlier.
    step = found.get("checkpoint", found.get("step"))
    return step if _is_count(step) else None


def read_metrics(file: Path, needs: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The steps of metrics.jsonl; lines that no run wrote (half of one, or damaged) are left out. ``needs``: keys that must be numbers."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError:
        return []
    found = (read_record(line) for line in lines)
    return [one for one in found if one is not None and all(one.get(key) is not None for key in needs)]


def read_record(line: bytes) -> dict[str, Any] | None:
    """One line of metrics.jsonl; None if no run wrote it: a run's line has a step, and its values are finite numbers, booleans or null."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not _is_count(found.get("step")):
        return None
    values = [value for value in found.values() if value is not None]
    return found if all(isinstance(value, int | float) and abs(value) < LARGEST for value in values) else None


def finite(value: float) -> float | None:
    """A number as a line of metrics.jsonl holds it; None if it is not finite, or too large for ``read_record``."""
    return float(value) if abs(value) < LARGEST else None


def _object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
