"""The cause of a failed run, kept for the user: the first worker to fail records why."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ahp.errors import AhpError, BadInput
from ahp.plan import Plan
from ahp.run_files import Status
from ahp.runtime.run.folder import RunFolder


@dataclass(frozen=True)
class Failure:
    """The error of one rank."""

    rank: int | None
    """None if a launcher reports it for its workers."""
    message: str
    exit_code: int
    trace: str
    kind: str = ""
    """Name of the exception's class."""
    may_pass: bool = False
    """Whether a machine, a disk or a network may be at fault, so that a new start can succeed."""
    missing: Sequence[int] = ()
    """Ranks that hang, according to this rank, which waited for them."""


class TrainingFailed(AhpError):
    """A run that ended early, with the exit code of what ended it."""

    def __init__(
        self,
        message: str,
        exit_code: int = 1,
        *,
        step: int = 0,
        kind: str = "",
        rank: int | None = None,
        saved_step: int = 0,
        may_pass: bool = False,
    ) -> None:
        """``step``: the last completed step; ``saved_step``: the step of the newest checkpoint; ``kind``: how it failed; ``rank``: the rank
        whose process died or hangs; ``may_pass``: as in ``Failure``."""
        super().__init__(message)
        self.exit_code, self.step, self.kind, self.rank, self.may_pass = exit_code, step, kind, rank, may_pass
        self.saved_step = saved_step

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended it: what its own code did at that step may have nothing to do with it."""
        return self.kind.startswith("SIG")

    def because(self, reason: str) -> TrainingFailed:
        """The same failure, with the reason why the run is not started again."""
        return TrainingFailed(
            f"{self}\nnot started again: {reason}", self.exit_code, step=self.step, kind=self.kind, rank=self.rank
        )


def may_pass(error: BaseException) -> bool:
    """Whether a new start may avoid an error: true for errors of torch, the system or the network. An error of AHP decides for itself; one
    that only code can cause (a wrong type, a missing key) comes again."""
    if isinstance(error, AhpError):
        return error.may_pass
    return isinstance(error, RuntimeError | OSError) and not isinstance(error, NotImplementedError | RecursionError)


def record(folder: RunFolder, rank: int | None, error: BaseException) -> None:
    """Write log/failure.json and status.json, unless another rank failed earlier. ``rank``: None from a launcher.

    The first failure is the cause; the other ranks only see afterwards that a peer is gone.
    """
    known = isinstance(error, AhpError)
    failure = Failure(
        rank=rank,
        message=str(error) if known else f"rank {rank}: {type(error).__name__}: {error}",
        exit_code=error.exit_code if isinstance(error, AhpError) else 1,
        trace="".join(traceback.format_exception(error)),
        kind=type(error).__name__,
        may_pass=may_pass(error),
        missing=getattr(error, "missing", ()),
    )
    try:
        with _file(folder).open("x") as file:
            json.dump(asdict(failure), file, indent=1)
        report(folder, failure.message, failure.exit_code)
    except OSError:
        # Either this is not the first failure, or the disk is full: the trace still goes to the worker's log.
        return


def report(folder: RunFolder, cause: str, exit_code: int) -> None:
    """Write to status.json that the run failed after the last step in metrics.jsonl.

    On a full disk the file stays as it is: the user still reads the cause on stderr.
    """
    with suppress(OSError):
        folder.write_status(Status("failed", last_step(folder), cause, exit_code))


def of_hang(folder: RunFolder, cause: str) -> str:
    """A launcher's message about workers that hang: the last completed step, the cause, and the axes of the run's layout."""
    try:
        layout = Plan.load(folder.plan_file).parallelism
    except BadInput:  # the run was not planned yet
        axes = []
    else:
        axes = [*layout.axes, *(["ep"] if layout.expert_parallel_degree > 1 else [])]
    where = f" (axes of the layout: {', '.join(axes)})" if axes else ""
    return f"after step {last_step(folder)}: {cause}{where}"


def last_step(folder: RunFolder) -> int:
    """The last completed step in metrics.jsonl, 0 for none."""
    metrics = folder.metrics()
    return int(metrics[-1]["step"]) if metrics else 0


def last_step_time_s(folder: RunFolder) -> float:
    """Step time of the last completed step in metrics.jsonl, 0 for none."""
    metrics = folder.metrics()
    return float(metrics[-1]["step_time_s"]) if metrics else 0.0


def read(folder: RunFolder) -> Failure | None:
    """The first failure since ``forget``; None if nothing could be written."""
    try:
        return Failure(**json.loads(_file(folder).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def forget(folder: RunFolder) -> None:
    """Delete the record of an old failure, before a new start."""
    try:
        os.unlink(_file(folder))
    except FileNotFoundError:
        return


def _file(folder: RunFolder) -> Path:
    return folder.log_folder / "failure.json"
