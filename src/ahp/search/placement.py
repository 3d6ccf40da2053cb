"""Where the parts of a tensor lie on the tensor-parallel axis, and which placements each operator can work with.

For Y = XA the choices are: split n (the columns of A: Y is split), k (the rows of A and the columns of X: Y is a
partial sum), a batch dim of both, or nothing. Every other operator passes splits on, or needs the whole tensor.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every rank holds the whole tensor."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank holds a summand of the tensor."""


@dataclass(frozen=True, slots=True)
class Split:
    """Every rank holds an equal part of each segment of ``dim``.

    One segment is the plain case. Several are a packed projection such as [q | k | v]: each of them is split by
    itself, and a rank's part is [q_r | k_r | v_r].
    """

    dim: int
    segments: tuple[int, ...]


Placement = Replicated | Partial | Split
R, P = Replicated(), Partial()


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run an operator: what each tensor input must be, and what comes out (each output alike)."""

    inputs: tuple[Placement, ...]
    output: Placement
    adds_bias_after_sum: bool = False
    """The operator is a row-split linear with a bias: the sum over ranks comes first, then the bias, once."""


@dataclass(frozen=True)
class Context:
    """What the rules need to know beside the node."""

    degree: int
    packings: dict[int, frozenset[tuple[int, ...]]]
    """For a size, the segment lists that some operator of the graph cuts it into."""

    def splits(self, dim: int, size: int) -> Iterator[Split]:
        for segments in [(size,), *sorted(self.packings.get(size, frozenset()) - {(size,)})]:
            if all(segment % self.degree == 0 for segment in segments):
                yield Split(dim, segments)


def args_of(node: Node) -> tuple[Any, ...]:
    """The positional arguments of a call; what each may be, the operator's rule knows."""
    return node.args


def kwargs_of(node: Node) -> dict[str, Any]:
    """The keyword arguments of a call."""
    return node.kwargs


def tensor_inputs(node: Node) -> list[Node]:
    """The tensor arguments of a call in order, list arguments (cat, stack) flattened."""
    found: list[Node] = []
    map_arg((args_of(node), kwargs_of(node)), lambda n: found.append(n))
    return found


def shape_of(node: Node) -> tuple[int, ...]:
    """Global shape of a node's (first) output."""
    value = node.meta["val"]
    if isinstance(value, (tuple, list)):
        value = value[0]
    return tuple(value.shape)


def is_tensor(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) or (
        isinstance(value, (tuple, list)) and len(value) > 0 and isinstance(value[0], torch.Tensor)
    )


def strategies(node: Node, context: Context) -> list[Strategy]:
    """Every way to run a call node; the first one is always: everything whole on every rank."""
    inputs = tensor_inputs(node)
    found = [Strategy((R,) * len(inputs), R)]
    if not inputs or not is_tensor(node):
        return found
    rule = _RULES.get(node.target)
    if rule is None and isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags:
        rule = _pointwise
    if rule is not None:
        found += [s for s in rule(node, context) if len(s.inputs) == len(inputs)]
    return found


