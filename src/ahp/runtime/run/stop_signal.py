"""A request to stop, noted when it comes and checked between steps.

Does not import torch, so that a worker can listen before it spends seconds on imports.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import FrameType

from ahp.runtime.ranks.stop_signals import STOP_SIGNALS, on_stop_signals

LAUNCHER_GONE = 128
"""Used like a signal's number. It is larger than every signal's, because ranks agree on the largest number that any of them has."""


def cause_of(number: int) -> str:
    """Why a run stopped, for status.json."""
    if number == LAUNCHER_GONE:
        return "the process that started the workers has gone without a word, killed or crashed; they saved and stopped"
    return f"stopped by {signal.Signals(number).name}"


def exit_code_of(number: int) -> int:
    """128 + the signal's number, as in shells; a launcher that is gone was most likely killed."""
    return 128 + (signal.SIGKILL if number == LAUNCHER_GONE else number)


class Stopped(BaseException):
    """A signal to stop came while there is nothing to finish first."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number, self.exit_code = number, 128 + number


AGAIN_S = 0.05
"""Time until a signal is sent again that came where Python drops exceptions."""


@contextmanager
def stops_at_once() -> Iterator[None]:
    """Inside the block, a signal to stop raises Stopped. Python prints and drops what is raised in a ``__del__`` (the library regex has one for
    each part of a pattern, and transformers compiles many), so a signal that comes there is sent again a moment later."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    def dropped(one: sys.UnraisableHookArgs) -> None:
        if isinstance(one.exc_value, Stopped):
            threading.Timer(AGAIN_S, os.kill, (os.getpid(), one.exc_value.number)).start()
        else:
            before(one)

    before, sys.unraisablehook = sys.unraisablehook, dropped
    try:
        with on_stop_signals(stop):
            yield
    finally:
        sys.unraisablehook = before


@dataclass
class StopRequest:
    """Remembers that a signal to stop came; the loop checks it between steps.

    A parent that is gone counts as a request to stop: nobody could stop an orphan otherwise.
    """

    received: int = 0
    parent: int = field(default_factory=os.getppid)

    def listen(self) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    def ending_at_once(self) -> AbstractContextManager[None]:
        """Inside the block, a signal to stop ends the process: nothing is left to save, and its code may wait in C++ for seconds."""
        return on_stop_signals(signal.SIG_DFL)

    def pending(self) -> int:
        """Number of the signal, LAUNCHER_GONE for an orphan, 0 for none."""
        if not self.received and os.getppid() != self.parent:
            self.received = LAUNCHER_GONE
        return self.received

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
