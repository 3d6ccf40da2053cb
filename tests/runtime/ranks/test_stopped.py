"""Workers that are stopped are ended once they are asked to, and not before."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil
import pytest

from ahp.runtime.ranks.stopped import POLL_S, ending_stopped, is_deaf

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says which signals wait for a process")


def test_a_stopped_worker_is_ended_only_once_it_was_asked_to() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        worker = psutil.Process(process.pid)
        try:
            with ending_stopped(lambda: [worker]):
                worker.suspend()
                time.sleep(4 * POLL_S)
                assert process.poll() is None
                assert not is_deaf(worker)
                worker.terminate()
                assert process.wait(20) == -signal.SIGKILL
        finally:
            process.kill()


def test_a_worker_that_goes_on_ends_by_itself() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            with ending_stopped(lambda: [psutil.Process(process.pid)]):
                process.send_signal(signal.SIGTERM)
                assert process.wait(20) == -signal.SIGTERM
        finally:
            process.kill()
