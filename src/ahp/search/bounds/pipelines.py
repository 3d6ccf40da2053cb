"""What depends on the pipeline alone and not on the rest of a layout: which layers stages hold, and on which rank they lie.

Dims: S = stages, U = distinct stages, p = pipeline ranks, K = kinds of layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ahp.arrays import Floats, Ints
from ahp.cached_method import cached_method
from ahp.forecast.group import Group
from ahp.forecast.mesh import PipelineAxis
from ahp.forecast.stage_table import StageTable
from ahp.plan import Parallelism
from ahp.schedule.placement import Placement
from ahp.schedule.registry import of_ranks
from ahp.schedule.stages import layers_of_stages
from ahp.search.bounds.paths import FullestRanks, Layers, fullest_ranks, longest_paths
from ahp.search.choices import ScheduleChoice
from ahp.search.problem import Problem

Pair = tuple[int, int]
"""Two pipeline ranks."""


@dataclass(frozen=True)
class Cut:
    """The distinct stages of some pipelines, [U] each."""

    stages: StageTable
    of: dict[int, Ints]
    """[S] Index of each stage of a pipeline among the distinct ones, keyed by virtual stages per rank."""
    passes_behind: Ints
    """Most backward passes of other stages that a rank computes after the last one of each stage."""


class Pipelines:
    """Pipelines of one problem, with stages as even as possible or as the user has fixed them."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    @cached_method
    def edges(self, p: int, v: int) -> Ints:
        """The first layer of every stage, and the number of layers after the last."""
        layout = Parallelism(
            pipeline_parallel_degree=p,
            virtual_stages_per_rank=v,
            layers_per_stage=self._problem.constraints.layers_per_stage,
        )
        layers = layers_of_stages(layout, self._problem.graph.num_layers, ends=self._problem.stage_ends)
        return np.cumsum([0, *layers])

    @cached_method
    def _layers(self, p: int, v: int) -> Layers:
        """The number of layers of each kind in every stage."""
        kinds, count = np.array(self._problem.graph.layers, dtype=np.int64), max(len(self._problem.graph.blocks), 1)
        own = (kinds[start:end] for start, end in pairwise(self.edges(p, v).tolist()))
        return tuple(tuple(np.bincount(layers, minlength=count).tolist()) for layers in own)

    @cached_method
    def cut(self, p: int, virtual: tuple[int, ...]) -> Cut:
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

    @cached_method
    def paths(self, pipes: tuple[ScheduleChoice, ...], p: int, m: int) -> Floats:
        """[L, C, parts of a ``Path``, K] The paths through each pipeline that can be longest; pipelines with fewer repeat their last."""
        each = [
            longest_paths(of_ranks(pipe.schedule, p), p, pipe.virtual, m, self._layers(p, pipe.virtual))
            for pipe in pipes
        ]
        number = np.arange(max(map(len, each)))
        return np.stack([own[np.minimum(number, len(own) - 1)] for own in each], axis=1)

    @cached_method
    def fullest(self, pipes: tuple[ScheduleChoice, ...], p: int, m: int) -> FullestRanks:
        ranks = [
            fullest_ranks(of_ranks(pipe.schedule, p), p, pipe.virtual, m, self._layers(p, pipe.virtual))
            for pipe in pipes
        ]
        return FullestRanks(*map(np.array, zip(*ranks, strict=True)))

    @cached_method
    def links(self, placement: Placement, axis: PipelineAxis, v: int) -> tuple[tuple[Pair, ...], Ints]:
        """Pairs of ranks that represent all links between neighboring stages, and [S - 1] the pair of each stage and the next."""
        holders = placement.stage_ranks(axis.places, v)
        per_node = self._problem.pricer.group.nodes.devices_per_node
        found: dict[Group | None, tuple[int, Pair]] = {}
        at = []
        for a, b in pairwise(holders):
            group = None if a == b else axis.pair(a, b, per_node)
            at.append(found.setdefault(group, (len(found), (a, b)))[0])
        return tuple(pair for _, pair in found.values()), np.array(at, dtype=np.int64)
