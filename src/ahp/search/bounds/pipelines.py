"""What pipelines have in common whatever else a layout decides: which layers their stages hold, and on which rank they lie.

Dims: S = stages, U = stages that differ, p = pipeline ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ahp.arrays import Floats, Ints
from ahp.forecast.group import Group
from ahp.forecast.mesh import PipelineAxis
from ahp.forecast.stage_table import StageTable
from ahp.plan import Parallelism
from ahp.schedule.bounds import in_flight
from ahp.schedule.descriptor import PipelineSchedule
from ahp.schedule.placement import Placement
from ahp.schedule.registry import of_ranks
from ahp.schedule.stages import layers_of_stages
from ahp.search.choices import ScheduleChoice
from ahp.search.problem import Problem

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


class Path(NamedTuple):
    """A way through a schedule of which each step waits for the one before: layers times passes of each kind, of layers as short as any.

    ``ahp.schedule.bounds`` has the ways that are taken.
    """

    forward: int = 0
    backward: int = 0
    """Whole backward passes, or both halves."""
    input_gradient: int = 0
    first_forward: int = 0
    """What comes once, with the first forward."""
    last_backward: int = 0
    head: int = 0
    """Micro-batches that pass the head both ways."""


@dataclass(frozen=True)
class Fronts:
    """Of some pipelines: the ways through each that may take longest, and the ranks whose memory is bounded."""

    paths: Ints
    """[L, C, parts of a ``Path``] Pipelines that have fewer repeat their last."""
    most_layers: Ints
    """[C] Layers of a rank, at most."""
    layers: Ints
    """[C, G] Of the second rank (of a single stage the first), and of the one that holds the most."""
    held: Ints
    """[C, G] Layers times micro-batches in flight there."""
    received: Ints
    """[C, G] Stages that its own receive from, in both passes."""

    def least_s(self, layer_s: Floats, either_s: Floats) -> Floats:
        """[N] Of the pipeline that takes least the way that takes longest, of layers that take ``layer_s`` [N, parts of a ``Path``], and
        ``either_s`` [N] in the forward or in the backward pass."""
        both = self.paths[..., :2].min(axis=-1, keepdims=True)
        counts = np.concatenate([self.paths, both], axis=-1).astype(float)
        paths_s = counts @ np.column_stack([layer_s, either_s]).T  # [L, C, N]
        return paths_s.max(axis=0).min(axis=0)


class Pipelines:
    """Pipelines of one problem, their stages as even as can be or as the user has fixed them."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.edges = cache(self._edges)
        self.cut = cache(self._cut)
        self.fronts = cache(self._fronts)
        self._paths, self._held = cache(self._paths_of), cache(self._held_of)
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

    def _fronts(self, pipes: tuple[ScheduleChoice, ...], p: int, m: int) -> Fronts:
        found = [(of_ranks(pipe.schedule, p), pipe.virtual) for pipe in pipes]
        paths = [self._paths(schedule, p, virtual, m) for schedule, virtual in found]
        most = [self._layers_of_ranks(schedule, p, virtual).max() for schedule, virtual in found]
        held = np.array([self._held(schedule, p, virtual, m) for schedule, virtual in found])
        as_many = [np.pad(own, ((0, max(map(len, paths)) - len(own)), (0, 0)), mode="edge") for own in paths]
        return Fronts(np.stack(as_many, axis=1), np.array(most), *np.moveaxis(held, -1, 0))

    def _layers_of_ranks(self, schedule: PipelineSchedule, p: int, v: int) -> Ints:
        """[p]"""
        return np.diff(self.edges(p, v))[schedule.placement.rank_stages(p, v)].sum(axis=1)

    def _paths_of(self, schedule: PipelineSchedule, p: int, v: int, m: int) -> Ints:
        """[paths, parts] Of those that are alike in all but one thing the longest."""
        edges, own = self.edges(p, v), schedule.placement.rank_stages(p, v)
        before, layers = edges[:p], self._layers_of_ranks(schedule, p, v)
        head = own[:, -1] == p * v - 1
        back = "input_gradient" if schedule.splits_backward else "backward"
        total, longest = int(edges[-1]), int(np.diff(edges).max())
        found = [Path(forward=total, first_forward=total)._replace(**{back: total})]
        for rank in _longest(layers, head, before):
            count, ahead = int(layers[rank]), int(before[rank])
            all_work = Path(ahead + m * count, m * count, 0, ahead + count, head=m * int(head[rank]))
            found.append(all_work._replace(last_backward=count))
            if not schedule.splits_backward:  # else weight gradients may fill the time in which gradients drain
                found.append(all_work._replace(backward=m * count + ahead))
        if schedule.all_forwards_first:
            passes = total + (m - 1) * longest
            found.append(Path(passes, passes, 0, total))
        forwards = schedule.forwards_before_gradient(p, v, m) if p > 1 else None
        if forwards is not None:
            found.append(self._after_first_gradient(schedule, p, v, m, forwards))
        return np.array(found, dtype=np.int64)

    def _after_first_gradient(self, schedule: PipelineSchedule, p: int, v: int, m: int, forwards: Ints) -> Path:
        """Of the rank where it takes longest: the way of the first micro-batch to its highest stage and back there, then all that the rank
        has left. A forward is taken for half as long as a backward pass."""
        edges, own = self.edges(p, v), schedule.placement.rank_stages(p, v)
        highest, sizes = own[:, -1], np.diff(edges)
        back = edges[-1] - edges[highest + 1]
        left_forward, left = ((m - forwards) * sizes[own]).sum(axis=1), m * sizes[own].sum(axis=1)
        if not schedule.splits_backward:
            left = left + back + edges[own[:, 0]]
            back = np.zeros_like(back)
        rank = int((left_forward + 2 * left + back).argmax())
        head = min(m, m - int(forwards[rank, -1]) + 1) if highest[rank] == p * v - 1 else 0
        return Path(int(edges[-1] + left_forward[rank]), int(left[rank]), int(back[rank]), int(edges[-1]), head=head)

    def _held_of(self, schedule: PipelineSchedule, p: int, v: int, m: int) -> Ints:
        """[G, 3] ``Fronts.layers``, ``held`` and ``received`` of two ranks."""
        own, sizes = schedule.placement.rank_stages(p, v), np.diff(self.edges(p, v))
        held = (in_flight(schedule.name, p, v, m) * sizes[own]).sum(axis=1)
        received = ((own > 0) * 1 + (own < p * v - 1)).sum(axis=1) * (p > 1)
        each = np.stack([sizes[own].sum(axis=1), held, received], axis=1)
        return each[[min(1, p - 1), int(held.argmax())]]

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


def _longest(layers: Ints, head: NDArray[np.bool_], before: Ints) -> list[int]:
    """Ranks, but for those that another one has at least as much of everything as."""
    most: dict[tuple[int, bool], int] = {}
    for rank, key in enumerate(zip(layers.tolist(), head.tolist(), strict=True)):
        if key not in most or before[most[key]] < before[rank]:
            most[key] = rank
    return list(most.values())
