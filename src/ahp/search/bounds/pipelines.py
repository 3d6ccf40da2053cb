"""What pipelines have in common whatever else a layout decides: which layers their stages hold, and on which rank they lie.

Dims: S = stages, U = stages that differ, p = pipeline ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ahp.forecast.group import Group
from ahp.forecast.mesh import PipelineAxis
from ahp.forecast.stage_table import StageTable
from ahp.plan import Parallelism
from ahp.schedule.bounds import in_flight
from ahp.schedule.placement import Placement
from ahp.schedule.registry import of_ranks
from ahp.schedule.stages import layers_of_stages
from ahp.search.choices import ScheduleChoice
from ahp.search.problem import Problem

Ints = NDArray[np.int64]

Pair = tuple[int, int]
"""Two pipeline ranks."""


@dataclass(frozen=True)
class Cut:
    """The stages of some pipelines, those that are alike once: each [U]."""

    stages: StageTable
    of: dict[int, Ints]
    """By virtual stages per rank: where in them each stage of the pipeline is, [S]."""
    passes_behind: Ints
    """Backward passes of other stages that a rank computes after the last one of each, at most."""


@dataclass(frozen=True)
class Load:
    """Layers of a rank over all its stages, layers before its first stage, and whether it has the head."""

    layers: int
    before: int
    head: bool


@dataclass(frozen=True)
class Loads:
    """Of several kinds of pipelines, one behind the other: ``Load`` of their ranks, each [N]."""

    layers: Ints
    before: Ints
    head: Ints
    """0 or 1."""
    drains: Ints
    """1 where gradients drain from the pipeline while the rank has nothing to do, 0 where weight gradients wait for that."""
    starts: Ints
    """The first of each kind."""

    @property
    def most_layers(self) -> Ints:
        """Of each kind, on any rank."""
        return np.maximum.reduceat(self.layers, self.starts)


@dataclass(frozen=True)
class SecondRank:
    """Of the second rank (of a single stage the first)."""

    layers: int
    held: int
    """Layers times the micro-batches in flight there."""
    received: int
    """Stages that its own receive from, in both passes."""


@dataclass(frozen=True)
class Fronts:
    """Of every kind of pipeline of some blocks: the ranks that may take longest, and the second rank, whose memory is bounded."""

    loads: Loads
    layers: Ints
    """[C] Of the second rank."""
    held: Ints
    """[C] Layers times micro-batches in flight there, in the pipeline of its kind that holds the fewest."""
    received: Ints
    """[C]"""


class Pipelines:
    """Pipelines of one problem, their stages as even as can be or as the user has fixed them."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.edges = cache(self._edges)
        self.cut = cache(self._cut)
        self.loads = cache(self._loads)
        self.loads_of = cache(self._loads_of)
        self.second_rank = cache(self._second_rank)
        self.fronts = cache(self._fronts)
        self.links = cache(self._links)

    def _edges(self, p: int, v: int) -> Ints:
        """The first layer of every stage, and the number of layers after the last."""
        layout = Parallelism(
            pipeline_parallel_degree=p,
            virtual_stages_per_rank=v,
            layers_per_stage=self._problem.constraints.layers_per_stage,
        )
        layers = layers_of_stages(layout, self._problem.graph.num_layers, ends=self._problem.stage_ends)
        return np.cumsum([0, *layers])

    def _cut(self, p: int, virtual: tuple[int, ...]) -> Cut:
        """The stages of the pipelines with these virtual stages per rank."""
        kinds, places = self._problem.graph.layers, {}
        rows: list[tuple[int, int, bool, bool]] = []
        of = {}
        for v in virtual:
            edges, index = self.edges(p, v).tolist(), []
            for stage, (start, end) in enumerate(pairwise(edges)):
                first, last = stage == 0, stage == p * v - 1
                key = kinds[start:end], first, last
                if key not in places:
                    places[key] = len(rows)
                    rows.append((start, end, first, last))
                index.append(places[key])
            of[v] = np.array(index, dtype=np.int64)
        behind = np.zeros(len(rows), dtype=np.int64)
        for at in of.values():
            behind[at[p:]] = p - 1
        return Cut(StageTable.of(kinds, len(self._problem.graph.blocks), rows), of, behind)

    def _loads(self, placement: Placement, p: int, v: int) -> tuple[Load, ...]:
        """The ranks of a pipeline, but for those that another one has at least as much of everything as."""
        layers, own = np.diff(self.edges(p, v)), placement.rank_stages(p, v)
        before = np.cumsum(layers[:p]) - layers[:p]
        head = int(own[:, -1].argmax())
        most: dict[tuple[int, bool], int] = {}
        for rank, count in enumerate(layers[own].sum(axis=1).tolist()):
            key = count, rank == head
            most[key] = max(most.get(key, 0), int(before[rank]))
        return tuple(Load(count, first, has_head) for (count, has_head), first in most.items())

    def _loads_of(self, p: int, kinds: tuple[tuple[Placement, bool, int], ...]) -> Loads:
        """Of schedules whose stages lie so, that split the backward or not, with so many virtual stages per rank."""
        each = [self.loads(placement, p, v) for placement, _, v in kinds]
        rows = [
            (load.layers, load.before, load.head, not splits)
            for (_, splits, _), loads in zip(kinds, each, strict=True)
            for load in loads
        ]
        starts = np.cumsum([0, *map(len, each)])[:-1]
        layers, before, head, drains = np.array(rows, dtype=np.int64).T
        return Loads(layers, before, head, drains, starts)

    def _fronts(self, pipes: tuple[ScheduleChoice, ...], p: int, m: int) -> Fronts:
        """Of these pipelines, those of one kind once."""
        kinds: dict[tuple[Placement, bool, int], list[SecondRank]] = {}
        for pipe in pipes:
            schedule = of_ranks(pipe.schedule, p)
            second = self.second_rank(schedule.name, p, pipe.virtual, m)
            kinds.setdefault((schedule.placement, schedule.splits_backward, pipe.virtual), []).append(second)
        layers, held, received = np.array(
            [(one[0].layers, min(second.held for second in one), one[0].received) for one in kinds.values()],
            dtype=np.int64,
        ).T
        return Fronts(self.loads_of(p, tuple(kinds)), layers, held, received)

    def _second_rank(self, schedule: str, p: int, v: int, m: int) -> SecondRank:
        rank = min(1, p - 1)
        own = of_ranks(schedule, p).placement.rank_stages(p, v)[rank]
        layers = np.diff(self.edges(p, v))[own]
        held = int(in_flight(schedule, p, v, m)[rank] @ layers)
        received = int(((own > 0) * 1 + (own < p * v - 1)).sum())
        return SecondRank(int(layers.sum()), held, received if p > 1 else 0)

    def _links(self, placement: Placement, axis: PipelineAxis, v: int) -> tuple[tuple[Pair, ...], Ints]:
        """Pairs of ranks that stand for all neighbouring stages, and which of them each stage sends to the next as, [S - 1]."""
        holders = placement.stage_ranks(axis.places, v)
        per_node = self._problem.pricer.nodes.devices_per_node
        found: dict[Group | None, tuple[int, Pair]] = {}
        at = []
        for a, b in pairwise(holders):
            group = None if a == b else axis.pair(a, b, per_node)
            at.append(found.setdefault(group, (len(found), (a, b)))[0])
        return tuple(pair for _, pair in found.values()), np.array(at, dtype=np.int64)
