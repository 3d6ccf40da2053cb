"""Weights, gradients and optimizer states that ranks hold, in columns: many ranks, and many ways to shard states, at once.

Dims: N = ways to shard states, W = ranks. Figures of ranks are [W] or [N, W], those of ways [N, 1]; for one layout each can be
one number, and its ``Traits`` can take the place of a ``TraitColumns`` of one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ahp.arrays import Floats, Ints
from ahp.engines.traits import Traits
from ahp.job import Job
from ahp.plan import Parallelism

Figures = NDArray[Any] | float


FIGURES: dict[str, tuple[str, ...]] = {
    "states": (
        "master_weight_bytes", "compute_weight_bytes", "device_bytes", "no_matrix_bytes", "flattened_bytes",
        "host_bytes", "host_bucket_bytes", "trained_share",
    ),
    "gradients": (
        "element_bytes", "beside_bytes", "whole", "update_bytes", "fused_accumulation", "adds_first",
        "cast_apart", "passes",
    ),
    "gather": (
        "keeps_weights", "ahead_elements", "is_waited_for", "in_each_forward", "in_each_backward", "overlap",
        "beside_stages", "ends_apart", "copies",
    ),
    "reduce": (
        "element_bytes", "copies", "bucket_elements", "keeps_buckets", "gradients_in_buckets", "collects_in_bucket",
        "every_micro_batch", "overlap", "beside_stages", "on_own_stream",
    ),
    "experts": ("leaves_lone",),
    "host": ("operators_per_unit",),
}  # fmt: skip
"""The figures of ``Traits`` that are read in columns, keyed by their record; booleans are 1 or 0."""

TraitColumns = SimpleNamespace
"""``FIGURES`` of several layouts under the names that they have in ``Traits``, each [N, 1]."""

Behaviour = Traits | TraitColumns


def trait_columns(figures: Floats) -> TraitColumns:
    """The columns of what ``trait_figures`` returned."""
    left = iter(figures[..., None])
    records = {of: dict(zip(names, islice(left, len(names)), strict=True)) for of, names in FIGURES.items()}
    return TraitColumns(**{of: SimpleNamespace(**columns) for of, columns in records.items()})


def trait_figures(traits: Sequence[Traits]) -> Floats:
    """[figures, N] Figures of several layouts, in the order of ``FIGURES``; equal traits are one object."""
    each = {id(one): one for one in traits}
    number = {key: at for at, key in enumerate(each)}
    return np.array([*map(_figures, each.values())], dtype=float)[[number[id(one)] for one in traits]].T


@lru_cache(maxsize=1 << 10)
def _figures(traits: Traits) -> list[float]:
    return [getattr(getattr(traits, of), name) for of, names in FIGURES.items() for name in names]


class Shards(NamedTuple):
    """How many ranks divide states (ZeRO): those of dense weights, and those of experts, which fewer ranks hold in common."""

    dense: Figures
    experts: Figures

    @classmethod
    def among(cls, ranks: Figures, expert_ranks: int = 1, tensor_ranks: int = 1) -> Shards:
        """``ranks`` divide the states of dense weights; times the ``tensor_ranks`` that hold whole experts, over the ``expert_ranks``
        that share the experts, they divide the states of experts. A single rank divides nothing."""
        experts = np.maximum(1.0, ranks * tensor_ranks / expert_ranks)
        return cls(ranks, np.where(np.equal(ranks, 1), 1.0, experts)[()])

    @classmethod
    def of(cls, parallelism: Parallelism, folded_experts: bool = False) -> Shards:
        """The ranks of one layout; ``folded_experts``: see ``ExpertTraits``."""
        tensor = parallelism.tensor_parallel_degree if folded_experts else 1
        return cls.among(parallelism.weight_shards, parallelism.expert_parallel_degree, tensor)


@dataclass(frozen=True)
class Weights:
    """Parameters (elements) that pipeline ranks, or stages, hold after tensor parallelism, before sharding over data ranks."""

    total: Figures
    largest_block: Figures = 0
    outside_blocks: Figures = 0
    """Parameters outside blocks: embedding, head, final norm."""
    head: Figures = 0
    """The head's part of ``outside_blocks``."""
    experts: Figures = 0
    """The experts' part of ``total``: an expert-parallel group holds them once, so that fewer ranks divide their states."""
    shapes: Figures = 0
    """One weight of each shape in a block, for the block where these have the most elements: experts have the same shapes."""
    largest_without_experts: Figures = 0
    """The most that one block has without its experts."""

    @property
    def dense(self) -> Figures:
        """Parameters outside experts."""
        return self.total - self.experts

    def updated(self, shards: Shards) -> Figures:
        """Parameters that the rank updates."""
        return self.dense / shards.dense + self.experts / shards.experts

    def of_ranks(self, own: Ints) -> Weights:
        """[W] The parameters of ranks with the stages ``own`` [W, V], from those of stages."""
        largest = "largest_block", "shapes", "largest_without_experts"
        each = {name: np.asarray(of)[own] for name, of in vars(self).items()}
        return Weights(**{name: of.max(axis=1) if name in largest else of.sum(axis=1) for name, of in each.items()})


