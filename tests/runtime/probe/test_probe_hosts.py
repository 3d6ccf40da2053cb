"""``ahp probe`` on several hosts: how they meet, what ends it, and the real thing in processes that find each other over the loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from ahp.cli import probe_hosts as command
from ahp.cli.main import main
from ahp.cluster import measure, team
from ahp.cluster.model import Cluster
from ahp.errors import AhpError, BadInput
from ahp.runtime.probe import hosts, meeting
from ahp.runtime.probe.meeting import Meeting, Place
from ahp.runtime.ranks import slurm
from ahp.runtime.ranks.meeting import NoAnswer
from ahp.runtime.ranks.own_store import store_on
from tests.cluster.test_hosts import host
from tests.runtime import workers
from tests.runtime.probe import given
from tests.runtime.workers import free_port

own = threading.local()


def together(count: int, work: Callable[[Meeting], Any]) -> list[Any]:
    """What each of some hosts, threads here, comes to; an error is a result too."""
    port = free_port()
    kept = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)

    def one(number: int) -> Any:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
        own.number = number
        try:
            return work(Meeting(Place(store, ("127.0.0.1", port), number, count), within_s=20))
        except (AhpError, SystemExit) as error:
            return error

    with ThreadPoolExecutor(count) as threads:
        found = list(threads.map(one, range(count)))
    del kept
    return found


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Hosts in threads that measure nothing: speeds by number, links of 1 Gb/s, 0.1 between hosts 0 and 3."""
    has: dict[str, Any] = {"speeds": [0.5, 1.0, 0.5, 1.0], "version": lambda number: "1.0", "error": None}

    def results(settings: dict[str, Any], module: str) -> Any:
        assert module == hosts.LINK_WORKER
        for pairs in settings["rounds"]:
            for low, high in pairs:
                if settings["host"] == low:
                    rate = 1.25e7 if (low, high) == (0, 3) else 1.25e8
                    one_way = {str(size): 1e-4 + size / rate for size in (4, 2**22)}
                    yield {"pair": [low, high], str(low): one_way, str(high): one_way, **(has["error"] or {})}

    def probe(**_: Any) -> Cluster:
        return Cluster(groups=(host("here", has["speeds"][own.number]).nodes,))

    monkeypatch.setattr(team, "results", results)
    monkeypatch.setattr(measure, "probe", probe)
    monkeypatch.setattr(hosts, "own_name", lambda: f"h{own.number}")
    monkeypatch.setattr(hosts, "version", lambda program: has["version"](own.number))  # torch's
    return has


def probed(check: Callable[[], None] = lambda: None) -> Callable[[Meeting], Any]:
    def work(at: Meeting) -> Any:
        found = hosts.probe_hosts(
            at, check=check, quick=True, workers=None, progress=lambda what, share: None, folder="."
        )
        at.leave()
        return found

    return work


@pytest.mark.slow
def test_groups_and_links_come_from_what_hosts_say_and_not_from_their_order(made_up: dict[str, Any]) -> None:
    found, *others = together(4, probed())
    assert others == [None] * 3, "the first alone writes"
    fast, slow = found.cluster.groups
    assert (fast.hosts, slow.hosts) == (("h1", "h3"), ("h0", "h2"))
    assert [link.between for link in found.cluster.links] == [("cpu-1", "cpu-2")]
    assert fast.inter_node is not None
    assert fast.inter_node.bandwidth_bytes_per_s == pytest.approx(1.25e8)
    assert len(found.directions) == 12
    assert any("h0 to h3 0.1" in warning for warning in found.warnings)
    shown = "\n".join(command.lines(found))
    assert "cpu-1: h1, h3" in shown
    assert "all pairs in 3 of 3 rounds" in shown
    made_up["speeds"] = [1.0] * 4
    assert not together(4, probed())[0].cluster.is_mixed


def test_hosts_of_different_versions_are_refused_on_all(made_up: dict[str, Any]) -> None:
    made_up["version"] = lambda number: "1.1" if number == 2 else "1.0"
    for error in together(3, probed()):
        assert isinstance(error, BadInput)
        assert "different versions of torch (1.0 on h0, 1.0 on h1, 1.1 on h2)" in str(error)


