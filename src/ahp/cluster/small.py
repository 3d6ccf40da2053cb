"""A training step so small that only the host's part of each operator is left: Python, dispatch, autograd.

On a CPU this part adds to every operator. A bare operator in a loop takes a third of it (docs/forecast/workers.md), so the
probe times operators as training runs them: in modules, forward and backward.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, ROWS = 8, 2
"""Features and rows: every tensor is smaller than a cache line's worth of work."""

NUM_OPERATORS = 36
"""Operators of one ``SmallStep`` that move bytes, without views, as the graph counts them. A test counts them again."""


class SmallStep(nn.Module):
    """Norm, two projections and a gate, as the hub's models write them, with a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.up, self.gate = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, width] -> [rows, width]."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1.0e-6)
        normed = self.scale * normed.to(x.dtype)
        return x + functional.silu(self.gate(normed)) * self.up(normed)

    def run(self, x: Tensor) -> None:
        """Forward and backward; the gradients are dropped."""
        self(x).sum().backward()
        x.grad = None
        for parameter in self.parameters():
            parameter.grad = None
