"""``ahp train --nodes 1:2``: two launchers of one worker each on this machine, of which one is killed and comes back."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from ahp import run_history
from ahp.cluster.model import Cluster
from ahp.runtime.ranks.watch import OWN_CAUSE_S
from ahp.runtime.run.folder import RunFolder
from benchmarks.namespaces import Host, HostSpec, hosts, why_not
from tests.runtime import hanging
from tests.runtime.run.test_trainer import curve, plan
from tests.runtime.run.test_trainer import text as text  # a fixture
from tests.runtime.workers import free_port, listened_on

STEPS, EVERY = 2500, 50
TWO_CORES = {"nodes": 2, "devices_per_node": 1, "device": "cpu", "inter_node_gbps": 10}
PATIENCE_S = 180.0


class Nodes:
    """Launchers of one job; each is a host of its own as far as it knows."""

    def __init__(
        self,
        folder: Path,
        job: dict[str, Any],
        *,
        num_addresses: int = 1,
        model: str = "tests.runtime.models:OfTexts",
        layout: Any = None,
        workers: int = 1,
        **run: Any,
    ) -> None:
        self.folder, self.ports, self.started = folder, [free_port() for _ in range(num_addresses)], []
        self.port = self.ports[0]
        self.rendezvous = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        self.run, self.workers = folder / "run", workers
        config = {
            "model": model,
            "cluster": Cluster.resolve(TWO_CORES).plain(),
            "job": job,
            "parallelism": layout or "auto",
            "run": {"folder": str(self.run), "sample": False, **run},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(config))

    def start(self, host: Host | None = None) -> subprocess.Popen[str]:
        """On this machine, or on a host of its own."""
        command = [sys.executable, "-m", "ahp", "train", "config.yaml", "--nodes", "1:2"]
        prefix, network = ([], {}) if host is None else (host.prefix, host.environment)
        given = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **network}
        node = subprocess.Popen(
            [*prefix, *command, "--workers-per-node", str(self.workers), "--rendezvous", self.rendezvous], cwd=self.folder, env=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, start_new_session=True,
        )  # fmt: skip
        self.started.append(node)
        return node

    def starts(self) -> list[run_history.Start]:
        return run_history.starts(self.run / "starts.jsonl")

    def until(self, said: Callable[[], bool]) -> None:
        began_s = time.monotonic()
        while not said():
            assert any(node.poll() is None for node in self.started), self.started[0].communicate()[1]
            assert time.monotonic() - began_s < PATIENCE_S, self.starts()
            time.sleep(0.1)


def kill(node: subprocess.Popen[str]) -> None:
    """With all that it has started, as when its host loses power."""
    with suppress(psutil.NoSuchProcess):
        for process in [*psutil.Process(node.pid).children(recursive=True), psutil.Process(node.pid)]:
            process.kill()
    node.communicate()


@pytest.fixture
def nodes(text: Path, tmp_path: Path) -> Iterator[Callable[..., Nodes]]:
    made: list[Nodes] = []

    def make(job: dict[str, Any] | None = None, **given: Any) -> Nodes:
        made.append(Nodes(tmp_path, plan(text).job.model_dump(mode="json") | (job or {}), **given))
        return made[-1]

    yield make
    for node in (node for some in made for node in some.started if node.poll() is None):
        kill(node)


@pytest.mark.wide
def test_a_lost_node_is_planned_without_and_joins_again(nodes: Callable[..., Nodes]) -> None:
    job, others = nodes({"steps": STEPS}, checkpoint_every=EVERY), listened_on()
    first = job.start()
    job.until(lambda: f"127.0.0.1:{job.port}" in listened_on())  # it keeps the store
    second = job.start()
    job.until(lambda: len(curve(job.run)) > EVERY)
    addresses = listened_on() - others
    kill(second)
    job.until(lambda: len(job.starts()) > 1 and len(curve(job.run)) > (job.starts()[-1].first_step + EVERY))
    third = job.start()
    (_, error), _ = first.communicate(), third.communicate()
    assert (first.returncode, third.returncode) == (0, 0), error
    history = job.starts()
    assert [start.workers for start in history] == [2, 1, 2]
    assert [start.failed for start in history] == [True, False, False], history
    assert history[1].steps_lost == 0, "it saves before the other joins"
    assert [step for step, *_ in curve(job.run)] == list(range(1, STEPS + 1))
    assert f"127.0.0.1:{job.port}" in addresses
    assert not {address.rpartition(":")[0] for address in addresses} & {"::", "0.0.0.0"}


@pytest.mark.wide
def test_without_the_host_that_keeps_the_store_the_others_end_and_say_so(nodes: Callable[..., Nodes]) -> None:
    if (reason := why_not([HostSpec()] * 2)) is not None:
        pytest.skip(reason)
    with hosts([HostSpec()] * 2) as (one, other):
        job = nodes({"steps": 1_000_000}, checkpoint_every=EVERY)
        job.rendezvous = f"{one.address}:29500"
        first, second = job.start(one), job.start(other)
        job.until(lambda: bool(job.starts()) and job.starts()[-1].workers == 2 and len(curve(job.run)) > EVERY)
        kill(first)
        _, error = second.communicate()
    assert second.returncode == 1
    assert f"the launcher that kept the store at {job.rendezvous} is gone; looking for another one" in error
    assert f"error: --rendezvous {job.rendezvous}: " in error
    assert "start the same command on each node again" in error
    assert "internal error" not in error


@pytest.mark.wide
def test_a_launcher_that_has_the_lost_address_too_keeps_the_store_from_then_on(nodes: Callable[..., Nodes]) -> None:
    job = nodes({"steps": STEPS}, checkpoint_every=EVERY)
    first = job.start()
    job.until(lambda: f"127.0.0.1:{job.port}" in listened_on())
    second = job.start()
    job.until(lambda: len(curve(job.run)) > EVERY)
    kill(first)
    _, error = second.communicate()
    assert second.returncode == 0, error
    assert f"the launcher that kept the store at 127.0.0.1:{job.port} is gone; looking for another one" in error
    assert [start.workers for start in job.starts()] == [2, 1]
    assert [step for step, *_ in curve(job.run)] == list(range(1, STEPS + 1))


@pytest.mark.wide
def test_the_next_address_takes_over_where_the_node_that_keeps_the_store_is_lost(nodes: Callable[..., Nodes]) -> None:
    job = nodes({"steps": STEPS}, num_addresses=2, checkpoint_every=EVERY)
    first = job.start()
    job.until(lambda: f"127.0.0.1:{job.ports[0]}" in listened_on())
    second = job.start()
    job.until(lambda: len(curve(job.run)) > EVERY)
    kill(first)
    job.until(lambda: len(job.starts()) > 1 and len(curve(job.run)) > (job.starts()[-1].first_step + EVERY))
    assert f"127.0.0.1:{job.ports[1]}" in listened_on()
    back = job.start()
    (_, error), _ = second.communicate(), back.communicate()
    assert (second.returncode, back.returncode) == (0, 0), error
    assert "is gone; looking for another one" in error
    history = job.starts()
    assert [start.workers for start in history] == [2, 1, 2], history
    assert [step for step, *_ in curve(job.run)] == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_an_error_that_a_start_would_meet_again_ends_all_at_once(nodes: Callable[..., Nodes]) -> None:
    job = nodes({"data": "nothing/there.txt"})
    ends = [(node.communicate(), node.returncode) for node in [job.start(), job.start()]]
    assert [code for _, code in ends] == [2, 2]
    errors = [error for (_, error), _ in ends]
    assert sum(error.count("nothing/there.txt") for error in errors) == 1, errors
    assert "Traceback" not in "".join(errors)
    assert job.starts() == []


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_its_host_and_axis(nodes: Callable[..., Nodes]) -> None:
    layout = {"pipeline_parallel_degree": 2, "micro_batch_size": 4, "pipeline_parallel_schedule": "GPipe"}
    job = nodes(
        model="tests.runtime.hanging:model", layout=layout, checkpoint_every=2, collective_timeout_s=8.0, elastic={"max_restarts": 0}
    )  # fmt: skip
    ends = [(node.communicate()[1], node.returncode) for node in [job.start(), job.start()]]
    assert 0 not in [code for _, code in ends], ends
    told = (
        f"after step {hanging.AFTER}: rank 1 on {socket.gethostname()} did not come to a collective on axis pp within "
    )
    status = RunFolder(job.run).status()
    assert status is not None
    assert (status.state, status.step) == ("failed", hanging.AFTER)
    assert status.cause is not None
    assert status.cause.startswith(f"{told}run.collective_timeout_s = 8; rank 0 on"), status.cause
    assert any(told in error for error, _ in ends)


@pytest.mark.wide
def test_all_workers_of_a_node_that_hang_are_named_and_ended(nodes: Callable[..., Nodes]) -> None:
    """The only node that came: no other rank waits for them."""
    job = nodes(
        model="tests.runtime.hanging:everywhere", layout={"data_parallel_replicate_degree": 2, "micro_batch_size": 2}, workers=2,
        checkpoint_every=2, collective_timeout_s=3.0, elastic={"max_restarts": 0},
    )  # fmt: skip
    node = job.start()
    _, error = node.communicate()
    assert node.returncode == 1, error
    status, host = RunFolder(job.run).status(), socket.gethostname()
    assert status is not None
    hung = f"ranks 0, 1 on {host} are hanging: for {3 + OWN_CAUSE_S:g} s no step has ended"
    ending = "and no worker has computed, read or written anything (axes of the layout: dp_replicate)"
    told = f"after step {hanging.AFTER}: {hung}, {ending}"
    assert (status.state, status.step, status.cause) == ("failed", hanging.AFTER, told)
    assert told in error
