"""fp16: the loss is scaled as torch.amp.GradScaler scales it, and every rank leaves out the same steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ahp.runtime.optimizer.loss_scale import LossScale
from tests.marks import cases
from tests.runtime.compute.test_bf16 import MICRO, RATE, plain
from tests.runtime.models import BUILDERS, JOB, OPTIMIZER, batch
from tests.runtime.test_equality import LAYOUTS, world_size
from tests.runtime.workers import Pool

STEPS = 8
HIGH = 2.0**22
"""A scale at which gradients of the small models overflow, so that the first steps are left out."""
FIRST, LAST = 5e-4, 2.5e-3
"""Relative, at the first and the last step. Half a unit in the last place of fp16's 11 bits is 5e-4; layouts add up in another
order, and the steps of AdamW carry the difference on."""


@pytest.mark.slow
def test_the_scale_moves_as_gradscalers() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.0), torch.amp.GradScaler("cpu")
    ours = LossScale("fp16")
    for step in range(2200):
        overflowed = step in (3, 4, 150)
        scaler.scale(weight.sum()).backward()
        assert weight.grad is not None
        weight.grad.fill_(math.inf if overflowed else 1.0)
        scaler.step(optimizer)
        scaler.update()
        ours.update(torch.tensor(float(overflowed)))
        assert ours.value == scaler.get_scale(), step
    assert ours.value == 65536 / 8 * 2, "it must have shrunk and grown"


def test_at_a_scale_of_one_an_overflow_is_no_longer_mended() -> None:
    scale = LossScale("fp16")
    scale.value = 2.0
    assert scale.can_shrink()
    for _ in range(3):
        scale.update(torch.tensor(1.0))
        assert (scale.value, bool(scale.can_shrink())) == (1.0, False)


def test_other_precisions_are_not_scaled() -> None:
    scale = LossScale("bf16")
    scale.update(torch.tensor(1.0))
    assert scale.value == scale.factor == 1.0
    assert not scale.can_shrink()
    assert scale.state() == {}


def train(rank: int, world: int, layout: dict[str, Any], folder: str) -> dict[str, Any]:
    from ahp.runtime.parallel import parallelize

    job = {**JOB, "precision": "fp16", "optimizer": {**OPTIMIZER, "learning_rate": RATE}}
    plan = {"job": job, "parallelism": layout}
    parallel = parallelize(BUILDERS["llama"](), plan)
    parallel.state.loss_scale.value = HIGH
    steps = [parallel.step(parallel.shard(batch(step))) for step in range(STEPS)]
    parallel.save(folder)
    again = parallelize(BUILDERS["llama"](), plan)
    again.load(folder)
    assert vars(again.state.loss_scale) == vars(parallel.state.loss_scale)
    return {"steps": steps, "scale": parallel.state.loss_scale.value}


@pytest.mark.parametrize("layout", cases(["one", "zero3", "tp", "1f1b", "zbv"], wide=["tp", "1f1b"]))
def test_layouts_leave_out_the_steps_that_one_process_does(pool: Pool, tmp_path: Path, layout: str) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=HIGH)
    expected = [step for step, _ in zip(plain("llama", torch.float16, scaler), range(STEPS), strict=False)]
    parallelism = {**LAYOUTS[layout], "micro_batch_size": MICRO}
    results = pool.run(train, world_size(parallelism), parallelism, str(tmp_path))
    assert len({str(result) for result in results}) == 1, "ranks disagree"
    skipped = [step.skipped for step in results[0]["steps"]]
    assert skipped == [not math.isfinite(norm) for _, norm in expected]
    assert 0 < sum(skipped) < STEPS - 2
    for number, (got, (loss, norm)) in enumerate(zip(results[0]["steps"], expected, strict=True)):
        allowed = FIRST + (LAST - FIRST) * number / (STEPS - 1)
        assert got.loss == pytest.approx(loss, rel=allowed)
        assert got.skipped or got.grad_norm == pytest.approx(norm, rel=allowed)
