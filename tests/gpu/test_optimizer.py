"""The optimizer on a GPU's fused kernels, where a rank may hold no row of a parameter."""

from __future__ import annotations

import torch
from torch import nn

from ahp.job import Optimizer
from ahp.runtime.optimizer.adamw import ShardedOptimizer


def test_empty_shards_count_their_steps(device: torch.device) -> None:
    parameters = {
        "first": nn.Parameter(torch.zeros(0, 4, device=device)),
        "second": nn.Parameter(torch.ones(3, 4, device=device)),
        "last": nn.Parameter(torch.zeros(0, device=device)),
    }
    alone = {"second": nn.Parameter(torch.ones(3, 4, device=device))}
    found, expected = ShardedOptimizer(parameters, Optimizer()), ShardedOptimizer(alone, Optimizer())
    for step in range(3):
        for optimizer in (found, expected):
            gradients = {name: torch.full_like(p, 1.0 + step) for name, p in optimizer.parameters.items()}
            optimizer.step(1e-3, gradients)
    assert [found.moments(name)["step"].item() for name in parameters] == [3.0] * 3
    assert torch.equal(found.shards["second"], expected.shards["second"])
