"""Layers of one model on one kind of nodes, priced once for all candidates whose layers cost the same."""

from __future__ import annotations

from collections.abc import Callable

from ahp.engines.traits import Traits
from ahp.forecast.assembly import recompute_of
from ahp.forecast.axes import Axes
from ahp.forecast.candidates.layer_columns import LayerColumns
from ahp.forecast.candidates.shardings import Shardings
from ahp.forecast.pricer import Pricer
from ahp.forecast.segment import Recompute


class LayerPrices:
    """Layers by the groups and traits that they depend on, by the micro-batch and by the kinds of recompute."""

    def __init__(self, pricer: Pricer, *, some_layers: bool) -> None:
        """``some_layers``: whether the user recomputes some layers of a stage and not others."""
        self._some, self._unit_pricer = some_layers, pricer.unit_pricer
        self._numbers: dict[tuple[Axes, Traits], int] = {}
        self._layers: dict[tuple[int, int, tuple[str, ...]], LayerColumns] = {}

    def number(self, axes: Axes, traits: Traits) -> int:
        """What candidates have in common whose layers cost the same."""
        return self._numbers.setdefault((axes, traits), len(self._numbers))

    def layers(
        self,
        number: int,
        axes: Axes,
        shardings: Callable[[], Shardings],
        micro_batch_size: int,
        recompute: tuple[str, ...],
    ) -> LayerColumns:
        """Under the first of some ways to share states; made where they were not priced before.

        ``number``: that of ``axes`` and its traits; ``recompute``: values of activation_checkpoint.
        """
        key = number, micro_batch_size, recompute
        if key not in self._layers:
            first = shardings()
            traits = first.traits[0]
            units = self._unit_pricer.units(micro_batch_size, axes, traits)
            kinds: list[Recompute] = [recompute_of(kind, traits, units) for kind in recompute]
            self._layers[key] = LayerColumns(units, kinds, first.data(0, 1), some_layers=self._some)
        return self._layers[key]
