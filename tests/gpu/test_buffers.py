"""Buffers that a forward writes, on a GPU: once a micro-batch, and kept over a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.averages import How, averaging
from tests.runtime.models import JOB, batch


def start(how: How, layout: dict[str, Any]) -> Any:
    from ahp.runtime.parallel import parallelize

    return parallelize(averaging(how), {"job": JOB, "parallelism": {"micro_batch_size": 2, **layout}})


@pytest.mark.parametrize("how", ["in place", "assigned", "batch norm"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_restart_keeps_them(alone: torch.device, tmp_path: Path, how: How, recompute: str) -> None:
    whole, stopped = start(how, {}), start(how, {"activation_checkpoint": recompute})
    for step in range(2):
        expected = whole.step(whole.shard(batch(step)))
        found = stopped.step(stopped.shard(batch(step)))
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
    stopped.save(tmp_path)
    again = start(how, {"activation_checkpoint": recompute})
    again.load(tmp_path)
    assert all(buffer.device == alone for buffer in again.state.buffers.tensors().values())
    for step in range(2, 4):
        expected, found = whole.step(whole.shard(batch(step))), again.step(again.shard(batch(step)))
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
    for name, buffer in whole.state.buffers.tensors().items():
        torch.testing.assert_close(again.state.buffers.tensors()[name], buffer, rtol=1e-4, atol=1e-5)