def state_bytes(weights: Weights, of: Behaviour, shards: Shards, micro_batches: int | Ints) -> dict[str, Figures]:
    """Bytes of parameters, optimizer states, gathered weights, gradients, reduce buffers and flat copies of each rank."""
    sent, block = _communicated(weights, of)
    part, trained = weights.updated(shards), of.states.trained_share
    held_bytes = trained * of.states.master_weight_bytes + (1 - trained) * _weight_bytes(of)
    no_matrix = weights.outside_blocks / shards.dense + weights.experts / shards.experts
    waits_whole = np.logical_and(of.gradients.whole, np.greater(micro_batches, 1))
    gradient = np.where(of.reduce.gradients_in_buckets, 0.0, np.where(waits_whole, weights.total, part))
    return {
        "parameters": np.ceil(part * held_bytes),
        "optimizer_states": np.ceil(trained * (part * of.states.device_bytes + no_matrix * of.states.no_matrix_bytes)),
        "gathered_weights": _gathered_bytes(weights.outside_blocks, sent, block, of, shards),
        "gradients": np.ceil(trained * gradient * (of.gradients.element_bytes + of.gradients.beside_bytes)),
        "reduce_buffers": trained * _reduce_buffer_bytes(weights, sent, block, of),
        # Taken permanently: the allocator does not merge memory that it got from the device at different times.
        "flat_copies": np.ceil(weights.total * of.states.flattened_bytes + part * of.gradients.update_bytes),
    }


def _communicated(weights: Weights, of: Behaviour) -> tuple[Figures, Figures]:
    """Elements of a rank, and of its largest block, that are gathered and reduced."""
    alone = of.experts.leaves_lone
    sent = np.where(alone, weights.dense, weights.total)
    return sent, np.where(alone, weights.largest_without_experts, weights.largest_block)


def _gathered_bytes(outside: Figures, sent: Figures, block: Figures, of: Behaviour, shards: Shards) -> Figures:
    # The block that computes and the one that is gathered ahead.
    in_use = np.maximum(outside + 2 * block, of.gather.ahead_elements) * np.logical_not(of.reduce.on_own_stream)
    gathered = np.minimum(np.where(of.gather.keeps_weights, sent, in_use), sent)
    return gathered * _gathered_element_bytes(of, shards)


def _gathered_element_bytes(of: Behaviour, shards: Shards) -> Figures:
    """Bytes per gathered element. A rank that shards nothing has copies only of the weights it trains, cast for each step."""
    cast = np.not_equal(of.states.compute_weight_bytes, of.states.master_weight_bytes) * of.states.trained_share
    return np.where(np.greater(shards.dense, 1), 1.0, cast) * of.states.compute_weight_bytes


def _reduce_buffer_bytes(weights: Weights, sent: Figures, block: Figures, of: Behaviour) -> Figures:
    bucket = of.reduce.bucket_elements
    copied = np.where(of.reduce.keeps_buckets, sent, np.minimum(sent, bucket))
    in_buckets = (copied + bucket * of.reduce.collects_in_bucket) * of.reduce.element_bytes
    # A unit's gradient in the compute copy's type, where there is one, and the flat buffer it is reduced in.
    of_unit = np.maximum(block, weights.outside_blocks) * (of.states.compute_weight_bytes + of.reduce.element_bytes)
    of_unit = of_unit * np.logical_not(of.reduce.on_own_stream)
    buffers = np.where(np.greater(bucket, 0), in_buckets, of_unit) * of.reduce.copies
    # One dummy gradient for each shape of weight, kept from layer to layer (Transformer Engine, get_dummy_wgrad).
    return buffers + (weights.shapes + weights.head) * of.states.compute_weight_bytes * of.gradients.fused_accumulation


