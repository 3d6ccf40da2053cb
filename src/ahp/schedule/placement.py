"""The rank that holds each stage of a pipeline."""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


class Placement(StrEnum):
    """How stages are placed on the ranks."""

    LOOPED = "looped"
    """From the first rank to the last, and again from the first: stage s on rank s mod p."""
    V_SHAPED = "v-shaped"
    """Down to the last rank and up again: rank r holds stages r and 2p - 1 - r."""

    def stage_ranks(self, p: int, v: int) -> tuple[int, ...]:
        """The rank of each of the p x v stages."""
        down = tuple(range(p))
        if self is Placement.LOOPED:
            return down * v
        return tuple(rank for turn in range(v) for rank in (down[::-1] if turn % 2 else down))

    @lru_cache(maxsize=1 << 10)
    def rank_stages(self, p: int, v: int) -> NDArray[np.int64]:
        """The stages of each rank, lowest first: [p, v]."""
        own: list[list[int]] = [[] for _ in range(p)]
        for stage, rank in enumerate(self.stage_ranks(p, v)):
            own[rank].append(stage)
        return np.array(own, dtype=np.int64)
