"""A rank's own time: what it computes and what it waits for a core, and nothing that it waits for others."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator

import pytest
import torch

from ahp.runtime.run.own_time import STEPS, Stopwatch, waited_for_core_s


def burn(seconds: float) -> None:
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


def burn_on(core: int) -> None:
    os.sched_setaffinity(0, {core})
    burn(60.0)


@pytest.fixture
def shared_core() -> Iterator[None]:
    """This process is bound to a core that another one uses too."""
    before = os.sched_getaffinity(0)
    core = min(before)
    other = multiprocessing.get_context("fork").Process(target=burn_on, args=(core,), daemon=True)
    other.start()
    os.sched_setaffinity(0, {core})
    yield
    os.sched_setaffinity(0, before)
    other.kill()
    other.join()


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not count it")
@pytest.mark.usefixtures("shared_core")
def test_a_thread_that_shares_its_core_waits_for_it() -> None:
    before_s = waited_for_core_s()
    burn(0.2)
    assert waited_for_core_s() - before_s > 0.02


def test_waiting_for_others_is_not_its_own() -> None:
    watch = Stopwatch(torch.device("cpu"))
    assert watch.read() is None
    for _ in range(STEPS):
        with watch.step(data_wait_s=0.25):
            burn(0.002)
            time.sleep(0.01)
    found = watch.read()
    assert found is not None
    assert 0.002 <= found.computing_s < 0.008
    assert found.waiting_for_data_s == 0.25
    assert found.step_s >= 0.012
    with watch.step(0.0):
        pass
    assert watch.read() is None
