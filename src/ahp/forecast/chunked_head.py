"""The cost of a model's end where the loss is computed chunk by chunk: the cost of one chunk times the number of chunks.

A chunk's gradient is made with its logits, so the whole work lies in the forward pass. Until the backward pass the rank
keeps the gradient of the hidden states and, in fp32, the gradients of the weights that the chunks add up.
"""

from __future__ import annotations

from dataclasses import fields, replace

from ahp.forecast.activations import NOTHING, SegmentMemory
from ahp.forecast.compute import SegmentTimes, Work
from ahp.forecast.efficiency import Rates
from ahp.forecast.tensor_collectives import TensorCost
from ahp.forecast.unit import Unit

SUM_BYTES = 4
"""Bytes of an element in fp32, in which gradients of chunks are added up (runtime/compute/chunked_loss.py)."""


def chunked_head(
    one: Unit, num_chunks: int, *, weights: int, weight_bytes: int, hidden_bytes: int, rates: Rates
) -> Unit:
    """The end of the model on a micro-batch, from the cost of ``one`` chunk.

    ``weights``: elements whose gradients are added up, including a weight tied to the embedding; ``weight_bytes``: of one
    element in the type that computes. ``hidden_bytes``: of the micro-batch's hidden states.
    """
    # Each chunk's gradient is read and added to the sum; the first is copied.
    moved = weights * (num_chunks * (weight_bytes + 2 * SUM_BYTES) - SUM_BYTES)
    added = Work(rates.element_wise_s(moved, 0.0, "float32"), num_chunks * max(1, len(one.weights.tensors)))
    cast = weights * (weight_bytes if weight_bytes != SUM_BYTES else 0)
    scaled = weights * 2 * SUM_BYTES + 2 * hidden_bytes + (cast + weights * SUM_BYTES if cast else 0)
    chunk = one.times.forward + one.times.input_gradient + one.times.weight_gradient
    forward = _times(chunk, num_chunks) + added
    zero = {field.name: Work() for field in fields(SegmentTimes)}
    times = SegmentTimes(
        **zero
        | {
            "forward": forward,
            "input_gradient": Work(rates.element_wise_s(scaled, 0.0, "float32"), max(1, len(one.weights.tensors)) + 1),
            "element_wise": _times(one.times.element_wise, num_chunks),
            "products": _times(one.times.products, num_chunks),
        }
    )
    held = one.memory
    return replace(
        one,
        times=times,
        tensor=TensorCost(
            num_chunks * (one.tensor.forward_s + one.tensor.backward_s), 0.0, 0.0, 0.0, num_chunks * one.tensor.launches
        ),
        memory=SegmentMemory(
            saved=hidden_bytes + weights * SUM_BYTES,
            saved_in_core=0,
            saved_in_chains=0,
            beside_products=NOTHING,
            every_second_product=NOTHING,
            masks=0,
            # While one chunk is computed: what it keeps and makes, and its own weight gradients.
            forward_extra=held.saved + max(held.forward_extra, held.backward_extra) + weights * weight_bytes,
            backward_extra=cast,
        ),
    )


def _times(work: Work, count: int) -> Work:
    return Work(work.device_s * count, work.launches * count)
