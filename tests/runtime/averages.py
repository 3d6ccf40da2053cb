"""A model whose modules write buffers in forward, before its blocks, in them, after them and in the model itself."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from tests.runtime.models import VOCABULARY, Block

How = Literal["in place", "assigned", "batch norm", "counted"]
"""A moving average of the hidden states, written in place or by another tensor; the averages of a batch norm; or what depends on the
number of steps alone, and so is the same whatever rows a rank has."""

WIDTH, LAYERS, MICRO_BATCHES = 32, 4, 4
"""Calls of a step are counted as so many."""


class Average(nn.Module):
    def __init__(self, how: How) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(WIDTH), persistent=False)
        self.norm = nn.BatchNorm1d(WIDTH) if how == "batch norm" else None
        self.mean: torch.Tensor
        self.count: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.norm is not None:
            return x + self.norm(x.transpose(1, 2)).transpose(1, 2)
        if self.training:
            with torch.no_grad():
                new = x.mean(dim=(0, 1))
                if self.how == "counted":
                    self.mean.fill_(0.1).mul_(self.count // MICRO_BATCHES)
                    self.count.add_(1)
                elif self.how == "assigned":
                    self.mean = 0.9 * self.mean + 0.1 * new
                    self.count = self.count + 1
                else:
                    self.mean.mul_(0.9).add_(new, alpha=0.1)
                    self.count.add_(1)
        return x - self.mean


class AveragingBlock(Block):
    def __init__(self, how: How) -> None:
        super().__init__(WIDTH, 4)
        self.average = Average(how)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.average(x))


class Averaging(nn.Module):
    """Of its own it writes two buffers: one before the blocks and one after them."""

    def __init__(self, how: How) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.before, self.after = Average(how), Average(how)
        self.blocks = nn.ModuleList(AveragingBlock(how) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("first", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))
        self.first: torch.Tensor
        self.last: torch.Tensor

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.before(self.tokens(input_ids))
        if self.training:
            self.first.add_(input_ids.float().mean())
        for block in self.blocks:
            x = block(x)
        if self.training:
            self.last.add_(x.detach().abs().mean())
        return self.head(self.after(x))


def averaging(how: How) -> nn.Module:
    torch.manual_seed(0)
    return Averaging(how)
