"""The documented commands for several nodes, on this machine: another host, port and numbers, and nothing else."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.runtime.run.test_trainer import HALF, MODEL, STEPS, curve, plan
from tests.runtime.run.test_trainer import text as text  # a fixture
from tests.runtime.workers import free_port, listened_on

ROOT = Path(__file__).parents[3]
PROGRAMS = Path(sys.executable).parent


def documented(program: str) -> list[str]:
    lines = (ROOT / "docs" / "training.md").read_text().splitlines()
    return [line for line in lines if line.startswith(f"{program} --")]


def entry_points_of_the_package(folder: Path) -> Path:
    """A folder in which Python finds them as pyproject.toml has them now, whenever the package was installed."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    about = folder / "entry_points_of_ahp-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: entry-points-of-ahp\nVersion: 0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in given.items())
        for group, given in groups.items()
    ]
    (about / "entry_points.txt").write_text("\n".join(lines))
    return folder


@pytest.mark.slow
def test_the_commands_for_two_nodes_train(text: Path, tmp_path: Path) -> None:
    config = {
        "model": MODEL,
        "cluster": {"nodes": 2, "devices_per_node": 1, "device": "cpu", "inter_node_gbps": 10},
        "job": plan(text).job.model_dump(mode="json"),
        "parallelism": {"data_parallel_shard_degree": 2},
        "run": {"folder": str(tmp_path / "run"), "checkpoint_every": HALF},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    commands = documented("torchrun")
    assert [re.findall(r"--rdzv-conf rank=(\d)", command) for command in commands] == [["0"], ["1"]]
    installed = entry_points_of_the_package(tmp_path / "installed")
    port, others = free_port(), listened_on()
    paths = {"PATH": f"{PROGRAMS}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join([str(installed), *sys.path])}
    nodes = []
    for command in commands:
        here = command.replace("HOST", "127.0.0.1").replace("29500", str(port))
        here = here.replace("--nproc-per-node 8", "--nproc-per-node 1") + " --json"
        nodes.append(
            subprocess.Popen(shlex.split(here), cwd=tmp_path, env={**os.environ, **paths}, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True)
        )  # fmt: skip
    while not (tmp_path / "run" / "metrics.jsonl").exists() and all(node.poll() is None for node in nodes):
        time.sleep(0.1)
    addresses = listened_on() - others
    (out, error), (silence, other_error) = (node.communicate() for node in nodes)
    assert [node.returncode for node in nodes] == [0, 0], f"{error}\n{other_error}"
    result = json.loads(out)
    assert (result["state"], result["step"]) == ("done", STEPS)
    assert silence == ""
    assert f"127.0.0.1:{port}" in addresses
    assert not {address.rpartition(":")[0] for address in addresses} & {"::", "0.0.0.0"}
    assert len(curve(tmp_path / "run")) == STEPS


def test_slurms_command_starts_the_same_on_each_node(tmp_path: Path) -> None:
    """With programs of those names that do what Slurm's do, one node after the other, and an ahp that says how it is called."""
    programs = {
        "srun": 'while [ "$1" != bash ]; do shift; done\nfor n in 0 1; do SLURM_NODEID=$n SLURM_JOB_NODELIST="n[0-1]" "$@"; done',
        "scontrol": '[ "$*" = "show hostnames n[0-1]" ] && printf "HOST\\nanother\\n"',
        "ahp": 'echo ahp "$@"',
    }
    for name, script in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    (command,) = documented("srun")
    assert len(documented("ahp train config.yaml --nodes 2")) == 1
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ended = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == documented("ahp train config.yaml --nodes 2") * 2
