"""Asks the workers of a launcher to save and stop, when a condition in the launcher is met."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress

import psutil

from ahp.runtime.ranks.beside import looking

POLL_S = 1.0
"""Time between two checks of the condition, which can wait that long."""


def stopping_when(
    is_due: Callable[[], bool] | None, workers: Callable[[], list[psutil.Process]]
) -> AbstractContextManager[None]:
    """Inside the block, workers get SIGTERM once ``is_due`` returns True: they finish their step, save, and end well."""

    def ask() -> bool:
        assert is_due is not None
        found = workers()
        if not found or not is_due():
            return False
        for worker in found:
            with suppress(psutil.Error):
                worker.send_signal(signal.SIGTERM)
        return True

    return nullcontext() if is_due is None else looking(ask, every_s=POLL_S)
