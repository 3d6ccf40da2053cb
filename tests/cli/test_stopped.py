"""A signal while ``ahp train`` measures the machine leaves no process, no file and no status that says it runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.own_cache import own_cache
from tests.runtime.slow import CONFIG


def started(tmp_path: Path, *options: str) -> subprocess.Popen[str]:
    folders = {"AHP_CACHE": own_cache(tmp_path), "TMPDIR": str(tmp_path / "aside")}
    (tmp_path / "aside").mkdir()
    (tmp_path / "text.txt").write_text("a few words, again and again\n" * 500)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    command = [
        sys.executable,
        "-m",
        "ahp",
        "train",
        "--model",
        str(tmp_path / "config.json"),
        "--job.data",
        str(tmp_path / "text.txt"),
    ]
    options = (*options, "--job.sequence-length", "16", "--run.folder", str(tmp_path / "run"))
    return subprocess.Popen([*command, *options], env={**os.environ, **folders}, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_signal_while_the_machine_is_measured_leaves_nothing(tmp_path: Path) -> None:
    run = started(tmp_path)
    try:
        aside, this = tmp_path / "aside", psutil.Process(run.pid)
        while not (list(aside.glob("ahp-probe-*/worker*.log")) and this.children(recursive=True)):
            assert run.poll() is None, run.communicate()[1]
            time.sleep(0.05)
        workers = this.children(recursive=True)
        run.send_signal(signal.SIGTERM)
        _, told = run.communicate(timeout=500)
    finally:
        run.kill()
    assert run.returncode == 128 + signal.SIGTERM
    assert told.endswith("stopped by SIGTERM\n")
    _, left = psutil.wait_procs(workers, timeout=120)  # whoever has taken them over may need a moment
    assert left == []
    # torch makes a folder for compiled kernels when a worker imports it, and leaves it.
    assert [path for path in aside.iterdir() if not path.name.startswith("torchinductor_")] == []
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["step"], status["exit_code"]) == ("interrupted", 0, 143)
    assert status["cause"] == "stopped by SIGTERM before training began"
