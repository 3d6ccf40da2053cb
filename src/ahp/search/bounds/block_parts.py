"""The layers of a space's blocks and the ways to share states among their replicas; blocks whose differences do not matter have the same object."""

from __future__ import annotations

from ahp.cached_method import cached_method
from ahp.engines.traits import Traits
from ahp.forecast.assembly import recompute_of
from ahp.forecast.axes import Axes
from ahp.forecast.candidates.layer_columns import LayerColumns
from ahp.forecast.candidates.shardings import Shardings
from ahp.forecast.data_parallel import DataParallel
from ahp.forecast.segment import Recompute
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
        traits = [self._traits_of(block, way, own) for way, own in zip(ways, layouts, strict=True)]
        return Shardings(layouts, traits, asked.pricer.group.nodes, asked.pricer.group.network)

    def _traits_of(self, block: int, way: ShardingChoice, layout: Parallelism) -> Traits:
        """The engine's traits for one way; neither the order of ranks nor the micro-batch changes them."""
        alike = (*self._space.mesh(block).degrees[:5], *way[:3])
        if alike not in self._traits:
            found = self._problem.traits(layout)
            self._traits[alike] = self._same_traits.setdefault(found, found)
        return self._traits[alike]


class BlockLayers:
    """Layers priced once for blocks whose layers cost the same."""

    def __init__(self, problem: Problem, space: Space, shardings: SpaceShardings) -> None:
        self._pricer, self._space, self._shardings = problem.pricer, space, shardings
        self._some = problem.constraints.recomputed_layers_per_stage is not None
        """Whether the user recomputes some layers of a stage and not others."""

    @cached_method
    def of(self, block: int) -> LayerColumns:
        """The layers of one block."""
        # How replicas share states changes no layer, so any of the ways will do; so will any groups of data-parallel ranks.
        axes, traits = self._space.axes(block), self._shardings.states(block).traits[0]
        return self._priced(axes, traits, int(self._space.blocks.micro_batch[block]), self._space.recompute(block))

    @cached_method
    def _priced(self, axes: Axes, traits: Traits, micro_batch: int, recompute: tuple[str, ...]) -> LayerColumns:
        units = self._pricer.group.unit_pricer.units(micro_batch, axes, traits)
        kinds: list[Recompute] = [recompute_of(kind, traits, units) for kind in recompute]
        return LayerColumns(units, kinds, DataParallel.on(self._pricer.group.nodes, traits), some_layers=self._some)
