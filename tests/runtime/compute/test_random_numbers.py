"""Layers that Python's or NumPy's own generator drops: the same on ranks that share tokens. The program's own numbers stay as they were."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer

from tests.runtime.models import JOB, VOCABULARY, Custom, batch
from tests.runtime.workers import Pool
from tests.search.families import build

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


class DropsItself(MixtralDecoderLayer):
    """Leaves itself out, with its experts, so that ranks which share experts would wait for each other."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.training and random.random() < 0.5:
            return hidden_states
        return super().forward(hidden_states, *args, **kwargs)


def train_experts(rank: int, world: int, layout: dict[str, Any]) -> list[tuple[float, float]]:
    """Runs in each worker."""
    from ahp.runtime.parallel import parallelize

    torch.manual_seed(0)
    model = build(
        "mixtral", device="cpu", vocab_size=VOCABULARY, num_hidden_layers=4, num_local_experts=4, hidden_size=32,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    for block in model.model.layers:
        block.__class__ = DropsItself
    parallel = parallelize(model, {"job": JOB, "parallelism": layout})
    results = [parallel.step(parallel.shard(batch(step))) for step in range(STEPS)]
    return [(r.loss, r.grad_norm) for r in results]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_ranks_that_share_experts_drop_the_same_layers(pool: Pool, recompute: str) -> None:
    (one,) = pool.run(train_experts, 1, {"micro_batch_size": 8})  # as many draws as a rank with half of the rows makes
    shared = {"data_parallel_shard_degree": 2, "expert_parallel_degree": 2, "micro_batch_size": 4}
    for each in pool.run(train_experts, 2, {**shared, "activation_checkpoint": recompute}):
        assert np.array(each) == pytest.approx(np.array(one), rel=1e-4)
