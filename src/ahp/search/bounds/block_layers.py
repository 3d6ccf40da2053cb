"""The layers of a space's blocks."""

from __future__ import annotations

from ahp.engines.traits import Traits
from ahp.forecast.axes import Axes
from ahp.forecast.candidates.layer_columns import LayerColumns
from ahp.forecast.candidates.layer_prices import LayerPrices
from ahp.search.bounds.space_shardings import SpaceShardings
from ahp.search.problem import Problem
from ahp.search.space import Space


class BlockLayers:
    """Layers priced once for blocks whose layers cost the same."""

    def __init__(self, problem: Problem, space: Space, shardings: SpaceShardings) -> None:
        self._space, self._shardings = space, shardings
        some = problem.constraints.recomputed_layers_per_stage is not None
        self._prices = LayerPrices(problem.pricer, some_layers=some)
        self._numbers: dict[int, tuple[int, Axes, Traits]] = {}
        """By mesh."""

    def of(self, block: int) -> LayerColumns:
        """Of one block."""
        blocks = self._space.blocks
        mesh, size = int(blocks.mesh[block]), int(blocks.micro_batch[block])
        if mesh not in self._numbers:
            axes, traits = self._space.axes(block), self._shardings.first_traits(block)
            self._numbers[mesh] = self._prices.number(axes, traits), axes, traits
        return self._prices.layers(*self._numbers[mesh], size, self._space.recompute(block))
