"""Layers that Python's or NumPy's own generator drops: the same on ranks that share tokens. The program's own numbers stay as they were."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.runtime.models import JOB, Custom, batch
from tests.runtime.workers import Pool

STEPS = 3


class DropsLayers(Custom):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids) + self.positions[: input_ids.shape[1]]
        for block in self.blocks:
            if not self.training or (random.random() + np.random.random()) > 1:
                x = block(x)
        return self.head(self.norm(x))


def train(rank: int, world: int, layout: dict[str, Any]) -> list[tuple[float, float]]:
    """Runs in each worker."""
    from ahp.runtime.parallel import parallelize

    torch.manual_seed(0)
    model: nn.Module = DropsLayers(32, layers=4)
    parallel = parallelize(model, {"job": JOB, "parallelism": layout})
    random.seed(rank)
    np.random.seed(rank)
    results = [parallel.step(parallel.shard(batch(step))) for step in range(STEPS)]
    assert (random.random(), np.random.random()) == (random.Random(rank).random(), np.random.RandomState(rank).random())
    return [(r.loss, r.grad_norm) for r in results]


def test_ranks_that_share_tokens_drop_the_same_layers(pool: Pool) -> None:
    (one,) = pool.run(train, 1, {})
    for each in pool.run(train, 2, {"tensor_parallel_degree": 2}):
        assert np.array(each) == pytest.approx(np.array(one), rel=1e-4)
