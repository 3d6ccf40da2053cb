"""The ways to share states among the replicas of a space's blocks; blocks whose differences do not matter have the same object."""

from __future__ import annotations

from collections.abc import Callable

from ahp.engines.traits import Traits
from ahp.forecast.candidates.shardings import Shardings
from ahp.plan import Parallelism
from ahp.search.choices import ShardingChoice
from ahp.search.problem import Problem
from ahp.search.space import Space


class SpaceShardings:
    """The ways to share states in one space."""

    def __init__(self, problem: Problem, space: Space) -> None:
        self._problem, self._space = problem, space
        self._of_mesh: dict[int, Shardings] = {}
        self._of_states: dict[tuple[int, ...], Shardings] = {}
        """Keyed by the degrees of a replica."""
        self._firsts: dict[int, Traits] = {}
        """Keyed by mesh."""
        self._traits: dict[tuple[object, ...], Traits] = {}
        self._same_traits: dict[Traits, Traits] = {}

    def of(self, block: int) -> Shardings:
        """The ways to share states of a block; blocks that differ only in the micro-batch have the same object."""
        mesh = int(self._space.blocks.mesh[block])
        if mesh not in self._of_mesh:
            self._of_mesh[mesh] = self._made(block, self._space.rows(block).splits)
        return self._of_mesh[mesh]

    def states(self, block: int) -> Shardings:
        """The ways to share states of a block and of all blocks that differ from it only in where ranks lie."""
        degrees = self._space.mesh(block).degrees
        if degrees not in self._of_states:
            self._of_states[degrees] = self._made(block, self._space.states(block))
        return self._of_states[degrees]

    def _made(self, block: int, ways: tuple[ShardingChoice, ...]) -> Shardings:
        asked, rows = self._problem, self._space.rows(block)
        layouts = self._space.layouts(block, ways, rows.pipes[0], rows.recompute[-1])
        traits = [self._traits_of(block, way, lambda own=own: own) for way, own in zip(ways, layouts, strict=True)]
        return Shardings(layouts, traits, asked.pricer.nodes, asked.pricer.network)

    def _traits_of(self, block: int, way: ShardingChoice, layout: Callable[[], Parallelism]) -> Traits:
        """The engine's traits for one way; neither the order of ranks nor the micro-batch changes them."""
        asked, alike = self._problem, (*self._space.mesh(block).degrees[:5], *way[:3])
        if alike not in self._traits:
            found = asked.traits(layout())
            self._traits[alike] = self._same_traits.setdefault(found, found)
        return self._traits[alike]

    def first_traits(self, block: int) -> Traits:
        """The engine's traits for a block's first way: the block's layers depend on these, its groups and the micro-batch."""
        mesh = int(self._space.blocks.mesh[block])
        if mesh not in self._firsts:
            space, rows = self._space, self._space.rows(block)
            way, others = rows.splits[0], (rows.pipes[0], rows.recompute[-1])
            self._firsts[mesh] = self._traits_of(block, way, lambda: space.layout_of(block, way, *others))
        return self._firsts[mesh]
