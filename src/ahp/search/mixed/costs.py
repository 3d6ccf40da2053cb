"""What the cells of a mixed layout take and hold, group by group: from each group's own units, at or below the forecast.

A stage takes at least what its units take on the group's own devices (their kernels by operator and shape, tensor and context
collectives, recompute), and where weights are gathered beside them what one layer more adds to a stage. It holds at least
the states of its weights and the activations that its micro-batches in flight keep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from ahp.cluster.cells import cells_of
from ahp.cluster.model import NodeGroup
from ahp.engines.registry import get
from ahp.forecast import memory
from ahp.forecast.assembly import num_groups, recompute_of
from ahp.forecast.axes import ALONE
from ahp.forecast.data_parallel import DataParallel
from ahp.forecast.groups import shard_ranks
from ahp.forecast.mixed import MixedPricer
from ahp.forecast.pricer import Pricer
from ahp.forecast.segment import Recompute, recomputed, segment_again_s, segment_backward_s, segment_forward_s
from ahp.forecast.stage import StageCost
from ahp.forecast.stage_memory import (
    kept_beside_layers,
    kept_of_kinds,
    needs_of_kinds,
    peak_bytes,
    stage_weights,
)
from ahp.forecast.states import RankWeights, Shards, state_bytes
from ahp.forecast.unit import Unit
from ahp.forecast.units import Units
from ahp.plan import Parallelism
from ahp.search.mixed.holding import WHOLE, Activations

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ENDS = ((True, False), (False, False), (False, True), (True, True))
"""Whether a stage is the first and whether it is the last, by its place: first, between, last, alone."""


def place_of(stage: int, num_stages: int) -> int:
    """The entry of ``ENDS`` of a stage."""
    return 3 if num_stages == 1 else 0 if stage == 0 else 2 if stage == num_stages - 1 else 1


@dataclass(frozen=True)
class Work:
    """Seconds of a group's cell for one micro-batch, forward and both passes."""

    layers: tuple[Floats, Floats]
    """[L] Of each layer."""
    beside: tuple[tuple[float, float], ...]
    """What a stage takes beside its layers, by place."""
    once: float = 0.0
    """What a cell that has the whole model takes once per step, for all micro-batches."""

    def whole_s(self, place: int) -> float:
        """Both passes of a stage with all layers."""
        return float(self.layers[1].sum()) + self.beside[place][1]


