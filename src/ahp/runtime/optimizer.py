"""AdamW over this rank's shards, and the learning rate of each step."""

from __future__ import annotations

import math

import torch
from torch import nn

from ahp.job import Optimizer as OptimizerSettings
from ahp.runtime.torch_compat import local_tensor

FINAL_FRACTION = 0.1
"""Share of the learning rate that is left at the last step of a decaying schedule."""


def learning_rate(settings: OptimizerSettings, step: int, num_steps: int) -> float:
    """The rate of step ``step`` (from 0) of ``num_steps``: linear warm-up, then the schedule."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.learning_rate
    decaying = max(1, num_steps - settings.warmup_steps)
    done = min(1.0, (step - settings.warmup_steps) / decaying)
    shape = 1 - done if settings.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return settings.learning_rate * (FINAL_FRACTION + (1 - FINAL_FRACTION) * shape)


class ShardedAdamW:
    """``torch.optim.AdamW`` on the local shards of distributed parameters.

    The optimizer works element by element, so it needs no collective and no knowledge of how a tensor is spread:
    plain tensors that share memory with the shards spare DTensor's dispatch at every operator.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], settings: OptimizerSettings) -> None:
        self.shards = {
            name: nn.Parameter(local_tensor(p.detach()), p.requires_grad)
            for name, p in parameters.items()
            if p.requires_grad
        }
        self.adamw = torch.optim.AdamW(
            [shard for shard in self.shards.values() if shard.numel() > 0] or [nn.Parameter(torch.zeros(1))],
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def step(self, rate: float, gradients: dict[str, torch.Tensor]) -> None:
        """One update at ``rate`` with this rank's parts of the gradients, by parameter name."""
        for name, shard in self.shards.items():
            shard.grad = gradients.get(name)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        for shard in self.shards.values():
            shard.grad = None

    def moments(self, name: str) -> dict[str, torch.Tensor]:
        """``step, exp_avg, exp_avg_sq`` of one parameter's shard, made if no step was taken yet."""
        shard = self.shards[name]
        state = self.adamw.state[shard]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=shard.device)
            state["exp_avg"] = torch.zeros_like(shard)
            state["exp_avg_sq"] = torch.zeros_like(shard)
        return state