class UnitBytes(NamedTuple):
    """Temporary bytes of whole units' weights and gradients, beyond ``state_bytes``, where units are gathered and reduced one by one on
    streams of their own (``ReduceTraits.on_own_stream``); else 0."""

    at_head: Figures
    """Gathered weights while the loss is computed: the head's unit."""
    gathered: Figures
    """Gathered weights while layers run backward: those of the layer that computes. The next layer is on the gathers' stream."""
    reduced: Figures
    """At the same time: the gradients of that layer, and the buffer that reduces those of the unit before it, such as the head."""
    last: Figures
    """Gradients and buffer of the last unit that is reduced, when all activations are gone."""
    pooled: Figures
    """Kept on the streams: by gathers, the two largest units in succession with the rank's shards of these units; by reductions, what goes
    beyond the gradients that ``state_bytes`` counts."""
    grown: Figures
    """Kept on the stream of reductions where gradients grow as activations go (one micro-batch): all gradients."""


def unit_bytes(weights: Weights, of: Behaviour, shards: Shards, micro_batches: int | Ints) -> UnitBytes:
    """Read from ``memory_snapshot()`` of FSDP2 on one of 8 and one of 128 ranks (torch 2.11; docs/forecast/memory.md)."""
    sent, block = _communicated(weights, of)
    apart, outside, head = of.gather.ends_apart, weights.outside_blocks, weights.head
    largest = np.maximum(block, np.where(apart, np.maximum(head, outside - head), outside))
    element = _gathered_element_bytes(of, shards) * of.reduce.on_own_stream
    freed = element * np.logical_not(of.gather.keeps_weights)
    sums, made, trained = of.reduce.element_bytes, of.states.compute_weight_bytes, of.states.trained_share
    in_buffers = trained * of.reduce.copies * of.reduce.on_own_stream * np.equal(of.reduce.bucket_elements, 0)
    gathering = (largest + block) * element * np.greater(shards.dense, 1) * (1 + 1 / shards.dense)
    gradients = np.ceil(trained * weights.updated(shards) * of.gradients.element_bytes) * of.reduce.on_own_stream
    next_one = in_buffers * largest * of.gradients.element_bytes / shards.dense
    is_single = np.equal(micro_batches, 1)
    return UnitBytes(
        at_head=np.minimum(np.where(apart, head, outside), sent) * freed,
        gathered=np.minimum(np.where(apart, 0.0, outside) + block, sent) * freed,
        reduced=in_buffers * (np.maximum(block, np.where(apart, head, 0.0)) * sums + block * made),
        last=in_buffers * largest * (sums + made),
        pooled=np.rint(gathering + np.where(is_single, 0.0, np.where(of.gradients.whole, gradients, next_one))),
        grown=np.where(is_single, gradients, 0.0),
    )


def layer_state_bytes(
    dense: Figures, experts: Figures, of: Behaviour, shards: Shards, micro_batches: int
) -> tuple[Figures, Figures]:
    """Least bytes that a layer with ``dense`` and ``experts`` parameters adds to its rank's states, whatever else is there; and the
    part that is gradients."""
    parts = state_bytes(Weights(dense + experts, experts=experts), of, shards, micro_batches)
    kept = np.where(of.gather.keeps_weights, parts["gathered_weights"], 0.0)
    kept += np.where(of.reduce.gradients_in_buckets, parts["reduce_buffers"], 0.0)
    states = parts["parameters"] + parts["optimizer_states"] + parts["gradients"] + kept
    return np.maximum(states - 3.0, 0.0), parts["gradients"]  # three of the parts are rounded up once for a rank


def visiting_bytes(weights: Weights, of: Behaviour, shards: Shards) -> Figures:
    """The most bytes of states from host memory that are on the device at once while weights are updated."""
    in_host = of.states.trained_share * weights.updated(shards) * of.states.host_bytes
    return np.ceil(np.minimum(of.states.host_bucket_bytes, in_host))


def cast_bytes(of: Behaviour, shards: Figures) -> Figures:
    """Bytes moved per weight element to make the compute copy: the shard cast, and the gathered buffer copied out."""
    computes, master = of.states.compute_weight_bytes, of.states.master_weight_bytes
    trained, several = of.states.trained_share, np.greater(shards, 1)
    # FSDP copies the shards of frozen weights too, where ranks shard them.
    moved = trained * (master + computes) + np.where(several, (1 - trained) * 2 * computes, 0.0)
    cast = np.where(np.logical_and(computes, np.not_equal(computes, master)), moved / shards, 0.0)
    return cast + np.where(np.logical_and(several, of.gather.copies), 2 * _weight_bytes(of), 0)


