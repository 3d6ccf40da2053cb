"""What ranks hold of weights, gradients and optimizer states, over columns: many ranks, and many ways to share states, at once.

Dims: N = ways to share states, W = ranks. Figures of ranks are [W] or [N, W], those of ways [N, 1]; of one layout each may be
one number, and its ``Traits`` stand for a ``TraitColumns`` of one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ahp.engines.engine import Traits
from ahp.forecast.groups import shard_ranks
from ahp.plan import Parallelism

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Figures = NDArray[Any] | float
Mask = Any
"""Truth of each row, or of one layout: numpy's own or Python's."""


@dataclass(frozen=True)
class TraitColumns:
    """``Traits`` of several layouts under their own names, each [N, 1]; what an engine does or does not is 1 or 0."""

    master_weight_bytes: Floats
    compute_weight_bytes: Floats
    device_state_bytes: Floats
    no_matrix_state_bytes: Floats
    host_state_bytes: Floats
    host_bucket_bytes: Floats
    gradient_bytes: Floats
    gradient_beside_bytes: Floats
    reduce_bytes: Floats
    keeps_gathered_weights: Floats
    gathered_ahead_elements: Floats
    keeps_whole_gradients: Floats
    reduce_copies: Floats
    reduce_bucket_elements: Floats
    keeps_reduce_buckets: Floats
    gradients_in_buckets: Floats
    collects_in_bucket: Floats
    fused_gradient_accumulation: Floats
    leaves_lone_experts: Floats
    waits_for_gathers: Floats
    gathers_in_each_forward: Floats
    gathers_in_each_backward: Floats
    reduces_every_micro_batch: Floats
    parameter_gather_overlap: Floats
    gradient_overlap: Floats
    host_operators_per_unit: Floats

    @classmethod
    def of(cls, traits: Sequence[Traits]) -> TraitColumns:
        """A row for each; equal ones are one object."""
        names = [field.name for field in fields(cls)]
        rows = {id(one): [getattr(one, name) for name in names] for one in traits}
        table = np.array([rows[id(one)] for one in traits], dtype=float)
        return cls(*(table[:, at : at + 1] for at in range(len(names))))


Behaviour = Traits | TraitColumns


class Shards(NamedTuple):
    """Ranks that divide states (ZeRO): those of dense weights, and those of experts, which fewer ranks hold alike."""

    dense: Figures
    experts: Figures

    @classmethod
    def among(cls, ranks: Figures, expert_ranks: int = 1) -> Shards:
        """Of the ``ranks`` that divide the states of dense weights, of which ``expert_ranks`` share the experts."""
        return cls(ranks, np.maximum(1.0, ranks / expert_ranks))

    @classmethod
    def of(cls, parallelism: Parallelism) -> Shards:
        """Of one layout."""
        return cls.among(shard_ranks(parallelism), parallelism.expert_parallel_degree)


@dataclass(frozen=True)
class RankWeights:
    """Parameters (elements) that pipeline ranks hold after tensor parallelism, before sharding over data ranks."""

    total: Figures
    largest_block: Figures = 0
    outside_blocks: Figures = 0
    """In the one unit that holds what is not in a block: embedding, head, final norm."""
    head: Figures = 0
    """Those of the head, among the ones outside blocks."""
    experts: Figures = 0
    """Weights of experts, among the total: an expert-parallel group holds them once, so that fewer ranks divide their states."""
    shapes: Figures = 0
    """One weight of each shape in a block, of the block where they are the most: experts have the same shapes."""
    largest_without_experts: Figures = 0
    """The most that one block has without its experts."""

    @property
    def dense(self) -> Figures:
        """Those that are no weights of experts."""
        return self.total - self.experts

    def updated(self, shards: Shards) -> Figures:
        """Those that the rank updates."""
        return self.dense / shards.dense + self.experts / shards.experts


def state_bytes(weights: RankWeights, of: Behaviour, shards: Shards, micro_batches: int | Ints) -> dict[str, Figures]:
    """Bytes of parameters, optimizer states, gathered weights, gradients and buffers of communication of each rank."""
    sent, block = _communicated(weights, of)
    part = weights.updated(shards)
    no_matrix = weights.outside_blocks / shards.dense + weights.experts / shards.experts
    waits_whole = np.logical_and(of.keeps_whole_gradients, np.greater(micro_batches, 1))
    gradient = np.where(of.gradients_in_buckets, 0.0, np.where(waits_whole, weights.total, part))
    return {
        "parameters": np.ceil(part * of.master_weight_bytes),
        "optimizer_states": np.ceil(part * of.device_state_bytes + no_matrix * of.no_matrix_state_bytes),
        "gathered_weights": _gathered_bytes(weights.outside_blocks, sent, block, of, shards),
        "gradients": np.ceil(gradient * (of.gradient_bytes + of.gradient_beside_bytes)),
        "reduce_buffers": _reduce_buffer_bytes(weights, sent, block, of),
    }


def _communicated(weights: RankWeights, of: Behaviour) -> tuple[Figures, Figures]:
    """Elements of a rank, and of its largest block, that are gathered and reduced."""
    alone = of.leaves_lone_experts
    sent = np.where(alone, weights.dense, weights.total)
    return sent, np.where(alone, weights.largest_without_experts, weights.largest_block)


def _gathered_bytes(outside: Figures, sent: Figures, block: Figures, of: Behaviour, shards: Shards) -> Figures:
    # FSDP2 holds the block it computes and the one it prefetches.
    in_use = np.maximum(outside + 2 * block, of.gathered_ahead_elements)
    gathered = np.minimum(np.where(of.keeps_gathered_weights, sent, in_use), sent)
    is_copy = np.logical_or(np.greater(shards.dense, 1), np.not_equal(of.compute_weight_bytes, of.master_weight_bytes))
    return np.where(is_copy, gathered * of.compute_weight_bytes, 0.0)


def _reduce_buffer_bytes(weights: RankWeights, sent: Figures, block: Figures, of: Behaviour) -> Figures:
    bucket = of.reduce_bucket_elements
    copied = np.where(of.keeps_reduce_buckets, sent, np.minimum(sent, bucket))
    in_buckets = (copied + bucket * of.collects_in_bucket) * of.reduce_bytes
    # A unit's gradient in the compute copy's type, where there is one, and the flat buffer it is reduced in.
    of_unit = np.maximum(block, weights.outside_blocks) * (of.compute_weight_bytes + of.reduce_bytes)
    buffers = np.where(np.greater(bucket, 0), in_buckets, of_unit) * of.reduce_copies
    # One for each shape of weight, kept from layer to layer (Transformer Engine, get_dummy_wgrad).
    return buffers + (weights.shapes + weights.head) * of.compute_weight_bytes * of.fused_gradient_accumulation


def layer_state_bytes(
    dense: Figures, experts: Figures, of: Behaviour, shards: Shards, micro_batches: int
) -> tuple[Figures, Figures]:
    """What a layer with so many parameters adds to the states of its rank at least, beside whatever others, and of that the
    gradients."""
    parts = state_bytes(RankWeights(dense + experts, experts=experts), of, shards, micro_batches)
    kept = np.where(of.keeps_gathered_weights, parts["gathered_weights"], 0.0)
    kept += np.where(of.gradients_in_buckets, parts["reduce_buffers"], 0.0)
    states = parts["parameters"] + parts["optimizer_states"] + parts["gradients"] + kept
    return np.maximum(states - 3.0, 0.0), parts["gradients"]  # three of the parts are rounded up once for a rank


def visiting_bytes(weights: RankWeights, of: Behaviour, shards: Shards) -> Figures:
    """Bytes of states from host memory that are on the device at once while the weights are updated, at most."""
    return np.ceil(np.minimum(of.host_bucket_bytes, weights.updated(shards) * of.host_state_bytes))


def cast_bytes(of: Behaviour, shards: Figures) -> Figures:
    """Bytes moved per weight element to make the compute copy: the shard cast, and the gathered buffer copied out."""
    computes, master = of.compute_weight_bytes, of.master_weight_bytes
    cast = np.where(np.logical_and(computes, np.not_equal(computes, master)), (master + computes) / shards, 0.0)
    return cast + np.where(np.greater(shards, 1), 2 * _weight_bytes(of), 0)


def gradient_copy_bytes(of: Behaviour, shards: Figures, micro_batches: int | Ints) -> Figures:
    """Bytes moved per weight element and micro-batch: the gradient into the type and buffer it waits in, or is sent from."""
    made, m = _weight_bytes(of), micro_batches
    # Into the flat buffer; then the shard is added to the earlier ones.
    each = made + of.reduce_bytes + np.where(np.equal(m, 1), 0.0, 2 * of.gradient_bytes / shards)
    # The first is kept as it is, or cast; each later one is read, and added in one kernel to the sum, which is read and written.
    first = np.where(np.equal(made, of.gradient_bytes), 0.0, made + of.gradient_bytes)
    once = (first + (m - 1) * (made + 2 * of.gradient_bytes)) / m
    return np.where(of.fused_gradient_accumulation, 0.0, np.where(of.reduces_every_micro_batch, each, once))


def last_copy_bytes(of: Behaviour) -> Figures:
    """Bytes moved per weight element after the last micro-batch: gradients of weights without a compute copy into the flat buffer."""
    return 2 * of.reduce_bytes * np.logical_and(of.reduce_copies, np.equal(of.compute_weight_bytes, 0))


def _weight_bytes(of: Behaviour) -> Figures:
    """Bytes of one weight element as it computes."""
    return np.where(of.compute_weight_bytes, of.compute_weight_bytes, of.master_weight_bytes)
