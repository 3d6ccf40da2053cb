"""Packed projections: dims that hold several segments, such as [q | k | v], as the graph itself cuts them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch.fx import Node

from ahp.search.slicing.placement import args_of, argument, shape_of

aten = torch.ops.aten

CUTS = {aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default}
"""Operators that cut one dim into several tensors."""
VIEWS = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
}


def find_packings(nodes: Iterable[Node]) -> dict[int, frozenset[tuple[int, ...]]]:
    """Sizes that an operator cuts into segments: split, chunk, slices that tile a dim, or a view of it as (3, n)."""
    packings: dict[int, set[tuple[int, ...]]] = {}
    ranges: dict[tuple[Node, int], set[tuple[int, int]]] = {}
    for node in nodes:
        if node.op != "call_function":
            continue
        if node.target in CUTS:
            packings.setdefault(shape_of(args_of(node)[0])[cut_dim(node)], set()).add(cut_sizes(node))
        elif node.target is aten.slice.Tensor:
            dim, start, end = slice_range(node)
            if shape_of(node)[dim] == end - start:
                ranges.setdefault((args_of(node)[0], dim), set()).add((start, end))
        elif node.target in VIEWS:
            for size, segments in _unpacked(node):
                packings.setdefault(size, set()).add(segments)
    for (source, dim), found in ranges.items():
        if segments := _tiles(found, shape_of(source)[dim]):
            packings.setdefault(shape_of(source)[dim], set()).add(segments)
    return {size: frozenset(s for s in found if len(s) > 1) for size, found in packings.items()}


def dim_groups(source: tuple[int, ...], shape: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """The smallest groups of dims with equal products that a view maps onto each other; dims of size 1 are left out."""
    left = [d for d, size in enumerate(source) if size != 1]
    right = [d for d, size in enumerate(shape) if size != 1]
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(left) and j < len(right):
        ins, outs = [left[i]], [right[j]]
        i, j = i + 1, j + 1
        while (a := math.prod(source[d] for d in ins)) != (b := math.prod(shape[d] for d in outs)):
            if a < b:
                ins.append(left[i])
                i += 1
            else:
                outs.append(right[j])
                j += 1
        groups.append((ins, outs))
    return groups


def _unpacked(node: Node) -> Iterable[tuple[int, tuple[int, ...]]]:
    """A dim that a view cuts into 2 or 3 equal parts first: [q | k | v] as (3, heads, size)."""
    source, shape = shape_of(args_of(node)[0]), shape_of(node)
    for group_in, group_out in dim_groups(source, shape):
        if len(group_in) == 1 and len(group_out) > 1 and shape[group_out[0]] in (2, 3):
            size, count = source[group_in[0]], shape[group_out[0]]
            yield size, (size // count,) * count


def _tiles(ranges: set[tuple[int, int]], size: int) -> tuple[int, ...]:
    """The lengths of ranges that cover a dim without a gap; empty when they overlap or leave something out."""
    at, lengths = 0, []
    for start, end in sorted(ranges - {(0, size)}):
        if start != at:
            return ()
        lengths.append(end - start)
        at = end
    return tuple(lengths) if at == size else ()


def cut_dim(node: Node) -> int:
    """The dim along which split or chunk cuts."""
    return argument(node, 2, "dim", 0) % len(shape_of(args_of(node)[0]))


def cut_sizes(node: Node) -> tuple[int, ...]:
    """The sizes of the pieces of split or chunk, along its dim."""
    return tuple(v.shape[cut_dim(node)] for v in node.meta["val"])


def slice_range(node: Node) -> tuple[int, int, int]:
    """Dim, first index and end (exclusive) of slice(x, dim, start, end), without negative or open ends."""
    dim = argument(node, 1, "dim", 0) % len(shape_of(args_of(node)[0]))
    size = shape_of(args_of(node)[0])[dim]
    start, end = argument(node, 2, "start"), argument(node, 3, "end")
    return dim, _index(start, size, 0), _index(end, size, size)


def _index(value: int | None, size: int, default: int) -> int:
    if value is None:
        return default
    return min(max(value + size if value < 0 else value, 0), size)
