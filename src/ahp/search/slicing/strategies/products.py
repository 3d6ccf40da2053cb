"""Matrix products: for Y = XA the splits of the batch, of m, n and k; and attention by heads."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from ahp.search.slicing.placement import (
    Context,
    P,
    Placement,
    R,
    Split,
    Strategy,
    args_of,
    kwargs_of,
    shape_of,
    tensor_inputs,
)
from ahp.search.slicing.strategies.elements import broadcast

ROW_BYTES = 16
"""What the rows of a grouped product's matrices are multiples of."""


def linear(node: Node, context: Context) -> Iterator[Strategy]:
    """aten.linear(x [*, k], weight [n, k], bias [n]); a weight [k] has no columns, and stays whole."""
    x, weight = shape_of(args_of(node)[0]), shape_of(args_of(node)[1])
    if len(weight) == 1:
        yield from _with_vector(x, context)
        return
    yield from _product(context, x, n=weight[0], n_dim=0, k_dim=1, has_bias=len(tensor_inputs(node)) == 3)


def addmm(node: Node, context: Context) -> Iterator[Strategy]:
    """aten.addmm(bias [n], x [m, k], weight [k, n]): the same product with its arguments in another order."""
    bias, x, weight = (shape_of(i) for i in tensor_inputs(node))
    if kwargs_of(node) or len(bias) != 1:
        return
    for s in _product(context, x, n=weight[1], n_dim=1, k_dim=0, has_bias=True):
        x_place, w_place, b_place = s.inputs
        yield Strategy((b_place, x_place, w_place), s.output, s.adds_bias_after_sum)


def _product(
    context: Context, x: tuple[int, ...], *, n: int, n_dim: int, k_dim: int, has_bias: bool
) -> Iterator[Strategy]:
    """x [*, k] times a matrix, then a bias: by columns (n), by rows (k), by batch or m (all dims of x before k)."""
    last, k = len(x) - 1, x[-1]
    tokens = [split for dim in range(last) for split in context.token_splits(dim, x[dim])]
    for split in _of_features(context, last, n):
        inputs = (R, split.at(n_dim)) + ((split.at(0),) if has_bias else ())
        yield Strategy(inputs, split)
    for split in _of_features(context, last, k):
        inputs = (split, split.at(k_dim))
        if not has_bias:
            yield Strategy(inputs, P)
            continue
        for output in (R, *tokens):
            yield Strategy((*inputs, R), output, adds_bias_after_sum=True)
    for split in tokens:
        yield Strategy((split, R, R)[: 2 + has_bias], split)


def _with_vector(x: tuple[int, ...], context: Context) -> Iterator[Strategy]:
    """x [*, k] times a vector [k]."""
    for dim in range(len(x) - 1):
        for split in context.token_splits(dim, x[dim]):
            yield Strategy((split, R), split)


def _of_features(context: Context, dim: int, size: int) -> Iterator[Split]:
    return (split for split in context.splits(dim, size) if not split.tokens)


def bilinear(node: Node, context: Context) -> Iterator[Strategy]:
    """aten.bilinear(x [*, i], y [*, j], weight [n, i, j], bias [n]): by columns (n), and by all dims before the last."""
    out, has_bias = shape_of(node), len(tensor_inputs(node)) == 4
    last = len(out) - 1
    for split in _of_features(context, last, out[last]):
        yield Strategy((R, R, split.at(0), split.at(0))[: 3 + has_bias], split)
    for split in (split for dim in range(last) for split in context.token_splits(dim, out[dim])):
        yield Strategy((split, split, R, R)[: 3 + has_bias], split)


def conv1d(node: Node, context: Context) -> Iterator[Strategy]:
    """aten.conv1d(x [batch, k, tokens], weight [n, k, 1], bias [n], ..): by columns (n), batch and tokens; a wider kernel reads other tokens."""
    x, weight, has_bias = shape_of(args_of(node)[0]), shape_of(args_of(node)[1]), len(tensor_inputs(node)) == 3
    if len(x) != 3 or weight[2] != 1 or shape_of(node)[2] != x[2]:
        return
    if weight[1] == x[1]:  # no groups
        for split in _of_features(context, 1, weight[0]):
            yield Strategy((R, split.at(0), split.at(0))[: 2 + has_bias], split)
    for split in (split for dim in (0, 2) for split in context.token_splits(dim, x[dim])):
        yield Strategy((split, R, R)[: 2 + has_bias], split)