def find_packings(nodes: Iterator[Node] | Any) -> dict[int, frozenset[tuple[int, ...]]]:
    """Sizes that an operator cuts into segments: split and chunk of a packed projection, or a view of it as (3, n)."""
    packings: dict[int, set[tuple[int, ...]]] = {}
    for node in nodes:
        if node.op == "call_function" and node.target in _CUTS:
            segments = cut_sizes(node)
            if len(segments) > 1:
                packings.setdefault(shape_of(args_of(node)[0])[cut_dim(node)], set()).add(segments)
        elif node.op == "call_function" and node.target in _VIEWS:
            source_shape, shape = shape_of(args_of(node)[0]), shape_of(node)
            for group_in, group_out in _dim_groups(source_shape, shape):
                if len(group_in) == 1 and len(group_out) > 1 and shape[group_out[0]] in (2, 3):
                    size, count = source_shape[group_in[0]], shape[group_out[0]]
                    packings.setdefault(size, set()).add((size // count,) * count)
    return {size: frozenset(found) for size, found in packings.items()}


# ---------------------------------------------------------------------------------------------------- rules


def _pointwise(node: Node, context: Context) -> Iterator[Strategy]:
    """Element by element with broadcasting: an input of size 1 along the split dim stays whole."""
    out, inputs = shape_of(node), tensor_inputs(node)
    for dim, size in enumerate(out):
        for split in context.splits(dim, size) if size > 1 else ():
            yield Strategy(tuple(_broadcast(split, shape_of(i), out) for i in inputs), split)
    if node.target in _SUMS and len(inputs) == 2 and all(shape_of(i) == out for i in inputs) and not kwargs_of(node):
        yield Strategy((P, P), P)


def _broadcast(split: Split, shape: tuple[int, ...], out: tuple[int, ...]) -> Placement:
    dim = split.dim - (len(out) - len(shape))
    return R if dim < 0 or shape[dim] == 1 else Split(dim, split.segments)


def _same(node: Node, context: Context) -> Iterator[Strategy]:
    """One tensor in, the same shape out, element by element."""
    for dim, size in enumerate(shape_of(node)):
        for split in context.splits(dim, size):
            yield Strategy((split,), split)
    if node.target not in (aten.dropout.default,):
        yield Strategy((P,), P)


def _dropout(node: Node, context: Context) -> Iterator[Strategy]:
    """With a probability of 0 it is the identity; else ranks would need different random numbers: kept whole."""
    if args_of(node)[1] == 0.0 or not args_of(node)[2]:
        yield from _same(node, context)


def _linear(node: Node, context: Context) -> Iterator[Strategy]:
    """aten.linear(x [*, k], weight [n, k], bias [n])"""
    x, weight = shape_of(args_of(node)[0]), shape_of(args_of(node)[1])
    yield from _product(
        context, len(x), n=weight[0], k=weight[1], n_dim=0, k_dim=1, has_bias=len(tensor_inputs(node)) == 3
    )


def _addmm(node: Node, context: Context) -> Iterator[Strategy]:
    """aten.addmm(bias [n], x [m, k], weight [k, n]): the same product with its arguments in another order."""
    if kwargs_of(node) or len(shape_of(args_of(node)[0])) != 1:
        return
    weight = shape_of(args_of(node)[2])
    for s in _product(context, 2, n=weight[1], k=weight[0], n_dim=1, k_dim=0, has_bias=True):
        x, w, b = s.inputs
        yield Strategy((b, x, w), s.output, s.adds_bias_after_sum)


def _product(
    context: Context, rank: int, *, n: int, k: int, n_dim: int, k_dim: int, has_bias: bool
) -> Iterator[Strategy]:
    for split in context.splits(rank - 1, n):
        inputs = (R, Split(n_dim, split.segments)) + ((Split(0, split.segments),) if has_bias else ())
        yield Strategy(inputs, split)
    for split in context.splits(rank - 1, k):
        inputs = (split, Split(k_dim, split.segments))
        yield Strategy((*inputs, R), R, adds_bias_after_sum=True) if has_bias else Strategy(inputs, P)


def _matmul(node: Node, context: Context) -> Iterator[Strategy]:
    """aten.matmul / mm / bmm of two tensors of equal rank: batch dims, m, n, k."""
    a, b = (shape_of(i) for i in tensor_inputs(node))
    if len(a) < 2 or len(a) != len(b):
        if len(b) == 2:  # a [*, k] times a matrix
            for split in context.splits(len(a) - 1, b[1]):
                yield Strategy((R, Split(1, split.segments)), split)
            for split in context.splits(len(a) - 1, b[0]):
                yield Strategy((split, Split(0, split.segments)), P)
        return
    last = len(a) - 1
    for dim in range(last - 1):
        if a[dim] == b[dim]:
            for split in context.splits(dim, a[dim]):
                yield Strategy((split, split), split)
    for split in context.splits(last - 1, a[last - 1]):
        yield Strategy((split, R), split)
    for split in context.splits(last, b[last]):
        yield Strategy((R, split), split)
    for split in context.splits(last, a[last]):
        yield Strategy((split, Split(last - 1, split.segments)), P)


def _attention(node: Node, context: Context) -> Iterator[Strategy]:
    """scaled_dot_product_attention(q, k, v [b, heads, s, d], mask): split by heads, query and key heads together."""
    dropout = args_of(node)[4] if len(args_of(node)) > 4 else kwargs_of(node).get("dropout_p", 0.0)
    inputs = tensor_inputs(node)
    shapes = [shape_of(i) for i in inputs]
    heads = [s[1] for s in shapes[:3]]
    if dropout or len(shapes[0]) != 4 or any(h % context.degree for h in heads):
        return
    placed: list[Placement] = [Split(1, (h,)) for h in heads]
    for mask in shapes[3:]:
        placed.append(Split(1, (mask[1],)) if len(mask) == 4 and mask[1] > 1 else R)
    yield Strategy(tuple(placed), Split(1, (heads[0],)))


def _normalisation(node: Node, context: Context) -> Iterator[Strategy]:
    """layer_norm, rms_norm(x, normalized_shape, weight, bias): whole over the normalised dims."""
    inputs = tensor_inputs(node)
    out = shape_of(node)
    for dim in range(len(out) - len(args_of(node)[1])):
        for split in context.splits(dim, out[dim]):
            yield Strategy((split,) + (R,) * (len(inputs) - 1), split)


def _reduction(node: Node, context: Context) -> Iterator[Strategy]:
    """mean, sum, amax, ... (x, dims, keepdim): whole over the reduced dims; a sum over the split dim is partial."""
    shape = shape_of(args_of(node)[0])
    dims = args_of(node)[1] if len(args_of(node)) > 1 else None
    reduced = {d % len(shape) for d in ([dims] if isinstance(dims, int) else dims or range(len(shape)))}
    keep = len(shape_of(node)) == len(shape)
    for dim, size in enumerate(shape):
        for split in context.splits(dim, size):
            if dim not in reduced:
                out_dim = dim if keep else dim - sum(r < dim for r in reduced)
                yield Strategy((split,), Split(out_dim, split.segments))
            elif node.target is aten.sum.dim_IntList:
                yield Strategy((split,), P)


def _softmax(node: Node, context: Context) -> Iterator[Strategy]:
    shape = shape_of(args_of(node)[0])
    for dim, size in enumerate(shape):
        if dim != args_of(node)[1] % len(shape):
            for split in context.splits(dim, size):
                yield Strategy((split,), split)


def _view(node: Node, context: Context) -> Iterator[Strategy]:
    """A split survives when its dim stays, is cut into (split, rest), is merged as the slowest, or is unpacked."""
    source, shape = shape_of(args_of(node)[0]), shape_of(node)
    for group_in, group_out in _dim_groups(source, shape):
        dim, out_dim = group_in[0], group_out[0]
        for split in context.splits(dim, source[dim]):
            if len(group_in) == 1 and len(group_out) == 1:
                yield Strategy((split,), Split(out_dim, split.segments))
            elif len(split.segments) == 1 and shape[out_dim] % context.degree == 0:
                yield Strategy((split,), Split(out_dim, (shape[out_dim],)))
            elif len(set(split.segments)) == 1 and len(split.segments) == shape[out_dim] and len(group_out) > 1:
                inner = group_out[1]
                if shape[inner] % context.degree == 0:
                    yield Strategy((split,), Split(inner, (shape[inner],)))
    yield Strategy((P,), P)


def _dim_groups(source: tuple[int, ...], shape: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Smallest groups of dims of equal product that a view maps onto each other; dims of size 1 are left out."""
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


def _permutation(order: Callable[[Node, int], list[int]]) -> Callable[[Node, Context], Iterator[Strategy]]:
    def rule(node: Node, context: Context) -> Iterator[Strategy]:
        shape = shape_of(args_of(node)[0])
        for out_dim, dim in enumerate(order(node, len(shape))):
            for split in context.splits(dim, shape[dim]):
                yield Strategy((split,), Split(out_dim, split.segments))
        yield Strategy((P,), P)

    return rule


def _transpose_order(node: Node, rank: int) -> list[int]:
    a, b = (args_of(node)[1] % rank, args_of(node)[2] % rank) if len(args_of(node)) > 2 else (0, 1)
    order = list(range(rank))
    order[a], order[b] = order[b], order[a]
    return order


def _unsqueeze(node: Node, context: Context) -> Iterator[Strategy]:
    shape = shape_of(args_of(node)[0])
    at = args_of(node)[1] % (len(shape) + 1)
    for dim, size in enumerate(shape):
        for split in context.splits(dim, size):
            yield Strategy((split,), Split(dim + (dim >= at), split.segments))


def _expand(node: Node, context: Context) -> Iterator[Strategy]:
    shape, out = shape_of(args_of(node)[0]), shape_of(node)
    for dim, size in enumerate(shape):
        if size > 1:
            for split in context.splits(dim, size):
                yield Strategy((split,), Split(dim + len(out) - len(shape), split.segments))


def _other_dims(dim_of: Callable[[Node], int], removes: bool) -> Callable[[Node, Context], Iterator[Strategy]]:
    """Operators that work along one dim (slice, select): splits of the other dims pass."""

    def rule(node: Node, context: Context) -> Iterator[Strategy]:
        shape = shape_of(args_of(node)[0])
        along = dim_of(node) % len(shape)
        for dim, size in enumerate(shape):
            if dim != along or (not removes and shape_of(node)[dim] == size):
                for split in context.splits(dim, size):
                    yield Strategy((split,), Split(dim - (removes and dim > along), split.segments))

    return rule


def cut_dim(node: Node) -> int:
    """The dim along which split or chunk cuts."""
    dim = args_of(node)[2] if len(args_of(node)) > 2 else kwargs_of(node).get("dim", 0)
    return dim % len(shape_of(args_of(node)[0]))


def cut_sizes(node: Node) -> tuple[int, ...]:
    """The sizes of the pieces of split or chunk, along its dim."""
    return tuple(v.shape[cut_dim(node)] for v in node.meta["val"])


def _cut(node: Node, context: Context) -> Iterator[Strategy]:
    """split, chunk: along a packed dim each piece is one segment; along another dim a split passes."""
    shape = shape_of(args_of(node)[0])
    along = cut_dim(node)
    sizes = cut_sizes(node)
    for dim, size in enumerate(shape):
        for split in context.splits(dim, size):
            if dim != along:
                yield Strategy((split,), split)
            elif split.segments == sizes and len(set(sizes)) == 1:
                yield Strategy((split,), Split(dim, (sizes[0],)))


def _getitem(node: Node, context: Context) -> Iterator[Strategy]:
    for dim, size in enumerate(shape_of(node)):
        for split in context.splits(dim, size):
            yield Strategy((split,), split)


def _concatenation(node: Node, context: Context) -> Iterator[Strategy]:
    inputs = tensor_inputs(node)
    out = shape_of(node)
    along = (args_of(node)[1] if len(args_of(node)) > 1 else kwargs_of(node).get("dim", 0)) % len(out)
    for dim, size in enumerate(out):
        if dim != along and all(shape_of(i)[dim] == size for i in inputs):
            for split in context.splits(dim, size):
                yield Strategy((split,) * len(inputs), split)


_SUMS = {aten.add.Tensor, aten.sub.Tensor}
_CUTS = {aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default}
_VIEWS = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
}

_RULES: dict[Any, Callable[[Node, Context], Iterator[Strategy]]] = {
    aten.linear.default: _linear,
    aten.addmm.default: _addmm,
    aten.matmul.default: _matmul,
    aten.mm.default: _matmul,
    aten.bmm.default: _matmul,
    aten.scaled_dot_product_attention.default: _attention,
    aten.layer_norm.default: _normalisation,
    aten.rms_norm.default: _normalisation,
    aten.mean.dim: _reduction,
    aten.sum.dim_IntList: _reduction,
    aten.amax.default: _reduction,
    aten.softmax.int: _softmax,
    aten.dropout.default: _dropout,
    aten.transpose.int: _permutation(_transpose_order),
    aten.t.default: _permutation(lambda node, rank: list(reversed(range(rank)))),
    aten.permute.default: _permutation(lambda node, rank: [d % rank for d in args_of(node)[1]]),
    aten.unsqueeze.default: _unsqueeze,
    aten.expand.default: _expand,
    aten.slice.Tensor: _other_dims(lambda node: args_of(node)[1] if len(args_of(node)) > 1 else 0, removes=False),
    aten.select.int: _other_dims(lambda node: args_of(node)[1], removes=True),
    aten.cat.default: _concatenation,
    operator.getitem: _getitem,
    **dict.fromkeys(_CUTS, _cut),
    **dict.fromkeys(_VIEWS, _view),
    **dict.fromkeys(
        [aten.to.dtype, aten.to.dtype_layout, aten.contiguous.default, aten.clone.default, aten.alias.default, aten.type_as.default],
        lambda node, context: _pointwise(node, context),
    ),
}  # fmt: skip
