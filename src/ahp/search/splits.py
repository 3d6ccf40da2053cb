"""The ways to share states among the replicas of a block, and what each leaves on a rank: ``forecast.memory`` on arrays.

Blocks that differ in the micro-batch alone have these in common. Dims: J = splits, W = ranks (or whatever has weights).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ahp.cluster.model import NodeGroup
from ahp.engines.engine import Traits
from ahp.forecast import memory
from ahp.forecast.communication import Network
from ahp.forecast.efficiency import is_cpu
from ahp.forecast.groups import data_groups, expert_groups, shard_ranks
from ahp.forecast.pricer import num_groups
from ahp.forecast.stage import DataParallel, Weights, cast_bytes, gradient_copy_bytes
from ahp.forecast.units import Axes, axes_of
from ahp.plan import Parallelism

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MUCH_BYTES = 10**12
"""So many that what an allocator wastes of them gives its share to twelve digits."""


@dataclass(frozen=True)
class WeightColumns:
    """``forecast.memory.RankWeights`` of several ranks, each [W] or one number."""

    total: Floats
    largest_block: Floats | float = 0.0
    outside_blocks: Floats | float = 0.0
    head: Floats | float = 0.0
    experts: Floats | float = 0.0
    shapes: Floats | float = 0.0


@dataclass(frozen=True)
class CollectiveTimes:
    """Seconds of gathering weights, reducing gradients, and summing them over the replicas, each [J, ...]."""

    gather: Floats
    reduce: Floats
    replicas: Floats

    def at(self, splits: list[int]) -> CollectiveTimes:
        return CollectiveTimes(self.gather[splits], self.reduce[splits], self.replicas[splits])


class Splits:
    """Every split of a block, with how the engine behaves there."""

    def __init__(self, layouts: list[Parallelism], traits: list[Traits], nodes: NodeGroup, network: Network) -> None:
        """``layouts``: one for each split; all else is equal."""
        self.layouts, self.traits, self._nodes, self._network = layouts, traits, nodes, network
        self._collectives: dict[Weights, CollectiveTimes] = {}
        self._moved: dict[int, Floats] = {}

    @cached_property
    def axes(self) -> Axes:
        """The groups that divide a micro-batch within one stage, whatever the split."""
        return axes_of(self.layouts[0], self._nodes.devices_per_node)

    @cached_property
    def alike(self) -> dict[Traits, list[int]]:
        """The splits by the engine's traits."""
        found: dict[Traits, list[int]] = {}
        for index, of in enumerate(self.traits):
            found.setdefault(of, []).append(index)
        return found

    @cached_property
    def _data(self) -> list[DataParallel]:
        """What goes over the groups of each split, of a single micro-batch."""
        per_node, on_cpu = self._nodes.devices_per_node, is_cpu(self._nodes.device)
        found = []
        for layout, traits in zip(self.layouts, self.traits, strict=True):
            shard, replicate = data_groups(layout, per_node)
            found.append(
                DataParallel(
                    shard=shard,
                    replicate=replicate,
                    experts=expert_groups(layout, per_node),
                    traits=traits,
                    micro_batches=1,
                    overlap=0.0 if on_cpu else 1.0,
                    operator_s=self._nodes.device.kernel_launch_s,
                    host_is_device=on_cpu,
                )
            )
        return found

    def data(self, split: int, micro_batches: int) -> DataParallel:
        """What goes over the groups of one split."""
        return replace(self._data[split], micro_batches=micro_batches)

    def moved_bytes(self, micro_batches: int) -> Floats:
        """[J, 2] Bytes moved for each parameter of a micro-batch: the compute copy made, and gradients copied."""
        if micro_batches not in self._moved:
            kinds = {(one.traits, one.shard.size): one for one in self._data}
            found = {}
            for kind, one in kinds.items():
                data = replace(one, micro_batches=micro_batches)
                found[kind] = cast_bytes(data), gradient_copy_bytes(data)
            self._moved[micro_batches] = np.array([found[one.traits, one.shard.size] for one in self._data])
        return self._moved[micro_batches]

    def collectives(self, weights: Weights) -> CollectiveTimes:
        """Of one unit of communication with these weights, [J]."""
        if weights not in self._collectives:
            passes = (DataParallel.gather_s, DataParallel.reduce_s, DataParallel.replicas_s)
            found = (np.array([of(one, weights, self._network) for one in self._data]) for of in passes)
            self._collectives[weights] = CollectiveTimes(*found)
        return self._collectives[weights]

    @cached_property
    def shards(self) -> Floats:
        """[J, 1] Ranks that divide the states."""
        return np.array([[shard_ranks(layout)] for layout in self.layouts], dtype=float)

    @cached_property
    def expert_shards(self) -> Floats:
        """[J, 1] Ranks that divide the states of experts."""
        return np.maximum(1.0, self.shards / self.layouts[0].expert_parallel_degree)

    def optimized(self, dense: Floats, experts: Floats) -> Floats:
        """[J, W] Parameters that a rank with so many updates."""
        return dense / self.shards + experts / self.expert_shards

    def _of_traits(self, name: str) -> NDArray[np.float64]:
        """[J, 1]"""
        return np.array([[getattr(traits, name)] for traits in self.traits], dtype=float)

    @cached_property
    def _bytes(self) -> tuple[Floats, Floats, Floats]:
        """[J, 1] each: of master weights, optimizer states on the device and gradients of one parameter."""
        return (
            self._of_traits("master_weight_bytes"),
            self._of_traits("device_state_bytes"),
            self._of_traits("gradient_bytes"),
        )

    @cached_property
    def _gathered(self) -> tuple[Floats, Floats, Floats]:
        """[J, 1] each: bytes of a gathered weight (0 where none is), whether all are held, bytes of a unit's buffers."""
        compute, master = self._of_traits("compute_weight_bytes"), self._of_traits("master_weight_bytes")
        any_gathered = (self.shards > 1) | (compute != master)
        buffers = self._of_traits("reduce_copies") * (compute + self._of_traits("reduce_bytes"))
        return np.where(any_gathered, compute, 0.0), self._of_traits("keeps_gathered_weights"), buffers

    @cached_property
    def _fused(self) -> tuple[Floats, Floats]:
        """[J, 1] each: bytes of a weight's place for gradients that are added elsewhere, whether gradients wait whole."""
        fused = self._of_traits("fused_gradient_accumulation") * self._of_traits("compute_weight_bytes")
        return fused, self._of_traits("keeps_whole_gradients")

    def states(self, weights: WeightColumns, micro_batches: int) -> tuple[Floats, Floats]:
        """[J, W] Bytes that do not depend on the schedule (the sum of ``memory.state_bytes``), and of them the gradients
        that activations may replace: with one micro-batch gradients grow as activations go."""
        total, master_optimizer = weights.total, self._bytes
        part = (total - weights.experts) / self.shards + weights.experts / self.expert_shards
        each, keeps_all, buffer = self._gathered
        units = weights.outside_blocks + 2 * np.asarray(weights.largest_block)
        gathered = np.minimum(np.where(keeps_all > 0, total, units), total) * each
        fused, whole = self._fused
        gradient = np.where(whole * (micro_batches > 1) > 0, total, part) * master_optimizer[2]
        buffers = np.maximum(weights.largest_block, weights.outside_blocks) * buffer
        buffers = buffers + (np.asarray(weights.shapes) + weights.head) * fused
        gradients = np.ceil(gradient)
        held = (
            np.ceil(part * master_optimizer[0]) + np.ceil(part * master_optimizer[1]) + gathered + gradients + buffers
        )
        return held, gradients if micro_batches == 1 else np.zeros_like(gradients)

    def states_of_layer(self, dense: float, experts: float, micro_batches: int) -> tuple[Floats, Floats]:
        """[J, 1] each: what a layer with so many parameters adds to ``states`` of its rank at least, beside whatever others."""
        weights = WeightColumns(np.array([dense + experts]), experts=np.array([experts]))
        states, gradients = self.states(weights, micro_batches)
        return np.maximum(states - 3.0, 0.0), gradients  # three of its parts are rounded up once for a rank

    @cached_property
    def _outside(self) -> tuple[Floats, Floats]:
        """[J, 1] Bytes that lie outside the allocator, and bytes that it holds for each one allocated."""

        def total(groups: int, allocated_bytes: int) -> int:
            return memory.rank_memory({"all": allocated_bytes}, self._nodes.device, groups).total

        groups = [num_groups(layout) for layout in self.layouts]
        known = {count: (total(count, 0), total(count, MUCH_BYTES)) for count in set(groups)}
        none, much = (np.array([[known[count][i]] for count in groups], dtype=float) for i in (0, 1))
        return none, (much - none) / MUCH_BYTES

    def device_bytes(self, allocated: Floats) -> Floats:
        """[J, ...] What a device must have for so many bytes in tensors, at least; ``allocated``: [J, ...]."""
        outside, each = (part.reshape(-1, *(1,) * (allocated.ndim - 1)) for part in self._outside)
        return outside + np.floor(allocated) * each - 1.0  # a byte for the rounding
