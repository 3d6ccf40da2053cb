"""Which operators of a block selective recompute keeps the results of, where it goes by operators."""

from __future__ import annotations

from ahp.forecast.split import GROUPED, is_weight_product
from ahp.graph.operators import Segment


def kept_results(segment: Segment) -> frozenset[int]:
    """Products with a weight, fused attention, and dropout, whose random numbers must not be drawn twice: their indexes."""
    forward = segment.phase("forward")
    return frozenset(op.index for op in forward if is_weight_product(op) or _is_kept(op.name))


def second_products(segment: Segment) -> frozenset[int]:
    """Of the products of a block with a weight and no bias the second, the fourth, ...; and those of stacked experts: their indexes.

    torchtitan counts ``aten.mm`` alone (distributed/activation_checkpoint.py, SelectiveAC): the result of a layer with a bias is always
    kept, that of a grouped product never, which is not on its list. The router, which it leaves out of the count, is in it here.
    """
    products = [op for op in segment.phase("forward") if is_weight_product(op)]
    counted = [op.index for op in products if op.name == "aten.mm"]
    return frozenset(counted[1::2]) | {op.index for op in products if op.name in GROUPED}


def _is_kept(name: str) -> bool:
    return "attention" in name or name == "aten.native_dropout"
