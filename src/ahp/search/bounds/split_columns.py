"""Ways to share states as columns of figures: ``ahp.forecast.memory`` and the traits of an engine on arrays.

Dims: N = ways to share states, of one block or of several one behind the other; W = ranks (or whatever has weights).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from ahp.engines.engine import Traits

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class WeightColumns:
    """``forecast.memory.RankWeights`` of several ranks, each [W] or [N, W] or one number."""

    total: Floats
    dense: Floats
    largest_block: Floats | float = 0.0
    outside_blocks: Floats | float = 0.0
    head: Floats | float = 0.0
    experts: Floats | float = 0.0
    shapes: Floats | float = 0.0
    largest_without_experts: Floats | float = 0.0


@dataclass(frozen=True)
class SplitColumns:
    """What each way leaves on a rank and asks of it, each [N, 1]; what an engine does or does not is 1 or 0."""

    shards: Floats
    """Ranks that divide the states."""
    expert_shards: Floats
    """Ranks that divide the states of experts."""
    outside_bytes: Floats
    """That lie outside the allocator."""
    held_for_each: Floats
    """Bytes that the allocator holds for each one allocated."""
    cast_bytes: Floats
    """Moved for each parameter of a micro-batch to make the compute copy."""
    copied_alone_bytes: Floats
    """Moved for each parameter to copy its gradient where there is one micro-batch."""
    copied_of_two_bytes: Floats
    """The mean of both micro-batches where there are two."""
    master_bytes: Floats
    """Of one parameter, as ``optimizer_bytes`` and ``gradient_bytes``."""
    optimizer_bytes: Floats
    gradient_bytes: Floats
    compute_bytes: Floats
    keeps_gathered: Floats
    buffer_bytes: Floats
    """Of a parameter of the unit whose gradients are sent."""
    bucket_elements: Floats
    """Most elements of gradients that are copied at once, of whatever units; 0 = those of one unit."""
    collected_bytes: Floats
    """Of the buffer that collects them."""
    sent_bytes: Floats
    """Of one element as it is sent."""
    ahead_elements: Floats
    """Of gathered weights that are in memory at once, beside those in use."""
    fused_bytes: Floats
    """Of a weight's place for gradients that are added elsewhere."""
    keeps_whole_gradients: Floats
    gathers: Floats
    """Whether the forward pass waits for gathered weights on any rank."""
    gathers_each: Floats
    """Whether it gathers them for every micro-batch."""
    gathers_again: Floats
    """Whether the backward pass of every micro-batch does."""
    reduces_each: Floats
    gather_overlap: Floats
    gradient_overlap: Floats
    last_bytes: Floats
    """Moved for each parameter after the last micro-batch."""
    host_operators: Floats
    """Of one pass of a unit, what the engine does itself."""
    leaves_lone_experts: Floats
    """Whether experts that one rank has alone are neither gathered nor sent."""

    @classmethod
    def of(cls, traits: Sequence[Traits], *first: Floats) -> SplitColumns:
        """``first``: the columns up to ``copied_of_two_bytes``, [N, 1] each."""
        known = {id(one): _figures(one) for one in traits}
        table = np.array([known[id(one)] for one in traits], dtype=float)
        return cls(*first, *(table[:, at : at + 1] for at in range(table.shape[1])))

    @classmethod
    def joined(cls, parts: Sequence[SplitColumns]) -> SplitColumns:
        """One behind the other."""
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    def part(self, rows: slice | Ints) -> SplitColumns:
        return SplitColumns(*(getattr(self, field.name)[rows] for field in fields(self)))

    def moved_bytes(self, micro_batches: int | Ints) -> tuple[Floats, Floats]:
        """[N, 1] each: moved for each parameter of a micro-batch, to make the compute copy and to copy its gradient
        (``forecast.stage``). ``micro_batches``: one number or [N, 1]."""
        m, alone = np.asarray(micro_batches), self.copied_alone_bytes
        later = np.where(self.reduces_each > 0, self.copied_of_two_bytes, 2 * self.copied_of_two_bytes - alone)
        more = np.where(self.reduces_each > 0, later, (alone + (m - 1) * later) / m)
        return self.cast_bytes, np.where(m == 1, alone, more)

    def optimized(self, dense: Floats, experts: Floats) -> Floats:
        """[N, W] Parameters that a rank with so many updates."""
        return dense / self.shards + experts / self.expert_shards

    def states(self, weights: WeightColumns, micro_batches: int | Ints) -> tuple[Floats, Floats]:
        """[N, W] Bytes that do not depend on the schedule (the sum of ``memory.state_bytes``), and of them the gradients
        that activations may replace: with one micro-batch gradients grow as activations go. ``micro_batches``: one number or [N, 1]."""
        total = weights.total
        part = (total - weights.experts) / self.shards + weights.experts / self.expert_shards
        any_gathered = (self.shards > 1) | (self.compute_bytes != self.master_bytes)
        alone = self.leaves_lone_experts > 0
        sent = np.where(alone, weights.dense, total)
        block = np.where(alone, weights.largest_without_experts, weights.largest_block)
        units = _in_use(weights, block)
        gathered = np.minimum(np.where(self.keeps_gathered > 0, sent, units), sent)
        gathered = gathered * np.where(any_gathered, self.compute_bytes, 0.0)
        gradient = np.where(self.keeps_whole_gradients * (np.asarray(micro_batches) > 1) > 0, total, part)
        buffers = np.maximum(block, weights.outside_blocks) * self.buffer_bytes
        buffers = buffers + (np.asarray(weights.shapes) + weights.head) * self.fused_bytes
        gradients = np.ceil(gradient * self.gradient_bytes)
        held = np.ceil(part * self.master_bytes) + np.ceil(part * self.optimizer_bytes)
        return held + gathered + gradients + buffers, np.where(np.asarray(micro_batches) == 1, gradients, 0.0)

    def buckets(self, weights: WeightColumns) -> Floats:
        """[N, W] Bytes on their way beyond one unit: gradients of several that are sent at once, weights that are gathered ahead."""
        sent = np.where(self.leaves_lone_experts > 0, weights.dense, weights.total)
        ahead = np.minimum(sent, self.ahead_elements) - np.minimum(sent, _in_use(weights, weights.largest_block))
        gradients = np.minimum(sent, self.bucket_elements) * self.sent_bytes + self.collected_bytes
        return gradients + np.maximum(ahead, 0.0) * self.compute_bytes

    def states_of_layer(
        self, dense: Floats | float, experts: Floats | float, micro_batches: int
    ) -> tuple[Floats, Floats]:
        """[N, 1] each: what a layer with so many parameters, [N, 1] or one number, adds to ``states`` of its rank at least, beside
        whatever others."""
        weights = WeightColumns(np.atleast_1d(dense + experts), np.atleast_1d(dense), experts=np.atleast_1d(experts))
        states, gradients = self.states(weights, micro_batches)
        return np.maximum(states - 3.0, 0.0), gradients  # three of its parts are rounded up once for a rank

    def most_allocated(self, device_bytes: float) -> Floats:
        """[N, 1] Bytes in tensors that a device with so many may have at most: ``device_bytes`` the other way round."""
        return (device_bytes + 1.0 - self.outside_bytes) / self.held_for_each + 1.0

    def device_bytes(self, allocated: Floats) -> Floats:
        """[N, ...] What a device must have for so many bytes in tensors, at least; ``allocated``: [N, ...]."""
        shape = -1, *(1,) * (allocated.ndim - 1)
        outside, each = self.outside_bytes.reshape(shape), self.held_for_each.reshape(shape)
        return outside + np.floor(allocated) * each - 1.0  # a byte for the rounding


