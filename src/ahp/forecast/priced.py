"""A priced layout with what its forecast was made from, and the choice where a layout leaves something open."""

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
"""A share larger than any rounding error of sums of seconds."""

MOST_KEPT = 400
"""The most prices that a pricer keeps: 57 KB each for a model of 405 B parameters in 64 stages."""


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
    """A layout with its forecast and everything the forecast was made from."""

    forecast: Forecast
    parallelism: Parallelism
    """As given, with activation_checkpoint ``auto`` and context_parallel_method decided."""
    span: Makespan
    """How long the schedule takes, rank by rank."""
    stages: tuple[StageCost, ...]
    memory: StageMemory
    optimizer_s: float
    ratio: float = 1.0
    """Measured over forecast step time of runs on these nodes: ``forecast`` is multiplied by it, the other fields are not."""
    replicas: tuple[Replica, ...] = ()
    """All replicas on a mixed cluster; ``span`` and ``stages`` are those of the slowest. Empty elsewhere: all are the same."""

    @property
    def timeline(self) -> Timeline:
        """Every action with its start and end; computed on demand."""
        return self.span.timeline

    @property
    def schedule(self) -> Schedule:
        return self.span.schedule


class KeptPrices:
    """Prices keyed by layout, both as asked for and as decided: a search comes back to its best layouts in either form."""

    def __init__(self, price: Callable[[Parallelism], Priced]) -> None:
        """``price``: prices a layout whose ``activation_checkpoint`` is not auto."""
        self._price, self._found = price, dict[Parallelism, Priced]()

    def of(self, layout: Parallelism) -> Priced:
        """The price of a layout. Raises what ``price`` raises, each time."""
        if layout not in self._found:
            found = lightest_that_fits(self._price, layout)
            if len(self._found) >= MOST_KEPT:
                self._found.clear()
            self._found[layout] = self._found[found.parallelism] = found
        return self._found[layout]


def lightest_that_fits(price: Callable[[Parallelism], Priced], parallelism: Parallelism) -> Priced:
    """The priced layout; ``activation_checkpoint`` auto becomes the lightest kind that fits, else the heaviest that can be priced."""
    if parallelism.activation_checkpoint != "auto":
        return price(parallelism)
    priced = None
    for lightest_first in ("none", "selective", "full"):
        layout = parallelism.model_copy(update={"activation_checkpoint": lightest_first})
        try:
            priced = price(layout)
        except AhpError:
            if priced is None:  # even without recompute, so the error has another cause
                raise
            continue
        if priced.forecast.fits:
            break
    assert priced is not None
    return priced


def faster_method(
    price: Callable[[Parallelism], Priced], parallelism: Parallelism, methods: list[ContextWay]
) -> Priced:
    """The layout priced with each of ``methods``: the fastest that fits, else the fastest of all. Without methods, priced as it is."""
    if not methods:
        return price(parallelism)
    return _faster(price(parallelism.model_copy(update={"context_parallel_method": method})) for method in methods)


def _faster(priced: Iterable[Priced]) -> Priced:
    """The fastest layout that fits, else the fastest of all; the first of equal ones."""
    return min(priced, key=lambda one: (not one.forecast.fits, one.forecast.step_time_s))


class Begun(NamedTuple):
    """A layout before its schedule has run."""

    parallelism: Parallelism
    traits: Traits
    units: Units
    stages: tuple[StageCost, ...]
    times: list[StageTimes]

    def takes_longer(self, other: Begun) -> bool:
        """Whether every stage takes longer than in ``other`` and no time of it is less: then the schedule takes longer too."""
        return all(
            own.passes_s > of.passes_s * (1 + ROUNDING) and all(map(ge, own, of))
            for own, of in zip(self.times, other.times, strict=True)
        )


def fastest_of(begun: Sequence[Begun], price: Callable[[Begun], Priced]) -> Priced:
    """Like ``faster_method``, for layouts that differ only in the method; skips those that are surely slower than one that fits."""
    least = min(begun, key=lambda one: sum(stage.passes_s for stage in one.times))
    first = price(least)
    rivals = [one for one in begun if one is least or not (first.forecast.fits and one.takes_longer(least))]
    return _faster(first if one is least else price(one) for one in rivals)
