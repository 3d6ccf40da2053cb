"""Lower bounds of step time and memory for every row of the space, from the forecast's own unit costs.

Five levels. Of a whole block, before anything of it is priced: its arithmetic at the fastest that the device computes,
the collectives within a replica, and the one pipeline fill that no schedule avoids (``block_bounds``). Of the same from
its priced units: their work. Then what the cheapest layer takes with each recompute that may fit; and with what each
split gathers and reduces (``layer_bounds``). Of each row: its stages cost what the forecast says (``stage_columns``), and its schedule takes at least the closed form of
``ahp.schedule.bounds`` (``block_rows``). Memory counts states and the activations kept at one moment near the fullest.
So a row whose bound is above the best time, or above the device, needs no forecast. Tests hold all under the forecast
on rows drawn at random.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from ahp.engines.registry import get
from ahp.engines.traits import Traits
from ahp.forecast import memory
from ahp.forecast.axes import Axes
from ahp.forecast.turns import least_share
from ahp.forecast.units import Units
from ahp.plan import Parallelism
from ahp.search.bounds.block_bounds import block_bounds_s, block_needs_bytes
from ahp.search.bounds.block_rows import BlockRows, RowBounds, after_s, recomputes
from ahp.search.bounds.layer_bounds import LayerBounds, PricedBlock, Ways, layers_before
from ahp.search.bounds.pipelines import Pipelines
from ahp.search.bounds.splits import Splits
from ahp.search.bounds.stage_columns import BlockStages
from ahp.search.choices import ShardingChoice
from ahp.search.problem import Problem
from ahp.search.space import Space

Floats = NDArray[np.float64]

TOGETHER = 128
"""Blocks that are bounded by their layers at once: enough that arrays pay, few beside the thousands that come up in a large space."""

FIRST_TOGETHER = 8
"""Where the lowest of all is wanted: so few at first, then twice as many, as often the first of them settle it."""


SOON = 1.02
"""Blocks whose bounds are no more than so many times another one's come up soon after it."""


