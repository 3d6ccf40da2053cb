"""What another plan would gain is searched for beside training, and told with the slow rank."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ahp.cluster.model import Cluster
from ahp.job import Job
from ahp.plan import Parallelism, Plan
from ahp.run_files import Status
from ahp.runtime.ranks.ranks import Ranks
from ahp.runtime.run import notices
from ahp.runtime.run.folder import RunFolder
from ahp.runtime.run.notices import Notices
from ahp.runtime.run.slow_plan import SlowPlan
from ahp.runtime.run.slow_ranks import SlowRank
from ahp.search.problem import problem_of
from tests.runtime.slow import CONFIG

JOB = Job(global_batch_size=4, sequence_length=64, precision="bf16")
PLAN = Plan(
    model=CONFIG,
    job=JOB,
    cluster=Cluster.parse("2xH100-SXM-80GB").plain(),
    parallelism=Parallelism(data_parallel_replicate_degree=2),
)
SLOW = SlowRank(1, "host", 1.5, "processor", "computes", 1)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    PLAN.save(folder.plan_file)
    return folder


@pytest.mark.slow
def test_a_process_of_its_own_searches_as_if_it_were_no_rank(folder: RunFolder) -> None:
    problem_of(PLAN)  # keeps the graph: at the lowest priority, a trace beside other tests took two minutes
    with mock.patch.dict(os.environ, RANK="1", WORLD_SIZE="2"):
        searching = SlowPlan(folder, 1, 1.5, "processor")
    try:
        assert searching.process.wait(timeout=500) == 0
        found = searching.read()
    finally:
        searching.close()
    assert found is not None
    assert 0 < found["best_step_time_s"] <= found["step_time_s"]
    assert found["words"].startswith("with this device as a group of its own, ahp plan forecasts ")
    slow = Cluster.load(folder.path / "slow-cluster.yaml")
    assert [group.name for group in slow.groups] == ["nodes", "slow"]


def test_a_search_that_is_not_over_ends_with_the_run(folder: RunFolder) -> None:
    searching = SlowPlan(folder, 1, 1.5, "processor")
    assert searching.read() is None
    searching.close()
    assert searching.process.returncode == -9


class Answers(SlowPlan):
    """Is over when it is asked the second time."""

    made: list[tuple[int, str]] = []  # noqa: RUF012

    def __init__(self, folder: RunFolder, rank: int, ratio: float, reason: str) -> None:
        self.rank, self.asked = rank, 0
        self.made.append((rank, reason))

    def read(self) -> dict[str, Any] | None:
        self.asked += 1
        return {"words": f"{self.rank}: 12 % more tokens/s"} if self.asked > 1 else None

    def close(self) -> None:
        return


@pytest.fixture
def watched(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notices]:
    """Of the first rank of a run in which ranks 1 (processor), 2 (data) and 3 (network) are slow."""
    monkeypatch.setattr(notices, "SlowPlan", Answers)
    monkeypatch.setattr(Answers, "made", [])
    found = Notices(PLAN, folder, Ranks(0, 1, torch.device("cpu")))
    slow_data = SlowRank(2, "host", 1.5, "data", "waits", 1)
    found.slow_ranks.standing = {1: SLOW, 2: slow_data, 3: SlowRank(3, "host", 1.4, "network", "its link", 1)}
    with found:
        found.begin()
        yield found


def test_each_slow_rank_is_searched_for_once_and_told(watched: Notices, folder: RunFolder) -> None:
    for step in range(1, 10):
        watched.after({"step": step, "loss": 1.0}, None)
    assert Answers.made == [(1, "processor"), (2, "data"), (3, "network")]
    said = folder.notes_file.read_text()
    assert f"rank 1: 1: 12 % more tokens/s; plan again with: --cluster {folder.path}/slow-cluster.yaml" in said
    kept = json.loads(folder.status_file.read_text())["slow_ranks"]
    assert [one["plan"] for one in kept] == [{"words": f"{rank}: 12 % more tokens/s"} for rank in (1, 2, 3)]


def test_another_process_leaves_there_what_was_noticed(watched: Notices, folder: RunFolder) -> None:
    watched.after({"step": 1, "loss": 1.0}, None)
    folder.write_status(Status("running", 1))
    RunFolder(folder.path).write_status(Status("failed", 1, "why", 1))
    found = json.loads(folder.status_file.read_text())
    assert found["state"] == "failed"
    assert [one["rank"] for one in found["slow_ranks"]] == [1, 2, 3]
    assert found["loss_spikes"] == []
