"""A lower bound of all layouts of a block from its priced units alone: the work that every rank has on average.

It comes between the arithmetic of ``block_bounds``, which needs no unit, and ``block_rows``, which looks at every way to
share the states: most blocks that the first lets through fall here. It holds for every split, schedule and recompute, and
however the layers are cut into stages.
"""

from __future__ import annotations

import numpy as np

from ahp.engines.engine import Traits
from ahp.forecast.efficiency import is_cpu
from ahp.forecast.overlap import shown_s
from ahp.forecast.turns import least_share
from ahp.forecast.unit import Unit
from ahp.forecast.units import Units
from ahp.search.problem import Problem


class WorkBounds:
    """Of the blocks of one problem."""

    def __init__(self, asked: Problem) -> None:
        self.asked = asked
        self._overlap = 0.0 if is_cpu(asked.pricer.nodes.device) else 1.0
        kinds = asked.graph.layers
        self._share = np.bincount(kinds, minlength=len(asked.graph.blocks)) / max(len(kinds), 1)
        self._passes: dict[tuple[int, float], tuple[float, float, float]] = {}

    def seconds(self, units: Units, traits: Traits, p: int, m: int) -> float:
        """That ``m`` micro-batches take at least on ``p`` pipeline ranks. ``units``: of one of them; ``traits``: of any split."""
        forward, both, ends = self._of_units(units, traits)
        # A rank of average place has so many stages before it, each with one layer at least but where an end has none.
        before = (p - 1) / 2 - (self.asked.stage_ends != "hold_layers") * (p - 1) / p
        work_s = m * (both * self.asked.graph.num_layers + ends) / p
        pricer = self.asked.pricer
        return max(work_s, (before * forward + work_s) * float(least_share(pricer.turns, p))) * pricer.stretch

    def _of_units(self, units: Units, traits: Traits) -> tuple[float, float, float]:
        """Device seconds of one micro-batch: the shortest layer's forward pass, both passes of the mean layer, and of the ends."""
        overlap = self._overlap * traits.tensor_overlap_backward
        key = id(units), overlap  # the pricer keeps its units
        if key not in self._passes:
            forward = [_forward_s(unit) for unit in units.blocks]
            both = [_forward_s(unit) + _backward_s(unit, overlap) for unit in units.blocks]
            ends = sum(_forward_s(unit) + _backward_s(unit, overlap) for unit in (units.embedding, units.head))
            self._passes[key] = min(forward, default=0.0), float(np.dot(self._share, both)), ends
        return self._passes[key]


def _forward_s(unit: Unit) -> float:
    return unit.times.forward_s + unit.tensor_forward_s + unit.context_forward_s + unit.expert_s


def _backward_s(unit: Unit, overlap: float) -> float:
    """Without recompute; the share ``overlap`` of tensor collectives may hide behind weight gradients."""
    tensor_s = shown_s(unit.tensor_backward_s, unit.times.weight_gradient.device_s, overlap)
    return unit.times.backward_s + tensor_s + unit.context_backward_s + unit.expert_s
