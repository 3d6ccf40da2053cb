"""The proven best: rows are priced in the order of a lower bound until the bound says that no row left can win."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from ahp.errors import BadInput, NotExpressible
from ahp.plan import Forecast

Price = Callable[[int], Forecast]
"""Forecast of one row; raises BadInput or NotExpressible when the row is not a layout after all."""


@dataclass(frozen=True)
class Limits:
    """How much is priced beyond what the proof of the best needs."""

    keep: int = 10
    """Rows of the ranking that are wanted."""
    proof: int = 4000
    """Forecasts after which the best is given without proof."""
    table: int = 150
    """Forecasts after which the ranking below the best may miss a row: the best is proven, the others are not."""


@dataclass
class Outcome:
    """What pricing the rows in the order of their bound found."""

    fitting: list[tuple[int, Forecast]] = field(default_factory=list)
    """Rows that fit with their forecast, fastest first."""
    misfits: list[tuple[int, Forecast]] = field(default_factory=list)
    """Priced rows that do not fit, in the order of pricing."""
    refused: list[tuple[int, str]] = field(default_factory=list)
    """Rows that the forecast or the engine refused, with the reason."""
    left: int = 0
    """Rows that were not priced, because their bound is above the last time of the ranking (or a limit was met)."""
    lowest_bound_left_s: float | None = None
    """The smallest lower bound among the rows left; above the best time, the best is proven."""
    seconds: float = 0.0

    @property
    def priced(self) -> int:
        return len(self.fitting) + len(self.misfits)

    @property
    def proven(self) -> bool:
        """Whether no row left can be faster than the best."""
        if not self.fitting:
            return self.left == 0
        return self.lowest_bound_left_s is None or self.lowest_bound_left_s >= self.fitting[0][1].step_time_s


def best_first(bounds: NDArray[np.float64], price: Price, limits: Limits | None = None) -> Outcome:
    """Price rows in the order of ``bounds`` (seconds, a lower bound of each row's step time).

    Stops when the bound of the next row is above the ``keep``-th best time. Equal bounds go in the order of the
    rows, so that the same input gives the same ranking.
    """
    limits = limits or Limits()
    start = perf_counter()
    outcome = Outcome()
    order = np.argsort(bounds, kind="stable")
    kept: list[float] = []
    """The ``keep`` best times as a heap of negatives: the slowest of them is ``-kept[0]``."""
    done = 0
    for index in order:
        if _enough(float(bounds[index]), kept, outcome.priced, limits):
            break
        done += 1
        try:
            forecast = price(int(index))
        except (BadInput, NotExpressible) as refusal:
            outcome.refused.append((int(index), str(refusal)))
            continue
        if not forecast.fits:
            outcome.misfits.append((int(index), forecast))
            continue
        outcome.fitting.append((int(index), forecast))
        heapq.heappush(kept, -forecast.step_time_s)
        if len(kept) > limits.keep:
            heapq.heappop(kept)
    outcome.left = len(order) - done
    outcome.lowest_bound_left_s = float(bounds[order[done]]) if outcome.left else None
    outcome.fitting.sort(key=lambda pair: (pair[1].step_time_s, sum(pair[1].memory.values()), pair[0]))
    outcome.seconds = perf_counter() - start
    return outcome


def _enough(bound: float, kept: list[float], priced: int, limits: Limits) -> bool:
    if not kept:
        return priced >= limits.proof
    best, slowest = -max(kept), -kept[0]
    if len(kept) == limits.keep and bound >= slowest:
        return True
    return priced >= (limits.table if bound >= best else limits.proof)
