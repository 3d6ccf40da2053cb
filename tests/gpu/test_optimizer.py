"""The optimizer on a GPU's fused kernels, where a rank may hold no row of a parameter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ahp.job import Optimizer
from ahp.runtime.optimizer.adamw import ShardedOptimizer
from ahp.runtime.optimizer.eight_bit import EightBitAdamW


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


def test_moments_in_8_bits_are_those_of_a_cpu(device: torch.device) -> None:
    pytest.importorskip("torchao")
    found = []
    for where in (torch.device("cpu"), device):
        generator = torch.Generator().manual_seed(0)
        shard = nn.Parameter(torch.randn(24, 512, generator=generator).to(where))
        optimizer = EightBitAdamW({"w": shard}, {"w": 0.1}, Optimizer(name="adamw8bit"))
        for step in range(4):
            shard.grad = torch.randn(24, 512, generator=generator).to(where)
            optimizer.step(1e-3, torch.tensor(step == 2, device=where))
        found.append((shard.detach().cpu(), {key: value.cpu() for key, value in optimizer.moments("w").items()}))
    (expected, states), (got, others) = found
    assert others["step"] == states["step"] == 3.0
    # A rounding may move an element to the next code: then its next update differs by a hundredth of one step.
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5)
    for key in ("exp_avg.codes", "exp_avg_sq.codes"):
        assert (others[key] != states[key]).float().mean() < 1e-3
