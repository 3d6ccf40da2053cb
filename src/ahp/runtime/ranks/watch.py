"""Finds workers that hang all together, or an only worker that hangs: no other rank waits for them, so their launcher has to notice.

A slow step is not a hang. Workers hang when no step has ended, and none of them has computed or read or written anything, for as long as a
collective may take. A worker that computes forever cannot be told from one that works.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from ahp.runtime.ranks.beside import looking

POLLS = 20
"""Number of polls in the limit."""
BUSY_SHARE = 0.05
"""Share of one core over one poll: below it, nothing counts as computed. [Empirical] gloo's threads of a job's groups wake a hundred times
a second each, 1 to 2 % of a core, whatever the worker does."""
BUSY_BYTES = 1 << 20
"""Bytes read and written between polls that do not count as work: gloo's threads read some bytes each time that they wake."""
OWN_CAUSE_S = 30.0
"""Time past the limit of collectives for workers that wait for another to report it themselves, which names the right one."""
STACK_S = 1.0
"""Time for workers to write their stacks into their logs."""


@dataclass(frozen=True)
class Watch:
    """Decides when workers hang."""

    progress: Path
    """A file that changes with every step."""
    limit_s: float
    stopped_s: float | None = None
    """How long a worker may be stopped (SIGSTOP); ``stopped.py`` checks it."""
    begins: Path | None = None
    """A file that changes when workers have joined, if they first wait for the one that prepares; None: they have nothing to wait for."""


@dataclass
class Quiet:
    """How long there was no sign of work. Counts polls, not the clock, which goes on while the launcher is stopped with its workers."""

    limit_s: float
    quiet_s: float = 0.0
    before: tuple[float, float, int] | None = None

    def after(self, poll_s: float, changed_s: float, computed_s: float, moved_bytes: int) -> bool:
        """Whether the limit is over, given when the progress last changed, and what the workers have computed, read and written since
        they began."""
        now = changed_s, computed_s, moved_bytes
        if self.before is not None:
            changed, computed, moved = (a - b for a, b in zip(now, self.before, strict=True))
            working = changed or computed < 0 or computed > BUSY_SHARE * poll_s or moved > BUSY_BYTES
            self.quiet_s = 0.0 if working else self.quiet_s + poll_s
        self.before = now
        return self.quiet_s >= self.limit_s


@dataclass
class Hang:
    """The result of the watch."""

    cause: str | None = None


@contextmanager
def watching(
    watch: Watch | None,
    workers: Callable[[], list[psutil.Process]],
    num_workers: int,
    report: Callable[[str], None] = lambda cause: None,
) -> Iterator[Hang]:
    """Inside the block, end workers that hang. The cause is set, and passed to ``report``, before the first worker has ended."""
    hang = Hang()
    if watch is None:
        yield hang
        return
    poll_s, quiet = watch.limit_s / POLLS, Quiet(watch.limit_s)

    def look() -> bool:
        found = workers()
        if len(found) < num_workers:  # not all have started, or the launcher is ending them
            return False
        with suppress(psutil.Error):  # a worker is ending
            if watch.begins is not None and _changed_s(watch.begins) < min(each.create_time() for each in found):
                return False
            used = [_used(each) for worker in found for each in (worker, *worker.children(recursive=True))]
            computed_s, moved_bytes = sum(s for s, _ in used), sum(b for _, b in used)
            if quiet.after(poll_s, _changed_s(watch.progress), computed_s, moved_bytes):
                hang.cause = _cause(found, watch.limit_s)
                report(hang.cause)
                _end(found)
                quiet.quiet_s = 0.0
        return False

    with looking(look, every_s=poll_s):
        yield hang


def _used(process: psutil.Process) -> tuple[float, int]:
    """Seconds of processor time, and bytes read and written, from files and sockets."""
    times, moved = process.cpu_times(), 0
    if hasattr(process, "io_counters"):  # not on macOS
        counters = process.io_counters()
        moved = getattr(counters, "read_chars", counters.read_bytes) + getattr(
            counters, "write_chars", counters.write_bytes
        )
    return times.user + times.system, moved


def _changed_s(progress: Path) -> float:
    try:
        return progress.stat().st_mtime
    except OSError:
        return 0.0


def _cause(workers: list[psutil.Process], limit_s: float) -> str:
    from ahp.runtime.ranks.meeting import named

    ranks = {int(worker.environ()["RANK"]): worker.status() for worker in workers}
    stopped = sorted(rank for rank, status in ranks.items() if status == psutil.STATUS_STOPPED)
    who, why = (stopped, "stopped (SIGSTOP)") if stopped else (sorted(ranks), "hanging")
    return (
        f"{named(who)} on {socket.gethostname()} {'are' if len(who) > 1 else 'is'} {why}: for {limit_s:g} s no step has ended, and no "
        "worker has computed, read or written anything"
    )


def _end(workers: list[psutil.Process]) -> None:
    _signal(workers, signal.SIGUSR2)
    time.sleep(STACK_S)
    _signal(workers, signal.SIGKILL)


def _signal(workers: list[psutil.Process], number: signal.Signals) -> None:
    for worker in workers:
        with suppress(psutil.Error):
            worker.send_signal(number)
