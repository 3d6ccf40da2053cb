"""Layers of one model on one kind of nodes, priced once for all candidates whose layers cost the same."""

from __future__ import annotations

from ahp.engines.traits import Traits
from ahp.forecast.assembly import recompute_of
from ahp.forecast.axes import Axes
from ahp.forecast.candidates.layer_columns import LayerColumns
from ahp.forecast.data_parallel import DataParallel
from ahp.forecast.pricer import Pricer
from ahp.forecast.segment import Recompute


class LayerPrices:
    """Layers by the groups and traits that they depend on, by the micro-batch and by the kinds of recompute."""

    def __init__(self, pricer: Pricer, *, some_layers: bool) -> None:
        """``some_layers``: whether the user recomputes some layers of a stage and not others."""
        self._some, self._pricer = some_layers, pricer
        self._numbers: dict[tuple[Axes, Traits], int] = {}
        self._layers: dict[tuple[int, int, tuple[str, ...]], LayerColumns] = {}

    def number(self, axes: Axes, traits: Traits) -> int:
        """What candidates have in common whose layers cost the same."""
        return self._numbers.setdefault((axes, traits), len(self._numbers))

    def layers(
        self, number: int, axes: Axes, traits: Traits, micro_batch_size: int, recompute: tuple[str, ...]
    ) -> LayerColumns:
        """Made where they were not priced before. ``number``: that of the axes and traits; ``recompute``: values of activation_checkpoint."""
        key = number, micro_batch_size, recompute
        if key not in self._layers:
            units = self._pricer.unit_pricer.units(micro_batch_size, axes, traits)
            kinds: list[Recompute] = [recompute_of(kind, traits, units) for kind in recompute]
            data = DataParallel.on(self._pricer.nodes, traits)  # whatever groups: layers do not depend on them
            self._layers[key] = LayerColumns(units, kinds, data, some_layers=self._some)
        return self._layers[key]
