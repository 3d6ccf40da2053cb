"""Two hosts of different speed: probed together, and trained with the probed figures, in either order of the hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml

from ahp.cluster.model import Cluster
from ahp.plan import Plan
from ahp.run_files import read_metrics
from benchmarks.namespaces import Host, HostSpec, hosts
from benchmarks.own_cache import own_cache
from tests.runtime.run.test_trainer import MODEL
from tests.runtime.run.test_trainer import text as text  # a fixture

pytestmark = pytest.mark.slow


def on_each(commands: Mapping[Host, Sequence[str]], folder: Path, cache: str) -> None:
    """A module of Python's on each of some hosts at once, all of which have to end well."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "AHP_CACHE": cache}
    processes = [
        subprocess.Popen(
            [*host.prefix, sys.executable, "-m", *words], cwd=folder,
            env={**environment, **host.environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for host, words in commands.items()
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=500)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * len(processes), said


def test_hosts_are_sensed_and_workers_placed_by_what_they_are(
    two_to_one: list[HostSpec], text: Path, tmp_path: Path
) -> None:
    cache = own_cache(tmp_path)
    with hosts(two_to_one) as made:
        slow, fast = made
        words = ["tests.cluster.small_probe", "probe", "--quick", "--nodes", "2", "--rendezvous", slow.address]
        on_each(dict.fromkeys(made, words), tmp_path, cache)
        cluster = Cluster.load(tmp_path / "cluster.yaml")
        assert [group.hosts for group in cluster.groups] == [(fast.name,), (slow.name,)], "the fastest first"
        assert [group.host.processors for group in cluster.groups] == [0.8, 0.4]
        peaks = [group.device.peak_flops_per_s["fp32"] for group in cluster.groups]
        assert 1.5 < peaks[0] / peaks[1] < 2.7, "2, but for what else this machine does"
        [link] = cluster.links
        assert 0.2 < link.link.bandwidth_bytes_per_s / 62.5e6 < 1.1, "500 Mb/s"
        assert "median of 1 pair of hosts" in link.link.source
        # They are known by their names from here on: imports at two fifths of a processor would only take long.
        for host in made:
            host.set_processors(None)

        config = {
            "model": MODEL,
            "cluster": "cluster.yaml",
            "job": {"data": str(text), "sequence_length": 16, "global_batch_size": 6, "steps": 4, "precision": "fp32"},
            "parallelism": {
                "data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1, "tensor_parallel_degree": 1, "pipeline_parallel_degree": 1,
                "micro_batch_size": 1, "micro_batches_per_replica": [4, 2],
            },
            "run": {"folder": "run", "sample": False},
        }  # fmt: skip
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
        words = ["ahp", "train", "config.yaml", "--nodes", "2", "--rendezvous", slow.address, "--workers-per-node", "1"]
        on_each(dict.fromkeys(made, words), tmp_path, cache)
        run = tmp_path / "run"
        assert Plan.load(run).parallelism.micro_batches_per_replica == (4, 2), "the first rank has the larger part"
        assert len(read_metrics(run / "metrics.jsonl")) == 4

        # Each is the launcher's first once, on workers that join twice.
        places = [[f"{number}@{first.address}:{port}" for number in order] for first, order, port in
                  ((slow, (0, 1), 29501), (fast, (1, 0), 29502))]  # fmt: skip
        words = ["tests.hosts.placed", str(run / "plan.yaml"), str(tmp_path)]
        on_each(
            {host: [*words, *own] for host, own in zip(made, zip(*places, strict=True), strict=True)}, tmp_path, cache
        )
        assert (tmp_path / fast.name).read_text() == "0 0", "whichever host is the launcher's first"
        assert (tmp_path / slow.name).read_text() == "1 1"
