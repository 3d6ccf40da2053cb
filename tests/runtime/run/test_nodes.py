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

from ahp.cli.nodes import asked
from ahp.runtime.ranks.slurm import task
from tests.runtime.ranks.test_slurm import STEP
from tests.runtime.run.test_trainer import HALF, STEPS, curve, plan
from tests.runtime.run.test_trainer import text as text  # a fixture
from tests.runtime.workers import free_port, listened_on

ROOT = Path(__file__).parents[3]
PROGRAMS = Path(sys.executable).parent


def documented(program: str) -> list[str]:
    lines = (ROOT / "docs" / "train" / "several-nodes.md").read_text().splitlines()
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
        "model": "tests.runtime.models:OfTexts",
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
    if any(node.poll() for node in nodes):  # the others wait for one that failed, and would for ten minutes
        for node in nodes:
            node.kill()
    (out, error), (silence, other_error) = (node.communicate() for node in nodes)
    assert [node.returncode for node in nodes] == [0, 0], f"{error}\n{other_error}"
    result = json.loads(out)
    assert (result["state"], result["step"]) == ("done", STEPS)
    assert silence == ""
    assert f"127.0.0.1:{port}" in addresses
    assert not {address.rpartition(":")[0] for address in addresses} & {"::", "0.0.0.0"}
    assert len(curve(tmp_path / "run")) == STEPS


def test_sruns_command_makes_each_task_the_launcher_of_its_node() -> None:
    (command,) = documented("srun")
    options, words = command.split(" ahp train ")
    given = dict(pair.rsplit(" ", 1) for pair in options.removeprefix("srun --").split(" --"))
    assert (words, given["nodes"], given["ntasks-per-node"]) == ("config.yaml", "2", "1")
    for node in "01":
        place = task({**STEP, "SLURM_PROCID": node, "SLURM_NODEID": node})
        assert asked(None, None, None, place) == (2, 2, f"localhost:{20_000 + 37 * 8}", None)
