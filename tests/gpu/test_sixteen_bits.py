"""bf16 on a GPU: compiled blocks beside eager ones, loss and gradient norm, at each layout that one GPU has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.runtime.compute.test_bf16 import FIRST, LAST, RATE
from tests.runtime.models import BUILDERS, JOB, OPTIMIZER, batch

STEPS = 6
LAYOUTS: list[dict[str, Any]] = [
    {}, {"micro_batch_size": 2}, {"micro_batch_size": 2, "activation_checkpoint": "selective"},
    {"micro_batch_size": 2, "activation_checkpoint": "full"},
]  # fmt: skip


def curve(model: str, layout: dict[str, Any], engine: dict[str, Any]) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step in bf16."""
    from ahp.runtime.parallel import parallelize

    job = {**JOB, "precision": "bf16", "optimizer": {**OPTIMIZER, "learning_rate": RATE}}
    parallel = parallelize(BUILDERS[model](), {"job": job, "parallelism": layout, "engine": engine})
    results = [parallel.step(parallel.shard(batch(step))) for step in range(STEPS)]
    return [(result.loss, result.grad_norm) for result in results]


def assert_alike(found: list[tuple[float, float]], expected: list[tuple[float, float]]) -> None:
    """Within what rounding to bf16 makes of sums in another order, and steps of it."""
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        allowed = FIRST + (LAST - FIRST) * step / (STEPS - 1)
        assert ours == pytest.approx(theirs, rel=allowed), f"step {step}"


@pytest.mark.parametrize("engine", [{"compile": True}, {"compile": True, "loss_chunk_tokens": 7}], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_compiled_steps_equal_eager_ones(
    model: str, layout: dict[str, Any], engine: dict[str, Any], alone: torch.device
) -> None:
    eager = {**engine, "compile": False}
    assert_alike(curve(model, layout, engine), curve(model, layout, eager))
