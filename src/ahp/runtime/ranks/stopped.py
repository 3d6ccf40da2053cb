"""Ends workers that are stopped (SIGSTOP): a worker that has been asked to end, for which torch's launcher would wait half a minute, and a
worker for which the others have waited up to their limit. It cannot report this itself, and the others need seconds to agree on who it is.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ahp.runtime.ranks.beside import looking
from ahp.runtime.ranks.meeting import named

POLL_S = 0.5
"""Time between two looks. A worker that goes on between them handles the signal itself."""
ASKED_LOOKS = 2
"""A worker is killed after this many looks in a row that find it stopped with a SIGTERM that it has not seen."""


@dataclass
class Stopped:
    """Which workers were stopped, and for how many looks: the clock would go on while the launcher is stopped with them."""

    limit_s: float | None
    """How long a worker may be stopped; None for any time."""
    report: Callable[[str], None] = lambda cause: None
    """Called with the cause before a worker is ended because of the limit."""
    cause: str | None = None
    looks: dict[int, int] = field(default_factory=dict)
    """How many looks in a row found a worker stopped, keyed by process id."""
    deaf: dict[int, int] = field(default_factory=dict)
    """The same, with a SIGTERM that the worker has not seen."""

    def look(self, workers: list[psutil.Process]) -> None:
        """End the workers whose time is over."""
        found = {worker.pid: worker for worker in workers if _is_stopped(worker)}
        self.looks = {pid: self.looks.get(pid, 0) + 1 for pid in found}
        self.deaf = {pid: self.deaf.get(pid, 0) + 1 for pid, worker in found.items() if is_deaf(worker)}
        over = [pid for pid in found if self.limit_s is not None and self.looks[pid] * POLL_S > self.limit_s]
        if over and self.cause is None:
            self.cause = _cause([found[pid] for pid in over], self.limit_s)
            self.report(self.cause)
        for pid in {*over, *(pid for pid, times in self.deaf.items() if times >= ASKED_LOOKS)}:
            with suppress(psutil.Error):
                found[pid].kill()


@contextmanager
def ending_stopped(
    workers: Callable[[], list[psutil.Process]],
    limit_s: float | None = None,
    report: Callable[[str], None] = lambda cause: None,
) -> Iterator[Stopped]:
    """Inside the block, kill every worker that is stopped for longer than the limit, or with a SIGTERM that it has not seen."""
    stopped = Stopped(limit_s, report)

    def look() -> bool:
        stopped.look(workers())
        return False

    with looking(look, every_s=POLL_S):
        yield stopped


def is_deaf(process: psutil.Process) -> bool:
    """Whether a process is stopped and a SIGTERM waits for it. Known only on Linux."""
    with suppress(psutil.Error, OSError):
        if process.status() != psutil.STATUS_STOPPED:
            return False
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        pending = next((int(line.split()[1], 16) for line in lines if line.startswith("ShdPnd:")), 0)
        return bool(pending >> (signal.SIGTERM - 1) & 1)
    return False


def _is_stopped(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.status() == psutil.STATUS_STOPPED
    return False


def _cause(workers: list[psutil.Process], limit_s: float | None) -> str:
    ranks = []
    for worker in workers:
        with suppress(psutil.Error, KeyError):
            ranks.append(int(worker.environ()["RANK"]))
    who = named(sorted(ranks)) if ranks else "a worker"
    return f"{who} on {socket.gethostname()} {'are' if len(ranks) > 1 else 'is'} stopped (SIGSTOP) for longer than run.collective_timeout_s = {limit_s:g}"
