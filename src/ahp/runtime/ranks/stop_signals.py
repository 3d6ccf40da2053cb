"""Signals that ask a run to save and end. Does not import torch, so that a worker can listen before it spends seconds on imports."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C; what schedulers and Kubernetes send before they kill; what Slurm's ``--signal=USR1@120`` sends before an allocation ends."""


@contextmanager
def on_stop_signals(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    """Inside the block, ``handler`` handles the signals to stop."""
    before = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)
