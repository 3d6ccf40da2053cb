"""One level of bounds of blocks: blocks that come up soon after each other are bounded together, each once."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator

TOGETHER = 128
"""Most blocks bounded in one call: enough that arrays pay, few compared with the thousands that come up in a large space."""

SOON = 1.02
"""Blocks whose bounds are at most this many times another block's come up soon after it."""


class Level:
    """Lower bounds of blocks in seconds, in one search, closer than those of the level before."""

    def __init__(
        self,
        known: dict[int, float],
        closer: Callable[[list[int]], Iterable[float]] = lambda blocks: (),
        before: Level | None = None,
    ) -> None:
        """``known``: bounds found earlier, new ones are added; ``closer``: bounds of several blocks; ``before``: None for the first level,
        which knows all blocks that are searched."""
        self.known, self._closer, self._before = known, closer, before
        self._searched: dict[int, float] = known if before is None else before._searched
        self._waiting = [(seconds, block) for block, seconds in known.items() if block in self._searched]
        """A heap of blocks that the next level may not have bounded yet."""
        heapq.heapify(self._waiting)

    def __call__(self, block: int) -> float:
        if block not in self.known:
            assert self._before is not None, "the first level knows all blocks that are searched"
            together = sorted({block, *self._before.soon(SOON * self._before(block), self.known)})
            for one, seconds in zip(together, self._closer(together), strict=True):
                self.known[one] = max(seconds, self._before(one))
                heapq.heappush(self._waiting, (self.known[one], one))
        return self.known[block]

    def soon(self, most_s: float, but: dict[int, float]) -> Iterator[int]:
        """Blocks whose bounds are at most ``most_s``, as many as are bounded together; ``but``: blocks to leave out."""
        for _ in range(TOGETHER):
            if self._waiting and self._waiting[0][0] <= most_s:
                block = heapq.heappop(self._waiting)[1]
                if block not in but:
                    yield block