class GroupCells:
    """The cells of one group for layouts that are alike in everything but pipeline, replicas and schedule."""

    def __init__(self, pricer: MixedPricer, group: str, layout: Parallelism, micro_batches: int) -> None:
        """``layout``: any of them; its pipeline degree is 1, or above as theirs. ``micro_batches``: of a replica, at least."""
        self.pricer, self.group, self.layout = pricer.groups[group], group, layout
        self._network = pricer.network.times(self.pricer.network)
        self._num_devices, self._least = pricer.cluster.num_devices, micro_batches
        engine = get(self.pricer.choice.name)
        self.traits = engine.traits(self.pricer.job, layout, self.pricer.choice)
        self.units: Units = self.pricer.units(layout)
        self.recompute: Recompute = recompute_of(layout.activation_checkpoint, self.traits, self.units)
        self.states = cache(self._states)
        self._ends = self.pricer.table([(0, 0, first, last) for first, last in ENDS])
        """Stages without layers."""

    @cached_property
    def work(self) -> Work:
        """From the stages that the forecast prices: of one layer and of two, of which the second adds the least of all.

        A stage's parts are sums over its layers, or the host's time where that is longer: each layer more adds as much as
        the one before, or more. Where layers differ, each is its units alone.
        """
        num_layers = len(self.units.layers)
        if self.layout.pipeline_parallel_degree == 1:
            none, [cost] = np.zeros(num_layers), self._costs((num_layers, WHOLE))
            whole = stage_weights(self.units, self.pricer.table([(0, num_layers, True, True)]))
            updated = float(whole.total[0] - whole.experts[0]) / shard_ranks(self.layout)
            once = sum(cost.first_forward.values()) + sum(cost.last_backward.values())
            once += self.pricer.update_s(updated, self.traits) + self.pricer.offload_s(updated, self.traits)
            if self.pricer.muon is not None:  # over how many replicas its matrices are dealt out is not known yet
                once += num_layers * self.pricer.muon.least_s() / self._num_devices
            return Work((none, none), ((0.0, 0.0),) * 3 + (_seconds(cost),), once)
        if not self._layers_alike:
            return self.of_units()
        one, two, with_first, with_last = self._stages((1, 1), (2, 1), (1, 0), (1, 2))
        forward, both = (min(more - less, less) for more, less in zip(two, one, strict=True))
        layers = np.full(num_layers, forward), np.full(num_layers, both)
        ends = one, with_first, with_last
        first, between, last = ((of[0] - forward, of[1] - both) for of in (ends[1], ends[0], ends[2]))
        return Work(layers, (first, between, last, last))

    @property
    def _layers_alike(self) -> bool:
        return len(set(self.units.layers)) == 1 and len(self.units.layers) > 1

    @cached_property
    def least_alone_s(self) -> float:
        """Seconds of both passes of the whole model for one micro-batch, at least: as ``work``, of stages that are priced sooner."""
        if not self._layers_alike:
            return self.of_units().whole_s(WHOLE)
        (_, one), (_, two) = self._stages((1, WHOLE), (2, WHOLE))
        return one + (len(self.units.layers) - 1) * min(two - one, one)

    @cached_property
    def units_s(self) -> float:
        """The same without what gathers weights and without the host."""
        return self.of_units().whole_s(WHOLE)

    def _stages(self, *stages: tuple[int, int]) -> list[tuple[float, float]]:
        """Seconds of stages with so many layers at a place."""
        return [_seconds(cost) for cost in self._costs(*stages)]

    def _costs(self, *stages: tuple[int, int]) -> list[StageCost]:
        table = self.pricer.table([(0, num_layers, *ENDS[place]) for num_layers, place in stages])
        return self.pricer.stage_costs(self.units, table, self._data, self.recompute, self._network)

    @cached_property
    def _data(self) -> DataParallel:
        """Replicas that sum gradients are not known yet: they take no time."""
        found = self.pricer.data_parallel(self.layout, self.traits)
        return replace(found, replicate=ALONE, experts=(found.experts[0], ALONE), micro_batches=self._least)

    def of_units(self) -> Work:
        """Without what gathers weights beside the layers, and without the host: fewer stages are priced for it."""
        data = self._data
        kinds = [_passes(unit, self.recompute, data) for unit in self.units.blocks]
        forward = np.array([kinds[kind][0] for kind in self.units.layers])
        both = np.array([kinds[kind][1] for kind in self.units.layers])
        embedding, head = (_passes(unit, "none", data) for unit in (self.units.embedding, self.units.head))
        alone = embedding[0] + head[0], embedding[1] + head[1]
        return Work((forward, both), (embedding, (0.0, 0.0), head, alone))

    def _per_layer(self, figure: Callable[[Unit], float]) -> Floats:
        kinds = [figure(unit) for unit in self.units.blocks]
        return np.array([kinds[kind] for kind in self.units.layers], dtype=float)

    @cached_property
    def kept(self) -> Floats:
        """[L] Bytes of each layer that one micro-batch keeps."""
        return kept_of_kinds(self.units, self.recompute)[list(self.units.layers)].astype(float)

    @cached_property
    def parameters(self) -> Floats:
        """[L]"""
        return self._per_layer(lambda u: u.parameters)

    def _states(self, micro_batches: int) -> Floats:
        """[4, P] Bytes of states of stages in each place with none of their layers, and for each parameter of them; of these the gradients."""
        weights, places = stage_weights(self.units, self._ends), np.zeros(len(ENDS))
        outside, head = weights.outside_blocks.astype(float), weights.head
        smallest = min((unit.parameters for unit in self.units.blocks), default=0)
        shards = Shards.among(shard_ranks(self.layout))

        def bytes_of(layers: int) -> tuple[Floats, Floats]:
            held = RankWeights(outside + layers * smallest, smallest if layers else 0, outside, head)
            parts = state_bytes(held, self.traits, shards, micro_batches)
            return places + sum(parts.values()), places + parts["gradients"]

        (few, _), (more, _) = bytes_of(2), bytes_of(4)
        # Past two layers each costs the same; what they cost more is gathered beside, of which one layer has less.
        each = (more - few) / max(2 * smallest, 1)
        one, gradients = bytes_of(1)
        of_gradients = gradients / np.maximum(outside + smallest, 1)
        return np.stack([one - each * smallest, each, of_gradients, outside * of_gradients])

    @cached_property
    def activations(self) -> Activations:
        """What stages hold of activations, [4]."""
        ends, units = self._ends, self.units
        received = ((2 - ends.first - ends.last) * units.hidden_bytes).astype(float)
        least = needs_of_kinds(units, self.recompute).min(initial=np.iinfo(np.int64).max) if units.blocks else 0
        every = self.traits.pipeline.in_torch
        return Activations(
            kept=np.full(len(ENDS), float(self.kept.min(initial=np.inf))),
            outside=kept_beside_layers(units, ends).astype(float),
            received=received if every else np.zeros(len(ENDS)),
            once=np.zeros(len(ENDS)) if every else received,
            temporary=peak_bytes(units, np.full(len(ENDS), least), ends).astype(float),
        )

    @cached_property
    def again_s(self) -> float:
        """Seconds of both passes that a stage takes longer, at most, where one layer more is recomputed: on the device, or on the host
        where that is waited for."""
        data = self._data
        return max((_again_s(unit, self.recompute, data) for unit in self.units.blocks), default=0.0)

    @cached_property
    def state_bytes(self) -> Floats:
        """[2, P, 4] What ``states`` says for one micro-batch and for several, by place."""
        return np.stack([self.states(m).T for m in (1, 2)])

    def states_at(self, place: int) -> tuple[float, float]:
        """Bytes of states of each layer, at least, and beside the layers, for several micro-batches."""
        beside, each, *_ = self.states(2)[:, place].tolist()
        return each * float(self.parameters.min(initial=np.inf)), beside


