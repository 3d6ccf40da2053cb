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
from ahp.forecast.communication import Group, Network
from ahp.forecast.data_parallel import DataParallel, Weights, cast_bytes, gradient_copy_bytes
from ahp.forecast.efficiency import is_cpu
from ahp.forecast.groups import data_groups, expert_groups, shard_ranks
from ahp.forecast.pricer import Pricer, num_groups
from ahp.forecast.units import ALONE, Axes, axes_of
from ahp.plan import Parallelism
from ahp.search.bounds.split_columns import SplitColumns

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MUCH_BYTES = 10**12
"""So many that what an allocator wastes of them gives its share to twelve digits."""


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
        """``layouts``: one for each split; all else is equal. Equal ``traits`` are one object."""
        self.layouts, self.traits, self._nodes, self._network = layouts, traits, nodes, network
        self._collectives: dict[Weights, CollectiveTimes] = {}
        self._of_kinds: dict[tuple[Weights, ...], CollectiveTimes] = {}
        self._update_s: Floats | None = None

    @cached_property
    def axes(self) -> Axes:
        """The groups that divide a micro-batch within one stage, whatever the split."""
        return axes_of(self.layouts[0], self._nodes.devices_per_node)

    @property
    def pipeline_ranks(self) -> int:
        """Whatever the split."""
        return self.layouts[0].pipeline_parallel_degree

    @cached_property
    def alike(self) -> dict[Traits, list[int]]:
        """The splits by the engine's traits."""
        known = {id(of): of for of in self.traits}
        found: dict[int, list[int]] = {}
        for index, of in enumerate(self.traits):
            found.setdefault(id(of), []).append(index)
        return {known[of]: at for of, at in found.items()}

    @cached_property
    def _data(self) -> list[DataParallel]:
        """What goes over the groups of each split, of a single micro-batch."""
        on_cpu = is_cpu(self._nodes.device)
        groups: dict[tuple[object, ...], tuple[Group, Group, tuple[Group, Group]]] = {}
        found = []
        for layout, traits in zip(self.layouts, self.traits, strict=True):
            key = (
                layout.data_parallel_shard_degree,
                layout.weight_shards,
                layout.mesh_order,
            )  # stages share their groups
            if key not in groups:
                groups[key] = self._groups(layout)
            shard, replicate, experts = groups[key]
            found.append(
                DataParallel(
                    shard=shard,
                    replicate=replicate,
                    experts=experts,
                    traits=traits,
                    micro_batches=1,
                    overlap=0.0 if on_cpu else 1.0,
                    operator_s=self._nodes.device.kernel_launch_s,
                    host_is_device=on_cpu,
                )
            )
        return found

    def _groups(self, layout: Parallelism) -> tuple[Group, Group, tuple[Group, Group]]:
        per_node = self._nodes.devices_per_node
        data = data_groups(layout, per_node)
        return *data, data if layout.expert_parallel_degree == 1 else expert_groups(layout, per_node)

    def data(self, split: int, micro_batches: int) -> DataParallel:
        """What goes over the groups of one split."""
        return replace(self._data[split], micro_batches=micro_batches)

    @cached_property
    def _moved(self) -> tuple[Floats, ...]:
        """[J, 1] each: bytes moved for each parameter of a micro-batch to make the compute copy, and to copy gradients of a
        single micro-batch and, on average, of two."""
        shards = self.shards[:, 0].astype(int).tolist()
        kinds = [(id(traits), size) for traits, size in zip(self.traits, shards, strict=True)]
        found = {}
        for traits, kind in zip(self.traits, kinds, strict=True):
            if kind not in found:
                group = Group(kind[1], 1, kind[1])
                one, two = (DataParallel(group, ALONE, traits, micro_batches=m, overlap=0.0) for m in (1, 2))
                found[kind] = cast_bytes(one), gradient_copy_bytes(one), gradient_copy_bytes(two)
        table = np.array([found[kind] for kind in kinds], dtype=float)
        return table[:, [0]], table[:, [1]], table[:, [2]]

    def collectives(self, weights: Weights) -> CollectiveTimes:
        """Of one unit of communication with these weights, [J]."""
        if weights not in self._collectives:
            passes = (DataParallel.gather_s, DataParallel.reduce_s, DataParallel.replicas_s)
            found = (np.array([of(one, weights, self._network) for one in self._data]) for of in passes)
            self._collectives[weights] = CollectiveTimes(*found)
        return self._collectives[weights]

    def collectives_of_kinds(self, kinds: tuple[Weights, ...]) -> CollectiveTimes:
        """Of the kinds of layers, [J, K]."""
        if kinds not in self._of_kinds:
            found = [self.collectives(weights) for weights in kinds]
            parts = [one.gather for one in found], [one.reduce for one in found], [one.replicas for one in found]
            shape = len(kinds), len(self.layouts)
            self._of_kinds[kinds] = CollectiveTimes(*(np.array(part, dtype=float).reshape(shape).T for part in parts))
        return self._of_kinds[kinds]

    @cached_property
    def shards(self) -> Floats:
        """[J, 1] Ranks that divide the states."""
        return np.array([[shard_ranks(layout)] for layout in self.layouts], dtype=float)

    @cached_property
    def expert_shards(self) -> Floats:
        """[J, 1] Ranks that divide the states of experts."""
        return np.maximum(1.0, self.shards / self.layouts[0].expert_parallel_degree)

    @cached_property
    def columns(self) -> SplitColumns:
        """The figures of each split."""
        return SplitColumns.of(self.traits, self.shards, self.expert_shards, *self._outside, *self._moved)

    def update_of_one_s(self, pricer: Pricer) -> Floats:
        """[J, 1] Seconds of clipping and the optimizer for one parameter that a rank updates."""
        if self._update_s is None:
            found = {id(of): pricer.update_s(1.0, of) + pricer.offload_s(1.0, of) for of in self.alike}
            self._update_s = np.array([[found[id(of)]] for of in self.traits])
        return self._update_s

    def buffer_bytes(self, hidden_bytes: int, micro_batches: int) -> int:
        """Of what a rank receives from each stage."""
        return (micro_batches if self.traits[0].torch_pipeline else 1) * hidden_bytes

    @cached_property
    def _outside(self) -> tuple[Floats, Floats]:
        """[J, 1] Bytes that lie outside the allocator, and bytes that it holds for each one allocated."""

        def total(groups: int, allocated_bytes: int) -> int:
            return memory.rank_memory({"all": allocated_bytes}, self._nodes.device, groups).total

        groups = [num_groups(layout) for layout in self.layouts]
        known = {count: (total(count, 0), total(count, MUCH_BYTES)) for count in set(groups)}
        none, much = (np.array([[known[count][i]] for count in groups], dtype=float) for i in (0, 1))
        return none, (much - none) / MUCH_BYTES
