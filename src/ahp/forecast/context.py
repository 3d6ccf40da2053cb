"""How long context-parallel ranks wait in attention for the keys and values of each other's tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable
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
    forward = backward = joined = joined_backward = 0.0
    for op in attention:
        share = 1.0 / division.tensor if op.index in division.split.divided else 1.0
        queries, keys = op.inputs[0], op.inputs[1:3]
        of_keys = max(share, 1.0 / keys[0].shape[1])  # a rank has one head at least
        if how.repeats_keys:
            of_keys = share * queries.shape[1] / keys[0].shape[1]
        if way == "all-to-all":
            seconds = sum(_exchange_s(spec, share, group, rates, network) for spec in (queries, op.outputs[0]))
            seconds += sum(_exchange_s(spec, of_keys, group, rates, network) for spec in keys)
            forward, backward = forward + seconds, backward + seconds
        else:
            seconds = network.time_s("all_gather", sum(spec.bytes for spec in keys) * of_keys, group)
            forward += seconds
            # A gather sends to all but one rank; gradients are sent as often as there are ranks.
            times_more = how.sums_bytes / DTYPE_BYTES[keys[0].dtype] * group.size / (group.size - 1)
            backward += seconds + seconds * (times_more or 1.0)
            num_keys = of_keys * sum(spec.numel for spec in keys)
            joined += _joined_s(share * op.outputs[0].numel, how.joined_bytes[0], group.size - 1, group, rates)
            joined_backward += _joined_s(
                share * queries.numel + num_keys, how.joined_bytes[1], group.size, group, rates
            )
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


def _joined_s(elements: float, joined_bytes: float, rounds: int, group: Group, rates: Rates) -> float:
    """Seconds in which kernels join what ``rounds`` bring; ``elements``: of all ranks of the group."""
    return rounds * rates.element_wise_s(joined_bytes * elements / group.size, 0.0, "float32")


def _exchange_s(spec: TensorSpec, share: float, group: Group, rates: Rates, network: Network) -> float:
    """Seconds of an all-to-all of [batch, heads, sequence, width], reordered before and after it. With fewer heads than ranks,
    each head is sent to several ranks."""
    heads = max(1, round(spec.shape[1] * share))
    times = group.size // math.gcd(heads, group.size)
    sent = spec.bytes * share * times / group.size
    copies_s = 2 * rates.element_wise_s(2 * sent, 0.0, spec.dtype)
    return network.time_s("all_to_all", sent, group) + copies_s
