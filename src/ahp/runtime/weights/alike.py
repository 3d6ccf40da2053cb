"""Checks that every rank built the same weights: a model that is not on the meta device must be equal everywhere, or what ranks
share differs from the start."""

from __future__ import annotations

from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn

NUM_SAMPLES = 16
"""About how many elements of a parameter are compared: other random numbers differ in each of them."""


def first_unlike(module: nn.Module, device: torch.device) -> str | None:
    """The first parameter whose values differ between ranks, None if there is none. Collective."""
    names = [name for name, _ in module.named_parameters()]
    sums = torch.tensor([_sample(p.detach()) for p in module.parameters()], dtype=torch.int64, device=device)
    extremes = torch.stack([sums, -sums])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    unlike = (extremes[0] != -extremes[1]).nonzero().flatten().tolist()
    return names[unlike[0]] if unlike else None


def _sample(values: torch.Tensor) -> int:
    step = max(1, values.numel() // NUM_SAMPLES)
    return crc32(values.flatten()[::step].cpu().contiguous().view(torch.uint8).numpy().tobytes())
