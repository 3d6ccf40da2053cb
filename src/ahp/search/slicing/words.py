"""The solution for a block in words: how each module's weights are split."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from ahp.search.slicing.placement import Placement, Split, Strategy, args_of, shape_of, tensor_inputs
from ahp.search.slicing.strategies import is_grouped

aten = torch.ops.aten


def words(chosen: dict[Node, Strategy], placed: dict[Node, Placement], weights: dict[Node, str]) -> dict[str, str]:
    """For the weight of each product, and for other weights that meet split tokens: column, row, batch, sequence, replicated."""
    origins = _origins(list(chosen), weights)
    found: dict[str, str] = {}
    for node, strategy in chosen.items():
        for matrix, rows, columns in _matrices(node):
            if matrix in origins:
                word = _of_split(placed[matrix], rows, columns) or _of_tokens(strategy.output) or "replicated"
                found[weights[origins[matrix]]] = word
    for node, strategy in chosen.items():
        for source in tensor_inputs(node):
            if source in origins and node not in origins and (word := _of_tokens(strategy.output)):
                found.setdefault(weights[origins[source]], word)
    return found


def _origins(calls: list[Node], weights: dict[Node, str]) -> dict[Node, Node]:
    """The weight that each node is, or is a form of (a transpose, another dtype, the weight plus one)."""
    origins = {node: node for node in weights}
    for node in calls:
        sources = {origins.get(source) for source in tensor_inputs(node)}
        if len(sources) == 1 and None not in sources:
            (origin,) = sources
            assert origin is not None
            origins[node] = origin
    return origins


def _matrices(node: Node) -> Iterator[tuple[Node, int, int]]:
    """The argument of a product that may be a weight, and which of its dims count the rows k and the columns n."""
    if node.target is aten.linear.default:
        yield args_of(node)[1], 1, 0
    elif node.target is aten.addmm.default:
        yield args_of(node)[2], 0, 1
    elif node.target in (aten.matmul.default, aten.mm.default, aten.bmm.default) or is_grouped(node):
        matrix = args_of(node)[1]
        rank = len(shape_of(matrix))
        if rank >= 2:
            yield matrix, rank - 2, rank - 1


def _of_split(placement: Placement, rows: int, columns: int) -> str | None:
    if not isinstance(placement, Split):
        return None
    return {columns: "column", rows: "row"}.get(placement.dim, "batch")


def _of_tokens(placement: Placement) -> str | None:
    """Sequences are split whole (batch), or each along its positions (sequence)."""
    if not isinstance(placement, Split) or not placement.tokens:
        return None
    return "sequence" if placement.dim == 1 or len(placement.segments) > 1 else "batch"


def module_of(weight: str) -> str:
    """The module that a weight belongs to, by which people know it; a bare parameter goes by its own name."""
    path, _, leaf = weight.rpartition(".")
    return path if leaf in ("weight", "bias") else weight
