"""Lower bounds of step time and memory for every row of the space, from the forecast's own unit costs.

Five levels. Of a whole block, before its layers are priced: what they take at least, and the one pipeline fill that no schedule avoids
(``block_bounds``). The same from its priced layers. Then what the cheapest layer takes with each recompute that may fit; and with what each
split gathers and reduces (``layer_bounds``). Of each row: its stages cost what the forecast says (``forecast.candidates``), and its
schedule takes at least the closed form of ``ahp.schedule.bounds`` (``block_rows``). Memory counts states and the activations kept at
one moment near the fullest.
So a row whose bound is above the best time, or above the device, needs no forecast. Tests hold all under the forecast
on rows drawn at random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ahp.forecast import memory
from ahp.search.bounds.block_bounds import block_bounds_s, block_needs_bytes, work_bounds_s
from ahp.search.bounds.block_layers import BlockLayers
from ahp.search.bounds.block_rows import BlockRows, RowBounds
from ahp.search.bounds.layer_bounds import LayerBounds, PricedBlock, Ways
from ahp.search.bounds.level import TOGETHER, Level
from ahp.search.bounds.pipelines import Pipelines
from ahp.search.bounds.space_shardings import SpaceShardings
from ahp.search.problem import Problem
from ahp.search.space import Space

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FIRST_TOGETHER = 8
"""Where the lowest of all is wanted: so few at first, then twice as many, as often the first of them settle it."""


class Bounds:
    """Lower bounds for one problem and its space."""

    def __init__(self, problem: Problem, space: Space) -> None:
        self.problem, self.space = problem, space
        self._pipelines = Pipelines(problem)
        self._shardings = SpaceShardings(problem, space)
        self._layers = BlockLayers(problem, space, self._shardings)
        self._known: tuple[dict[int, float], ...] = {}, {}, {}
        """What the levels have found."""
        self._first_s: Floats | None = None

    def only(self, blocks: NDArray[np.bool_]) -> Bounds:
        """The same of some blocks; the others count as too large."""
        some = Bounds(self.problem, self.space)
        some._shardings, some._layers, some._known = self._shardings, self._layers, self._known
        some._first_s = np.where(blocks, self.first_s(), np.inf)
        return some

    def most_that_fits_bytes(self) -> float:
        """Bytes above which a forecast does not fit."""
        return memory.most_that_fits(self.problem.capacity_bytes)

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """``work_s``, ``kinds_s`` and ``block_s``, which ask more of the forecast one after the other."""
        first_s = self.first_s()
        fits = np.flatnonzero(np.isfinite(first_s))
        levels = [Level(dict(zip(fits.tolist(), first_s[fits].tolist(), strict=True)), lambda blocks: ())]
        for known, closer in zip(self._known, (self._work_s, self._kinds_s, self._block_s), strict=True):
            levels.append(Level(known, closer, levels[-1]))
        return tuple(levels[1:])

    def work_s(self, block: int) -> float:
        """Seconds that every row of one block takes at least, whatever it does beside its units' work. Prices the units."""
        return self.levels[0](block)

    def kinds_s(self, block: int) -> float:
        """Seconds that every row of one block takes at least with a recompute that may fit; infinite where none does.

        Nothing that depends on where ranks lie beside their units.
        """
        return self.levels[1](block)

    def block_s(self, block: int) -> float:
        """Seconds that every row of one block that fits takes at least; infinite where none does."""
        return self.levels[2](block)

    def _work_s(self, blocks: list[int]) -> Iterable[float]:
        layers = [self._layers.of(block) for block in blocks]
        return work_bounds_s(self.problem, self.space, np.array(blocks), layers).tolist()

    def _kinds_s(self, blocks: list[int]) -> Iterable[float]:
        most_bytes = self.most_that_fits_bytes()
        bare = {block: self._bare(block) for block in blocks}
        return self._of_layers(bare, lambda layers: layers.of_kinds_s(most_bytes)).values()

    def _block_s(self, blocks: list[int]) -> Iterable[float]:
        most_bytes = self.most_that_fits_bytes()
        return self._of_layers(self._priced_of(blocks), lambda layers: layers.of_rows_s(most_bytes)).values()

    def _of_layers(
        self, priced: dict[int, PricedBlock], seconds_s: Callable[[LayerBounds], Floats]
    ) -> dict[int, float]:
        """A bound of each block from what its layers take; those with the same kinds of recompute are looked at together, and
        those with the same pipelines side by side."""
        if not self.problem.graph.blocks:
            return dict.fromkeys(priced, 0.0)
        found: dict[int, float] = {}
        for kinds in dict.fromkeys(one.rows.recompute for one in priced.values()):
            alike = [block for block, one in priced.items() if one.rows.recompute == kinds]
            alike.sort(key=lambda block: (priced[block].p, id(priced[block].rows.pipes), block))
            layers = LayerBounds(self.problem, self._pipelines, [priced[block] for block in alike])
            found |= dict(zip(alike, seconds_s(layers).tolist(), strict=True))
        return {block: found[block] for block in priced}

    def _priced_of(self, blocks: Iterable[int]) -> dict[int, PricedBlock]:
        return {block: self._priced(block) for block in blocks}

    def _priced(self, block: int) -> PricedBlock:
        of, rows, splits = self.space.blocks, self.space.rows(block), self._shardings.of(block)
        stages, m = self._layers.of(block), int(of.micro_batches[block])
        after = self.problem.pricer.after_s(splits.layouts[0], stages.units)
        return PricedBlock(rows, splits, stages, int(of.pipeline[block]), m, after)

    def _bare(self, block: int) -> PricedBlock:
        """The same with all ways to share states, wherever ranks lie: memory does not depend on that, and it was asked already."""
        of, rows, stages = self.space.blocks, self.space.rows(block), self._layers.of(block)
        p, m = int(of.pipeline[block]), int(of.micro_batches[block])
        return PricedBlock(rows, self._shardings.states(block), stages, p, m, 0.0)

    def first_s(self) -> Floats:
        """Seconds that every row of each block takes at least before its layers are priced; infinite where none fits.

        However its layers are cut into stages.
        """
        if self._first_s is None:
            fits = np.flatnonzero(self.blocks_bytes() <= self.most_that_fits_bytes())
            self._first_s = np.full(len(self.space.blocks), np.inf)
            self._first_s[fits] = block_bounds_s(self.problem, self.space, fits)
        return self._first_s

    def of_any_cut(self, block: int) -> float:
        """Seconds that every row of a block with a pipeline takes, cut in any way; infinite where none fits."""
        return self._of_any_cut([block])[block]

    def _of_any_cut(self, blocks: Iterable[int]) -> dict[int, float]:
        most_bytes = self.most_that_fits_bytes()
        found = self._of_layers(self._priced_of(blocks), lambda layers: layers.of_any_cut_s(most_bytes))
        return {block: max(self.work_s(block), one) for block, one in found.items()}

    def any_cut_s(self) -> float:
        """Seconds that every layout with a pipeline takes at least, however its layers are cut into stages.

        Closer for the blocks whose units the search has priced; infinite where no cut of any fits.
        """
        return self._lowest(self.space.blocks.pipeline > 1, lambda some: self._of_any_cut(some))

    def of_any_part(self, block: int, ways: Ways) -> float:
        """Seconds that every layout of a block takes that recomputes a part of its layers, however they are cut into stages;
        infinite where none fits, or the engine cannot."""
        return self._of_any_part([block], ways)[block]

    def _of_any_part(self, blocks: Iterable[int], ways: Ways) -> dict[int, float]:
        most_bytes = self.most_that_fits_bytes()
        found = self._of_layers(self._priced_of(blocks), lambda layers: layers.of_any_part_s(most_bytes, ways))
        return {block: max(self.work_s(block), one) for block, one in found.items()}

    def any_part_s(self, ways: Ways) -> float:
        """Seconds that every layout takes at least that recomputes a part of its layers, however they are cut into stages."""
        return self._lowest(np.ones(len(self.space.blocks), dtype=bool), lambda some: self._of_any_part(some, ways))

    def _lowest(self, which: NDArray[np.bool_], closer_s: Callable[[Iterable[int]], dict[int, float]]) -> float:
        """The lowest bound of some blocks; those whose units the search has priced are looked at closer where they are the lowest."""
        found = self.first_s().copy()
        work_s = self._known[0]
        known = list(work_s)
        found[known] = np.maximum(found[known], list(work_s.values()))
        found[~which] = np.inf
        looser, size = {block for block in known if np.isfinite(found[block])}, FIRST_TOGETHER
        while np.isfinite(least := found.min(initial=np.inf)) and int(found.argmin()) in looser:
            lowest = np.argpartition(found, min(size, len(found) - 1))[:size].tolist()
            together = {int(found.argmin()), *looser.intersection(lowest)}
            looser, size = looser - together, min(2 * size, TOGETHER)
            for block, closer in closer_s(together).items():
                found[block] = max(found[block], closer)
        return float(least)

    def needs_bytes(self, block: int) -> Floats:
        """Bytes that every row of a block needs at least on its fullest rank."""
        return self._rows(block).needs_bytes().reshape(-1)

    def rows(self, block: int, most_bytes: float) -> RowBounds:
        """Bounds of every row of a block; one that needs more than ``most_bytes`` takes infinitely long."""
        return self._rows(block).bounds(most_bytes)

    def _rows(self, block: int) -> BlockRows:
        of, splits = self.space.blocks, self._shardings.of(block)
        m, size = int(of.micro_batches[block]), int(of.micro_batch[block])
        stages = self._layers.of(block)
        return BlockRows(self.problem, self._pipelines, self.space.rows(block), splits, stages, m, size)

    def blocks_s(self) -> Floats:
        """Seconds that every row of each block takes at least, whether it fits or not."""
        return block_bounds_s(self.problem, self.space, np.arange(len(self.space.blocks)))

    def blocks_bytes(self) -> Floats:
        """Bytes that every row of each block needs at least."""
        return block_needs_bytes(self.problem, self.space, self._shardings.states)
