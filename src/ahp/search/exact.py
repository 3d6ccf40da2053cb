"""The proven best: rows are priced in the order of a lower bound until the bound proves that no row left can win.

There is one queue. A block is in it with a lower bound of all its rows. When the block comes up it gets a closer bound;
when its last bound comes up the block is opened, and each row enters by itself; a row that comes up is priced. A row that
never comes up cannot win.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ahp.errors import BadInput, NotExpressible
from ahp.plan import Forecast

Place = tuple[int, int]
"""A block and one of its rows."""

Refine = Callable[[int], float]
"""A closer lower bound of all rows of one block, in seconds; infinite if no row fits."""

Open = Callable[[int], NDArray[np.float64]]
"""Lower bounds of the rows of one block, in seconds; infinite for rows known not to fit."""

Price = Callable[[Place], Forecast]
"""Forecast of one row; raises BadInput or NotExpressible if the row is not a legal layout after all."""


@dataclass(frozen=True)
class Limits:
    """How much is priced beyond what the proof of the best needs."""

    keep: int = 10
    """Number of rows wanted in the ranking."""
    proof: int = 4000
    """Forecasts after which the best is returned without proof, and the ranking below it may miss a row."""
    ceiling_s: float = float("inf")
    """Rows that take this long or longer are not wanted: something better is known already."""
    slack: float = 0.0
    """Share of the best time by which a row left unpriced may be faster: 0 proves the best."""


@dataclass
class Outcome:
    """The result of pricing rows in the order of their bounds."""

    fitting: list[tuple[Place, Forecast]] = field(default_factory=list)
    """Rows that fit with their forecast, fastest first."""
    misfits: list[tuple[Place, Forecast]] = field(default_factory=list)
    """Priced rows that do not fit, in the order of pricing."""
    refused: list[tuple[Place, str]] = field(default_factory=list)
    """Rows that the forecast or the engine refused, with the reason."""
    opened: dict[int, NDArray[np.float64]] = field(default_factory=dict)
    """Lower bounds of the rows of each block that was opened, in seconds; infinite where a row does not fit."""
    bounds_s: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """The closest known lower bound of each block; infinite if none of its rows fits."""
    too_large: int = 0
    """Number of rows that are known not to fit without a forecast."""
    left: int = 0
    """Number of rows not priced, because their bound is above the last time of the ranking or a limit was reached."""
    lowest_bound_left_s: float | None = None
    """The smallest lower bound among the rows left; if it is at least the best time, the best is proven."""

    @property
    def priced(self) -> int:
        return len(self.fitting) + len(self.misfits)

    @property
    def proven(self) -> bool:
        """Whether no row left can be faster than the best."""
        if not self.fitting:
            return self.left == 0
        return self.lowest_bound_left_s is None or self.lowest_bound_left_s >= self.fitting[0][1].step_time_s

    def settled(self, rows: int, lowest_s: float) -> Outcome:
        """The outcome, sorted, with what is left of all ``rows`` and the lowest bound of these."""
        self.fitting.sort(key=lambda pair: (pair[1].step_time_s, pair[1].needed_bytes, pair[0]))
        self.left = rows - self.too_large - self.priced - len(self.refused)
        self.lowest_bound_left_s = lowest_s if self.left else None
        return self


def best_first(
    blocks: NDArray[np.float64],
    sizes: NDArray[np.int64],
    refine: Sequence[Refine],
    open_block: Open,
    price: Price,
    limits: Limits | None = None,
) -> Outcome:
    """Refine blocks, open them and price rows in the order of their lower bounds.

    Stops when the next bound reaches the ``keep``-th best time. Equal bounds go in the order of blocks and rows, so
    the same input gives the same ranking.

    Args:
        blocks: a lower bound in seconds of all rows of each block; infinite if no row fits.
        sizes: number of rows of each block.
        refine: closer bounds of one block, each closer and slower to compute than the one before.
        open_block: bounds of one block's rows; a bound below the block's own is raised to it.
        price: forecast of one row.
        limits: how far to go.
    """
    queue = _Queue(blocks, sizes, refine, open_block)
    limits, outcome = limits or Limits(), Outcome()
    kept: list[float] = []
    """The ``keep`` best times as a heap of negatives: the slowest is ``-kept[0]``. Equal times in one block count once: most are ZeRO
    stages that cost the same."""
    different: set[tuple[int, float]] = set()
    while (bound := queue.next_s()) < np.inf and not _enough(bound, kept, outcome.priced, limits):
        place = queue.pop()
        if place is None:
            continue
        try:
            forecast = price(place)
        except (BadInput, NotExpressible) as refusal:
            outcome.refused.append((place, str(refusal)))
            continue
        if not forecast.fits:
            outcome.misfits.append((place, forecast))
            continue
        outcome.fitting.append((place, forecast))
        if (place[0], forecast.step_time_s) in different:
            continue
        different.add((place[0], forecast.step_time_s))
        heapq.heappush(kept, -forecast.step_time_s)
        if len(kept) > limits.keep:
            heapq.heappop(kept)
    outcome.opened, outcome.bounds_s, outcome.too_large = queue.opened, queue.bounds_s, queue.too_large
    return outcome.settled(int(sizes.sum()), queue.next_s())


class _Queue:
    """Blocks not yet opened and rows not yet priced, ordered by their bounds."""

    def __init__(
        self, blocks: NDArray[np.float64], sizes: NDArray[np.int64], refine: Sequence[Refine], open_block: Open
    ) -> None:
        self.opened: dict[int, NDArray[np.float64]] = {}
        self.bounds_s = blocks.copy()
        self.too_large = int(sizes[np.isinf(blocks)].sum())
        self._sizes, self._refine, self._open = sizes, refine, open_block
        there = np.flatnonzero(np.isfinite(blocks))
        self._heap = [
            (bound, True, block, -1) for bound, block in zip(blocks[there].tolist(), there.tolist(), strict=True)
        ]
        """(bound, whether it is a block that was never refined, block, position): the next row of each opened block; position -1 - n is a
        block that was refined n times. Of equal bounds, those of blocks never refined come last."""
        heapq.heapify(self._heap)
        self._of_block: dict[int, tuple[list[float], list[int]]] = {}
        """Bounds of the rows that may fit, ascending, and which rows they are; keyed by block."""

    def next_s(self) -> float:
        """The lowest bound there is; infinite when nothing is left."""
        return self._heap[0][0] if self._heap else np.inf

    def pop(self) -> Place | None:
        """Take the entry with the lowest bound: return a row, or refine or open a block and return None."""
        bound, _, block, at = heapq.heappop(self._heap)
        if at >= 0:
            self._push(block, at + 1)
            return block, self._of_block[block][1][at]
        if (times := -1 - at) < len(self._refine):
            self._refine_once(block, times, bound)
        else:
            self._open_rows(block, bound)
        return None

    def _refine_once(self, block: int, times: int, bound: float) -> None:
        """``times``: how often the block was refined before."""
        self.bounds_s[block] = bound = max(self._refine[times](block), bound)
        if np.isinf(bound):
            self.too_large += int(self._sizes[block])
        else:
            heapq.heappush(self._heap, (bound, False, block, -2 - times))

    def _open_rows(self, block: int, bound: float) -> None:
        bounds = np.maximum(self._open(block), bound)
        self.opened[block], self.bounds_s[block] = bounds, bounds.min(initial=np.inf)
        order = np.argsort(bounds, kind="stable")[: int(np.isfinite(bounds).sum())]
        self.too_large += len(bounds) - len(order)
        self._of_block[block] = bounds[order].tolist(), order.tolist()
        self._push(block, 0)

    def _push(self, block: int, at: int) -> None:
        bounds = self._of_block[block][0]
        if at < len(bounds):
            heapq.heappush(self._heap, (bounds[at], False, block, at))


def _enough(bound: float, kept: list[float], priced: int, limits: Limits) -> bool:
    if bound >= limits.ceiling_s:
        return True
    if not kept:
        return priced >= limits.proof
    best, slowest = -max(kept), -kept[0]
    if limits.slack and bound >= best * (1 - limits.slack):
        return True
    if len(kept) == limits.keep and bound >= slowest:
        return True
    return priced >= limits.proof
