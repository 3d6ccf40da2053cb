"""One level of bounds of blocks: those that come up soon after each other are bounded together, each once."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator

TOGETHER = 128
"""Blocks that are bounded at once: enough that arrays pay, few beside the thousands that come up in a large space."""

SOON = 1.02
"""Blocks whose bounds are no more than so many times another one's come up soon after it."""


class Level:
    """Seconds that every row of a block takes at least, closer than those of the level before."""

    def __init__(
        self, known: dict[int, float], closer: Callable[[list[int]], Iterable[float]], before: Level | None = None
    ) -> None:
        """``known``: what was found before, added to; ``closer``: of several blocks; the level ``before``: None of the first, whose
        bounds are all known."""
        self.known, self._closer, self._before = known, closer, before
        self._searched: dict[int, float] = known if before is None else before._searched
        self._waiting = [(seconds, block) for block, seconds in known.items() if block in self._searched]
        """A heap of blocks that the next level may not have looked at."""
        heapq.heapify(self._waiting)

    def __call__(self, block: int) -> float:
        if block not in self.known:
            if self._before is None:  # it does not fit
                return 0.0
            self._look_at(sorted({block, *self._before.soon(SOON * self._before(block), self.known)}))
        return self.known[block]

    def _look_at(self, blocks: list[int]) -> None:
        assert self._before is not None
        for block, seconds in zip(blocks, self._closer(blocks), strict=True):
            self.known[block] = max(seconds, self._before(block))
            heapq.heappush(self._waiting, (self.known[block], block))

    def soon(self, most_s: float, but: dict[int, float]) -> Iterator[int]:
        """Blocks whose bounds are no more than that, so many that they can be looked at together; ``but``: not these."""
        for _ in range(TOGETHER):
            if self._waiting and self._waiting[0][0] <= most_s:
                block = heapq.heappop(self._waiting)[1]
                if block not in but:
                    yield block