def test_a_file_that_exists_ends_it_before_anything_is_measured(
    made_up: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("")
    monkeypatch.setattr(measure, "probe", lambda **_: pytest.fail("measured"))
    first, second = together(2, probed(lambda: command._require_new(file)))  # pyright: ignore[reportPrivateUsage]
    assert isinstance(first, BadInput)
    assert "exists already; give another file, or delete it" in str(first)
    assert isinstance(second, SystemExit)
    assert second.code == 2


def test_hosts_that_do_not_reach_each_other_are_named(made_up: dict[str, Any]) -> None:
    made_up["error"] = {"error": "Connection refused"}
    for error in together(2, probed()):
        assert "h0 and h1 do not reach each other: Connection refused; name the interface" in str(error)


def test_a_host_that_never_comes_is_named_within_a_limit() -> None:
    store = dist.HashStore()
    with pytest.raises(
        NoAnswer, match=r"hosts 1, 2 of 3 did not come to the probe of several hosts within 0.2 s; host 0 did, on "
    ):
        Meeting(Place(store, ("127.0.0.1", 1), 0, 3), within_s=0.2)


def test_the_first_is_whoever_keeps_the_store_and_one_too_many_is_refused() -> None:
    address = f"127.0.0.1:{free_port()}"
    first, second = meeting.at_rendezvous(2, address), meeting.at_rendezvous(2, address)
    assert (first.number, first.is_first, second.number) == (0, True, 1)
    with pytest.raises(BadInput, match=r"--nodes = 2: so many hosts have come to 127.0.0.1:\d+ already"):
        meeting.at_rendezvous(2, address)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--nodes", "2"], "--rendezvous missing"),
        (["--rendezvous", "10.0.0.1"], "--nodes missing"),
        (["--nodes", "0", "--rendezvous", "10.0.0.1"], "--nodes = '0': must be a number of nodes"),
        (["--nodes", "2", "--rendezvous", "10.0.0.1", "--inter-node-gbps", "1"], "the network of several hosts is measured"),
    ],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", *words]) == 2
    assert told in capsys.readouterr().err


def test_under_torchrun_a_host_is_there_once_whatever_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(meeting, "launchers_store", lambda: (store, 4, 8))
    known = {"RANK": "4", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_RANK", "0")
    found = meeting.under_launcher()
    assert found == Place(store, ("10.0.0.1", 29500), 1, 2)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert meeting.under_launcher() is None


def test_under_srun_with_several_tasks_on_a_node_the_first_stands_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    store, kept = dist.HashStore(), object()
    monkeypatch.setattr(meeting, "launchers_store", lambda: (store, 2, 3))
    monkeypatch.setattr(meeting.slurm, "become_worker", lambda task: kept)
    monkeypatch.setenv("MASTER_ADDR", "node1")
    monkeypatch.setenv("MASTER_PORT", "20296")
    task = slurm.Task(
        number=2, tasks=3, local=0, tasks_here=1, node=1, nodes=2, first_node="node1", port=20296
    )  # two tasks on the first node, one on the second
    assert meeting.under_srun(task) == Place(store, ("node1", 20296), 1, 2, kept)
    assert meeting.under_srun(replace(task, number=1, local=1, node=0)) is None


def wait(processes: list[subprocess.Popen[str]]) -> list[str]:
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    return outputs


@pytest.mark.wide  # two nodes below and the hosts of tests/hosts meet, measure and write in the same way
def test_three_processes_over_the_loopback_write_one_cluster(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo"}
    words = [sys.executable, "-m", "ahp", "probe", "--quick", "--workers", "1", "--nodes", "3", "--rendezvous", address]
    processes = [
        subprocess.Popen(
            [*words, "-o", str(tmp_path / f"{number}.yaml"), "--json"], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )
        for number in range(3)
    ]  # fmt: skip
    outputs = wait(processes)
    [file] = tmp_path.glob("*.yaml")
    cluster = Cluster.load(file)
    assert [Cluster.from_dict(json.loads(out)) for out in outputs if out] == [cluster]
    assert cluster.num_devices == 3
    for group in cluster.groups:
        assert group.measured is not None
        assert (group.inter_node is None) == (group.nodes == 1)
    assert len(cluster.links) == len(cluster.groups) * (len(cluster.groups) - 1) // 2


def as_launched(rank: int, world_size: int, folder: str, port: int) -> int:
    """In each worker, as torchrun starts the second of two on a node."""
    dist.destroy_process_group()
    node, local = divmod(rank, 2)
    variables = {
        **workers.place(rank, world_size, port), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    with mock.patch.dict(os.environ, variables):
        return given.run(["probe", "--quick", "--workers", "1", "-o", f"{folder}/{node}.yaml"])


def test_the_first_of_each_nodes_workers_measures_for_it(pool: workers.Pool, tmp_path: Path) -> None:
    """What a host measures of itself is given: tests/hosts measures it on two that differ."""
    store = store_on("127.0.0.1", 0, option="the launcher's store")
    assert pool.run(as_launched, 4, str(tmp_path), store.port) == [0] * 4
    [file] = tmp_path.glob("*.yaml")
    assert file.name == "0.yaml"
    assert Cluster.load(file).num_devices == 2


@pytest.mark.wide  # as the test above, and as tests/runtime/run/test_nodes.py starts ahp train
def test_two_nodes_of_torchrun_are_two_hosts_with_two_workers_each(tmp_path: Path) -> None:
    port = free_port()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [
                sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "ahp",
                "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", f"rank={node}", "-m", "tests.runtime.probe.given", "probe",
                "--quick", "--workers", "1", "-o", str(tmp_path / f"{node}.yaml"),
            ],
            env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for node in range(2)
    ]  # fmt: skip
    wait(processes)
    [file] = tmp_path.glob("*.yaml")
    assert file.name == "0.yaml"
    assert Cluster.load(file).num_devices == 2
