"""Ways to shard states as columns of figures, of one block or of several blocks one after the other.

Dims: N = ways to shard states; W = ranks (or whatever has weights).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ahp.arrays import Floats, Ints
from ahp.engines.traits import Traits
from ahp.forecast import memory
from ahp.forecast.memory import Outside
from ahp.forecast.states import (
    Figures,
    Shards,
    TraitColumns,
    UnitBytes,
    Weights,
    cast_bytes,
    gradient_copy_bytes,
    layer_state_bytes,
    state_bytes,
    trait_columns,
    trait_figures,
    unit_bytes,
)


@dataclass(frozen=True)
class ShardingColumns:
    """Memory and work of each way on a rank; the columns of one figure are [N, 1]."""

    figures: Floats
    """[figures, N] The figures of ``Shards``, of ``Outside`` and of the traits."""

    @classmethod
    def of(cls, shards: Shards, outside: Outside, traits: Sequence[Traits]) -> ShardingColumns:
        """``shards`` and ``outside``: [N] each; equal ``traits`` are one object."""
        return cls(np.vstack([*shards, *outside, trait_figures(traits)]))

    @classmethod
    def joined(cls, parts: Sequence[ShardingColumns]) -> ShardingColumns:
        """The parts, one after the other."""
        return cls(np.concatenate([part.figures for part in parts], axis=1))

    def part(self, rows: slice | Ints) -> ShardingColumns:
        return ShardingColumns(self.figures[:, rows])

    @cached_property
    def shards(self) -> Shards:
        return Shards(*self.figures[:2, :, None])

    @cached_property
    def outside(self) -> Outside:
        return Outside(*self.figures[2:5, :, None])

    @cached_property
    def traits(self) -> TraitColumns:
        return trait_columns(self.figures[5:])

    def moved_bytes(self, micro_batches: int | Ints) -> tuple[Floats, Floats]:
        """[N, 1] each: bytes moved per parameter and micro-batch, to make the compute copy and to copy its gradient.
        ``micro_batches``: one number or [N, 1]."""
        shards = self.shards.dense
        copied = gradient_copy_bytes(self.traits, shards, micro_batches)
        return np.asarray(cast_bytes(self.traits, shards)), np.asarray(copied)

    def states(self, weights: Weights, micro_batches: int | Ints) -> tuple[Floats, Floats]:
        """[N, W] Bytes that do not depend on the schedule, and the gradients among them whose place activations can take: with
        one micro-batch gradients grow as activations go. ``micro_batches``: one number or [N, 1]."""
        parts = state_bytes(weights, self.traits, self.shards, micro_batches)
        return np.asarray(sum(parts.values())), np.where(np.equal(micro_batches, 1), parts["gradients"], 0.0)

    def units(self, weights: Weights, micro_batches: int) -> UnitBytes:
        """[N, W, 1] each: bytes of whole units' weights and gradients beyond ``states``."""
        found = unit_bytes(weights, self.traits, self.shards, micro_batches)
        return UnitBytes(*(np.asarray(count)[..., None] for count in found))

    def updated(self, weights: Weights) -> Floats:
        """[N, W] Parameters that a rank updates."""
        return np.asarray(weights.updated(self.shards))

    def states_of_layer(self, dense: Figures, experts: Figures, micro_batches: int) -> tuple[Floats, Floats]:
        """[N, 1] each: least bytes that a layer adds to ``states`` of its rank, whatever else is there."""
        states, gradients = layer_state_bytes(dense, experts, self.traits, self.shards, micro_batches)
        return np.asarray(states), np.where(micro_batches == 1, gradients, 0.0)

    def most_allocated(self, device_bytes: float) -> Floats:
        """[N, 1] The most bytes in tensors that a device with ``device_bytes`` can have."""
        return np.asarray(memory.most_allocated(device_bytes, self.outside))

    def device_bytes(self, allocated: Floats, pooled: Figures = 0.0, freed: Figures = 0.0) -> Floats:
        """[N, ...] Bytes that a device must have for ``allocated`` bytes in tensors; ``allocated``, ``pooled``: [N, ...]; ``freed``: [...] the
        gap that a head leaves."""
        shape = (-1, *(1,) * (allocated.ndim - 1))
        outside = Outside(*(np.reshape(part, shape) for part in self.outside))
        gap = freed * np.reshape(self.traits.reduce.on_own_stream, shape)
        return np.asarray(memory.device_bytes(allocated, outside, pooled, gap))
