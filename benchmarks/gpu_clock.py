"""How gpu_kernels.py times a kernel: events around batches of calls, on operands that the level-2 cache cannot hold."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import torch

Row = dict[str, Any]

BATCH_S = 10.0e-3
"""Length of a batch of calls: far above the clock's resolution and a launch."""
BATCHES = 5
COLD_BYTES = 200 * 2**20
"""Operands of successive calls are spread over so much: four times the level-2 cache of Hopper."""


def seconds_of(call: Callable[[], Any], batch_s: float = BATCH_S, batches: int = BATCHES) -> float:
    """Of one call: the median over batches, each between two events."""
    call()
    once = timed_s(call, 1)
    count = max(1, min(1000, round(batch_s / max(once, 1e-7))))
    return statistics.median(timed_s(call, count) for _ in range(batches))


def timed_s(call: Callable[[], Any], count: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / count


def spread(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Iterator[list[torch.Tensor]]:
    """Sets of random operands, again and again."""
    size = sum(torch.Size(shape).numel() for shape in shapes) * dtype.itemsize
    made = [
        [torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes]
        for _ in range(max(1, min(64, COLD_BYTES // size)))
    ]
    return cycle(made)
