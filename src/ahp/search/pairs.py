"""Layouts with their forecasts, as searches pass them on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ahp.plan import Forecast, Parallelism
from ahp.search.exact import Place

Pair = tuple[Parallelism, Forecast]
"""A layout with its forecast."""


def by_time(pairs: Iterable[Pair]) -> list[Pair]:
    """The shortest step first; of equal steps, those that come first."""
    return sorted(pairs, key=lambda pair: pair[1].step_time_s)


@dataclass(frozen=True)
class Improved:
    """Rows of the table, and layouts made from them by another cut into stages or with fewer layers recomputed."""

    ranked: list[Pair]
    """The fastest first."""
    places: dict[Parallelism, Place] = field(default_factory=dict)
    """Where each row is in the table, keyed by the row's own layout."""
    cuts: int = 0
    """Forecasts made to find better cuts."""
    lightened: int = 0
    """Forecasts made to recompute fewer layers."""
    words: dict[Parallelism, str] = field(default_factory=dict)
    """What a layout gains over the row that it was made from, where it gains enough to say."""
