"""The ways to shard states among the replicas of a block, and what each leaves on a rank.

Blocks that differ only in the micro-batch share them. Dims: J = splits, W = ranks (or whatever has weights).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ahp.arrays import Floats
from ahp.cached_method import cached_method
from ahp.cluster.model import NodeGroup
from ahp.engines.traits import Traits
from ahp.forecast.assembly import num_groups
from ahp.forecast.candidates.sharding_columns import ShardingColumns
from ahp.forecast.communication import Network
from ahp.forecast.data_parallel import CommUnit, DataParallel
from ahp.forecast.group import Group
from ahp.forecast.groups import data_groups, expert_groups
from ahp.forecast.memory import Outside
from ahp.forecast.pricer import Pricer
from ahp.forecast.sharing import SharedWeights, StageUnits, UnitTimes
from ahp.forecast.states import Shards
from ahp.plan import Parallelism


class CollectiveTimes(NamedTuple):
    """Seconds of gathering weights, reducing gradients, and summing them over the replicas, each [J, ...]."""

    gather: Floats
    reduce: Floats
    replicas: Floats


class Shardings:
    """Every split of a block, with the engine's traits for it."""

    def __init__(self, layouts: list[Parallelism], traits: list[Traits], nodes: NodeGroup, network: Network) -> None:
        """``layouts``: one for each split; all else is equal. Equal ``traits`` are one object."""
        self.layouts, self.traits, self._nodes, self._network = layouts, traits, nodes, network
        self._update_s: Floats | None = None

    @property
    def tensor(self) -> int:
        """Tensor-parallel ranks."""
        return self.layouts[0].tensor_parallel_degree

    @property
    def _folded(self) -> bool:
        return self.traits[0].experts.folded

    @property
    def ranks_of_an_expert(self) -> int:
        """How many ranks hold all experts together, a part on each."""
        return self.layouts[0].expert_parallel_degree * (1 if self._folded else self.tensor)

    @cached_property
    def alike(self) -> dict[Traits, list[int]]:
        """The splits, keyed by the engine's traits."""
        known = {id(of): of for of in self.traits}
        found: dict[int, list[int]] = {}
        for index, of in enumerate(self.traits):
            found.setdefault(id(of), []).append(index)
        return {known[of]: at for of, at in found.items()}

    @cached_property
    def _data(self) -> list[DataParallel]:
        """The data-parallel groups and traffic of each split, for a single micro-batch."""
        groups: dict[tuple[object, ...], tuple[tuple[Group, Group], tuple[Group, Group]]] = {}
        found = []
        for layout, traits in zip(self.layouts, self.traits, strict=True):
            # ZeRO stages share their groups.
            key = layout.data_parallel_shard_degree, layout.weight_shards, layout.mesh_order
            if key not in groups:
                per_node = self._nodes.devices_per_node
                groups[key] = data_groups(layout, per_node), expert_groups(layout, per_node, self._folded)
            found.append(DataParallel.on(self._nodes, traits, 1, *groups[key]))
        return found

    def data(self, split: int, micro_batches: int) -> DataParallel:
        """The data-parallel groups and traffic of one split."""
        return replace(self._data[split], micro_batches=micro_batches)

    @cached_method
    def collectives(self, weights: CommUnit) -> CollectiveTimes:
        """[J] Times of one unit of communication with these weights."""
        passes = (DataParallel.gather_s, DataParallel.reduce_s, DataParallel.replicas_s)
        return CollectiveTimes(*(np.array([of(one, weights, self._network) for one in self._data]) for of in passes))

    @cached_method
    def collectives_of_kinds(self, kinds: tuple[CommUnit, ...]) -> CollectiveTimes:
        """[J, K] Times of the kinds of layers."""
        parts = zip(*map(self.collectives, kinds), strict=True) if kinds else [()] * 3
        shape = len(kinds), len(self.layouts)
        return CollectiveTimes(*(np.array(part, dtype=float).reshape(shape).T for part in parts))

    def shared(self, units: StageUnits, which: list[int], micro_batches: int) -> SharedWeights:
        """Times of the units of stages with some splits."""
        ends = units.before.tolist(), units.after.tolist()
        outside = [[self.collectives(CommUnit(count)) for count in end] for end in ends]
        gathers, reduces, replicas = (
            UnitTimes(of_kinds[which][:, None], *(np.array([one[part][which] for one in end]).T for end in outside))
            for part, of_kinds in enumerate(self.collectives_of_kinds(units.kinds))
        )
        cast, copied = (part[which, 0] for part in self.columns.moved_bytes(micro_batches))
        return SharedWeights(units, gathers, reduces, replicas, cast, copied)

    @cached_property
    def columns(self) -> ShardingColumns:
        """The figures of each split."""
        ranks = np.array([layout.weight_shards for layout in self.layouts], dtype=float)
        groups = np.array([num_groups(layout, self._folded) for layout in self.layouts], dtype=float)
        shards = Shards.among(ranks, self.layouts[0].expert_parallel_degree, self.tensor if self._folded else 1)
        outside = Outside.of(self._nodes.device, groups)
        return ShardingColumns.of(shards, Outside(*np.broadcast_arrays(*outside)), self.traits)

    def update_of_one_s(self, pricer: Pricer) -> Floats:
        """[J, 1] Seconds of clipping and the optimizer for one parameter that a rank updates."""
        if self._update_s is None:
            found = {id(of): pricer.group.update_s(1.0, of) + pricer.group.offload_s(1.0, of) for of in self.alike}
            self._update_s = np.array([[found[id(of)]] for of in self.traits])
        return self._update_s
