"""A rank that is slower than its like is named, with what it is slow in; ranks that differ as planned are not."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ahp.job import Job
from ahp.plan import Parallelism, Plan
from ahp.runtime.run.own_time import OwnTime
from ahp.runtime.run.slow_ranks import Judge, as_shares, roles, slow_links
from tests.runtime import slow
from tests.runtime.workers import Pool

STEP_S = 0.2


def took(computing_s: float = 0.1, core_s: float = 0.0, data_s: float = 0.0) -> OwnTime:
    return OwnTime(computing_s, core_s, data_s, STEP_S)


def judged(*windows: list[OwnTime], alike: str = "aaaa") -> list[dict[int, tuple[float, str]]]:
    """Of each window the ranks that are slow: (ratio, reason)."""
    judge, standing, said = Judge(list(alike)), [], []
    for window in windows:
        found = judge.after(window, standing)
        standing = list(found)
        said.append({rank: (round(one.ratio, 2), one.reason) for rank, one in found.items()})
    return said


def test_a_rank_is_slow_from_1_3_times_its_like_on_and_for_its_largest_part() -> None:
    even = [took()] * 4
    assert judged(even) == [{}]
    assert judged([took(0.129), *even[1:]]) == [{}]
    assert judged([took(0.131), *even[1:]]) == [{0: (1.31, "processor")}]
    assert judged([*even[:3], took(core_s=0.06)]) == [{3: (1.6, "processor")}]
    assert judged([*even[:3], took(0.11, data_s=0.05)]) == [{3: (1.6, "data")}]
    assert judged([took(0.2), took(0.2), *even[2:]], alike="aabb") == [{}], "as slow as its like"
    assert judged([took(0.002), *[took(0.0012)] * 3]) == [{}], "less than a millisecond"


def test_a_rank_at_the_threshold_is_told_once() -> None:
    at = [[took(ratio / 10), *[took()] * 3] for ratio in (1.35, 1.25, 1.19, 1.25)]
    assert [set(found) for found in judged(*at)] == [{0}, {0}, set(), set()]


def test_a_rank_without_its_like_is_compared_with_itself() -> None:
    """Of a pipeline with uneven stages; where all are slower, the job is, and no rank."""
    usual, faster = [took(0.1), took(0.3)], [took(0.09), took(0.27)]
    late = [took(0.2), took(0.28)]
    assert judged(usual, faster, late, alike="ab") == [{}, {}, {0: (2.14, "processor")}]
    assert judged(usual, [took(0.2), took(0.6)], alike="ab") == [{}, {}]
    assert judged([took(0.0), took(0.0)], usual, alike="ab") == [{}, {}]


def test_a_gpu_is_as_slow_as_its_products_and_its_data() -> None:
    products = [took(1e-3)] * 3
    assert judged(as_shares([*products, took(1.4e-3)], list("aaaa"))) == [{3: (1.4, "processor")}]
    assert judged(as_shares([*products, took(1e-3, data_s=0.05)], list("aaaa"))) == [{3: (1.33, "data")}]
    mixed = as_shares([took(1e-3), took(1e-3), took(3e-3), took(4.5e-3)], list("aabb"))
    assert judged(mixed, alike="aabb") == [{3: (1.5, "processor")}]
    assert judged(as_shares([took(0.0)] * 4, list("aaaa"))) == [{}], "no product is over yet"


def test_a_slow_link_is_its_ranks() -> None:
    assert slow_links([0.01, 0.01, 0.02, 0.01])[2].ratio == 2.0
    assert slow_links([0.01, 0.01, 0.012, 0.01]) == {}
    assert slow_links([0.0, 0.0]) == {}


def test_like_are_ranks_of_one_stage_and_share() -> None:
    p = Parallelism(pipeline_parallel_degree=2, data_parallel_replicate_degree=2, micro_batches_per_replica=(3, 1))
    plan = Plan(parallelism=p, job=Job(global_batch_size=4))
    assert roles(plan) == [(0, 3, None), (0, 1, None), (1, 3, None), (1, 1, None)]
    even = Plan(parallelism=Parallelism(tensor_parallel_degree=2, data_parallel_replicate_degree=2))
    assert len(set(roles(even))) == 1


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("text")
    shutil.copy(json.__file__, folder / "a.txt")
    shutil.copy(shutil.__file__, folder / "b.txt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AHP_CACHE", str(folder / "cache"))
        yield folder


REPLICAS = Parallelism(data_parallel_replicate_degree=2, micro_batch_size=2)
UNEVEN = Parallelism(pipeline_parallel_degree=2, micro_batch_size=2, layers_per_stage=(1, 2))


def found(
    pool: Pool,
    text: Path,
    folder: Path,
    layout: Parallelism,
    *,
    more: float = 1.0,
    slow_data: bool = False,
    steps: int = 22,
) -> tuple[list[dict[str, Any]], str]:
    """``slow_ranks`` of status.json after the run, and what it said."""
    job = {"data": str(text), "steps": steps, "global_batch_size": 4, "sequence_length": 16, "precision": "fp32"}
    plan = Plan(model="tests.runtime.slow:model", job=Job.model_validate(job), parallelism=layout)
    pool.run(slow.train, layout.world_size, plan, folder, os.environ["AHP_CACHE"], more, slow_data)
    notes = folder / "log" / "notes.txt"
    said = notes.read_text() if notes.exists() else ""
    return json.loads((folder / "status.json").read_text())["slow_ranks"], said


@pytest.mark.slow
def test_a_rank_that_computes_longer_is_named(pool: Pool, text: Path, tmp_path: Path) -> None:
    (one,), said = found(pool, text, tmp_path / "run", REPLICAS, more=4.0)
    assert (one["rank"], one["host"], one["reason"], one["since_step"]) == (1, socket.gethostname(), "processor", 1)
    assert one["ratio"] > 1.3
    assert f"step 20: rank 1 on {socket.gethostname()} is slow (processor): {one['ratio']:.2f} times its like" in said


@pytest.mark.slow
def test_a_rank_whose_data_comes_late_is_named(pool: Pool, text: Path, tmp_path: Path) -> None:
    (one,), said = found(pool, text, tmp_path / "run", REPLICAS, slow_data=True)
    assert (one["rank"], one["reason"]) == (1, "data")
    assert "is slow (data): " in said
    assert "it waits for its data" in said


@pytest.mark.slow
@pytest.mark.parametrize("layout", [REPLICAS, UNEVEN], ids=lambda p: p.short())
def test_even_ranks_and_uneven_stages_are_not_named(
    pool: Pool, text: Path, tmp_path: Path, layout: Parallelism
) -> None:
    """All burn the same in the second stage alone."""
    steps = 42 if layout is UNEVEN else 22
    assert found(pool, text, tmp_path / "run", layout, steps=steps) == ([], "")
