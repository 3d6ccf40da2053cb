"""What a training loop may make the host wait for on a GPU: nothing within a step, a step's numbers when they are read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ahp.runtime.parallel import Parallel, parallelize
from ahp.runtime.torch_compat import local_tensor
from tests.runtime.models import BUILDERS, JOB, OPTIMIZER, batch

ENGINES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "muon": {"optimizer": {"name": "muon"}},
    "fp16": {"precision": "fp16"},
    "bf16": {"precision": "bf16"},
    "recompute": {"activation_checkpoint": "full"},
    "micro-batches": {"micro_batch_size": 2},
}


def made(
    *, optimizer: dict[str, Any] | None = None, precision: str = "fp32", offload: bool = False, **layout: Any
) -> Parallel:
    job = {**JOB, "precision": precision, "optimizer": {**OPTIMIZER, **(optimizer or {})}}
    return parallelize(
        BUILDERS["llama"](), {"job": job, "parallelism": layout, "engine": {"offload_optimizer": offload}}
    )


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the device is an error."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("kind", ENGINES)
def test_the_host_waits_for_nothing_within_a_step(alone: torch.device, kind: str) -> None:
    parallel = made(**ENGINES[kind])
    for step in range(2):  # kernels and states are made in the first
        parallel.step(parallel.shard(batch(step)))
    parts = [{key: value.pin_memory() for key, value in batch(step).items()} for step in (2, 3)]
    torch.cuda.synchronize()
    with no_waiting():
        results = [parallel.step(part) for part in parts]
    assert [math.isfinite(result.loss) and math.isfinite(result.grad_norm) for result in results] == [True, True]


def test_the_guard_sees_a_wait(alone: torch.device) -> None:
    with no_waiting(), pytest.raises(RuntimeError, match="synchronizing"):
        torch.ones((), device=alone).item()


def test_a_result_waits_for_its_own_step_alone(alone: torch.device) -> None:
    parallel = made()
    first = parallel.step(parallel.shard(batch(0)))
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second of the device's clock, queued after the step
    later = torch.cuda.Event()
    later.record()
    assert math.isfinite(first.loss)
    assert not later.query(), "reading the first step's loss waited for what was queued after it"
    torch.cuda.synchronize()


def weights(parallel: Parallel) -> list[torch.Tensor]:
    moments = [
        value for name in parallel.state.optimizer.shards for value in parallel.state.optimizer.moments(name).values()
    ]
    return [local_tensor(p.detach()).clone() for p in parallel.parameters.values()] + [m.clone() for m in moments]


@pytest.mark.parametrize(
    "kind", [{}, {"optimizer": {"name": "muon"}}, {"offload": True}, {"precision": "fp16"}], ids=str
)
def test_a_step_left_out_on_the_device_is_one_that_was_not_taken(alone: torch.device, kind: dict[str, Any]) -> None:
    ours, other = made(**kind), made(**kind)
    gradients = ours.state.local.gradients

    def poisoned() -> dict[str, torch.Tensor]:
        found = gradients()
        if ours.num_steps_done == 1:
            for gradient in found.values():
                gradient.fill_(math.nan)
        return found

    ours.state.local.gradients = poisoned  # type: ignore[method-assign]
    for step in range(3):
        before = weights(ours)
        result = ours.step(ours.shard(batch(step)))
        if step == 1:
            assert result.failed or result.skipped
            assert all(torch.equal(a, b) for a, b in zip(weights(ours), before, strict=True))
            other.state.num_steps_done += 1
            if "precision" in kind:
                other.state.loss_scale.update(torch.ones((), device=alone))
        else:
            assert math.isfinite(result.grad_norm)
            other.step(other.shard(batch(step)))
    assert all(torch.equal(a, b) for a, b in zip(weights(ours), weights(other), strict=True))