UNALIKE_CAST, UNALIKE_SUM = 1.75, 1.2
"""Factors on the bytes of a kernel that casts 16-bit gradients to fp32, or adds them to fp32: torch computes an address for each element, as for
``unvectorized`` in kernels.yaml. Within a step an H200 cast 278e9 and added 245e9 elements/s. At that rate per SM and clock these are the factors of
A100 and H100; the H200's memory is faster, and there a sum counts 1.7."""


def gradient_copy_bytes(of: Behaviour, shards: Figures, micro_batches: int | Ints) -> Figures:
    """Bytes moved per weight element and micro-batch to copy the gradient into the type and buffer that it waits in or is sent from."""
    made, m = _weight_bytes(of), micro_batches
    # The gradient goes into the flat buffer; then its shard is added to the earlier ones.
    each = made + of.reduce.element_bytes + np.where(np.equal(m, 1), 0.0, 2 * of.gradients.element_bytes / shards)
    # The first gradient is kept as it is, or cast; one kernel adds each later one to the sum: it reads both and writes the sum.
    kept, alike = of.gradients.element_bytes, np.equal(made, of.gradients.element_bytes)
    cast = np.where(alike, 0.0, UNALIKE_CAST * (made + kept))
    added = np.where(alike, 1.0, UNALIKE_SUM) * (made + 2 * kept)
    added = np.where(of.gradients.cast_apart, cast + 3 * kept, added)
    num_added = m - np.where(of.gradients.adds_first, 0, 1)
    once = (cast * (m - num_added) + added * num_added) / m
    copied = np.where(of.gradients.fused_accumulation, 0.0, np.where(of.reduce.every_micro_batch, each, once))
    return of.states.trained_share * copied


def last_copy_bytes(of: Behaviour, micro_batches: int | Ints) -> Figures:
    """Bytes moved per weight element once a step: to copy gradients into the flat buffer, if they waited elsewhere, and in an engine's
    other passes over all of them."""
    sent = 2 * of.reduce.element_bytes * of.states.trained_share
    waited = np.logical_and(np.greater(micro_batches, 1), np.logical_not(of.reduce.every_micro_batch))
    elsewhere = np.logical_or(waited, np.equal(of.states.compute_weight_bytes, 0))
    passed = of.gradients.passes * of.gradients.element_bytes * of.states.trained_share
    return sent * np.logical_and(of.reduce.copies, elsewhere) + passed


EIGHT_BIT_UPDATE_BYTES = 242
"""Bytes moved per parameter by AdamW with moments in 8 bits on a CPU, counted over the operators of runtime/optimizer/eight_bit.py: 21 to
decode each moment, 32 to add the gradient, 66 to encode both moments, 72 for the update, 30 to write the results unless the step is skipped."""

COMPILED_EIGHT_BIT_UPDATE_BYTES = 74
"""The same on a GPU, in one compiled kernel: it moves 16, but memory could move these 74 while it looks codes up. [H200] torchao's kernel of these
steps took about 16 ms more than fused AdamW (28 bytes) for 1.5 billion parameters, measured on another H200 and scaled (docs/benchmarks.md)."""

CLIP_PASSES = 3
"""How often clipping passes over a gradient: one read for the norm, one read and write for the scale."""


def update_bytes(job: Job, traits: Traits, *, on_cpu: bool) -> float:
    """Bytes that the optimizer moves through memory for each parameter, trained or not: norm, clipping and AdamW."""
    # AdamW reads weight, gradient and states, and writes weight and states, in one kernel (fused=True).
    states, in_8_bits = traits.states, job.optimizer.share_in_8_bits
    moved = 2 * (states.master_weight_bytes + states.optimizer_bytes) + traits.gradients.element_bytes
    if in_8_bits:
        in_fp32 = 2 * (states.master_weight_bytes + 8) + traits.gradients.element_bytes
        in_blocks = EIGHT_BIT_UPDATE_BYTES if on_cpu else COMPILED_EIGHT_BIT_UPDATE_BYTES
        moved = in_8_bits * in_blocks + (1 - in_8_bits) * in_fp32
    # The compute copy is made again, where no gather makes it.
    if states.compute_weight_bytes and traits.gather.forward == "never":
        moved += states.master_weight_bytes + states.compute_weight_bytes
    moved += job.state_bytes * (CLIP_PASSES if job.optimizer.grad_clip is not None else 1)
    moved += traits.gradients.before_update_bytes
    return moved * states.trained_share


def _weight_bytes(of: Behaviour) -> Figures:
    """Bytes of one weight element in the type that computes."""
    return np.where(of.states.compute_weight_bytes, of.states.compute_weight_bytes, of.states.master_weight_bytes)
