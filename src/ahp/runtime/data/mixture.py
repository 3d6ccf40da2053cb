"""Mixes several weighted texts into one: the text that a row is from, and all order, depend only on (seed, number of the row)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from ahp.runtime.data.batches import Batches, random_stream, stacked

DEALT = 1000
"""Rows that are dealt out at a time: each text has its share of these rows, in an order drawn for them."""
ORDER_STREAM = 1 << 62
"""Added to the number of a block of ``DEALT`` rows to seed its order."""


class Mixture:
    """The global batch of every step, called like ``Batches``."""

    def __init__(
        self, parts: Sequence[Batches], weights: Sequence[float], *, seed: int, global_batch_size: int
    ) -> None:
        """``weights``: one for each part, in any unit."""
        self.parts, self.seed, self.global_batch_size = parts, seed, global_batch_size
        self.rows_of_parts = shares(weights)
        self._order = lru_cache(maxsize=2)(self._draw)

    def __call__(self, step: int, rows: range | None = None) -> dict[str, torch.Tensor]:
        """``rows`` of the global batch of a step, from 0; None = all."""
        first, found = step * self.global_batch_size, []
        for row in range(self.global_batch_size) if rows is None else rows:
            part, index = self.place(first + row)
            found.append(self.parts[part].row(index, first + row))
        return stacked(found)

    def place(self, number: int) -> tuple[int, int]:
        """For a row of the run, from 0: the part it is from, and how many rows before it are from that part."""
        dealt, place = divmod(number, DEALT)
        parts, before = self._order(dealt)
        part = int(parts[place])
        return part, dealt * self.rows_of_parts[part] + int(before[place])

    def _draw(self, dealt: int) -> tuple[np.ndarray, np.ndarray]:
        """For each row of a block of ``DEALT``: its part, and how many rows of the block before it are from that part."""
        parts = np.repeat(np.arange(len(self.parts)), self.rows_of_parts)
        parts = random_stream(self.seed, ORDER_STREAM + dealt).permutation(parts)
        before = np.zeros(DEALT, dtype=np.int64)
        for part in range(len(self.parts)):
            mine = parts == part
            before[mine] = np.arange(int(mine.sum()))
        return parts, before


def shares(weights: Sequence[float]) -> list[int]:
    """How many of ``DEALT`` rows each weight gets, by the largest remainders; at least one."""
    exact = np.asarray(weights, dtype=float) / sum(weights) * DEALT
    found = np.maximum(np.floor(exact).astype(np.int64), 1)
    order = np.argsort(found - exact, kind="stable")  # parts that lack the most come first
    for part in order[: max(0, DEALT - int(found.sum()))]:
        found[part] += 1
    found[int(found.argmax())] += DEALT - int(found.sum())
    return found.tolist()