def matmul(node: Node, context: Context) -> Iterator[Strategy]:
    """aten.matmul / mm / bmm: batch dims of both, m, n, k."""
    a, b = (shape_of(i) for i in tensor_inputs(node))
    if len(a) >= 2 and len(b) == 2:
        return _product(context, a, n=b[1], n_dim=1, k_dim=0, has_bias=False)
    if len(b) == 1:
        return _with_vector(a, context)
    return _stacked(a, b, shape_of(node), context)


def baddbmm(node: Node, context: Context) -> Iterator[Strategy]:
    """aten.baddbmm(x, a [batch, m, k], b [batch, k, n]): the product of a and b, and x beside it."""
    x, a, b = (shape_of(i) for i in tensor_inputs(node))
    for s in _stacked(a, b, shape_of(node), context):
        if isinstance(s.output, Split):
            yield Strategy((broadcast(s.output, x, shape_of(node)), *s.inputs), s.output)


def _stacked(a: tuple[int, ...], b: tuple[int, ...], out: tuple[int, ...], context: Context) -> Iterator[Strategy]:
    """a [*, m, k] times b [*, k, n]: batch dims, which may be broadcast, m, n, k."""
    if len(a) < 2 or len(b) < 2:
        return
    m, n = len(out) - 2, len(out) - 1
    for dim in range(m):
        for split in context.splits(dim, out[dim]):
            yield Strategy((broadcast(split, a, out), broadcast(split, b, out)), split)
    for split in context.splits(m, out[m]):
        yield Strategy((split.at(len(a) - 2), R), split)
    for split in context.splits(n, out[n]):
        yield Strategy((R, split.at(len(b) - 1)), split)
    for split in context.splits(len(a) - 1, a[-1]):
        yield Strategy((split, split.at(len(b) - 2)), P)


def grouped(node: Node, context: Context) -> Iterator[Strategy]:
    """grouped product(x [rows, k], weight [experts, k, n], offsets): n and k, the same for every expert.

    A split by experts is another axis (expert parallelism), where a rank needs only the rows of its experts. torch's kernel takes no parts
    whose rows are not multiples of 16 bytes.
    """
    x, weight = shape_of(args_of(node)[0]), shape_of(args_of(node)[1])
    if len(x) != 2 or len(weight) != 3 or len(tensor_inputs(node)) != 3:
        return
    whole = context.degree * ROW_BYTES // node.meta["val"].itemsize
    if weight[2] % whole == 0:
        for split in _of_features(context, 1, weight[2]):
            yield Strategy((R, split.at(2), R), split)
    if weight[1] % whole == 0:
        for split in _of_features(context, 1, weight[1]):
            yield Strategy((split, split.at(1), R), P)


def attention(node: Node, context: Context) -> Iterator[Strategy]:
    """scaled_dot_product_attention(q, k, v [b, heads, s, d], mask): by heads, query and key heads together, or by batch."""
    inputs = tensor_inputs(node)
    shapes = [shape_of(i) for i in inputs]
    if len(shapes[0]) != 4 or len(inputs) < 3:
        return
    q, k, v = shapes[:3]
    if q[1] % context.degree == 0 and context.degree % k[1] == 0 and k[1] == v[1] < context.degree:
        # fewer key heads than ranks: each takes the one that its query heads share, from whole keys and values
        split = Split(1, (q[1],))
        yield Strategy((split, R, R, *(_of_mask(split, mask, q) for mask in shapes[3:])), split)
    if not any(s[1] % context.degree for s in (q, k, v)):
        split = Split(1, (q[1],))
        masks: list[Placement] = [_of_mask(split, mask, q) for mask in shapes[3:]]
        yield Strategy((split, split.at(1, (k[1],)), split.at(1, (v[1],)), *masks), split)
    for split in context.token_splits(0, q[0]) if q[0] == k[0] == v[0] else ():
        yield Strategy((split, split, split, *(_of_mask(split, mask, q) for mask in shapes[3:])), split)


def _of_mask(split: Split, mask: tuple[int, ...], q: tuple[int, ...]) -> Placement:
    """A mask that is broadcast along the split dim stays whole."""
    dim = split.dim - (len(q) - len(mask))
    return split.at(dim) if dim >= 0 and mask[dim] == q[split.dim] and mask[dim] > 1 else R


def experts(node: Node, context: Context) -> Iterator[Strategy]:
    """ahp::experts(tokens, chosen, weights, path, is_summand): whole inputs, and a summand out if ``is_summand``, on this axis."""
    yield Strategy((R, R, R), P if args_of(node)[4] else R)
