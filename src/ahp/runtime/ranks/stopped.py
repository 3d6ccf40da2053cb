"""Ends workers that are stopped (SIGSTOP) and have been asked to end: torch's launcher would wait half a minute for each."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

POLL_S = 0.5
"""Between two looks. A worker that goes on between them handles the signal itself."""


@contextmanager
def ending_stopped(workers: Callable[[], list[psutil.Process]]) -> Iterator[None]:
    """Within, kill every worker that two looks in a row find stopped with a SIGTERM that it has not seen."""
    over = threading.Event()

    def look() -> None:
        before: set[int] = set()
        while not over.wait(POLL_S):
            found = {worker.pid: worker for worker in workers() if is_deaf(worker)}
            for pid in found.keys() & before:
                with suppress(psutil.Error):
                    found[pid].kill()
            before = set(found)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def is_deaf(process: psutil.Process) -> bool:
    """Whether a process is stopped and a SIGTERM waits for it. Only Linux tells."""
    with suppress(psutil.Error, OSError):
        if process.status() != psutil.STATUS_STOPPED:
            return False
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        pending = next((int(line.split()[1], 16) for line in lines if line.startswith("ShdPnd:")), 0)
        return bool(pending >> (signal.SIGTERM - 1) & 1)
    return False