def that_have(groups: Sequence[NodeGroup], width: int) -> list[str]:
    """The name of each group that has cells of so many devices, and for each other, which cannot say what these take, that of the
    first that has: it counts for nothing there."""
    has = [cells_of(group, width) > 0 for group in groups]
    first = groups[has.index(True)]
    return [(group if there else first).name for group, there in zip(groups, has, strict=True)]


def room_bytes(pricer: Pricer, layout: Parallelism) -> float:
    """Bytes in tensors that a device of a group has for a layout."""
    device = pricer.nodes.device
    most = memory.most_that_fits(device.memory_bytes)
    folded = get(pricer.choice.name).traits(pricer.job, layout, pricer.choice).experts.folded
    return float(memory.most_allocated(most, memory.Outside.of(device, num_groups(layout, folded))))


def _seconds(cost: StageCost) -> tuple[float, float]:
    """Of one micro-batch, forward and both passes."""
    forward_s = sum(cost.forward.values())
    return forward_s, forward_s + sum(cost.backward.values())


def _passes(unit: Unit, recompute: Recompute, data: DataParallel) -> tuple[float, float]:
    """Device seconds of a unit, forward and both passes."""
    forward = segment_forward_s(unit)
    return forward, forward + segment_backward_s(unit, data.tensor_overlap) + segment_again_s(unit, recompute, data)


def _again_s(unit: Unit, recompute: Recompute, data: DataParallel) -> float:
    device_s, work = segment_again_s(unit, recompute, data), recomputed(unit, recompute)
    if data.host_is_device:
        return device_s
    return max(device_s, work.launches * data.traits.host.launches_per_operator * data.operator_s)
