"""A layout with what its forecast was made from; and which one is taken where the layout leaves something open."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import ge
from typing import NamedTuple

from ahp.cluster.cells import Cell
from ahp.engines.traits import ContextWay, Traits
from ahp.errors import AhpError
from ahp.forecast.stage import StageCost
from ahp.forecast.stage_memory import StageMemory
from ahp.forecast.units import Units
from ahp.plan import Forecast, Parallelism
from ahp.schedule.actions import Schedule
from ahp.schedule.makespan import Makespan
from ahp.schedule.simulate import StageTimes, Timeline

ROUNDING = 1e-6
"""As a share, more than sums of seconds are rounded by."""

MOST_KEPT = 400
"""Prices that a pricer keeps: 57 KB each for 405 B in 64 stages."""


@dataclass(frozen=True)
class Replica:
    """The pipeline of one replica on a mixed cluster."""

    cells: tuple[Cell, ...]
    """The devices of each pipeline rank."""
    stages: tuple[StageCost, ...]
    span: Makespan
    memory: StageMemory


@dataclass(frozen=True)
class Priced:
    """A layout with everything its forecast was made from."""

    forecast: Forecast
    parallelism: Parallelism
    """As given, with activation_checkpoint ``auto`` and context_parallel_method decided."""
    span: Makespan
    """How long the schedule takes, rank by rank."""
    stages: tuple[StageCost, ...]
    memory: StageMemory
    optimizer_s: float
    ratio: float = 1.0
    """Measured over forecast steps of runs on these nodes, which the forecast is multiplied by, and the rest is not."""
    replicas: tuple[Replica, ...] = ()
    """On a mixed cluster all replicas; ``span`` and ``stages`` are those of the slowest. Elsewhere they are alike."""

    @property
    def timeline(self) -> Timeline:
        """Every action with its start and end; made when it is asked for."""
        return self.span.timeline

    @property
    def schedule(self) -> Schedule:
        return self.span.schedule


class KeptPrices:
    """Prices by layout, as asked for and as decided: a search comes back to its best layouts, with what they leave open and without."""

    def __init__(self, price: Callable[[Parallelism], Priced]) -> None:
        """``price``: of a layout that leaves recompute open or not."""
        self._price, self._found = price, dict[Parallelism, Priced]()

    def of(self, layout: Parallelism) -> Priced:
        """Raises what ``price`` raises, each time."""
        if layout not in self._found:
            found = lightest_that_fits(self._price, layout)
            if len(self._found) >= MOST_KEPT:
                self._found.clear()
            self._found[layout] = self._found[found.parallelism] = found
        return self._found[layout]


def lightest_that_fits(price: Callable[[Parallelism], Priced], parallelism: Parallelism) -> Priced:
    """The layout priced; ``activation_checkpoint`` auto as the lightest that fits, or that can be."""
    if parallelism.activation_checkpoint != "auto":
        return price(parallelism)
    priced = None
    for lightest_first in ("none", "selective", "full"):
        layout = parallelism.model_copy(update={"activation_checkpoint": lightest_first})
        try:
            priced = price(layout)
        except AhpError:
            if priced is None:  # with nothing recomputed, so that it is something else
                raise
            continue
        if priced.forecast.fits:
            break
    assert priced is not None
    return priced


def faster_method(
    price: Callable[[Parallelism], Priced], parallelism: Parallelism, methods: list[ContextWay]
) -> Priced:
    """The layout priced with each ``context_parallel_method``, the faster of those that fit, or of all; as it is without any."""
    if not methods:
        return price(parallelism)
    return _faster(price(parallelism.model_copy(update={"context_parallel_method": method})) for method in methods)


def _faster(priced: Iterable[Priced]) -> Priced:
    """Of those that fit, or of all; of equal ones the first."""
    return min(priced, key=lambda one: (not one.forecast.fits, one.forecast.step_time_s))


class Begun(NamedTuple):
    """A layout before its schedule has run."""

    parallelism: Parallelism
    traits: Traits
    units: Units
    stages: tuple[StageCost, ...]
    times: list[StageTimes]

    def takes_longer(self, other: Begun) -> bool:
        """Whether each of its stages does, with nothing that takes less: then the schedule does too."""
        return all(
            own.passes_s > of.passes_s * (1 + ROUNDING) and all(map(ge, own, of))
            for own, of in zip(self.times, other.times, strict=True)
        )


def fastest_of(begun: Sequence[Begun], price: Callable[[Begun], Priced]) -> Priced:
    """As ``faster_method``, of layouts that differ in that alone; those are not priced that one which fits is seen to be faster than."""
    least = min(begun, key=lambda one: sum(stage.passes_s for stage in one.times))
    first = price(least)
    rivals = [one for one in begun if one is least or not (first.forecast.fits and one.takes_longer(least))]
    return _faster(first if one is least else price(one) for one in rivals)
