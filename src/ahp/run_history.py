"""The starts of a run: which plan each had, how far it came, why it ended, and what failures cost. Free of torch.

``starts.jsonl`` has a line when workers start and one when they have ended. Where the second is missing, whoever would have written
it was killed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Start:
    """Workers that were started once."""

    began: str
    """Time in ISO 8601, as ``ended``."""
    plan: str
    workers: int
    first_step: int
    """Steps that were done before."""
    ended: str | None = None
    last_step: int | None = None
    """Steps that were done when it ended."""
    saved_step: int | None = None
    """Steps in the newest checkpoint then: those between were lost."""
    why: str | None = None
    failed: bool = False
    """Neither finished nor stopped by a signal."""

    @property
    def made_steps(self) -> bool:
        return self.last_step is not None and self.last_step > self.first_step

    @property
    def seconds(self) -> float | None:
        """From its beginning to its end, None where nobody knows."""
        if self.ended is None:
            return None
        return (datetime.fromisoformat(self.ended) - datetime.fromisoformat(self.began)).total_seconds()

    @property
    def steps_lost(self) -> int | None:
        """Steps that were made and are in no checkpoint."""
        if self.last_step is None or self.saved_step is None:
            return None
        return max(0, self.last_step - self.saved_step)


def began(file: Path, start: Start) -> None:
    """Write down that workers start."""
    _append(file, asdict(start))


def ended(file: Path, **found: Any) -> None:
    """Write down how the last start ended: ``ended``, ``last_step``, ``saved_step``, ``why``, ``failed``."""
    _append(file, found)


def starts(file: Path) -> list[Start]:
    """What the file says, oldest first. Lines that are none are left out."""
    found: list[Start] = []
    for line in _lines(file):
        try:
            if "began" in line:
                found.append(Start(**line))
            elif found:
                found[-1] = replace(found[-1], **line)
        except TypeError:
            continue
    return [start for start in found if _is_sound(start)]


def effective_share(history: Sequence[Start], metrics: Sequence[dict[str, Any]]) -> float | None:
    """Seconds of the steps that count, over all seconds since the first start but those between starts by hand: the effective training
    time ratio. None without a start of known length."""
    spans = [start.seconds for start in history]
    if not spans or any(span is None for span in spans):
        return None
    total = sum(span for span in spans if span is not None)
    steps = sum(record.get("step_time_s") or 0.0 for record in metrics)
    return min(1.0, steps / total) if total > 0 else None


def _append(file: Path, line: dict[str, Any]) -> None:
    with suppress(OSError), file.open("a") as target:  # a run does not end for want of its history
        target.write(json.dumps(line) + "\n")


def _lines(file: Path) -> list[dict[str, Any]]:
    try:
        lines = file.read_bytes().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def _is_sound(start: Start) -> bool:
    numbers = (start.workers, start.first_step, start.last_step, start.saved_step)
    if not all(number is None or type(number) is int for number in numbers):
        return False
    if not isinstance(start.plan, str) or not isinstance(start.why, str | None) or type(start.failed) is not bool:
        return False
    try:
        return start.seconds is None or start.seconds >= 0
    except (TypeError, ValueError):
        return False
