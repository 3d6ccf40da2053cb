"""Lower bounds of step time and memory for every row of the space, from the forecast's own unit costs.

Four levels. Of a whole block, before anything of it is priced: its arithmetic at the fastest that the device computes,
the collectives within a replica, and the one pipeline fill that no schedule avoids (``block_bounds``). Of the same from
its priced units: their work (``work_bounds``). Then what the cheapest layer takes with each split and each recompute that may fit. Of each row: its stages
cost what the forecast says (``stage_columns``), and its schedule takes at least the closed form of
``ahp.schedule.bounds`` (``block_rows``). Memory counts states and the activations kept at one moment near the fullest.
So a row whose bound is above the best time, or above the device, needs no forecast. Tests hold all under the forecast
on rows drawn at random.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from ahp.engines.engine import Traits
from ahp.engines.registry import get
from ahp.forecast import memory
from ahp.search.bounds.block_bounds import block_bounds_s, block_needs_bytes
from ahp.search.bounds.block_rows import BlockRows, RowBounds, after_s, recomputes
from ahp.search.bounds.layer_bounds import LayerBounds, PricedBlock
from ahp.search.bounds.pipelines import Pipelines
from ahp.search.bounds.splits import Splits
from ahp.search.bounds.stage_columns import BlockStages
from ahp.search.bounds.work_bounds import WorkBounds
from ahp.search.choices import Split
from ahp.search.problem import Problem
from ahp.search.space import Space

Floats = NDArray[np.float64]

FIT_PROBABILITY = 0.95
"""What ``Forecast.fits`` asks for."""

TOGETHER = 64
"""Blocks that are bounded by their layers at once: enough that arrays pay, few beside the thousands that come up in a large space."""


class Bounds:
    """Lower bounds for one problem and its space."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._pipelines = Pipelines(problem)
        self._splits: dict[tuple[object, ...], Splits] = {}
        self._traits: dict[tuple[object, ...], Traits] = {}
        self._same_traits: dict[Traits, Traits] = {}
        self._stages: dict[tuple[int, int], BlockStages] = {}
        """By units and traits. Of these no figure depends on the number of micro-batches."""
        self._waiting: list[tuple[float, int]] = []
        """Blocks whose work is known, a heap by its seconds."""
        self._block_s: dict[int, float] = {}
        self._work = WorkBounds(problem)
        self._work_s: dict[int, float] = {}
        self._first_s: Floats | None = None

    def splits(self, space: Space, block: int) -> Splits:
        """Of a block; blocks that differ in the micro-batch alone share them."""
        return self._shared(space, block, space.rows(block).splits)

    def _shared(self, space: Space, block: int, ways: tuple[Split, ...]) -> Splits:
        asked, mesh = self.problem, space.mesh(block)
        key = *mesh[:5], ways
        if key not in self._splits:
            rows, engine = space.rows(block), get(asked.engine.name)
            layouts = space.layouts(block, ways, rows.pipes[0], rows.recompute[0])
            traits = []
            for layout, way in zip(layouts, ways, strict=True):
                # Neither the order of ranks nor the micro-batch changes how an engine behaves.
                alike = *mesh[:5], *way[:3]
                if alike not in self._traits:
                    found = engine.traits(asked.job, layout, asked.engine)
                    self._traits[alike] = self._same_traits.setdefault(found, found)
                traits.append(self._traits[alike])
            self._splits[key] = Splits(layouts, traits, asked.pricer.nodes, asked.pricer.network)
        return self._splits[key]

    def most_that_fits_bytes(self) -> float:
        """Bytes above which a forecast does not fit: ``forecast.memory.fit_probability`` solved for its argument."""
        sigma = memory.need_error()
        return self.problem.capacity_bytes * float(np.exp(-NormalDist().inv_cdf(FIT_PROBABILITY) * sigma))

    def work_s(self, space: Space, block: int) -> float:
        """Seconds that every row of one block takes at least, whatever it does beside its units' work. Prices the units."""
        of = space.blocks
        p, m, size = int(of.pipeline[block]), int(of.micro_batches[block]), int(of.micro_batch[block])
        self._work_s[block] = found = self._work.seconds(self.splits(space, block), p, m, size)
        heapq.heappush(self._waiting, (found, block))
        return found

    def block_s(self, space: Space, block: int) -> float:
        """Seconds that every row of one block that fits takes at least; infinite where none does. Prices the units.

        Blocks that have less work than others come up next, and are looked at with it.
        """
        if block not in self._block_s:
            together = {block}
            while self._waiting and len(together) < TOGETHER:
                together |= {heapq.heappop(self._waiting)[1]} - self._block_s.keys()
            at, layers = self._of_layers(space, together)
            self._block_s.update(zip(at, layers.of_rows_s(self.most_that_fits_bytes()).tolist(), strict=True))
        return self._block_s[block]

    def _of_layers(self, space: Space, blocks: Iterable[int]) -> tuple[list[int], LayerBounds]:
        """The blocks in an order in which those with the same pipelines lie side by side, and their bounds."""
        priced = {block: self._priced(space, block) for block in sorted(blocks)}
        order = sorted(priced, key=lambda block: (priced[block].p, id(priced[block].rows.pipes), block))
        return order, LayerBounds(self.problem, self._pipelines, [priced[block] for block in order])

    def _priced(self, space: Space, block: int) -> PricedBlock:
        asked, of, rows, splits = self.problem, space.blocks, space.rows(block), self.splits(space, block)
        m, size = int(of.micro_batches[block]), int(of.micro_batch[block])
        units = asked.pricer.unit_pricer.units(size, splits.axes, splits.traits[0])
        key = id(units), id(splits.traits[0])  # the pricer keeps its units, and this the traits
        if key not in self._stages:
            some = asked.constraints.recomputed_layers_per_stage is not None
            self._stages[key] = BlockStages(units, recomputes(rows, splits, units), splits, m, some_layers=some)
        after = after_s(asked, splits.layouts[0], units)
        return PricedBlock(rows, splits, self._stages[key], int(of.pipeline[block]), m, after)

    def first_s(self, space: Space) -> Floats:
        """Seconds that every row of each block takes at least before its units are priced; infinite where none fits.

        However its layers are cut into stages.
        """
        if self._first_s is None:
            fits = self.blocks_bytes(space) <= self.most_that_fits_bytes()
            self._first_s = np.where(fits, self.blocks_s(space), np.inf)
        return self._first_s

    def of_any_cut(self, space: Space, block: int) -> float:
        """Seconds that every row of a block with a pipeline takes, cut in any way; infinite where none fits."""
        return self._of_any_cut(space, [block])[block]

    def _of_any_cut(self, space: Space, blocks: Iterable[int]) -> dict[int, float]:
        at, layers = self._of_layers(space, blocks)
        found = layers.of_any_cut_s(self.most_that_fits_bytes()).tolist()
        return {block: max(self.work_s(space, block), one) for block, one in zip(at, found, strict=True)}

    def any_cut_s(self, space: Space) -> float:
        """Seconds that every layout with a pipeline takes at least, however its layers are cut into stages.

        Closer for the blocks whose units the search has priced; infinite where no cut of any fits.
        """
        found = self.first_s(space).copy()
        known = list(self._work_s)
        found[known] = np.maximum(found[known], list(self._work_s.values()))
        found[space.blocks.pipeline == 1] = np.inf
        looser = {block for block in known if np.isfinite(found[block])}
        while np.isfinite(least := found.min(initial=np.inf)) and int(found.argmin()) in looser:
            lowest = np.argpartition(found, min(TOGETHER, len(found) - 1))[:TOGETHER].tolist()
            together = {int(found.argmin()), *looser.intersection(lowest)}
            looser -= together
            for block, closer in self._of_any_cut(space, together).items():
                found[block] = max(found[block], closer)
        return float(least)

    def needs_bytes(self, space: Space, block: int) -> Floats:
        """Bytes that every row of a block needs at least on its fullest rank."""
        return self._rows(space, block).needs_bytes().reshape(-1)

    def rows(self, space: Space, block: int, most_bytes: float) -> RowBounds:
        """Bounds of every row of a block; one that needs more than ``most_bytes`` takes infinitely long."""
        return self._rows(space, block).bounds(most_bytes)

    def _rows(self, space: Space, block: int) -> BlockRows:
        of, splits = space.blocks, self.splits(space, block)
        m, size = int(of.micro_batches[block]), int(of.micro_batch[block])
        return BlockRows(self.problem, self._pipelines, space.rows(block), splits, m, size)

    def blocks_s(self, space: Space) -> Floats:
        """Seconds that every row of each block takes at least."""
        return block_bounds_s(self.problem, space)

    def blocks_bytes(self, space: Space) -> Floats:
        """Bytes that every row of each block needs at least."""
        return block_needs_bytes(self.problem, space, lambda block: self._shared(space, block, space.states(block)))
