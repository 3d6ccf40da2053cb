"""How long context-parallel ranks wait in attention for the keys and values of each other's tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ahp.engines.traits import ContextTraits, ContextWay
from ahp.forecast.communication import Network
from ahp.forecast.compute import SegmentTimes
from ahp.forecast.division import Division
from ahp.forecast.efficiency import Rates, is_cpu
from ahp.forecast.group import Group
from ahp.forecast.overlap import hidden_s, shown_s
from ahp.graph.operators import DTYPE_BYTES, Operator, TensorSpec


class SharedTokens(NamedTuple):
    """Seconds of one unit's attention."""

    forward_s: float = 0.0
    """Seconds that the rank waits in the forward pass for tokens of the others, and joins what they bring."""
    again_s: float = 0.0
    """The part of it that selective recompute sends again, where it sends anything: 0 for a ring, whose result is kept."""
    backward_s: float = 0.0
    hidden_forward_s: float = 0.0
    """Seconds of its computation that hide a ring's messages."""
    hidden_backward_s: float = 0.0


def shared_tokens_s(
    attention: Iterable[Operator],
    division: Division,
    group: Group,
    times: SegmentTimes,
    way: ContextWay,
    how: ContextTraits,
    rates: Rates,
    network: Network,
) -> SharedTokens:
    """Seconds that attention waits for the other ranks of ``group``.

    Keys and values are gathered or go round a ring; in the backward pass again, with their gradients (``how.sums_bytes``). Kernels join what the rounds
    bring. On a ring keys and values travel while attention computes on those already there, so that all except for the last part of
    the computation can hide them. By all-to-all, queries, keys, values and results are exchanged, and so are their gradients.
    """
    if group.size == 1:
        return SharedTokens()
    forward = backward = 0.0
    for op in attention:
        queries, keys = op.inputs[0], op.inputs[1:3]
        share, of_keys = _shares(op, division, how)
        if way == "all-to-all":
            given = [(queries, share), *((spec, of_keys) for spec in keys)]
            packed = how.packs_heads and len({spec.shape[-1] for spec, _ in given}) == 1
            messages = [*([given] if packed else ([one] for one in given)), [(op.outputs[0], share)]]
            seconds = sum(_exchange_s(message, group, rates, network) for message in messages)
            forward, backward = forward + seconds, backward + seconds
        else:
            seconds = network.time_s("all_gather", sum(spec.bytes for spec in keys) * of_keys, group)
            forward += seconds
            backward += seconds * gathers_in_backward(op, how, group.size)
    joined, joined_backward = (0.0, 0.0) if way == "all-to-all" else joined_s(attention, division, how, rates)
    if way != "ring" or is_cpu(rates.device):
        forward, backward = forward + joined, backward + joined_backward
        return SharedTokens(forward, 0.0 if way == "ring" else forward, backward)
    beside = 1.0 - 1.0 / group.size
    forward_beside_s = beside * times.attention.device_s
    backward_beside_s = beside * times.attention_backward.device_s
    return SharedTokens(
        shown_s(forward, forward_beside_s, 1.0) + joined,
        0.0,
        shown_s(backward, backward_beside_s, 1.0) + joined_backward,
        hidden_s(forward, forward_beside_s, 1.0),
        hidden_s(backward, backward_beside_s, 1.0),
    )


def gathers_in_backward(op: Operator, how: ContextTraits, ranks: int) -> float:
    """How many times as long as one gather of keys and values their messages of a backward pass take: a gather, and their gradients."""
    # A gather sends to all but one rank; gradients are sent as often as there are ranks.
    return 1.0 + (how.sums_bytes / DTYPE_BYTES[op.inputs[1].dtype] * ranks / (ranks - 1) or 1.0)


def joined_s(
    attention: Iterable[Operator], division: Division, how: ContextTraits, rates: Rates
) -> tuple[float, float]:
    """Seconds in which kernels join what the rounds of a ring bring, in a forward and in a backward pass."""
    forward, backward = 0.0, 0.0
    for op in attention:
        share, of_keys = _shares(op, division, how)
        num_keys = of_keys * sum(spec.numel for spec in op.inputs[1:3])
        elements = share * op.outputs[0].numel, share * op.inputs[0].numel + num_keys
        result_s, gradient_s = (
            rates.element_wise_s(moved * count / division.context, 0.0, "float32")
            for moved, count in zip(how.joined_bytes, elements, strict=True)
        )
        forward, backward = forward + (division.context - 1) * result_s, backward + division.context * gradient_s
    return forward, backward


def _shares(op: Operator, division: Division, how: ContextTraits) -> tuple[float, float]:
    """The parts of queries, and of keys and values, that the tensor rank has; more than 1 of keys that are copied for each query."""
    share = 1.0 / division.tensor if op.index in division.split.divided else 1.0
    num_keys = op.inputs[1].shape[1]
    if how.repeats_keys:
        return share, share * op.inputs[0].shape[1] / num_keys
    return share, max(share, 1.0 / num_keys)  # a rank has one head at least


def _exchange_s(tensors: Sequence[tuple[TensorSpec, float]], group: Group, rates: Rates, network: Network) -> float:
    """Seconds of one all-to-all of tensors [batch, heads, sequence, width], each with the part that the tensor rank has, reordered before and
    after it. With fewer heads than ranks, each head is sent to several ranks."""
    sent, copies_s = 0.0, 0.0
    for spec, share in tensors:
        heads = max(1, round(spec.shape[1] * share))
        own = spec.bytes * share * (group.size // math.gcd(heads, group.size)) / group.size
        sent, copies_s = sent + own, copies_s + 2 * rates.element_wise_s(2 * own, 0.0, spec.dtype)
    return network.time_s("all_to_all", sent, group) + copies_s
