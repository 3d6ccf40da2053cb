"""Handles a signal to stop at a node's launcher: passes it on to the workers, and waits until they have saved and ended.

torch's launcher kills workers 30 s after the signal, which 2.11 cannot change. The scheduler decides how long there is to save (Slurm's
``--signal`` and ``KillWait``, Kubernetes' ``terminationGracePeriodSeconds``): it kills what is left itself.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import psutil

from ahp.runtime.ranks.launch import SECOND_SIGNAL_S, workers_of
from ahp.runtime.ranks.stop_signals import on_stop_signals

LOOK_S = 0.1
"""Time between two checks whether workers have ended."""


@contextmanager
def workers_saving_first() -> Iterator[None]:
    """Inside the block, a signal to stop is sent to the workers as SIGTERM; torch's SignalException follows when all ended. A second kills them."""
    from torch.distributed.elastic.multiprocessing import SignalException

    came_s: list[float] = []

    def stop(number: int, frame: FrameType | None) -> None:
        again = bool(came_s)
        if again and time.monotonic() - came_s[0] <= SECOND_SIGNAL_S:
            return
        came_s.append(time.monotonic())
        workers = workers_of("ahp")
        for worker in workers:
            with suppress(psutil.NoSuchProcess):
                worker.send_signal(signal.SIGKILL if again else signal.SIGTERM)
        if again:
            return  # back to the first signal's wait
        while any(lives(worker) for worker in workers):
            time.sleep(LOOK_S)
        raise SignalException(f"stopped by {signal.Signals(number).name}", sigval=signal.Signals(number))

    with on_stop_signals(stop):
        yield


def lives(worker: psutil.Process) -> bool:
    """Whether a worker has not ended. torch has to reap it, so an ended worker can be a zombie."""
    try:
        return worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
