"""The exported script on a Slurm cluster of two nodes: trained, told to save, requeued, gone on; a node drained, planned anew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from ahp.plan import Plan
from tests.runtime.run.test_trainer import MODEL, plan
from tests.runtime.run.test_trainer import text as text  # a fixture
from tests.slurm.cluster import SlurmCluster, slurm_cluster, why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.wide,
    pytest.mark.skipif(why_not() is not None, reason=f"no Slurm cluster here: {why_not()}"),
]
STEPS = 2000
"""More than are made before the signal comes; fewer at the end, by hand."""


def steps_in(folder: Path) -> list[int]:
    file = folder / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


def until_step(folder: Path, step: int, within_s: float = 180) -> None:
    end_s = time.monotonic() + within_s
    while len(steps_in(folder)) < step:
        assert time.monotonic() < end_s, f"{len(steps_in(folder))} steps; {logs(folder.parent)}"
        time.sleep(0.2)


def logs(folder: Path) -> str:
    return "\n".join(file.read_text()[-3000:] for file in folder.glob("*.log"))


def exported(text: Path, folder: Path) -> str:
    config = {
        "model": MODEL,
        "cluster": "slurm@10",
        "job": plan(text, steps=STEPS).job.model_dump(mode="json"),
        "run": {"folder": str(folder / "run"), "checkpoint_every": 1000, "sample": False},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    program = folder / "ahp"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m ahp "$@"\n')
    program.chmod(0o755)
    command = [
        sys.executable,
        "-m",
        "ahp",
        "export",
        "slurm",
        "config.yaml",
        "--nodes",
        "1:2",
        "--workers-per-node",
        "1",
    ]
    done = subprocess.run(
        [*command, "--cpu", "--ahp", str(program)], cwd=folder, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    return done.stdout.split("sbatch ")[1].strip()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    (tmp_path / "slurm").mkdir()
    with slurm_cluster(tmp_path / "slurm") as found:
        yield found


def test_signal_requeue_and_a_drained_node(text: Path, tmp_path: Path, cluster: SlurmCluster) -> None:
    script, run = exported(text, tmp_path), tmp_path / "run"
    number = cluster.run("sbatch", "--parsable", script, cwd=tmp_path).strip()
    until_step(run, 5)
    assert cluster.job(number)["NumNodes"] == "2"
    assert Plan.load(run).parallelism.world_size == 2

    cluster.run("scancel", "--signal=USR1", number)
    job = cluster.until(number, "PENDING", 60)
    assert job["Restarts"] == "1"
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["exit_code"]) in {("interrupted", 138), ("interrupted", 143)}
    saved = status["step"]
    assert 5 <= saved < 1000, logs(tmp_path)
    assert (run / "checkpoints" / f"step-{saved}").is_dir()

    cluster.run("scontrol", "update", "NodeName=ahp-node2", "State=DRAIN", "Reason=test")
    # By itself Slurm waits two minutes; at once the node would take the job for the one that it ended this second.
    cluster.run("scontrol", "update", f"JobId={number}", "StartTime=now+5")
    cluster.until(number, "RUNNING", 150)
    until_step(run, saved + 5)
    assert cluster.job(number)["NodeList"] == "ahp-node1"
    assert Plan.load(run).parallelism.world_size == 1
    steps = steps_in(run)
    assert steps == list(range(1, len(steps) + 1))
    cluster.run("scancel", number)
    cluster.until(number, "CANCELLED", 60)
    assert json.loads((run / "status.json").read_text())["state"] == "interrupted"
