"""Tokens on their way to the experts of other ranks, and back.

An all-to-all sends a copy of a token for each expert that it is routed to. Kernels that know the network (DeepEP, HybridEP) send it
once to each node that has one of its experts, from where it goes over NVLink to each of the ranks that have.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

from ahp.forecast.communication import Times
from ahp.forecast.division import num_experts
from ahp.forecast.group import Group
from ahp.forecast.overlap import shown_s
from ahp.graph.operators import Operator


@dataclass(frozen=True)
class Routed:
    """What a rank routes in one pass of a micro-batch."""

    num_bytes: float
    """Of all copies: one for each expert of each token."""
    per_token: int
    """Experts that a token is routed to."""
    num_experts: int

    @classmethod
    def of(cls, grouped: Operator, share: float, tokens: int) -> Routed:
        """``grouped``: the first product with the experts' weights; ``share``: of what it reads, what the rank sends; ``tokens``: of
        which it reads the copies."""
        copies = grouped.inputs[0]
        return cls(share * copies.bytes, max(1, round(copies.shape[0] / tokens)), num_experts(grouped))

    def share_sent_once(self, places: int) -> float:
        """Of all copies, those that are left where each of ``places``, which have as many experts each, gets a token once:
        experts are chosen alike often, and no expert twice."""
        elsewhere = self.num_experts - self.num_experts // places
        hit = 1.0 - comb(elsewhere, self.per_token) / comb(self.num_experts, self.per_token)
        return places * hit / self.per_token


def all_to_all_s(routed: Routed, group: Group, network: Times, *, once_to_a_node: bool) -> float:
    """Seconds on one way, to the experts or back. ``once_to_a_node``: each node gets a token once."""
    if group.nodes == 1 or not once_to_a_node:
        return network.time_s("all_to_all", routed.num_bytes, group)
    between_s = network.time_s("all_to_all", routed.share_sent_once(group.nodes) * routed.num_bytes, group)
    within = Group(group.local, group.local, 1)
    # A rank forwards what arrives on its node for the others there, while more arrives.
    return max(between_s, network.time_s("all_to_all", routed.share_sent_once(group.size) * routed.num_bytes, within))


def pass_waits_s(
    routed: Routed, group: Group, network: Times, passes_s: float, *, once_to_a_node: bool, overlap: float
) -> float:
    """Seconds that a pass waits for its tokens to reach their experts, and for the answers.

    ``passes_s``: computation of the forward and the backward pass, of which each hides half on average: the share ``overlap`` of both
    all-to-alls may run beside the opposite pass of another micro-batch.
    """
    sent_s = 2 * all_to_all_s(routed, group, network, once_to_a_node=once_to_a_node)
    return shown_s(sent_s, passes_s / 2, overlap) if overlap else sent_s
