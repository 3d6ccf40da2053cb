"""What a run says when its folder cannot be written: the cause, what is kept, and how to go on."""

from __future__ import annotations

import errno
import resource
from typing import Any

from ahp.errors import AhpError, first_line
from ahp.runtime.files import is_full
from ahp.runtime.run.failure import TrainingFailed
from ahp.runtime.run.folder import RunFolder

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
COMES_AGAIN = (*NO_SPACE, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.ENAMETOOLONG)
"""Error numbers that a new start meets again until a person has changed something; others (EIO, ESTALE) may be a storage's or a network's moment."""
ROOM = "make room there, and start the same command again"
LARGER = "raise that limit (ulimit -f), and start the same command again"


class CannotWrite(AhpError):
    """The run's folder cannot be written any more."""

    def __init__(self, message: str, *, may_pass: bool = False) -> None:
        super().__init__(message)
        self.may_pass = may_pass


def cannot_write(folder: RunFolder, what: str, error: BaseException, saved: int | None) -> CannotWrite:
    """The error for the user. ``what`` could not be written; ``saved``: the step of the newest checkpoint, None for none."""
    may_pass, way_on = False, "start the same command again once it can be written"
    if not folder.path.is_dir():
        return CannotWrite(_gone(folder))
    if not _has_number(error, COMES_AGAIN):  # torch's archive writer reports each of them as a RuntimeError
        error = folder.fault_of_writing() or error
    if has_no_space(error) or is_full(folder.path):
        reason, way_on = "the disk is full", ROOM
    elif (limit_bytes := _limit_reached(folder)) is not None:
        reason, way_on = f"no file may be larger than {limit_bytes:,} bytes", LARGER
    else:
        reason, may_pass = reason_of(error), not _has_number(error, COMES_AGAIN)
    kept = f"; the checkpoint of step {saved} is kept" if saved is not None else ""
    message = f"run.folder = {str(folder.path)!r}: {what} cannot be written, {reason}{kept}"
    return CannotWrite(message if may_pass else f"{message}; {way_on}", may_pass=may_pass)


def without_a_cause(folder: RunFolder, step: int) -> TrainingFailed | None:
    """Why workers ended after ``step`` that could leave no cause in the folder; None if the folder can be written."""
    message = f"run.folder = {str(folder.path)!r}: after step {step} "
    if not folder.path.is_dir():
        message = _gone(folder)
    elif is_full(folder.path):
        message += f"the disk is full; {ROOM}; the workers' output: {folder.log_folder}"
    elif (fault := folder.fault_of_writing()) is not None:
        message += (
            f"it cannot be written any more ({fault.strerror}); start the same command again once it can be written"
        )
    else:
        return None
    return TrainingFailed(message, step=step, kind=CannotWrite.__name__)


def _gone(folder: RunFolder) -> str:
    return (
        f"run.folder = {str(folder.path)!r}: the folder is gone (deleted, moved, or its disk is not mounted any more); bring it back before you "
        "start the same command again, or the run begins with step 1"
    )


def _limit_reached(folder: RunFolder) -> int | None:
    """The limit of a file's size in bytes, if a file of the run has reached it."""
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit_bytes == resource.RLIM_INFINITY:
        return None
    sizes = (file.stat().st_size for file in folder.path.rglob("*") if file.is_file())
    return limit_bytes if any(size >= limit_bytes for size in sizes) else None


def has_no_space(error: BaseException | None) -> bool:
    """Whether a full disk caused an error."""
    return _has_number(error, NO_SPACE)


def _has_number(error: BaseException | None, numbers: tuple[int, ...]) -> bool:
    """Whether one of the system's errors is an error, a cause of it, or among the failures that torch collects from ranks."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in numbers:
            return True
        failures = getattr(error, "failures", None)
        if isinstance(failures, dict) and any(_has_number(_exception(item), numbers) for item in failures.values()):
            return True
        error = error.__cause__ or error.__context__
    return False


def reason_of(error: BaseException) -> str:
    """The first line of the first rank's error: torch's own message has every rank's trace."""
    failures = getattr(error, "failures", None)
    first = next(iter(failures.values()), None) if isinstance(failures, dict) else None
    found = _exception(first) or error
    return f"{type(found).__name__}: {first_line(found)}"


def _exception(item: Any) -> BaseException | None:
    # torch's CheckpointException holds (exception, stack) for each rank
    candidate = item[0] if isinstance(item, tuple) and item else item
    return candidate if isinstance(candidate, BaseException) else None
