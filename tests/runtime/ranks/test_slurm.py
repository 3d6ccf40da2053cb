"""A task's place among those of its srun, from variables as Slurm 22.05 sets them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ahp.cli.nodes import asked
from ahp.errors import BadInput
from ahp.runtime.ranks.slurm import address_of, first_of, task, worker_variables

STEP = {
    "SLURM_JOB_ID": "37",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "localhost,node[2-4]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}
UNEVEN = {
    **STEP, "SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_STEP_NUM_NODES": "3",
    "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
}  # fmt: skip


def test_one_task_on_each_node_is_its_launcher() -> None:
    place = task(STEP)
    assert place is not None
    assert place.is_launcher
    assert place.endpoint == f"localhost:{20_000 + 37 * 8}"
    assert asked(None, None, None, place) == (2, 2, place.endpoint, None)
    assert asked("1:2", None, 4, place) == (1, 2, place.endpoint, 4)
    assert asked(None, "10.0.0.1:1", None, place) == (2, 2, "10.0.0.1:1", None)


def test_a_single_task_is_a_launcher_where_it_is_told_its_workers() -> None:
    alone = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    place = task({**STEP, **alone, "SLURM_PROCID": "0", "SLURM_NODEID": "0"})
    assert place is not None
    assert asked(None, None, None, place) is None
    assert asked(None, None, 2, place) == (1, 1, place.endpoint, 2)
    assert asked("2", "10.0.0.1", 2, place) == (2, 2, "10.0.0.1", 2)


def test_several_tasks_on_a_node_are_workers() -> None:
    place = task(UNEVEN)
    assert place is not None
    assert not place.is_launcher
    told = worker_variables(place, {"SLURM_CPUS_PER_TASK": "3", "OMP_WAIT_POLICY": "passive"})
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS", "MASTER_ADDR")
    assert [told[name] for name in names] == ["3", "5", "1", "2", "1", "3", "localhost"]
    assert worker_variables(place, {"OMP_NUM_THREADS": "7"}).get("OMP_NUM_THREADS") is None


@pytest.mark.parametrize(
    "changes",
    [
        {"RANK": "0"},  # torchrun, or a worker of ahp train's own launcher
        {"TORCHELASTIC_RUN_ID": "ahp-round-3"},
    ],
)
def test_no_place_of_srun(changes: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    if "TORCHELASTIC_RUN_ID" in changes:
        monkeypatch.setenv(*next(iter(changes.items())))
    assert task({**STEP, **changes}) is None
    batch = {name: value for name, value in STEP.items() if not name.startswith("SLURM_STEP")}
    assert task(batch) is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"SLURM_PROCID": "2"}, r"SLURM_PROCID = 2: the step has 2.*valid: 0, 1"),
        ({"SLURM_PROCID": "x"}, r"SLURM_PROCID = 'x': must be a whole number"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1"}, r"SLURM_STEP_TASKS_PER_NODE = '1': must tell the tasks of 2 nodes"),
        ({"SLURM_LOCALID": "1"}, r"SLURM_LOCALID = 1 on node 1"),
        ({"SLURM_STEP_NODELIST": ""}, r"SLURM_STEP_NODELIST = ''"),
    ],
)
def test_variables_that_contradict_each_other(changes: dict[str, str], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        task({**STEP, **changes})


def test_options_that_srun_decided_otherwise() -> None:
    launcher, worker = task(STEP), task(UNEVEN)
    with pytest.raises(BadInput, match=r"--nodes = '3:4': .*\(valid: 2\)"):
        asked("3:4", None, None, launcher)
    for options in (("3", None, None), (None, "host", None), (None, None, 2)):
        with pytest.raises(
            BadInput, match="srun has started 5 tasks on 3 nodes, each of which is a worker; leave it out"
        ):
            asked(*options, worker)


def test_a_worker_that_sees_its_own_gpu_alone_is_refused() -> None:
    place = task(UNEVEN)
    assert place is not None
    with pytest.raises(BadInput, match=r"CUDA_VISIBLE_DEVICES = '1': .*--gpu-bind none"):
        worker_variables(place, {"CUDA_VISIBLE_DEVICES": "1"})
    worker_variables(place, {"CUDA_VISIBLE_DEVICES": "0,1"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("gpu[07-09,12],login", "gpu07"),
        ("rack[1-2]n[03,5]", "rack1n03"),
        ("a-1.b,c", "a-1.b"),
        ("cn[5]-ib", "cn5-ib"),
    ],
)
def test_the_first_name_of_a_list(nodes: str, first: str) -> None:
    assert first_of(nodes) == first


def test_a_name_without_an_address_is_looked_up_in_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "no-such-host.invalid"
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "NodeName=$3 Gres=(null) NodeAddr=10.1.2.3 NodeHostName=x"\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert subprocess.run(["scontrol", "", "", ""], check=True, stdout=subprocess.PIPE).stdout
    assert address_of(name) == "10.1.2.3"
    assert address_of("localhost") == "localhost"
