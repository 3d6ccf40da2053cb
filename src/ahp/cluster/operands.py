"""Tensors for calls that are timed repeatedly, in another place of memory each time.

A loop over the same operands finds them in the first cache. A training step does not: between two uses of a weight lie
the other layers. This makes products of a small model 10 to 20 % slower on one AMD EPYC core (docs/forecast/workers.md).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

ALIGN = 64
"""Tensors start at multiples of this many elements, because torch's own allocations are aligned too."""


class Operands:
    """``num_bytes`` of random numbers of each dtype, from which operands are cut one after the other."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes, self.device = num_bytes, device
        self._pools: dict[torch.dtype, Tensor] = {}

    def of(self, dtype: torch.dtype, *shapes: tuple[int, ...]) -> Iterator[tuple[Tensor, ...]]:
        """Sets of tensors of these shapes, without end; after ``num_bytes`` the first come again, at once if one set is larger."""
        sizes = [-(-math.prod(shape) // ALIGN) * ALIGN for shape in shapes]
        pool = self._pool(dtype, sum(sizes))
        sets = [
            tuple(
                pool[start : start + math.prod(shape)].view(shape)
                for start, shape in zip(itertools.accumulate([first, *sizes]), shapes, strict=False)
            )
            for first in range(0, len(pool) - sum(sizes) + 1, sum(sizes))
        ]
        return itertools.cycle(sets)

    def kept(self, call: Callable[[], Tensor | tuple[Tensor, ...]]) -> Callable[[], None]:
        """The same call, with its results kept until they take ``num_bytes``, and then all dropped.

        A step does this with what its backward pass needs: a result lies outside the caches, and on pages that the system has
        yet to hand out, because it takes back memory that was dropped.
        """
        results: list[object] = [made := call()]
        num_bytes = sum(tensor.nbytes for tensor in (made if isinstance(made, tuple) else (made,)))
        most = max(1, self.num_bytes // max(num_bytes, 1))

        def keeps() -> None:
            if len(results) >= most:
                results.clear()
            results.append(call())

        return keeps

    def _pool(self, dtype: torch.dtype, at_least: int) -> Tensor:
        if dtype not in self._pools:
            self._pools[dtype] = torch.randn(self.num_bytes // dtype.itemsize, device=self.device).to(dtype)
        pool = self._pools[dtype]
        return pool if len(pool) >= at_least else torch.randn(at_least, device=self.device).to(dtype)
