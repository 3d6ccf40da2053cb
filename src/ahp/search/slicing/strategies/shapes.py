"""Operators that move elements: views, permutations, cuts of packed projections, joins, indexing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.fx import Node

from ahp.search.slicing.packing import CUTS, cut_dim, cut_sizes, dim_groups, slice_range
from ahp.search.slicing.placement import C, Context, P, R, Split, Strategy, args_of, argument, shape_of, tensor_inputs

aten = torch.ops.aten


def view(node: Node, context: Context) -> Iterator[Strategy]:
    """A split survives where its parts are even pieces of one dim of the new shape."""
    source, shape = shape_of(args_of(node)[0]), shape_of(node)
    for group_in, group_out in dim_groups(source, shape):
        for dim in group_in:
            for split in context.splits(dim, source[dim]):
                after = _through_view(split, source, shape, group_in, group_out, context)
                if after is not None:
                    yield Strategy((split,), after)
    yield from (Strategy((one,), one) for one in (P, C))


def _through_view(
    split: Split, source: tuple[int, ...], shape: tuple[int, ...], ins: list[int], outs: list[int], context: Context
) -> Split | None:
    """Merge the dims ``ins`` into one, whose segments repeat for each index of the dims before, then cut it into ``outs``."""
    before = math.prod(source[d] for d in ins if d < split.dim)
    behind = math.prod(source[d] for d in ins if d > split.dim)
    flat = tuple(segment * behind for segment in split.segments) * before
    for position, dim in enumerate(outs):
        before = math.prod(shape[d] for d in outs[:position])
        behind = math.prod(shape[d] for d in outs[position + 1 :])
        if len(flat) % before or any(segment % (behind * context.degree) for segment in flat):
            continue
        count = len(flat) // before
        segments = tuple(segment // behind for segment in flat[:count])
        if flat == flat[:count] * before and sum(segments) == shape[dim]:
            return split.at(dim, segments)
    return None


def _moved(shape: tuple[int, ...], context: Context, dims: Iterable[tuple[int, int]]) -> Iterator[Strategy]:
    """Splits of dims that an operator leaves as they are, at another place, pass; and summands stay summands. ``dims``: each such dim of
    its input, and its place in its output."""
    for dim, after in dims:
        for split in context.splits(dim, shape[dim]):
            yield Strategy((split,), split.at(after))
    yield Strategy((P,), P)


def permutation(order: Callable[[Node, int], list[int]]) -> Callable[[Node, Context], Iterator[Strategy]]:
    """The rule of an operator that puts dim ``order(node, rank)[i]`` at place i."""

    def rule(node: Node, context: Context) -> Iterator[Strategy]:
        shape = shape_of(args_of(node)[0])
        return _moved(shape, context, ((dim, after) for after, dim in enumerate(order(node, len(shape)))))

    return rule


def transposed(node: Node, rank: int) -> list[int]:
    """The order of dims after transpose(x, a, b)."""
    a, b = args_of(node)[1] % rank, args_of(node)[2] % rank
    order = list(range(rank))
    order[a], order[b] = order[b], order[a]
    return order


def unsqueeze(node: Node, context: Context) -> Iterator[Strategy]:
    """unsqueeze(x, dim)"""
    shape = shape_of(args_of(node)[0])
    at = args_of(node)[1] % (len(shape) + 1)
    return _moved(shape, context, ((dim, dim + (dim >= at)) for dim in range(len(shape))))


def squeeze(node: Node, context: Context) -> Iterator[Strategy]:
    """squeeze(x, dim)"""
    shape = shape_of(args_of(node)[0])
    at = args_of(node)[1] % len(shape)
    removed = len(shape_of(node)) < len(shape)
    return _moved(shape, context, ((d, d - (removed and d > at)) for d, size in enumerate(shape) if size > 1))


def expand(node: Node, context: Context) -> Iterator[Strategy]:
    """expand(x, sizes): where a dim grows from 1, each rank can make its own part alone."""
    shape, out = shape_of(args_of(node)[0]), shape_of(node)
    more = len(out) - len(shape)
    for dim, size in enumerate(out):
        for split in context.splits(dim, size) if size > 1 else ():
            if dim < more or shape[dim - more] == 1:
                if not split.tokens and len(split.segments) == 1:
                    yield Strategy((R,), split)
            else:
                yield Strategy((split.at(dim - more),), split)
    yield Strategy((P,), P)


def slicing(node: Node, context: Context) -> Iterator[Strategy]:
    """slice(x, dim, start, end, step): along a packed dim it takes whole segments; splits of the other dims pass."""
    shape, out = shape_of(args_of(node)[0]), shape_of(node)
    _, start, end = slice_range(node)
    for split in context.splits_of(shape):
        if out[split.dim] == shape[split.dim]:
            yield Strategy((split,), split)
        elif (taken := _whole_segments(split.segments, start, end)) and out[split.dim] == end - start:
            yield Strategy((split,), split.at(split.dim, taken))
    yield Strategy((P,), P)


def _whole_segments(segments: tuple[int, ...], start: int, end: int) -> tuple[int, ...]:
    """The segments that make up [start, end); empty when it cuts one."""
    first, taken = 0, []
    for segment in segments:
        if start <= first and first + segment <= end:
            taken.append(segment)
        first += segment
    return tuple(taken) if sum(taken) == end - start else ()


def select(node: Node, context: Context) -> Iterator[Strategy]:
    """select(x, dim, index): one index of a dim; splits of the other dims pass."""
    shape = shape_of(args_of(node)[0])
    along = argument(node, 1, "dim", 0) % len(shape)
    return _moved(shape, context, ((dim, dim - (dim > along)) for dim in range(len(shape)) if dim != along))


def cut(node: Node, context: Context) -> Iterator[Strategy]:
    """split, chunk: a packed dim falls into its segments (``getitem`` picks one); splits of the other dims pass."""
    shape = shape_of(args_of(node)[0])
    along, sizes = cut_dim(node), cut_sizes(node)
    for split in context.splits_of(shape):
        if split.dim != along or split.segments == sizes:
            yield Strategy((split,), split)
    yield Strategy((P,), P)


def getitem(node: Node, context: Context) -> Iterator[Strategy]:
    """One output of an operator that has several."""
    source, index = args_of(node)
    for dim, size in enumerate(shape_of(source)):
        if source.target in CUTS and dim == cut_dim(source):
            sizes = cut_sizes(source)
            for split in context.splits(dim, sum(sizes)):
                if split.segments == sizes:
                    yield Strategy((split,), split.at(dim, (sizes[index],)))
        elif dim < len(shape_of(node)) and shape_of(node)[dim] == size:
            for split in context.splits(dim, size):
                yield Strategy((split,), split)
    yield Strategy((P,), P)


def concatenation(node: Node, context: Context) -> Iterator[Strategy]:
    """cat(tensors, dim): splits of the other dims pass; along ``dim`` each tensor is one segment of the result."""
    inputs, out = tensor_inputs(node), shape_of(node)
    if any(len(shape_of(i)) != len(out) for i in inputs):  # an empty tensor is joined in
        return
    along = argument(node, 1, "dim", 0) % len(out)
    for split in context.splits_of(out):
        if split.dim != along:
            yield Strategy((split,) * len(inputs), split)
    sizes = tuple(shape_of(i)[along] for i in inputs)
    if len(sizes) > 1 and context.divides(sizes):
        yield Strategy(tuple(Split(along, (size,)) for size in sizes), Split(along, sizes))
    yield Strategy((P,) * len(inputs), P)


def stack(node: Node, context: Context) -> Iterator[Strategy]:
    """stack(tensors, dim): adds a new dim; splits of the old dims pass."""
    inputs = tensor_inputs(node)
    shape = shape_of(inputs[0])
    at = argument(node, 1, "dim", 0) % len(shape_of(node))
    for one in _moved(shape, context, ((dim, dim + (dim >= at)) for dim in range(len(shape)))):
        yield Strategy(one.inputs * len(inputs), one.output)


def repeat_interleave(node: Node, context: Context) -> Iterator[Strategy]:
    """repeat_interleave(x, repeats, dim): repeats each element several times in a row, and so each part."""
    shape, out = shape_of(args_of(node)[0]), shape_of(node)
    if len(shape) != len(out):
        return
    for split in context.splits_of(shape):
        of, size = out[split.dim], shape[split.dim]
        yield Strategy((split,), split.at(split.dim, tuple(s * of // size for s in split.segments)))
    yield Strategy((P,), P)


def index(node: Node, context: Context) -> Iterator[Strategy]:
    """x[i] or x[:, i] with one tensor of indices: splits of the other dims pass, and summands stay summands."""
    indices = args_of(node)[1]
    looked_up = [d for d, i in enumerate(indices) if i is not None]
    if len(looked_up) != 1:
        return
    along, shape = looked_up[0], shape_of(args_of(node)[0])
    more = len(shape_of(node)) - len(shape)
    for split in context.splits_of(shape):
        if split.dim != along:
            yield Strategy((split, R), split.at(split.dim + (more if split.dim > along else 0)))
    yield from (Strategy((one, R), one) for one in (P, C))


def index_select(node: Node, context: Context) -> Iterator[Strategy]:
    """index_select(x, dim, indices [n]): splits of the other dims pass, and summands stay summands."""
    shape = shape_of(args_of(node)[0])
    along = argument(node, 1, "dim") % len(shape)
    for one in _moved(shape, context, ((dim, dim) for dim in range(len(shape)) if dim != along)):
        yield Strategy((*one.inputs, R), one.output)
    yield Strategy((C, R), C)


def gather(node: Node, context: Context) -> Iterator[Strategy]:
    """gather(x, dim, indices): splits of the other dims pass, of both alike; summands stay summands."""
    shape, out = shape_of(args_of(node)[0]), shape_of(node)
    along = argument(node, 1, "dim") % len(shape)
    for split in context.splits_of(shape):
        if split.dim != along and out[split.dim] == shape[split.dim]:
            yield Strategy((split, split), split)
    yield Strategy((P, R), P)


def scatter(node: Node, context: Context) -> Iterator[Strategy]:
    """scatter(x, dim, indices, values or one value), scatter_add: splits of the other dims pass, of all tensors alike."""
    shape, others = shape_of(args_of(node)[0]), [shape_of(i) for i in tensor_inputs(node)[1:]]
    along = args_of(node)[1] % len(shape)
    for split in context.splits_of(shape):
        if split.dim != along and all(other[split.dim] == shape[split.dim] for other in others):
            yield Strategy((split,) * (1 + len(others)), split)


def index_written(node: Node, context: Context) -> Iterator[Strategy]:
    """index_add, index_copy(x, dim, indices [n], values), index_fill(x, dim, indices, one value): splits of the other dims pass."""
    shape = shape_of(args_of(node)[0])
    for split in context.splits_of(shape):
        if split.dim != args_of(node)[1] % len(shape):
            yield Strategy((split, R, split)[: len(tensor_inputs(node))], split)


def looked_up(node: Node, context: Context) -> Iterator[Strategy]:
    """embedding(weight, indices), one_hot(indices, classes): each rank looks up its own tokens."""
    inputs = tensor_inputs(node)
    for dim, size in enumerate(shape_of(inputs[-1])):
        for split in context.token_splits(dim, size):
            yield Strategy((*(R for _ in inputs[1:]), split), split)


def moved_within(node: Node, context: Context) -> Iterator[Strategy]:
    """flip(x, dims), roll(x, shifts, dims): splits of the other dims pass, of all elements in a row none."""
    shape = shape_of(args_of(node)[0])
    dims = args_of(node)[1] if node.target is aten.flip.default else argument(node, 2, "dims", [])
    moved = {d % len(shape) for d in dims or (range(len(shape)) if node.target is aten.roll.default else ())}
    return _moved(shape, context, ((dim, dim) for dim in range(len(shape)) if dim not in moved))


def pad(node: Node, context: Context) -> Iterator[Strategy]:
    """pad(x, [last before, last after, ...], mode, value): splits of dims that are not padded pass; summands stay summands beside zeros."""
    shape, sizes, value = shape_of(args_of(node)[0]), args_of(node)[1], argument(node, 3, "value", None)
    padded = {len(shape) - 1 - i // 2 for i, size in enumerate(sizes) if size}
    moved = _moved(shape, context, ((dim, dim) for dim in range(len(shape)) if dim not in padded))
    return (s for s in moved if s.output != P or not value)


def repeat(node: Node, context: Context) -> Iterator[Strategy]:
    """repeat(x, times): splits of dims that are not repeated pass."""
    shape, times = shape_of(args_of(node)[0]), args_of(node)[1]
    more = len(times) - len(shape)
    return _moved(shape, context, ((dim, dim + more) for dim in range(len(shape)) if times[dim + more] == 1))


def complex_view(node: Node, context: Context) -> Iterator[Strategy]:
    """view_as_complex, view_as_real: pairs in the last dim become numbers or the reverse; splits of the other dims pass."""
    shape = shape_of(args_of(node)[0])
    return _moved(shape, context, ((dim, dim) for dim in range(min(len(shape), len(shape_of(node))))))
