"""A priced layout with what its forecast was made from, what all pricers share, and the choice where a layout leaves something open."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ahp.cluster.cells import Cell
from ahp.cluster.model import Cluster
from ahp.engines.ahp import held_in_8_bits
from ahp.engines.registry import get, traits_of
from ahp.engines.traits import ContextWay, Traits
from ahp.errors import AhpError, BadInput, NotExpressible
from ahp.forecast.rules import illegal
from ahp.forecast.stage import StageCost
from ahp.forecast.stage_memory import StageMemory
from ahp.graph.operators import ModelGraph
from ahp.job import Job
from ahp.plan import EngineChoice, Forecast, Parallelism
from ahp.schedule.actions import Schedule
from ahp.schedule.makespan import Makespan
from ahp.schedule.simulate import Timeline

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


def on_graph(job: Job, graph: ModelGraph) -> Job:
    """The job with the facts about its model that prices need: how much of it is trained, and how much of that has moments in 8 bits."""
    if job.lora is None and job.optimizer.name != "adamw8bit":
        return job
    trained = [p for segment in graph.segments() for p in segment.parameters if p.trainable]
    in_8_bits = sum(p.numel for p in trained if held_in_8_bits(p.shape))
    return job.on_model(graph.trained_share, in_8_bits / max(1, sum(p.numel for p in trained)))


class LayoutPricer(ABC):
    """What pricers of plain and of mixed clusters share: the engine's traits, and prices keyed by layout, both as asked for and as decided:
    a search comes back to its best layouts in either form."""

    slowest_share: float
    """Share by which the slowest of all devices lags behind the mean."""
    ratio: float = 1.0
    """Measured step time over forecast step time, from runs on these nodes."""
    turns: float = 1.0
    """How many workers take turns on a core."""

    def __init__(self, graph: ModelGraph, cluster: Cluster, job: Job, choice: EngineChoice) -> None:
        self.graph, self.cluster, self.choice = graph, cluster, choice
        self.job = on_graph(job, graph)
        self._found: dict[Parallelism, Priced] = {}

    def price(self, parallelism: Parallelism) -> Priced:
        """Price one layout. ``activation_checkpoint`` auto becomes the lightest kind that fits, ``context_parallel_method``
        None the faster method.

        Raises NotExpressible when the engine cannot run the layout, BadInput when it breaks another rule.
        """
        if parallelism not in self._found:
            found = lightest_that_fits(self._price_faster, parallelism)
            if len(self._found) >= MOST_KEPT:
                self._found.clear()
            self._found[parallelism] = self._found[found.parallelism] = found
        return self._found[parallelism]

    @property
    def stretch(self) -> float:
        """Factor on the mean rank's seconds: the slowest rank lags behind, and runs took ``ratio`` times as long as forecast."""
        return (1.0 + self.slowest_share) * self.ratio

    def _price_faster(self, parallelism: Parallelism) -> Priced:
        """Price a layout whose ``activation_checkpoint`` is not auto, with the fastest method of context parallelism if it leaves this open."""
        if parallelism.context_parallel_degree > 1:  # choosing a method needs groups; an illegal layout has none
            self.legal_traits(parallelism)
        ways = [parallelism.model_copy(update={"context_parallel_method": way}) for way in self.methods(parallelism)]
        return self._fastest(ways) if len(ways) > 1 else self._price(ways[0] if ways else parallelism)

    def _fastest(self, ways: Sequence[Parallelism]) -> Priced:
        """Price layouts that leave nothing open; the ``faster`` of them."""
        return faster(map(self._price, ways))

    @abstractmethod
    def methods(self, parallelism: Parallelism) -> list[ContextWay]:
        """Values of context_parallel_method to choose from; empty where there is no choice."""

    @abstractmethod
    def _price(self, parallelism: Parallelism) -> Priced:
        """Price a layout that leaves nothing open."""

    def traits(self, parallelism: Parallelism) -> Traits:
        """How the engine behaves under a layout."""
        return traits_of(self.job, parallelism, self.choice)

    def legal_traits(self, parallelism: Parallelism) -> Traits:
        """``traits`` of a layout that may break rules. Raises like ``price``."""
        if reason := get(self.choice.name).refuses(self.job, parallelism, self.choice):
            raise NotExpressible(reason)
        if reason := illegal(self.graph, self.cluster, self.job, parallelism, self.choice):
            raise BadInput(reason)
        return self.traits(parallelism)


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


def faster(priced: Iterable[Priced]) -> Priced:
    """The fastest layout that fits, else the fastest of all; the first of equal ones."""
    return min(priced, key=lambda one: (not one.forecast.fits, one.forecast.step_time_s))
