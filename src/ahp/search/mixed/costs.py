"""What the cells of a mixed layout take and hold, group by group: from each group's own units, at or below the forecast.

A stage takes at least what its units take on the group's own devices (their kernels by operator and shape, tensor and context
collectives, recompute), and where weights are gathered beside them what one layer more adds to a stage. It holds at least
the states of its weights and the activations that its micro-batches in flight keep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from ahp.engines.registry import get
from ahp.forecast import margins, memory
from ahp.forecast.assembly import num_groups, recompute_of
from ahp.forecast.efficiency import is_cpu
from ahp.forecast.groups import shard_ranks
from ahp.forecast.mixed import MixedPricer
from ahp.forecast.pricer import Pricer
from ahp.forecast.stage import (
    DataParallel,
    Recompute,
    StageCost,
    dropped_bytes,
    made_again,
    recomputed,
    tensor_backward_s,
)
from ahp.forecast.unit import Unit
from ahp.forecast.units import ALONE, Units
from ahp.plan import Parallelism
from ahp.schedule.bounds import in_flight
from ahp.search.bounds.space_bounds import FIT_PROBABILITY
from ahp.search.mixed.holding import WHOLE, Activations, States, most_layers

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

    def over_runs(self, place: int, passes: int) -> Floats:
        """[L + 1, L + 1] Of a stage with the layers from the row to the column; where it has none 0, and infinite for both passes.

        ``passes``: 0 for the forward pass, 1 for both.
        """
        found = _runs(self.layers[passes]) + self.beside[place][passes]
        return np.where(np.tri(len(found), dtype=bool), np.inf if passes else 0.0, found)

    def line(self, place: int) -> tuple[float, float, float, float]:
        """Forward beside the layers, of the mean layer; the same of both passes."""
        (forward, both), beside = self.layers, self.beside[place]
        return beside[0], float(forward.mean()), beside[1], float(both.mean())


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
        self.recompute: Recompute = recompute_of(layout, self.traits, self.units)
        self.states = cache(self._states)
        self.over_runs = cache(lambda place, passes: self.work.over_runs(place, passes))

    @cached_property
    def work(self) -> Work:
        """From the stages that the forecast prices: of one layer and of two, of which the second adds the least of all.

        A stage's parts are sums over its layers, or the host's time where that is longer: each layer more adds as much as
        the one before, or more. Where layers differ, each is its units alone.
        """
        num_layers = len(self.units.layers)
        if self.layout.pipeline_parallel_degree == 1:
            none, cost = np.zeros(num_layers), self._cost(num_layers, 3)
            updated = (cost.parameters - cost.experts) / shard_ranks(self.layout)
            once = sum(cost.first_forward.values()) + sum(cost.last_backward.values())
            once += self.pricer.update_s(updated, self.traits) + self.pricer.offload_s(updated, self.traits)
            if self.pricer.muon is not None:  # over how many replicas its matrices are dealt out is not known yet
                once += num_layers * self.pricer.muon.least_s() / self._num_devices
            return Work((none, none), ((0.0, 0.0),) * 3 + (_seconds(cost),), once)
        if not self._layers_alike:
            return self.of_units()
        one, two = self._stage(1, 1), self._stage(2, 1)
        forward, both = (min(more - less, less) for more, less in zip(two, one, strict=True))
        layers = np.full(num_layers, forward), np.full(num_layers, both)
        ends = one, self._stage(1, 0), self._stage(1, 2)
        first, between, last = ((of[0] - forward, of[1] - both) for of in (ends[1], ends[0], ends[2]))
        return Work(layers, (first, between, last, last))

    @property
    def _layers_alike(self) -> bool:
        return len(set(self.units.layers)) == 1 and len(self.units.layers) > 1

    @cached_property
    def least_alone_s(self) -> float:
        """Seconds of both passes of the whole model for one micro-batch, at least: as ``work``, of stages that are priced sooner."""
        if not self._layers_alike:
            return self.of_units().over_runs(WHOLE, 1)[0, -1]
        one, two = self._stage(1, WHOLE)[1], self._stage(2, WHOLE)[1]
        return one + (len(self.units.layers) - 1) * min(two - one, one)

    def _stage(self, num_layers: int, place: int) -> tuple[float, float]:
        return _seconds(self._cost(num_layers, place))

    def _cost(self, num_layers: int, place: int) -> StageCost:
        first, last = ENDS[place]
        return self.pricer.stage_cost(
            self.units, range(num_layers), self._data, self.recompute, first=first, last=last, network=self._network
        )

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
        return self._per_layer(lambda u: u.memory.saved - dropped_bytes(u, self.units, self.recompute))

    @cached_property
    def parameters(self) -> Floats:
        """[L]"""
        return self._per_layer(lambda u: u.parameters)

    def _states(self, place: int, micro_batches: int) -> tuple[float, float, float, float]:
        """Bytes of a stage's states with none of its layers, and for each parameter of them; of these the gradients."""
        first, last = ENDS[place]
        outside = self.units.embedding.parameters * first + self.units.head.parameters * last
        tied = self.units.tied_parameters if last else 0
        outside += tied if not first else 0
        smallest = min((unit.parameters for unit in self.units.blocks), default=0)

        def bytes_of(layers: int) -> dict[str, int]:
            weights = memory.RankWeights(
                total=outside + layers * smallest,
                largest_block=smallest if layers else 0,
                outside_blocks=outside,
                head=self.units.head.parameters + tied if last else 0,
            )
            shards = shard_ranks(self.layout)
            return memory.state_bytes(weights, self.traits, shards=shards, micro_batches=micro_batches)

        few, more = bytes_of(2), bytes_of(4)
        # Past two layers each costs the same; what they cost more is gathered beside, of which one layer has less.
        each = (sum(more.values()) - sum(few.values())) / max(2 * smallest, 1)
        one = bytes_of(1)
        of_gradients = one["gradients"] / max(outside + smallest, 1)
        return sum(one.values()) - each * smallest, each, of_gradients, outside * of_gradients

    def needs(self, place: int, held: int, micro_batches: int) -> Floats:
        """[L + 1, L + 1] Bytes in tensors of a stage with the layers from the row to the column, at least.

        ``held``: micro-batches that it keeps at once, of ``micro_batches``.
        """
        _, each, per_gradient, outside_gradients = self.states(place, micro_batches)
        parameters = _runs(self.parameters)
        activations = held * (_runs(self.kept) + self._kept_outside(place))
        if micro_batches == 1:  # gradients grow as activations go
            activations = np.maximum(activations - per_gradient * parameters - outside_gradients, 0.0)
        buffers = self._received(place) * (micro_batches if self.traits.torch_pipeline else 1)
        return self._without_layers(place, micro_batches) + buffers + each * parameters + activations

    @cached_property
    def activations(self) -> Activations:
        """What stages hold of activations, [4]."""
        places = range(len(ENDS))
        received = np.array([self._received(place) for place in places])
        every = self.traits.torch_pipeline
        return Activations(
            kept=np.full(len(ENDS), float(self.kept.min(initial=np.inf))),
            outside=np.array([self._kept_outside(place) for place in places]),
            received=received if every else np.zeros(len(ENDS)),
            once=np.zeros(len(ENDS)) if every else received,
            temporary=np.array([self._temporary(last=last) for _, last in ENDS]),
        )

    def states_at(self, place: int) -> tuple[float, float]:
        """Bytes of states of each layer, at least, and beside the layers, for several micro-batches."""
        beside, each, *_ = self.states(place, 2)
        return each * float(self.parameters.min(initial=np.inf)), beside

    def _received(self, place: int) -> float:
        """Bytes that a stage receives for a micro-batch."""
        first, last = ENDS[place]
        return 0.0 if first and last else float(((not first) + (not last)) * self.units.hidden_bytes)

    def _kept_outside(self, place: int) -> float:
        """Bytes of one micro-batch that a stage keeps beside its layers'."""
        first, last = ENDS[place]
        kept = self.units.embedding.memory.saved * first + self.units.head.memory.saved * last
        return float(kept + (0 if last else self.units.hidden_bytes))

    def _without_layers(self, place: int, micro_batches: int) -> float:
        """Bytes of a stage beside its layers, their activations and what it receives."""
        return self.states(place, micro_batches)[0] + self._temporary(last=ENDS[place][1])

    def _temporary(self, *, last: bool) -> float:
        """Bytes at the peak of one backward pass beyond what is kept, at least."""
        needs = [
            u.memory.backward_extra + made_again(u, self.recompute, dropped_bytes(u, self.units, self.recompute))
            for u in self.units.blocks
        ]
        head = self.units.head.memory
        least = min(needs, default=0) - (head.saved if last else 0)
        return float(max(0, least, max(head.forward_extra, head.backward_extra) if last else 0))


