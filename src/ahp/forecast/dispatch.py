"""How long tokens take to the experts of other ranks, and back.

An all-to-all sends a copy of a token for each expert that the token is routed to. Kernels that know the network (DeepEP, HybridEP) send
it once to each node that has one of its experts, and from there over NVLink to each rank that has one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

from ahp.engines.traits import ExpertTraits
from ahp.forecast.communication import Times
from ahp.forecast.division import num_experts
from ahp.forecast.efficiency import Rates
from ahp.forecast.group import Group
from ahp.forecast.overlap import shown_s
from ahp.forecast.titan_experts import ADDED_ADDRESSES, PUT_ADDRESSES
from ahp.graph.operators import Operator


@dataclass(frozen=True)
class Routed:
    """The tokens that a rank routes in one pass of a micro-batch."""

    num_bytes: float
    """Bytes of all copies: one for each expert of each token."""
    per_token: int
    """Experts that a token is routed to."""
    num_experts: int
    row_bytes: int
    """Bytes of one copy."""

    @classmethod
    def of(cls, grouped: Operator, share: float, tokens: int) -> Routed:
        """``grouped``: the first product with the experts' weights; ``share``: the part of its input that the rank sends; ``tokens``: how
        many tokens its input has copies of."""
        copies = grouped.inputs[0]
        per_token = max(1, round(copies.shape[0] / tokens))
        return cls(share * copies.bytes, per_token, num_experts(grouped), copies.bytes // copies.shape[0])

    def share_sent_once(self, places: int) -> float:
        """The share of all copies that is left where each of ``places``, with equally many experts each, gets a token once:
        experts are chosen equally often, and no expert twice."""
        elsewhere = self.num_experts - self.num_experts // places
        hit = 1.0 - comb(elsewhere, self.per_token) / comb(self.num_experts, self.per_token)
        return places * hit / self.per_token


def all_to_all_s(routed: Routed, group: Group, network: Times, how: ExpertTraits) -> float:
    """Seconds in one direction, to the experts or back."""
    if group.nodes == 1 and how.tokens_once_to_a_rank:
        return network.time_s("all_to_all", routed.share_sent_once(group.size) * routed.num_bytes, group)
    if group.nodes == 1 or not how.tokens_once_to_a_node:
        return network.time_s("all_to_all", routed.num_bytes, group)
    between_s = network.time_s("all_to_all", routed.share_sent_once(group.nodes) * routed.num_bytes, group)
    within = Group(group.local, group.local, 1)
    # A rank forwards what arrives for others on its node, while more arrives.
    return max(between_s, network.time_s("all_to_all", routed.share_sent_once(group.size) * routed.num_bytes, within))


def numbers_s(routed: Routed, group: Group, network: Times, how: ExpertTraits) -> float:
    """Seconds of the messages with numbers in one pass, the mean of both passes: as if all were of four bytes for each copy. Kernels that know
    the network send them with the tokens."""
    if group.nodes > 1 and how.tokens_once_to_a_node:
        return 0.0
    num_bytes = routed.num_bytes / routed.row_bytes * 4
    return how.numbers_sent / 2 * network.time_s("all_to_all", num_bytes, group)


def arrived_bytes(routed: Routed, group: Group, how: ExpertTraits) -> float:
    """Bytes of the tokens that arrive at a rank's experts in one pass, and of what is kept of the results that come back to it."""
    there = routed.share_sent_once(group.size) if how.tokens_once_to_a_rank else 1.0
    back = 1 / routed.per_token if how.keeps_sums else 1.0
    return routed.num_bytes * (there + back)


def sorted_s(grouped: Operator, share: float, group: Group, how: ExpertTraits, rates: Rates) -> float:
    """Seconds in which a pass puts the copies that have arrived from each rank in the order of their experts, and back: two kernels, each of which
    reads and writes every copy. ``share``: the part of the copies that the rank computes."""
    sent_once = group.nodes > 1 and how.tokens_once_to_a_node
    if not how.sorts_arrived or sent_once or num_experts(grouped) == group.size:
        return 0.0
    copies = grouped.inputs[0]
    moved_s = share * copies.bytes / rates.bytes_per_s
    if not how.sorts_by_torch or rates.gpu is None:
        return 4.0 * moved_s
    # ``x[indices]`` is as fast as memory; forward the results are put, backward the gradients are added: the mean of both passes.
    by_element = share * copies.numel * (PUT_ADDRESSES + ADDED_ADDRESSES) / 2
    return 2.0 * moved_s + max(2.0 * moved_s, rates.gpu.unvectorized_s(by_element))


def copied_s(grouped: Operator, share: float, ranks: int, bytes_per_s: float) -> tuple[float, float]:
    """Seconds of a forward and of a backward pass in which autograd copies tensors of all copies of tokens, where experts run one after another.
    ``share``: the part of the copies that the rank computes; ``ranks`` share the experts.

    Megatron-LM d0f13074a5, core/transformer/moe/experts.py, SequentialMLP. Forward: the tensor of all results is set to zero, and each expert's are copied into it.
    Backward (torch 2.3, autograd/functions/tensor.cpp, CopySlices): for each expert the gradient of all results is copied, and that of its tokens is written into
    a tensor of zeros, which is added to those of the others. Its slices are copied too, and but for one expert set to zero and copied back.
    """
    tensor_s, local = share * grouped.inputs[0].bytes / bytes_per_s, num_experts(grouped) // ranks
    whole, slices = 2 * local + local + 3 * (local - 1), 2 + 2 + 3 * (local - 1) / local
    return 3 * tensor_s, (whole + slices if local > 1 else 3) * tensor_s  # a lone expert's slices are the whole tensors


def pass_waits_s(
    routed: Routed, group: Group, network: Times, passes_s: float, how: ExpertTraits, *, overlap: float
) -> float:
    """Seconds that a pass waits for its tokens to reach their experts, and for the results.

    ``passes_s``: computation of the forward and the backward pass together, half of which can hide this pass's sends on average: the share
    ``overlap`` of both all-to-alls can overlap with the opposite pass of another micro-batch.
    """
    sent_s = 2 * all_to_all_s(routed, group, network, how)
    return shown_s(sent_s, passes_s / 2, overlap) if overlap else sent_s
