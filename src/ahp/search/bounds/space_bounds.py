"""Lower bounds of step time and memory for every row of the space, from the forecast's own unit costs.

There are four levels. For a whole block, before its layers are priced: the least time of the layers and of their gradient copies on the paths
through its schedules (``block_bounds``, ``pipelines``). The same from its priced layers. Then the time of each kind of layer with each recompute
that can fit, and with what each split gathers and reduces (``layer_bounds``). For each row: stage times as in the forecast
(``forecast.candidates``), and the closed form of its schedule in ``ahp.schedule.bounds`` (``block_rows``). Memory counts states and the
activations kept at one moment near the fullest.
So a row whose bound is above the best time, or above the device's memory, needs no forecast. Tests check that all bounds are
below the forecast on random rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ahp.arrays import Floats
from ahp.cached_method import cached_method
from ahp.forecast import memory
from ahp.search.bounds.block_bounds import (
    block_bounds_s,
    block_needs_bytes,
    least_copies_s,
    schedule_bounds_s,
    work_bounds_s,
)
from ahp.search.bounds.block_parts import BlockLayers, SpaceShardings
from ahp.search.bounds.block_rows import BlockRows, RowBounds
from ahp.search.bounds.cut_bounds import CutBounds
from ahp.search.bounds.layer_bounds import PricedBlock, Ways
from ahp.search.bounds.level import TOGETHER, Level
from ahp.search.bounds.pipelines import Pipelines
from ahp.search.problem import Problem
from ahp.search.space import Space

MANY_BLOCKS = 20_000
"""In larger spaces only blocks that the search has priced already get a closer bound of any cut. [Empirical] 405 B on 16,384 devices has 54,000 blocks:
pricing them too would add 4 s to the 8 s of the search, and raise the bound from 0.63 to 0.72 of the best plan."""

FIRST_TOGETHER = 8
"""How many blocks get a closer bound at first when the lowest of all is wanted; then twice as many: often the first ones settle it."""


class Bounds:
    """Lower bounds for one problem and its space."""

    def __init__(self, problem: Problem, space: Space) -> None:
        self.problem, self.space = problem, space
        self._pipelines = Pipelines(problem)
        self._shardings = SpaceShardings(problem, space)
        self._layers = BlockLayers(problem, space, self._shardings)
        self._work: dict[int, float] = {}
        """``work_s`` of blocks whose units are priced."""
        self._scheduled: dict[int, float] = {}
        self._any_cut: dict[int, float] = {}
        """``of_any_cut`` of blocks that had it computed."""
        self._closest: dict[int, float] = {}
        """The closest bounds of blocks that ``levels`` found."""

    def most_that_fits_bytes(self) -> float:
        """Bytes above which a forecast does not fit."""
        return memory.most_that_fits(self.problem.capacity_bytes)

    def levels(self, blocks_s: Floats) -> tuple[Level, Level]:
        """Closer bounds for a search of the blocks whose known bound in ``blocks_s`` is finite: ``scheduled_s``, and the bound of all rows
        that fit, infinite if none does."""
        searched = np.flatnonzero(np.isfinite(blocks_s))
        first = Level(dict(zip(searched.tolist(), blocks_s[searched].tolist(), strict=True)))
        work = Level(self._scheduled, lambda blocks: self.scheduled_s(blocks).tolist(), first)
        return work, Level(self._closest, self._block_s, work)

    def _block_s(self, blocks: list[int]) -> Iterable[float]:
        most_bytes = self.most_that_fits_bytes()
        found = self._of_layers(self._priced_of(blocks), lambda layers: layers.of_rows_s(most_bytes))
        return [found[block] for block in blocks]

    def that_may_fit(self, blocks: list[int]) -> list[int]:
        """The blocks among these that have a row that may fit, by what its layers hold."""
        return [block for block, closer_s in zip(blocks, self._block_s(blocks), strict=True) if closer_s < np.inf]

    def work_s(self, blocks: list[int]) -> Floats:
        """Lower bound in seconds of every layout of some blocks, whether it fits or not: its units' work alone, in any cut into stages.
        Prices the units."""
        layers = [self._layers.of(block) for block in blocks]
        which = np.array(blocks, dtype=np.int64)
        found = work_bounds_s(self.problem, self.space, which, layers, self._copies_s[which])
        self._work.update(zip(blocks, found.tolist(), strict=True))
        return found

    def scheduled_s(self, blocks: list[int]) -> Floats:
        """Lower bound in seconds of every row of some blocks: ``work_s`` and the waits that its schedule makes unavoidable."""
        layers, which = [self._layers.of(block) for block in blocks], np.array(blocks, dtype=np.int64)
        asked = self.problem, self.space, self._pipelines, which
        device_s = schedule_bounds_s(*asked, np.array([of.least_s for of in layers]), self._copies_s[which])
        hosts_s = np.array([of.least_host_s for of in layers])
        host_s = schedule_bounds_s(*asked, hosts_s, np.zeros_like(hosts_s[:, 0]))
        return np.maximum(self.work_s(blocks), np.maximum(device_s, host_s))

    def _of_layers(self, priced: dict[int, PricedBlock], seconds_s: Callable[[CutBounds], Floats]) -> dict[int, float]:
        """A bound of each block from the times of its layers; blocks with the same kinds of recompute are bounded together, and
        blocks with the same pipelines are adjacent."""
        if not self.problem.graph.blocks:
            return dict.fromkeys(priced, 0.0)
        found: dict[int, float] = {}
        for kinds in dict.fromkeys(one.rows.recompute for one in priced.values()):
            alike = [block for block, one in priced.items() if one.rows.recompute == kinds]
            alike.sort(key=lambda block: (priced[block].p, priced[block].rows.pipes, block))
            layers = CutBounds(self.problem, self._pipelines, [priced[block] for block in alike])
            found |= dict(zip(alike, seconds_s(layers).tolist(), strict=True))
        return found

    def _priced_of(self, blocks: Iterable[int]) -> dict[int, PricedBlock]:
        return {block: self._priced(block) for block in blocks}

    def _priced(self, block: int) -> PricedBlock:
        of, rows, splits = self.space.blocks, self.space.rows(block), self._shardings.of(block)
        stages, m = self._layers.of(block), int(of.micro_batches[block])
        after = self.problem.pricer.group.after_s(splits.layouts[0], stages.units)
        return PricedBlock(rows, splits, stages, int(of.pipeline[block]), m, after)

    @cached_property
    def _copies_s(self) -> Floats:
        return least_copies_s(self.problem, self.space, self._shardings.states)

    def first_s(self) -> Floats:
        """Lower bound in seconds of every row of each block before its layers are priced; infinite if none fits."""
        return self._first_s[1]

    @cached_property
    def _first_s(self) -> tuple[Floats, Floats]:
        """Bounds of each block: of every layout in any cut into stages, and of every row."""
        found = np.full((2, len(self.space.blocks)), np.inf)
        which = np.flatnonzero(self.blocks_bytes() <= self.most_that_fits_bytes())
        found[:, which] = block_bounds_s(self.problem, self.space, self._pipelines, which, self._copies_s[which])
        return found[0], found[1]

    def lowest_of_any_cut(self, known_s: float) -> list[int]:
        """The blocks whose bound of any cut ``any_cut_s`` found to be below ``known_s``, the lowest first."""
        self.any_cut_s(known_s)
        below = sorted((seconds, block) for block, seconds in self._any_cut.items() if seconds < known_s)
        return [block for _, block in below]

    def of_any_cut(self, blocks: Iterable[int]) -> dict[int, float]:
        """Lower bound in seconds of every row of some blocks with a pipeline, in any cut; infinite if none fits."""
        most_bytes, wanted = self.most_that_fits_bytes(), list(blocks)
        new = self._priced_of(block for block in wanted if block not in self._any_cut)
        found = self._of_layers(new, lambda layers: layers.of_any_cut_s(most_bytes))
        self._any_cut |= self._no_less_than_work(found)
        return {block: self._any_cut[block] for block in wanted}

    def _no_less_than_work(self, found: dict[int, float]) -> dict[int, float]:
        blocks = list(found)
        return dict(zip(blocks, np.maximum(self.work_s(blocks), list(found.values())).tolist(), strict=True))

    def any_cut_s(self, known_s: float = np.inf) -> float:
        """Lower bound in seconds of every layout with a pipeline, in any cut into stages; infinite if no cut of any fits. ``known_s``: time of
        a known plan; the bound is made closer only until it reaches this."""
        return self._lowest(self.space.blocks.pipeline > 1, self.of_any_cut, known_s)

    def of_any_part(self, blocks: Iterable[int], ways: Ways) -> dict[int, float]:
        """Lower bound in seconds of every layout of some blocks that recomputes a part of its layers, in any cut into stages;
        infinite if none fits, or if the engine cannot."""
        most_bytes = self.most_that_fits_bytes()
        found = self._of_layers(self._priced_of(blocks), lambda layers: layers.of_any_part_s(most_bytes, ways))
        return self._no_less_than_work(found)

    def any_part_s(self, ways: Ways, known_s: float = np.inf) -> float:
        """Like ``any_cut_s``, of every layout that recomputes a part of its layers, in any cut into stages."""
        every = np.ones(len(self.space.blocks), dtype=bool)
        return self._lowest(every, lambda some: self.of_any_part(some, ways), known_s)

    def _lowest(
        self, which: NDArray[np.bool_], closer_s: Callable[[Iterable[int]], dict[int, float]], known_s: float
    ) -> float:
        """The lowest bound of some blocks, after closer bounds of the lowest ones; only until it reaches ``known_s``."""
        found = self._first_s[0].copy()
        known = list(self._work)
        found[known] = np.maximum(found[known], list(self._work.values()))
        found[~which] = np.inf
        below = np.flatnonzero(found < known_s).tolist()
        looser = set(below) if len(found) <= MANY_BLOCKS else self._work.keys() & below
        size = FIRST_TOGETHER
        while (least := found.min(initial=np.inf)) < known_s and int(found.argmin()) in looser:
            lowest = np.argpartition(found, min(size, len(found) - 1))[:size].tolist()
            together = {int(found.argmin()), *looser.intersection(lowest)}
            unpriced = sorted(together.difference(self._work))
            if unpriced:  # these may no longer be the lowest
                found[unpriced] = np.maximum(found[unpriced], self.work_s(unpriced))
                continue
            looser, size = looser - together, min(2 * size, TOGETHER)
            for block, closer in closer_s(together).items():
                found[block] = max(found[block], closer)
        return float(least)

    def needs_bytes(self, block: int) -> Floats:
        """Least bytes that every row of a block needs on its fullest rank."""
        return self._rows(block).needs_bytes.reshape(-1)

    def rows(self, block: int, most_bytes: float) -> RowBounds:
        """Bounds of every row of a block; rows that need more than ``most_bytes`` take infinitely long."""
        return self._rows(block).bounds(most_bytes)

    @cached_method
    def _rows(self, block: int) -> BlockRows:
        of, splits = self.space.blocks, self._shardings.of(block)
        m, size = int(of.micro_batches[block]), int(of.micro_batch[block])
        stages = self._layers.of(block)
        return BlockRows(self.problem, self._pipelines, self.space.rows(block), splits, stages, m, size)

    def blocks_bytes(self) -> Floats:
        """Least bytes that every row of each block needs."""
        return block_needs_bytes(self.problem, self.space, np.arange(len(self.space.blocks)), self._shardings.states)
