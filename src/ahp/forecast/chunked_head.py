"""The cost of a model's end where the loss is computed chunk by chunk: the cost of one chunk times the number of chunks.

A chunk's gradient is made with its logits, so the whole work lies in the forward pass. Until the backward pass the rank
keeps the gradient of the hidden states and, in fp32, the gradients of the weights that the chunks add up. The runtime takes the
same ``chunks`` of tokens.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from ahp.forecast.activations import SegmentMemory
from ahp.forecast.compute import SegmentTimes, Work
from ahp.forecast.efficiency import Rates
from ahp.forecast.tensor_collectives import TensorCost
from ahp.forecast.unit import Unit

SUM_BYTES = 4
"""Bytes of an element in fp32, in which gradients of chunks are added up (runtime/compute/chunked_loss.py)."""


Chunk = tuple[slice, slice]
"""Rows and positions, as an index of [batch, sequence]."""


def chunks(batch: int, sequence: int, most_tokens: int) -> list[Chunk]:
    """Chunks of at most ``most_tokens`` tokens, as even as possible: some whole rows, or else a part of one row."""
    if most_tokens >= sequence:
        return [(rows, slice(None)) for rows in _even(batch, most_tokens // sequence)]
    return [(slice(row, row + 1), part) for row in range(batch) for part in _even(sequence, most_tokens)]


def num_chunks(batch: int, sequence: int, most_tokens: int) -> int:
    """The number of ``chunks``, without listing them: chunks of one token would be too many."""
    if most_tokens >= sequence:
        return -(-batch // (most_tokens // sequence))
    return batch * -(-sequence // most_tokens)


def _even(length: int, most: int) -> list[slice]:
    count = -(-length // most)
    ends = [length * i // count for i in range(count + 1)]
    return [slice(a, b) for a, b in pairwise(ends)]


def chunked_head(one: Unit, count: int, *, weights: int, weight_bytes: int, hidden_bytes: int, rates: Rates) -> Unit:
    """The end of the model on a micro-batch, from the cost of ``one`` of ``count`` chunks.

    ``weights``: elements whose gradients are added up, including a weight tied to the embedding; ``weight_bytes``: of one
    element in the type that computes. ``hidden_bytes``: of the micro-batch's hidden states.
    """
    # Each chunk's gradient is read and added to the sum; the first is copied.
    moved = weights * (count * (weight_bytes + 2 * SUM_BYTES) - SUM_BYTES)
    added = Work(rates.element_wise_s(moved, 0.0, "float32"), count * max(1, len(one.weights.tensors)))
    cast = weights * (weight_bytes if weight_bytes != SUM_BYTES else 0)
    scaled = weights * 2 * SUM_BYTES + 2 * hidden_bytes + (cast + weights * SUM_BYTES if cast else 0)
    chunk = one.times.forward + one.times.input_gradient + one.times.weight_gradient
    forward = _times(chunk, count) + added
    times = SegmentTimes(
        forward=forward,
        input_gradient=Work(rates.element_wise_s(scaled, 0.0, "float32"), max(1, len(one.weights.tensors)) + 1),
        element_wise=_times(one.times.element_wise, count),
        products=_times(one.times.products, count),
    )
    held = one.memory
    return replace(
        one,
        times=times,
        tensor=TensorCost(
            count * (one.tensor.forward_s + one.tensor.backward_s), 0.0, 0.0, 0.0, count * one.tensor.launches
        ),
        memory=SegmentMemory(
            saved=hidden_bytes + weights * SUM_BYTES,
            # While one chunk is computed: what it keeps and makes, and its own weight gradients.
            forward_extra=held.saved + max(held.forward_extra, held.backward_extra) + weights * weight_bytes,
            backward_extra=cast,
        ),
    )


def _times(work: Work, count: int) -> Work:
    return Work(work.device_s * count, work.launches * count)
