"""A signal to stop is heard wherever it comes."""

from __future__ import annotations

import signal
import sys
import time

import pytest

from ahp.runtime.run.stop_signal import Stopped, stops_at_once


class SignalledWhileFreed:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


def work() -> None:
    SignalledWhileFreed()
    time.sleep(5)


def test_a_signal_that_comes_while_an_object_is_freed_still_stops() -> None:
    before = sys.unraisablehook
    with pytest.raises(Stopped, match="SIGTERM"), stops_at_once():
        work()
    assert sys.unraisablehook is before
