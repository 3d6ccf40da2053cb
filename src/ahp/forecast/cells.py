"""Times of one layout's stages on each group of a mixed cluster, at or below the forecast and linear in the number of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ahp.arrays import Floats
from ahp.forecast.assembly import recompute_of
from ahp.forecast.axes import ALONE
from ahp.forecast.cell_columns import BETWEEN, ENDS, FIRST, LAST, WHOLE
from ahp.forecast.data_parallel import DataParallel
from ahp.forecast.mixed import MixedPricer
from ahp.forecast.segment import Recompute, SegmentFigures
from ahp.forecast.stage_memory import stage_weights
from ahp.plan import Parallelism


@dataclass(frozen=True)
class StageLine:
    """Seconds of a group's cell for one micro-batch, forward and both passes."""

    layers: Floats
    """[2, L] Of each layer."""
    beside: Floats
    """[2, P] Of a stage besides its layers, by place."""
    once: float = 0.0
    """Seconds once per step, for all micro-batches, of a cell that has the whole model."""

    def whole_s(self, place: int) -> float:
        """Both passes of a stage with all layers."""
        return float(self.layers[1].sum() + self.beside[1, place])


class GroupCells:
    """The cells of one group for layouts that differ only in pipeline, replicas and schedule."""

    def __init__(self, pricer: MixedPricer, group: str, layout: Parallelism) -> None:
        """``layout``: any of these layouts; its pipeline degree is 1 if theirs are, else above 1."""
        self._pricer, self._layout = pricer.groups[group], layout
        self._network = pricer.network.times(self._pricer.network)
        self._num_devices = pricer.cluster.num_devices
        self._traits = self._pricer.traits(layout)
        self._units = self._pricer.units(layout)
        self._recompute: Recompute = recompute_of(layout.activation_checkpoint, self._traits, self._units)
        # The replicas that sum gradients and their micro-batches are not known yet, so neither takes time here.
        found = self._pricer.data_parallel(layout, self._traits)
        experts = found.experts[0], ALONE
        self._data: DataParallel = replace(found, replicate=ALONE, experts=experts, micro_batches=1)

    @cached_property
    def line(self) -> StageLine:
        """The line through the forecast's prices of a stage with one layer and with two: the second layer adds the least.

        A stage's parts are sums over its layers, or the host's time where that is longer, so each further layer adds as
        much as the one before, or more. Where layers differ, each counts its unit alone.
        """
        num_layers = len(self._units.layers)
        if self._layout.pipeline_parallel_degree == 1:
            return self._whole()
        if len(set(self._units.layers)) != 1 or num_layers == 1:
            return self._of_units()
        one, two, first, last = self._passes_s(self._priced([(1, BETWEEN), (2, BETWEEN), (1, FIRST), (1, LAST)]))
        each = np.minimum(two - one, one)
        beside = np.stack([first, one, last, last], axis=1) - each[:, None]
        return StageLine(np.repeat(each[:, None], num_layers, axis=1), beside)

    def _whole(self) -> StageLine:
        """The line of the whole model, with what comes once per step."""
        num_layers = len(self._units.layers)
        costs = self._priced([(num_layers, WHOLE)])
        [both] = self._passes_s(costs)
        weights = stage_weights(self._units, self._pricer.table([(0, num_layers, True, True)]))
        updated = float(np.asarray(weights.dense)[0]) / self._layout.weight_shards
        once = float(costs["first_forward"][0] + costs["last_backward"][0])
        once += self._pricer.update_s(updated, self._traits) + self._pricer.offload_s(updated, self._traits)
        if self._pricer.muon is not None:  # how many replicas its matrices are dealt out to is not known yet
            once += num_layers * self._pricer.muon.least_s() / self._num_devices
        beside = np.zeros((2, len(ENDS)))
        beside[:, WHOLE] = both
        return StageLine(np.zeros((2, num_layers)), beside, once)

    @cached_property
    def last_s(self) -> Floats:
        """[L + 1] Least seconds that a first stage of 0 to L layers takes after its last micro-batch; with a pipeline degree of 1, all are 0
        except for the stage of all layers."""
        num_layers = len(self._units.layers)
        alone = self._layout.pipeline_parallel_degree == 1
        costs = self._priced([(num_layers, WHOLE)] if alone else [(n, FIRST) for n in range(num_layers + 1)])
        found = np.minimum(costs["last_backward"], costs["last_weight_gradient"])
        return np.concatenate([np.zeros(num_layers), found]) if alone else found

    @cached_property
    def _figures(self) -> SegmentFigures:
        return SegmentFigures(self._units, [self._recompute], self._data)

    def _of_units(self) -> StageLine:
        """The line of units alone, without gathering weights and without the host."""
        figures = self._figures
        passes = np.array([figures.forward_s, figures.forward_s + figures.backward_s])
        kinds, embedding, head = passes[:, :-2], passes[:, -2], passes[:, -1]
        kinds[1] += figures.again_s[0]
        beside = np.stack([embedding, 0 * head, head, embedding + head], axis=1)
        return StageLine(kinds[:, list(self._units.layers)], beside)

    def _priced(self, stages: Sequence[tuple[int, int]]) -> dict[str, Floats]:
        """[S] Seconds of stages, given as (layers, place) each, keyed by the fields of ``StageCost``."""
        num_layers = len(self._units.layers)
        table = self._pricer.table([(0, min(n, num_layers), *ENDS[place]) for n, place in stages])
        costs = self._pricer.stage_costs(self._units, table, self._data, self._recompute, self._network)
        return {name: np.broadcast_to(of, (1, 1, len(stages)))[0, 0] for name, of in costs.seconds().items()}

    @staticmethod
    def _passes_s(costs: dict[str, Floats]) -> Floats:
        """[S, 2] For one micro-batch, forward and both passes."""
        return np.stack([costs["forward"], costs["forward"] + costs["backward"]], axis=1)

    @cached_property
    def again_s(self) -> float:
        """The most seconds that recomputing one more layer adds to both passes of a stage: on the device, or on the host where the
        device waits for the host."""
        figures, data = self._figures, self._data
        device_s, beside = figures.again_s[0], figures.again["beside_forward"][0] + figures.again["beside_backward"][0]
        if data.host_is_device:
            return float((device_s + beside * data.operator_s).max(initial=0.0))
        launches = (figures.again["launches"][0] + beside) * data.traits.host.launches_per_operator
        return float(np.maximum(device_s, launches * data.operator_s).max(initial=0.0))