class Bounds:
    """Lower bounds for one problem and its space."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._pipelines = Pipelines(problem)
        self._splits: dict[int, Splits] = {}
        """By mesh."""
        self._of_states: dict[tuple[int, ...], Splits] = {}
        """By the degrees of a replica."""
        self._firsts: dict[int, Splits] = {}
        """The first split of each mesh: most blocks need no other."""
        self._traits: dict[tuple[object, ...], Traits] = {}
        self._same_traits: dict[Traits, Traits] = {}
        self._numbers: dict[tuple[Axes, Traits], int] = {}
        self._alike: dict[int, int] = {}
        """Of each mesh, which groups and traits its units depend on."""
        self._units: dict[tuple[int, int], Units] = {}
        self._stages: dict[tuple[int, int], BlockStages] = {}
        """Both by this and the micro-batch."""
        self._waiting: list[tuple[float, int]] = []
        """Blocks whose work is known, a heap by its seconds."""
        self._kinds_s: dict[int, float] = {}
        self._fitting: list[tuple[float, int]] = []
        """Blocks of which some recompute may fit, a heap by the seconds with it."""
        self._block_s: dict[int, float] = {}
        self._ahead: list[int] | None = None
        """Blocks whose work is not known, the one with the lowest bound last; some of them may have come up meanwhile."""
        self._work_s: dict[int, float] = {}
        self._first_s: Floats | None = None

    def splits(self, space: Space, block: int) -> Splits:
        """Of a block; blocks that differ in the micro-batch alone share them."""
        mesh = int(space.blocks.mesh[block])
        if mesh not in self._splits:
            self._splits[mesh] = self._made(space, block, space.rows(block).splits)
        return self._splits[mesh]

    def _states(self, space: Space, block: int) -> Splits:
        """The ways to share states of a block and of all that differ from it in where ranks lie."""
        degrees = space.mesh(block)[:5]
        if degrees not in self._of_states:
            self._of_states[degrees] = self._made(space, block, space.states(block))
        return self._of_states[degrees]

    def _made(self, space: Space, block: int, ways: tuple[ShardingChoice, ...]) -> Splits:
        asked, rows = self.problem, space.rows(block)
        layouts = space.layouts(block, ways, rows.pipes[0], rows.recompute[-1])
        traits = [self._traits_of(space, block, *pair) for pair in zip(ways, layouts, strict=True)]
        return Splits(layouts, traits, asked.pricer.nodes, asked.pricer.network)

    def _traits_of(self, space: Space, block: int, way: ShardingChoice, layout: Parallelism) -> Traits:
        """Neither the order of ranks nor the micro-batch changes how an engine behaves."""
        asked, alike = self.problem, (*space.mesh(block)[:5], *way[:3])
        if alike not in self._traits:
            found = get(asked.engine.name).traits(asked.job, layout, asked.engine)
            self._traits[alike] = self._same_traits.setdefault(found, found)
        return self._traits[alike]

    def _first(self, space: Space, block: int) -> Splits:
        """What the units of a block depend on beside its micro-batch."""
        mesh = int(space.blocks.mesh[block])
        if mesh not in self._firsts:
            rows, pricer = space.rows(block), self.problem.pricer
            layout = space.layout_of(block, rows.splits[0], rows.pipes[0], rows.recompute[-1])
            traits = self._traits_of(space, block, rows.splits[0], layout)
            self._firsts[mesh] = Splits([layout], [traits], pricer.nodes, pricer.network)
        return self._firsts[mesh]

    def most_that_fits_bytes(self) -> float:
        """Bytes above which a forecast does not fit."""
        return memory.most_that_fits(self.problem.capacity_bytes)

    def work_s(self, space: Space, block: int) -> float:
        """Seconds that every row of one block takes at least, whatever it does beside its units' work. Prices the units."""
        if block not in self._work_s:
            of, stages, pricer = space.blocks, self._stages_of(space, block), self.problem.pricer
            p, m = int(of.pipeline[block]), int(of.micro_batches[block])
            before_s, work_s = layers_before(self.problem, p) * stages.least_forward_s, m * stages.micro_batch_s / p
            self._work_s[block] = (
                max(work_s, (before_s + work_s) * float(least_share(pricer.turns, p))) * pricer.stretch
            )
            heapq.heappush(self._waiting, (self._work_s[block], block))
        return self._work_s[block]

    def kinds_s(self, space: Space, block: int) -> float:
        """Seconds that every row of one block takes at least with a recompute that may fit; infinite where none does.

        Nothing that depends on where ranks lie beside their units. Blocks with little more work come up soon, and are looked at with it.
        """
        if block not in self._kinds_s:
            together = {block, *self._soon(space, SOON * self.work_s(space, block))}
            most_bytes = self.most_that_fits_bytes()
            found = self._of_layers(
                {one: self._bare(space, one) for one in together}, lambda layers: layers.of_kinds_s(most_bytes)
            )
            for one, seconds in found.items():
                self._kinds_s[one] = max(seconds, self._work_s[one])
                heapq.heappush(self._fitting, (self._kinds_s[one], one))
        return self._kinds_s[block]

    def block_s(self, space: Space, block: int) -> float:
        """Seconds that every row of one block that fits takes at least; infinite where none does. Prices the units.

        Blocks with little more of what is known come up soon, and are looked at with it.
        """
        if block not in self._block_s:
            together, most_s = {block}, SOON * self.kinds_s(space, block)
            while len(together) < TOGETHER and self._fitting and self._fitting[0][0] <= most_s:
                together.add(heapq.heappop(self._fitting)[1])
            most_bytes = self.most_that_fits_bytes()
            together = self._priced_of(space, together.difference(self._block_s))
            self._block_s |= self._of_layers(together, lambda layers: layers.of_rows_s(most_bytes))
        return self._block_s[block]

    def _soon(self, space: Space, most_s: float) -> Iterator[int]:
        """Blocks that were not looked at and have no more work than this, as far as is known; some of the next are asked."""
        if self._ahead is None:
            self._ahead = np.argsort(self.first_s(space), kind="stable").tolist()[::-1]
        for _ in range(TOGETHER):
            if self._ahead and self.first_s(space)[self._ahead[-1]] <= most_s:
                self.work_s(space, self._ahead.pop())
        for _ in range(TOGETHER):
            if self._waiting and self._waiting[0][0] <= most_s:
                block = heapq.heappop(self._waiting)[1]
                if block not in self._kinds_s:
                    yield block

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
        return found

    def _priced_of(self, space: Space, blocks: Iterable[int]) -> dict[int, PricedBlock]:
        return {block: self._priced(space, block) for block in sorted(blocks)}

    def _priced(self, space: Space, block: int) -> PricedBlock:
        of, rows, splits = space.blocks, space.rows(block), self.splits(space, block)
        stages, m = self._stages_of(space, block), int(of.micro_batches[block])
        after = after_s(self.problem, splits.layouts[0], stages.units)
        return PricedBlock(rows, splits, stages, int(of.pipeline[block]), m, after)

    def _bare(self, space: Space, block: int) -> PricedBlock:
        """The same with all ways to share states, wherever ranks lie: memory does not depend on that, and it was asked already."""
        of, rows, stages = space.blocks, space.rows(block), self._stages_of(space, block)
        p, m = int(of.pipeline[block]), int(of.micro_batches[block])
        return PricedBlock(rows, self._states(space, block), stages, p, m, 0.0)

    def _stages_of(self, space: Space, block: int) -> BlockStages:
        key = self._alike_of(space, block), int(space.blocks.micro_batch[block])
        if key not in self._stages:
            first, units = self._first(space, block), self._units_of(space, block)
            some = self.problem.constraints.recomputed_layers_per_stage is not None
            kinds = recomputes(space.rows(block), first.traits[0], units)
            self._stages[key] = BlockStages(units, kinds, first.data(0, 1), some_layers=some)
        return self._stages[key]

    def _units_of(self, space: Space, block: int) -> Units:
        size = int(space.blocks.micro_batch[block])
        key = self._alike_of(space, block), size
        if key not in self._units:
            first = self._first(space, block)
            self._units[key] = self.problem.pricer.unit_pricer.units(size, first.axes, first.traits[0])
        return self._units[key]

    def _alike_of(self, space: Space, block: int) -> int:
        """A number that blocks share whose units depend on the same, but for the micro-batch."""
        mesh = int(space.blocks.mesh[block])
        if mesh not in self._alike:
            first = self._first(space, block)
            self._alike[mesh] = self._numbers.setdefault((first.axes, first.traits[0]), len(self._numbers))
        return self._alike[mesh]

    def first_s(self, space: Space) -> Floats:
        """Seconds that every row of each block takes at least before its units are priced; infinite where none fits.

        However its layers are cut into stages.
        """
        if self._first_s is None:
            fits = np.flatnonzero(self.blocks_bytes(space) <= self.most_that_fits_bytes())
            self._first_s = np.full(len(space.blocks), np.inf)
            self._first_s[fits] = block_bounds_s(self.problem, space, fits)
        return self._first_s

    def of_any_cut(self, space: Space, block: int) -> float:
        """Seconds that every row of a block with a pipeline takes, cut in any way; infinite where none fits."""
        return self._of_any_cut(space, [block])[block]

    def _of_any_cut(self, space: Space, blocks: Iterable[int]) -> dict[int, float]:
        most_bytes = self.most_that_fits_bytes()
        found = self._of_layers(self._priced_of(space, blocks), lambda layers: layers.of_any_cut_s(most_bytes))
        return {block: max(self.work_s(space, block), one) for block, one in found.items()}

    def any_cut_s(self, space: Space) -> float:
        """Seconds that every layout with a pipeline takes at least, however its layers are cut into stages.

        Closer for the blocks whose units the search has priced; infinite where no cut of any fits.
        """
        return self._lowest(space, space.blocks.pipeline > 1, lambda some: self._of_any_cut(space, some))

    def of_any_part(self, space: Space, block: int, ways: Ways) -> float:
        """Seconds that every layout of a block takes that recomputes a part of its layers, however they are cut into stages;
        infinite where none fits, or the engine cannot."""
        return self._of_any_part(space, [block], ways)[block]

    def _of_any_part(self, space: Space, blocks: Iterable[int], ways: Ways) -> dict[int, float]:
        most_bytes = self.most_that_fits_bytes()
        found = self._of_layers(self._priced_of(space, blocks), lambda layers: layers.of_any_part_s(most_bytes, ways))
        return {block: max(self.work_s(space, block), one) for block, one in found.items()}

    def any_part_s(self, space: Space, ways: Ways) -> float:
        """Seconds that every layout takes at least that recomputes a part of its layers, however they are cut into stages."""
        return self._lowest(
            space, np.ones(len(space.blocks), dtype=bool), lambda some: self._of_any_part(space, some, ways)
        )

    def _lowest(
        self, space: Space, which: NDArray[np.bool_], closer_s: Callable[[Iterable[int]], dict[int, float]]
    ) -> float:
        """The lowest bound of some blocks; those whose units the search has priced are looked at closer where they are the lowest."""
        found = self.first_s(space).copy()
        known = list(self._work_s)
        found[known] = np.maximum(found[known], list(self._work_s.values()))
        found[~which] = np.inf
        looser, size = {block for block in known if np.isfinite(found[block])}, FIRST_TOGETHER
        while np.isfinite(least := found.min(initial=np.inf)) and int(found.argmin()) in looser:
            lowest = np.argpartition(found, min(size, len(found) - 1))[:size].tolist()
            together = {int(found.argmin()), *looser.intersection(lowest)}
            looser, size = looser - together, min(2 * size, TOGETHER)
            for block, closer in closer_s(together).items():
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
        stages = self._stages_of(space, block)
        return BlockRows(self.problem, self._pipelines, space.rows(block), splits, stages, m, size)

    def blocks_s(self, space: Space) -> Floats:
        """Seconds that every row of each block takes at least."""
        return block_bounds_s(self.problem, space, np.arange(len(space.blocks)))

    def blocks_bytes(self, space: Space) -> Floats:
        """Bytes that every row of each block needs at least."""
        return block_needs_bytes(self.problem, space, lambda block: self._states(space, block))
