"""Which operators of a block selective recompute keeps the results of, where it goes by operators."""

from __future__ import annotations

from ahp.forecast.split import is_weight_product
from ahp.graph.operators import Segment


def kept_results(segment: Segment) -> frozenset[int]:
    """Products with a weight, fused attention, and dropout, whose random numbers must not be drawn twice: their indexes."""
    forward = segment.phase("forward")
    return frozenset(op.index for op in forward if is_weight_product(op) or _is_kept(op.name))


def second_products(segment: Segment) -> frozenset[int]:
    """Of the products of a block with a weight and no bias the second, the fourth, ...: their indexes.

    torchtitan counts ``aten.mm`` alone (distributed/activation_checkpoint.py, SelectiveAC): a layer with a bias is always
    kept, and so are stacked experts. The router, which it leaves out of the count, is in it here.
    """
    products = [op.index for op in segment.phase("forward") if op.name == "aten.mm" and is_weight_product(op)]
    return frozenset(products[1::2])


def _is_kept(name: str) -> bool:
    return "attention" in name or name == "aten.native_dropout"
