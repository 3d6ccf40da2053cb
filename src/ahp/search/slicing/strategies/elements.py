"""Operators that work element by element, and those that reduce or normalise some dims."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.fx import Node

from ahp.search.slicing.placement import (
    C,
    Context,
    P,
    Placement,
    R,
    Split,
    Strategy,
    args_of,
    argument,
    kwargs_of,
    shape_of,
    tensor_inputs,
)

aten = torch.ops.aten

_SUMS = {aten.add.Tensor, aten.sub.Tensor}
_SCALES = {aten.mul.Tensor, aten.div.Tensor, aten.neg.default, aten.mul.Scalar, aten.div.Scalar}

UNTAGGED = {
    aten.polar.default, aten.complex.default, aten.floor_divide.default, aten.where.Scalar, aten.where.ScalarSelf, aten.where.ScalarOther,
    aten.real.default, aten.imag.default,
}  # fmt: skip
"""Operators that work element by element without torch's tag that says so."""
MEANS = {aten.mean.default, aten.mean.dim}
_ADD_UP = MEANS | {aten.sum.default, aten.sum.dim_IntList}
_NORMS = {aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dim_dtype}
REDUCTIONS = {
    *_ADD_UP, aten.amax.default, aten.amin.default, aten.max.dim, aten.min.dim, aten.argmax.default,
    aten.argmin.default, aten.prod.dim_int, aten.std.correction, aten.var.correction, aten.logsumexp.default, aten.any.dim, aten.all.dim,
    aten.max.default, aten.min.default, aten.prod.default, aten.any.default, aten.all.default, aten.std_mean.correction,
    aten.var_mean.correction, aten.median.dim, aten.aminmax.default, aten.nansum.default, aten.count_nonzero.default, *_NORMS,
}  # fmt: skip
LIKE = {aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default}
"""Operators that make a tensor of one value, as large as another."""
ALONG_ONE_DIM = {
    aten.softmax.int, aten.log_softmax.int, aten.cumsum.default, aten.cumprod.default, aten.cummax.default, aten.cummin.default,
    aten.logcumsumexp.default, aten.topk.default, aten.sort.default,
    aten.sort.stable, aten.argsort.default, aten.glu.default,
}  # fmt: skip


def pointwise(node: Node, context: Context) -> Iterator[Strategy]:
    """With broadcasting: an input of size 1 along the split dim stays whole. Sums and multiples of summands are summands."""
    out, inputs = shape_of(node), tensor_inputs(node)
    for split in context.splits_of(out):
        if out[split.dim] > 1:
            yield Strategy(tuple(broadcast(split, shape_of(i), out) for i in inputs), split)
    if node.target in _SUMS and len(inputs) == 2 and all(shape_of(i) == out for i in inputs) and not kwargs_of(node):
        yield Strategy((P, P), P)
    if node.target in _SCALES and shape_of(inputs[0]) == out and inputs[0] is args_of(node)[0]:
        yield Strategy((P, *(R for _ in inputs[1:])), P)
    if node.target is aten.mul.Tensor and len(inputs) == 2 and shape_of(inputs[1]) == out:
        yield Strategy((R, P), P)


def broadcast(split: Split, shape: tuple[int, ...], out: tuple[int, ...]) -> Placement:
    """Where an input of this shape lies if the output is split."""
    dim = split.dim - (len(out) - len(shape))
    return R if dim < 0 or shape[dim] == 1 else split.at(dim)


def same(node: Node, context: Context) -> Iterator[Strategy]:
    """One tensor in, the same elements out. Summands stay summands unless they become whole numbers or truth values: rounded one by
    one they add up to something else."""
    yield from every_dim(node, context)
    dtype = node.meta["val"].dtype
    if dtype.is_floating_point or dtype.is_complex or dtype == args_of(node)[0].meta["val"].dtype:
        yield from (Strategy((one,), one) for one in (P, C))


def every_dim(node: Node, context: Context) -> Iterator[Strategy]:
    """One tensor in, the same shape out, element by element; not linear. This includes dropout: each rank drops elements
    of its own part, by its own random numbers."""
    for split in context.splits_of(shape_of(node)):
        yield Strategy((split,), split)


def prelu(node: Node, context: Context) -> Iterator[Strategy]:
    """prelu(x, weight [1] or [size of x's dim 1])"""
    for split in context.splits_of(shape_of(node)):
        if shape_of(tensor_inputs(node)[1]) in ((), (1,)) or split.dim != 1:
            yield Strategy((split, R), split)


def normalisation(node: Node, context: Context) -> Iterator[Strategy]:
    """layer_norm, rms_norm(x, normalized_shape, weight, bias): whole over the normalised dims."""
    return _along(range(len(shape_of(node)) - len(args_of(node)[1])), node, context)


def of_each_row(node: Node, context: Context) -> Iterator[Strategy]:
    """group_norm(x [rows, ...], groups, weight, bias): splits of the rows pass."""
    return _along([0], node, context)


def _along(dims: Iterable[int], node: Node, context: Context) -> Iterator[Strategy]:
    """Splits of the first input and the output along some dims; the other inputs are whole."""
    for dim in dims:
        for split in context.splits(dim, shape_of(node)[dim]):
            yield Strategy((split,) + (R,) * (len(tensor_inputs(node)) - 1), split)


def reduction(node: Node, context: Context) -> Iterator[Strategy]:
    """mean, sum, amax, ... (x, dims, keepdim), norms (x, order, dims, keepdim): a sum or mean over the split dim is partial, other
    reductions need it whole."""
    shape = shape_of(args_of(node)[0])
    dims = argument(node, 2 if node.target in _NORMS else 1, "dim")
    reduced = {d % len(shape) for d in ([dims] if isinstance(dims, int) else dims or range(len(shape)))}
    keep = len(shape_of(node)) == len(shape)
    is_sum = node.target in _ADD_UP
    for split in context.splits_of(shape):
        dim = split.dim
        if dim not in reduced:
            yield Strategy((split,), split.at(dim if keep else dim - sum(r < dim for r in reduced)))
        elif is_sum:
            yield Strategy((split,), P)
    if is_sum:
        yield Strategy((P,), P)


def along_one_dim(node: Node, context: Context) -> Iterator[Strategy]:
    """softmax, cumsum, topk, sort, glu, ... (x, ..., dim): splits of the other dims pass."""
    shape = shape_of(args_of(node)[0])
    position = 2 if node.target is aten.topk.default else 1
    along = argument(node, position, "dim", -1) % len(shape)
    for split in context.splits_of(shape):
        if split.dim != along:
            yield Strategy((split,), split)
