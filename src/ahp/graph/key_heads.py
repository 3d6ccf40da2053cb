"""Finds where keys and values with fewer heads than queries are made, from the graph alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ahp.graph.operators import ModelGraph, Operator, Segment

BATCHED = ("aten.bmm", "aten.baddbmm")
"""Products of activations with activations: the scores of unfused attention, and the product with the values."""


@dataclass(frozen=True)
class Keys:
    """Where the keys and values of one segment are made. Operators are given by index."""

    heads: int = 0
    """The fewest key heads of any attention in the segment; 0 = none has fewer than query heads."""
    products: frozenset[int] = frozenset()
    """Weight products that make keys and values of fused attention, and nothing else; empty if these cannot be told apart."""
    between: frozenset[int] = frozenset()
    """Operators between these products and attention."""
    read: tuple[int, ...] = ()
    """Operators of ``products`` and ``between`` that attention reads."""


def keys_of(segment: Segment) -> Keys:
    """The keys and values of a segment."""
    forward = list(segment.phase("forward"))
    after = _after_products(forward)
    repeated = _repeated(forward, after)
    fused = [op for op in forward if is_fused(op) and op.inputs[1].shape[1] < op.inputs[0].shape[1]]
    heads = [*repeated, *(op.inputs[1].shape[1] for op in fused)]
    if not heads:
        return Keys()
    paths = [_path(op, forward, after) for op in fused]
    if repeated or any(path is None for path in paths):
        return Keys(min(heads))
    products, between, read = (frozenset().union(*(path[i] for path in paths if path)) for i in range(3))
    return Keys(min(heads), products, between, tuple(sorted(read)))


def is_fused(op: Operator) -> bool:
    """Whether an operator is a whole attention, on [batch, heads, tokens, width]."""
    return "attention" in op.name and len(op.inputs) >= 3 and len(op.inputs[0].shape) == 4


def has_fused_attention(graph: ModelGraph) -> bool:
    """Whether any block computes attention in one operator."""
    return any(is_fused(op) for block in graph.blocks for op in block.operators)


def has_eager_attention(graph: ModelGraph) -> bool:
    """Whether a block computes attention in parts: a softmax of scores, which a product of activations made. Routers' logits come from a weight."""
    return any(map(_softmax_of_scores, graph.blocks)) and not has_fused_attention(graph)


def _softmax_of_scores(block: Segment) -> bool:
    scores: set[int] = set()
    for op in block.phase("forward"):
        if op.name in BATCHED or (op.flops == 0 and scores & set(op.depends_on)):
            scores.add(op.index)
        if op.name == "aten._softmax" and op.index in scores:
            return True
    return False


def leads_to_attention(forward: list[Operator], products: set[int]) -> set[int]:
    """Weight products before or after attention with no other weight product in between."""
    core = {op.index for op in forward if is_fused(op) or op.name in BATCHED}
    after: set[int] = set()
    found: set[int] = set()
    for op in forward:
        if any(i in after for i in op.depends_on):
            (found if op.index in products else after).add(op.index)
        if op.index in core:
            after.add(op.index)
    before = {i for op in forward if op.index in core for i in op.depends_on}
    for op in reversed(forward):
        if op.index in before and op.index in products:
            found.add(op.index)
        elif op.index in before:
            before.update(op.depends_on)
    return found


def _after_products(forward: list[Operator]) -> set[int]:
    """Weight products, and all operators that depend on them."""
    after: set[int] = set()
    for op in forward:
        if (op.flops > 0 and op.parameters) or after & set(op.depends_on):
            after.add(op.index)
    return after


def _repeated(forward: list[Operator], after: set[int]) -> list[int]:
    """Heads of each tensor that is repeated for several query heads and then goes into attention by itself (``cat`` joins it with others)."""
    found: list[int] = []
    heads: dict[int, int] = {}
    for op in forward:
        sources = [i for i in op.depends_on if i in after]
        if _grows(op) and sources:
            heads[op.index] = op.inputs[0].shape[1]
        elif is_fused(op) or op.name in BATCHED:
            found += [heads[i] for i in sources if i in heads]
        elif sources and all(i in heads for i in sources):
            heads[op.index] = min(heads[i] for i in sources)
    return found


def _grows(op: Operator) -> bool:
    return op.name == "aten.expand" and len(op.inputs[0].shape) > 3 and op.outputs[0].numel > op.inputs[0].numel


def _path(
    attention: Operator, forward: list[Operator], after: set[int]
) -> tuple[frozenset[int], frozenset[int], frozenset[int]] | None:
    """Products that make keys and values of fused attention, operators between, and operators read; None if queries share any."""
    by_index = {op.index: op for op in forward}
    of_keys = {i for i in attention.depends_on if i in after and set(by_index[i].outputs) & set(attention.inputs[1:3])}
    keys, queries = (
        _back_to_products(start, by_index, after)
        for start in (of_keys, {i for i in attention.depends_on if i in after} - of_keys)
    )
    products = frozenset(i for i in keys if by_index[i].flops > 0)
    if keys & queries or not products:
        return None
    return products, frozenset(keys - products), frozenset(of_keys)


def _back_to_products(start: set[int], by_index: dict[int, Operator], after: set[int]) -> set[int]:
    """All operators from ``start`` back to weight products, including these."""
    found, waiting = set(start), list(start)
    while waiting:
        op = by_index[waiting.pop()]
        if op.flops > 0 and op.parameters:
            continue
        new = {i for i in op.depends_on if i in after} - found
        found |= new
        waiting += new
    return found
