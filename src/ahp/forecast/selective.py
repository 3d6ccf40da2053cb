"""Which results of a block selective recompute keeps, where it goes by operators, and how far a second run of its forward goes."""

from __future__ import annotations

from ahp.forecast.split import GROUPED, is_weight_product
from ahp.graph.operators import Segment


def kept_results(segment: Segment) -> frozenset[int]:
    """Products with a weight, fused attention, and dropout, whose random numbers must not be drawn twice: their indexes."""
    forward = segment.phase("forward")
    return frozenset(op.index for op in forward if is_weight_product(op) or _is_kept(op.name))


def second_products(segment: Segment, *, attention_too: bool = False) -> frozenset[int]:
    """Of the products of a block with a weight and no bias the second, the fourth, ...; and those of stacked experts: their indexes.

    torchtitan counts ``aten.mm`` alone (distributed/activation_checkpoint.py, SelectiveAC): the result of a layer with a bias is always
    kept, that of a grouped product never, which is not on its list. The router, which it leaves out of the count, is in it here.
    ``attention_too``: and fused attention, where it is not on the list either.
    """
    products = [op for op in segment.phase("forward") if is_weight_product(op)]
    counted = [op.index for op in products if op.name == "aten.mm"]
    fused = {op.index for op in segment.phase("forward") if attention_too and "attention" in op.name}
    return frozenset(counted[1::2]) | {op.index for op in products if op.name in GROUPED} | fused


def asked_for(segment: Segment, kept: frozenset[int]) -> frozenset[int]:
    """Of these results, those that the backward pass reads, or what is made again for it: all that is kept by who sees both passes."""
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

    torch's checkpoint runs a forward again no further than this: where the last tensor is saved it stops
    (torch 2.13, utils/checkpoint.py, set_checkpoint_early_stop).
    """
    forward = {op.index: op for op in segment.phase("forward")}
    return max((i for op in segment.phase("backward") for i in op.depends_on if i in forward), default=-1)


def _is_kept(name: str) -> bool:
    return "attention" in name or name == "aten.native_dropout"