def _in_use(weights: WeightColumns, block: Floats | float) -> Floats | float:
    """Gathered weights of a rank: what is in no block, the block that computes and the next one."""
    return weights.outside_blocks + 2 * block


def _figures(traits: Traits) -> tuple[float, ...]:
    """The columns from ``master_bytes`` on."""
    bucket = traits.reduce_copies * traits.reduce_bucket_elements
    return (
        traits.master_weight_bytes,
        traits.device_state_bytes,
        traits.gradient_bytes + traits.gradient_beside_bytes,
        traits.compute_weight_bytes,
        traits.keeps_gathered_weights,
        (traits.reduce_copies and not bucket) * (traits.compute_weight_bytes + traits.reduce_bytes),
        math.inf if bucket and traits.keeps_reduce_buckets else bucket,
        traits.collects_in_bucket * bucket * traits.reduce_bytes,
        traits.reduce_bytes,
        traits.gathered_ahead_elements,
        traits.fused_gradient_accumulation * traits.compute_weight_bytes,
        traits.keeps_whole_gradients,
        traits.forward_gathers != "never" and not traits.gathers_at_start,
        traits.forward_gathers == "per_micro_batch",
        traits.backward_gathers == "per_micro_batch",
        traits.reduces_every_micro_batch,
        traits.parameter_gather_overlap,
        traits.gradient_overlap,
        2 * traits.reduce_bytes * (traits.compute_weight_bytes == 0 and traits.reduce_copies),
        traits.host_operators_per_unit / 2,
        traits.leaves_lone_experts,
    )
