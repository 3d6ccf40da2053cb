"""A signal to a launcher ends it when its workers have ended, however long they save; a second one kills them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

WORKER = """
import signal, sys, time
def save(*_):
    time.sleep({save_s}); open("saved", "w").close(); sys.exit(143)
signal.signal(signal.SIGTERM, save); open("listens", "w").close(); time.sleep(60)
"""
LAUNCHER = """
import subprocess, sys
from torch.distributed.elastic.multiprocessing import SignalException
from ahp.runtime.ranks.saving_first import workers_saving_first
worker = subprocess.Popen([sys.executable, "-c", open("worker.py").read(), "-m", "ahp"])
try:
    with workers_saving_first():
        worker.wait()
except SignalException as stopped:
    sys.exit(128 + stopped.sigval)
"""


def started(folder: Path, save_s: float) -> subprocess.Popen[bytes]:
    (folder / "worker.py").write_text(WORKER.format(save_s=save_s))
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER], cwd=folder)
    while not (folder / "listens").exists() and launcher.poll() is None:
        time.sleep(0.05)
    return launcher


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_launcher_waits(number: signal.Signals, tmp_path: Path) -> None:
    launcher = started(tmp_path, 1.5)
    launcher.send_signal(number)
    assert launcher.wait(120) == 128 + number
    assert (tmp_path / "saved").exists()


@pytest.mark.slow
def test_a_second_signal_kills(tmp_path: Path) -> None:
    launcher = started(tmp_path, 50)
    launcher.send_signal(signal.SIGUSR1)
    time.sleep(1.5)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(120) == 128 + signal.SIGUSR1
    assert not (tmp_path / "saved").exists()
