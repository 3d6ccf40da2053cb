"""``run.on_nan`` on real layouts: one rank's gradient is no number at one step, all ranks do the same, to the last digit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ahp.runtime.ranks.ranks import Ranks
from ahp.runtime.run.folder import RunFolder
from ahp.runtime.run.loop import Diverged, Loop, Settings
from ahp.runtime.run.stop_signal import StopRequest
from tests.runtime.models import BUILDERS, JOB, OPTIMIZER, batch
from tests.runtime.workers import Pool

STEPS, BAD, SAVED = 8, 6, 4
"""The gradient of step 6 is no number; the checkpoint before it is that of step 4."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero3": {"data_parallel_shard_degree": 2, "zero_stage": 3, "micro_batch_size": 4},
    "1f1b": {"pipeline_parallel_degree": 2, "micro_batch_size": 2},
}
CASES = [
    ("zero3", 1),
    pytest.param("1f1b", 0, marks=pytest.mark.slow),
    *(pytest.param(*case, marks=pytest.mark.wide) for case in (("zero3", 0), ("1f1b", 1))),
]
JOB_OF_RUN = {**JOB, "steps": STEPS, "optimizer": {**OPTIMIZER, "schedule": "cosine", "warmup_steps": 2}}
Curve = dict[int, tuple[float | None, float | None]]


def made(layout: dict[str, Any]) -> Any:
    from ahp.runtime.parallel import parallelize

    return parallelize(BUILDERS["llama"](), {"job": JOB_OF_RUN, "parallelism": layout})


def run(rank: int, world: int, layout: dict[str, Any], on_nan: str, ahead: int, folder: str) -> dict[str, Any]:
    """A run whose second rank finds a gradient that is no number."""
    parallel = made(layout)
    gradients = parallel.state.local.gradients

    def poisoned() -> dict[str, torch.Tensor]:
        found = gradients()
        if rank == 1 and parallel.num_steps_done == BAD - 1:
            next(iter(found.values())).fill_(math.nan)
        return found

    parallel.state.local.gradients = poisoned
    where = RunFolder(folder)
    where.create()
    loop = Loop(
        parallel=parallel,
        batches=lambda step, rows: {key: value[rows.start : rows.stop] for key, value in batch(step).items()},
        plan=parallel.plan,
        folder=where,
        ranks=Ranks(rank, world, torch.device("cpu")),
        settings=Settings(checkpoint_every=SAVED, on_nan=on_nan),  # type: ignore[arg-type]
        stop=StopRequest(),
        data_fingerprint="abc",
        steps_ahead=ahead,
    )
    try:
        loop.run()
        said = ""
    except Diverged as error:
        said = str(error)
    dist.barrier()
    return {"curve": curve(where), "said": said, "steps": parallel.num_steps_done}


def curve(folder: RunFolder) -> Curve:
    return {m["step"]: (m["loss"], m["grad_norm"]) for m in folder.metrics()}


def by_hand(rank: int, world: int, layout: dict[str, Any], left_out: list[int]) -> Curve:
    """The same job where some steps are not taken."""
    parallel, found = made(layout), {}
    for step in range(1, STEPS + 1):
        if step not in left_out:
            parallel.skip_to(step - 1)
            result = parallel.step(parallel.shard(batch(step - 1)))
            found[step] = (result.loss, result.grad_norm)
    return found


@pytest.mark.parametrize(("layout", "ahead"), CASES)
def test_skip_is_a_run_without_that_step(pool: Pool, tmp_path: Path, layout: str, ahead: int) -> None:
    found = pool.run(run, 2, LAYOUTS[layout], "skip", ahead, str(tmp_path / "run"))
    expected = pool.run(by_hand, 2, LAYOUTS[layout], [BAD])[0]
    assert found[0] == found[1]
    assert found[0]["curve"] == expected | {BAD: (None, None)}


@pytest.mark.parametrize(("layout", "ahead"), CASES)
def test_rollback_is_a_run_without_the_steps_since_the_checkpoint(
    pool: Pool, tmp_path: Path, layout: str, ahead: int
) -> None:
    found = pool.run(run, 2, LAYOUTS[layout], "rollback", ahead, str(tmp_path / "run"))
    expected = pool.run(by_hand, 2, LAYOUTS[layout], list(range(SAVED + 1, BAD + 1)))[0]
    assert found[0] == found[1]
    assert found[0]["curve"][BAD] == (None, None)
    for step in (*range(1, SAVED + 1), *range(BAD + 1, STEPS + 1)):
        assert found[0]["curve"][step] == expected[step], step


@pytest.mark.parametrize(("layout", "ahead"), CASES)
def test_stop_names_the_gradient_and_the_rank(pool: Pool, tmp_path: Path, layout: str, ahead: int) -> None:
    found = pool.run(run, 2, LAYOUTS[layout], "stop", ahead, str(tmp_path / "run"))
    assert found[0]["said"] == found[1]["said"]
    assert f"step {BAD}: loss = " in found[0]["said"]
    assert "the first gradient in backward that is not a number" in found[0]["said"]
    assert "(rank 1)" in found[0]["said"]
    assert f"the checkpoint of step {SAVED} is kept" in found[0]["said"]
    assert sorted(found[0]["curve"]) == list(range(1, BAD))


def by_the_clock(rank: int, world: int, folder: str) -> list[int]:
    """A run of which only the first rank's clock says that a checkpoint is due."""
    from unittest import mock

    where = RunFolder(folder)
    where.create()
    parallel = made(LAYOUTS["zero3"])
    now_s = [0.0]

    def clock() -> float:
        now_s[0] += 1.0 if rank == 0 else 1e-6
        return now_s[0]

    with mock.patch("ahp.runtime.run.loop.time.perf_counter", clock):
        Loop(
            parallel=parallel,
            batches=lambda step, rows: {key: value[rows.start : rows.stop] for key, value in batch(step).items()},
            plan=parallel.plan,
            folder=where,
            ranks=Ranks(rank, world, torch.device("cpu")),
            settings=Settings(checkpoint_every=None, checkpoint_every_s=12.0, keep=9),
            stop=StopRequest(),
            data_fingerprint="abc",
        ).run()
    dist.barrier()
    return [checkpoint.step for checkpoint in where.checkpoints()]


def test_the_first_ranks_clock_says_when_a_checkpoint_is_due(pool: Pool, tmp_path: Path) -> None:
    """Were each rank's own clock asked, they would wait for each other in different collectives."""
    found = pool.run(by_the_clock, 2, str(tmp_path / "run"))
    assert found[0] == found[1]
    assert len(found[0]) > 1
    assert found[0][-1] == STEPS
