"""Asks the workers of a launcher to save and stop, when something in the launcher says so."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil

POLL_S = 1.0
"""Between two questions; whatever asks for it can wait so long."""


@contextmanager
def stopping_when(is_due: Callable[[], bool] | None, workers: Callable[[], list[psutil.Process]]) -> Iterator[None]:
    """Within, workers get SIGTERM once ``is_due`` says yes: they finish their step, save, and end well."""
    if is_due is None:
        yield
        return
    over = threading.Event()

    def ask() -> None:
        while not over.wait(POLL_S):
            if workers() and is_due():
                for worker in workers():
                    with suppress(psutil.Error):
                        worker.send_signal(signal.SIGTERM)
                return

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