def room_bytes(pricer: Pricer, layout: Parallelism) -> float:
    """Bytes in tensors that a device of a group has for a layout."""
    device = pricer.nodes.device
    most = device.memory_bytes * float(np.exp(-NormalDist().inv_cdf(FIT_PROBABILITY) * memory.need_error()))
    outside = device.reserved_memory_bytes
    outside += 0 if is_cpu(device) else num_groups(layout) * margins.value("communicator_bytes")
    return (most - outside) / margins.value("reserved_over_allocated")


class LayoutTables:
    """What the stages of one layout cost on each group."""

    def __init__(self, groups: Sequence[GroupCells], layout: Parallelism) -> None:
        self.groups, self.layout = groups, layout
        self.num_layers, self.num_stages = len(groups[0].units.layers), layout.pipeline_parallel_degree
        self._room = [room_bytes(cells.pricer, layout) for cells in groups]
        self._places = [place_of(stage, self.num_stages) for stage in range(self.num_stages)]
        self.most_layers = cache(self._most_layers)
        self.fits = cache(self._fits)

    @property
    def lines(self) -> Floats:
        """[4, G, S] Of a stage's seconds: forward beside its layers, of a layer; both passes beside, of a layer."""
        return self._lines

    @cached_property
    def _lines(self) -> Floats:
        found = [[of.work.line(place) for place in range(4)] for of in self.groups]
        return np.moveaxis(np.array(found)[:, self._places], 2, 0)

    def stage_s(self, kind: tuple[int, ...], layers: tuple[int, ...]) -> tuple[Floats, Floats]:
        """[S] Seconds of a replica's stages for one micro-batch: both passes, and the forward one."""
        runs = pairwise(np.cumsum([0, *layers]).tolist())
        at = list(zip(kind, self._places, runs, strict=True))
        whole = [self.groups[group].over_runs(place, 1)[run] for group, place, run in at]
        return np.array(whole), np.array([self.groups[group].over_runs(place, 0)[run] for group, place, run in at])

    def _held(self, micro_batches: int) -> Ints:
        """[S] Micro-batches that each stage keeps at once."""
        name = self.layout.pipeline_parallel_schedule if self.num_stages > 1 else "1F1B"
        return in_flight(name, self.num_stages, 1, micro_batches)[:, 0]

    def _most_layers(self, micro_batches: int) -> Ints:
        """[G, S] Layers that a device of the group can hold in a stage, at most."""
        return most_layers(*self._holding, self.num_layers, self._held(micro_batches), np.array(micro_batches))

    @cached_property
    def _holding(self) -> tuple[Activations, States]:
        """Of stages on each group, [G, S]."""
        activations = zip(*(of.activations for of in self.groups), strict=True)
        states = np.array([[of.states_at(place) for place in range(len(ENDS))] for of in self.groups])[:, self._places]
        room = np.array(self._room)[:, None]
        return (
            Activations(*(np.array(field)[:, self._places] for field in activations)),
            States(room, states[..., 0], states[..., 1]),
        )

    def _fits(self, group: int, stage: int, micro_batches: int) -> NDArray[np.bool_]:
        """[L + 1, L + 1] Whether the group's device holds each run of layers, as far as the lower bound of its need tells."""
        held = int(self._held(micro_batches)[stage])
        return self.groups[group].needs(self._places[stage], held, micro_batches) <= self._room[group]


def _runs(layers: Floats) -> Floats:
    sums = np.concatenate([[0.0], np.cumsum(layers)])
    return sums[None, :] - sums[:, None]


def _seconds(cost: StageCost) -> tuple[float, float]:
    """Of one micro-batch, forward and both passes."""
    forward_s = sum(cost.forward.values())
    return forward_s, forward_s + sum(cost.backward.values())


def _passes(unit: Unit, recompute: Recompute, data: DataParallel) -> tuple[float, float]:
    """Device seconds of a unit, forward and both passes."""
    forward = unit.times.forward_s + unit.tensor_forward_s + unit.context_forward_s + unit.expert_s
    backward = unit.times.backward_s + tensor_backward_s(unit, data) + unit.context_backward_s + unit.expert_s
    again = recomputed(unit, recompute).device_s
    again += forward - unit.times.forward_s if recompute == "full" else 0.0
    return forward, forward + backward + again
