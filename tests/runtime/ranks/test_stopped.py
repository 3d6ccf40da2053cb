"""Workers that are stopped are ended once they are asked to, or when the others have waited long enough, and not before."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from ahp.runtime.ranks.stopped import POLL_S, ending_stopped, is_deaf

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says which signals wait for a process")


@pytest.mark.slow
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
                assert process.wait(120) == -signal.SIGKILL
        finally:
            process.kill()


def test_a_worker_that_goes_on_ends_by_itself() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            with ending_stopped(lambda: [psutil.Process(process.pid)]):
                process.send_signal(signal.SIGTERM)
                assert process.wait(120) == -signal.SIGTERM
        finally:
            process.kill()


@pytest.mark.slow
def test_a_worker_that_stays_stopped_is_named_and_ended_at_its_limit() -> None:
    said: list[str] = []
    with subprocess.Popen(["sleep", "60"], env={"RANK": "3"}) as process:
        worker = psutil.Process(process.pid)
        try:
            with ending_stopped(lambda: [worker], 4 * POLL_S, said.append) as stopped:
                worker.suspend()
                time.sleep(2.5 * POLL_S)
                worker.resume()  # so that it was not stopped in a row
                time.sleep(1.5 * POLL_S)
                worker.suspend()
                time.sleep(2.5 * POLL_S)
                assert process.poll() is None
                assert process.wait(120) == -signal.SIGKILL
        finally:
            process.kill()
    host = socket.gethostname()
    assert stopped.cause == f"rank 3 on {host} is stopped (SIGSTOP) for longer than run.collective_timeout_s = 2"
    assert said == [stopped.cause]
