"""A lower bound of all layouts of a block from its priced units alone: the work that every rank has on average.

It comes between the arithmetic of ``block_bounds``, which needs no unit, and ``block_rows``, which looks at every way to
share the states: most blocks that the first lets through fall here. It holds for every split, schedule and recompute, and
however the layers are cut into stages.
"""

from __future__ import annotations

import numpy as np

from ahp.engines.engine import Traits
from ahp.forecast.efficiency import is_cpu
from ahp.forecast.segment import segment_backward_s, segment_forward_s
from ahp.forecast.turns import least_share
from ahp.forecast.units import Units
from ahp.search.problem import Problem


class WorkBounds:
    """Of the blocks of one problem."""

    def __init__(self, asked: Problem) -> None:
        self.asked = asked
        self._overlap = 0.0 if is_cpu(asked.pricer.nodes.device) else 1.0
        kinds = asked.graph.layers
        self._share = np.bincount(kinds, minlength=len(asked.graph.blocks)) / max(len(kinds), 1)
        self._passes: dict[tuple[Units, float], tuple[float, float, float]] = {}

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
        key = units, overlap
        if key not in self._passes:
            forward = [segment_forward_s(unit) for unit in units.blocks]
            both = [segment_forward_s(unit) + segment_backward_s(unit, overlap) for unit in units.blocks]
            ends = sum(
                segment_forward_s(unit) + segment_backward_s(unit, overlap) for unit in (units.embedding, units.head)
            )
            self._passes[key] = min(forward, default=0.0), float(np.dot(self._share, both)), ends
        return self._passes[key]
