"""The starts of a run: which plan each had, how far it came, why it ended, and what failures cost. Free of torch.

``starts.jsonl`` has a line when workers start and one when they have ended, and between them one if the first was wrong. If the last is
missing, the process that would have written it was killed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

SECONDS_PER_DAY = 86_400


@dataclass(frozen=True)
class Start:
    """One start of a run's workers."""

    began: str
    """Time in ISO 8601, like ``ended``."""
    plan: str
    workers: int
    first_step: int
    """Steps that were done before."""
    ended: str | None = None
    last_step: int | None = None
    """Steps that were done when it ended."""
    saved_step: int | None = None
    """Steps in the newest checkpoint at that time: the steps after it were lost."""
    why: str | None = None
    failed: bool = False
    """Neither finished nor stopped by a signal."""
    useful_s: float | None = None
    """Seconds of its steps that a checkpoint, or the end of the run, has kept."""
    useful_tokens: float | None = None
    """Tokens of these steps."""
    kind: str | None = None
    """How it failed: the name of an exception's class, or of a signal."""

    @property
    def made_steps(self) -> bool:
        return self.last_step is not None and self.last_step > self.first_step

    @property
    def seconds(self) -> float | None:
        """Seconds from its beginning to its end; None if the end is not known."""
        if self.ended is None:
            return None
        return (datetime.fromisoformat(self.ended) - datetime.fromisoformat(self.began)).total_seconds()

    @property
    def seconds_lost(self) -> float | None:
        """Its seconds minus those of steps that were kept: the start itself, and steps that are in no checkpoint."""
        if self.seconds is None or self.useful_s is None:
            return None
        return max(0.0, self.seconds - self.useful_s)

    @property
    def steps_lost(self) -> int | None:
        """Steps that were made and are in no checkpoint."""
        if self.last_step is None or self.saved_step is None:
            return None
        return max(0, self.last_step - self.saved_step)

    def plain(self) -> dict[str, Any]:
        """Plain data for status.json."""
        return {**asdict(self), "steps_lost": self.steps_lost, "seconds_lost": self.seconds_lost}


def began(file: Path, start: Start) -> None:
    """Record that workers start."""
    _append(file, asdict(start))


def began_at(file: Path, step: int) -> None:
    """Correct the last start if its workers found other steps done than the process that started them: the newest checkpoint was damaged."""
    found = starts(file)
    if found and found[-1].first_step != step:
        _append(file, {"first_step": step})


def ended(file: Path, **found: Any) -> None:
    """Record how the last start ended: the other fields of ``Start``."""
    _append(file, found)


def starts(file: Path) -> list[Start]:
    """The starts in the file, oldest first. Lines that make no sense are left out."""
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


def useful(metrics: Sequence[dict[str, Any]], first_step: int, saved_step: int) -> dict[str, float]:
    """``useful_s`` and ``useful_tokens`` of the steps after ``first_step`` up to ``saved_step``."""
    kept = [m for m in metrics if first_step < m["step"] <= saved_step and m.get("step_time_s")]
    tokens = sum(m["step_time_s"] * (m.get("tokens_per_s") or 0.0) for m in kept)
    return {"useful_s": sum(m["step_time_s"] for m in kept), "useful_tokens": tokens}


@dataclass(frozen=True)
class Effect:
    """How much of its time a run used, with failures and starts included."""

    share: float
    """Seconds of the steps that were kept, divided by all seconds of the starts that have ended: the effective training time ratio. The time
    between two starts by hand is not in it."""
    tokens_per_day: float
    tokens_per_day_without_failures: float
    """If every second had gone into such steps."""


def effect(history: Sequence[Start]) -> Effect | None:
    """The effect of the starts that have ended; None if none of their steps was kept."""
    known = [(s.seconds, s.useful_s, s.useful_tokens) for s in history]
    ended = [(total, useful, tokens) for total, useful, tokens in known if total and useful and tokens is not None]
    idle_s = sum(total for total, useful, _ in known if total and useful == 0)
    total_s, useful_s, tokens = (sum(column) for column in zip(*ended, strict=True)) if ended else (0.0, 0.0, 0.0)
    if useful_s <= 0:
        return None
    share = min(1.0, useful_s / (total_s + idle_s))
    without = SECONDS_PER_DAY * tokens / useful_s
    return Effect(share, share * without, without)


def _append(file: Path, line: dict[str, Any]) -> None:
    with suppress(OSError), file.open("a") as target:  # a run must not end because its history cannot be written
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
    kept = (start.useful_s, start.useful_tokens)
    if not all(one is None or (type(one) in (int, float) and 0 <= one < math.inf) for one in kept):
        return False
    numbers = (start.workers, start.first_step, start.last_step, start.saved_step)
    if not all(number is None or type(number) is int for number in numbers):
        return False
    words = isinstance(start.why, str | None) and isinstance(start.kind, str | None)
    if not isinstance(start.plan, str) or not words or type(start.failed) is not bool:
        return False
    try:
        return start.seconds is None or start.seconds >= 0
    except (TypeError, ValueError):
        return False
