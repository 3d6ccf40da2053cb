"""The layers of a space's blocks."""

from __future__ import annotations

from ahp.engines.traits import Traits
from ahp.forecast.assembly import recompute_of
from ahp.forecast.axes import Axes
from ahp.forecast.candidates.layer_columns import LayerColumns
from ahp.forecast.data_parallel import DataParallel
from ahp.forecast.segment import Recompute
from ahp.search.bounds.space_shardings import SpaceShardings
from ahp.search.problem import Problem
from ahp.search.space import Space


class BlockLayers:
    """Layers priced once for blocks whose layers cost the same."""

    def __init__(self, problem: Problem, space: Space, shardings: SpaceShardings) -> None:
        self._pricer, self._space, self._shardings = problem.pricer, space, shardings
        self._some = problem.constraints.recomputed_layers_per_stage is not None
        """Whether the user recomputes some layers of a stage and not others."""
        self._of_mesh: dict[int, tuple[int, Axes, Traits]] = {}
        self._numbers: dict[tuple[Axes, Traits], int] = {}
        """A number for what meshes have in common if their layers cost the same."""
        self._layers: dict[tuple[int, int, tuple[str, ...]], LayerColumns] = {}

    def of(self, block: int) -> LayerColumns:
        """The layers of one block."""
        blocks = self._space.blocks
        mesh, size = int(blocks.mesh[block]), int(blocks.micro_batch[block])
        if mesh not in self._of_mesh:
            axes, traits = self._space.axes(block), self._shardings.first_traits(block)
            self._of_mesh[mesh] = self._numbers.setdefault((axes, traits), len(self._numbers)), axes, traits
        number, axes, traits = self._of_mesh[mesh]
        key = number, size, self._space.recompute(block)
        if key not in self._layers:
            units = self._pricer.unit_pricer.units(size, axes, traits)
            kinds: list[Recompute] = [recompute_of(kind, traits, units) for kind in key[2]]
            data = DataParallel.on(self._pricer.nodes, traits)  # any groups do: layers do not depend on them
            self._layers[key] = LayerColumns(units, kinds, data, some_layers=self._some)
        return self._layers[key]
