"""Which results of a block selective recompute keeps, where it selects by operator, and where a second run of the forward stops."""

from __future__ import annotations

from ahp.forecast.split import GROUPED, is_weight_product
from ahp.graph.operators import Segment


def kept_results(segment: Segment) -> frozenset[int]:
    """Indexes of weight products, fused attention, and dropout, whose random numbers must not be drawn twice."""
    forward = segment.phase("forward")
    return frozenset(
        op.index
        for op in forward
        if is_weight_product(op) or "attention" in op.name or op.name == "aten.native_dropout"
    )


def second_products(segment: Segment, *, attention_too: bool = False) -> frozenset[int]:
    """Indexes of a block's second, fourth, ... weight product without a bias, and of all products of stacked experts.

    torchtitan counts only ``aten.mm`` (distributed/activation_checkpoint.py, SelectiveAC): the result of a layer with a bias is always
    kept, that of a grouped product never, since it is not on torchtitan's list. Its count leaves the router out, the one here does not.
    ``attention_too``: and fused attention, where it is not on the list either.
    """
    products = [op for op in segment.phase("forward") if is_weight_product(op)]
    counted = [op.index for op in products if op.name == "aten.mm"]
    fused = {op.index for op in segment.phase("forward") if attention_too and "attention" in op.name}
    return frozenset(counted[1::2]) | {op.index for op in products if op.name in GROUPED} | fused


def asked_for(segment: Segment, kept: frozenset[int]) -> frozenset[int]:
    """The results in ``kept`` that the backward pass reads, or its recompute does: a compiler that sees both passes keeps no others."""
    forward = {op.index: op for op in segment.phase("forward")}
    waiting = [i for op in segment.phase("backward") for i in op.depends_on if i in forward]
    seen: set[int] = set()
    while waiting:
        index = waiting.pop()
        if index not in seen:
            seen.add(index)
            waiting += forward[index].depends_on if index not in kept else ()
    return kept & seen


def last_read(segment: Segment) -> int:
    """The last operator of the forward pass whose result the backward pass reads; -1 where it reads none.

    torch's checkpoint repeats a forward no further than this: it stops where the last tensor is saved (torch 2.13,
    utils/checkpoint.py, set_checkpoint_early_stop).
    """
    forward = {op.index: op for op in segment.phase("forward")}
    return max((i for op in segment.phase("backward") for i in op.depends_on if i in forward), default=-1)
