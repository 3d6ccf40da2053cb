"""What torch says of checkpoints that it cannot read or write, in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ahp.errors import AhpError


class WrongCheckpoint(AhpError):
    """A checkpoint has not the tensors that the model and its optimizer want."""

    def __init__(self, folder: Path, reason: str) -> None:
        rule = "it is of another model or another optimizer, or another version of AHP wrote it"
        super().__init__(f"{folder} does not go into this model: {reason}; {rule}")
        self.reason = reason


def first_reason(error: BaseException) -> str:
    """The first line of what the first rank said: torch's own message has every rank's trace."""
    failures = getattr(error, "failures", None)
    first = next(iter(failures.values()), None) if isinstance(failures, dict) else None
    found = exception_of(first) or error
    return f"{type(found).__name__}: {(str(found).strip().splitlines() or ['no reason'])[0].rstrip('.')}"


def exception_of(item: Any) -> BaseException | None:
    """torch's CheckpointException holds (exception, stack) by rank."""
    candidate = item[0] if isinstance(item, tuple) and item else item
    return candidate if isinstance(candidate, BaseException) else None
