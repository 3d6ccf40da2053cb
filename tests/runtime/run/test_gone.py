"""A worker that goes under torchrun is named by those that lose it; a launcher that was frozen goes on."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ahp.job import Job
from ahp.plan import Parallelism, Plan
from ahp.runtime.run.folder import RunFolder
from tests.runtime import dying
from tests.runtime.hanging import CONFIG

pytestmark = pytest.mark.slow

REPLICAS = Parallelism(data_parallel_replicate_degree=2)


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    shutil.copy(json.__file__, folder / "a.txt")
    shutil.copy(shutil.__file__, folder / "b.txt")
    monkeypatch.setenv("AHP_CACHE", str(tmp_path / "cache"))
    return folder


def ahp_train(model: Any, text: Path, folder: Path, layout: Parallelism, steps: int) -> list[str]:
    """The command that runs this plan."""
    job = {"data": str(text), "steps": steps, "global_batch_size": 2, "sequence_length": 32, "precision": "fp32"}
    plan = folder.with_suffix(".yaml")
    Plan(model=model, job=Job.model_validate(job), parallelism=layout).save(plan)
    return ["-m", "ahp", "train", str(plan), "--run.folder", str(folder), "--run.sample", "false"]


def test_under_torchrun_without_restarts_who_went_is_named(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = ahp_train("tests.runtime.dying:model", text, folder, REPLICAS, 8)
    ended = subprocess.run([sys.executable, *torchrun, *command], capture_output=True, text=True, check=False)
    assert ended.returncode == 1, ended.stderr
    status = RunFolder(folder).status()
    assert status is not None
    assert (status.state, status.step, status.exit_code) == ("failed", dying.AFTER, 1)
    host = re.escape(socket.gethostname())
    told = (
        rf"after step {dying.AFTER}: rank 1 on {host} went, or failed first: .*; rank 0 on {host} lost its connection: "
    )
    assert re.match(told, status.cause or ""), status.cause
    assert f"error: after step {dying.AFTER}: rank 1 on " in ended.stderr
    assert "internal error" not in ended.stderr


@pytest.mark.wide
def test_a_launcher_that_was_frozen_ends_when_it_is_let_go_on(text: Path, tmp_path: Path) -> None:
    """Its workers need it only where they meet, as for the first checkpoint: they wait for it there."""
    folder = RunFolder(tmp_path / "run")
    command = [sys.executable, *ahp_train(CONFIG, text, folder.path, Parallelism(), 20)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while not folder.metrics():
            assert run.poll() is None, run.communicate()[1]
            time.sleep(0.05)
        os.kill(run.pid, signal.SIGSTOP)
        time.sleep(2)
        assert run.poll() is None
        os.kill(run.pid, signal.SIGCONT)
        _, told = run.communicate(timeout=500)
    finally:
        run.kill()
    assert run.returncode == 0, told
    assert len(folder.metrics()) == 20
