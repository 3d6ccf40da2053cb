"""Which placements each operator can work with.

For Y = XA the choices are: split n (the columns of A: Y is split), k (the rows of A and the columns of X: Y is a
partial sum), m or the batch (the tokens of X: Y is split like X), or nothing. Every other operator passes splits on, or
needs the whole tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Node

from ahp.search.slicing.packing import CUTS, VIEWS
from ahp.search.slicing.placement import Context, R, Strategy, args_of, is_tensor, tensor_inputs
from ahp.search.slicing.strategies import elements, products, shapes

aten = torch.ops.aten


def strategies(node: Node, context: Context) -> list[Strategy]:
    """Every way to run a call node; the first keeps everything whole on every rank, except for ``ahp::experts``."""
    inputs = tensor_inputs(node)
    found = [Strategy((R,) * len(inputs), R)]
    if not inputs or not is_tensor(node):
        return found
    rule = _rule(node)
    if rule is products.experts:
        return list(products.experts(node, context))  # only as the weights lie
    if rule is not None:
        found += [s for s in dict.fromkeys(rule(node, context)) if len(s.inputs) == len(inputs) and s not in found]
    return found


def is_known(node: Node) -> bool:
    """Whether a call has a rule; without one its inputs have to be whole."""
    return _rule(node) is not None


def _rule(node: Node) -> Callable[[Node, Context], Iterator[Strategy]] | None:
    rule = _RULES.get(_name(node.target) or node.target)
    if rule is None and isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags:
        return elements.pointwise
    return rule


def is_grouped(node: Node) -> bool:
    """Whether a call is a product with a stack of matrices, a group of rows for each."""
    return _RULES.get(_name(node.target) or node.target) is products.grouped


def _name(target: Any) -> str:
    """The name of an operator of another library, which may not be loaded; empty for all others."""
    return str(target) if isinstance(target, torch._ops.OpOverload) and target.namespace != "aten" else ""


def _reversed(node: Node, rank: int) -> list[int]:
    return list(reversed(range(rank)))


def _permuted(node: Node, rank: int) -> list[int]:
    return [d % rank for d in args_of(node)[1]]


_RULES: dict[Any, Callable[[Node, Context], Iterator[Strategy]]] = {
    aten.linear.default: products.linear,
    aten.addmm.default: products.addmm,
    aten.matmul.default: products.matmul,
    aten.bilinear.default: products.bilinear,
    aten.mm.default: products.matmul,
    aten.bmm.default: products.matmul,
    aten._grouped_mm.default: products.grouped,
    "transformers.grouped_mm_fallback.default": products.grouped,
    "ahp.experts.default": products.experts,
    aten.scaled_dot_product_attention.default: products.attention,
    aten.layer_norm.default: elements.normalisation,
    aten.rms_norm.default: elements.normalisation,
    aten.baddbmm.default: products.baddbmm,
    aten.conv1d.default: products.conv1d,
    aten.dropout.default: elements.every_dim,
    **dict.fromkeys(elements.LIKE, elements.every_dim),
    **dict.fromkeys(elements.UNTAGGED, elements.pointwise),
    aten.prelu.default: elements.prelu,
    aten.hardswish.default: elements.every_dim,
    aten.log_sigmoid.default: elements.every_dim,
    aten.group_norm.default: elements.of_each_row,
    aten.transpose.int: shapes.permutation(shapes.transposed),
    aten.t.default: shapes.permutation(_reversed),
    aten.permute.default: shapes.permutation(_permuted),
    aten.unsqueeze.default: shapes.unsqueeze,
    aten.squeeze.dim: shapes.squeeze,
    aten.expand.default: shapes.expand,
    aten.slice.Tensor: shapes.slicing,
    aten.select.int: shapes.select,
    aten.unbind.int: shapes.select,
    aten.cat.default: shapes.concatenation,
    aten.stack.default: shapes.stack,
    aten.repeat_interleave.self_int: shapes.repeat_interleave,
    aten.repeat.default: shapes.repeat,
    aten.view_as_complex.default: shapes.complex_view,
    aten.view_as_real.default: shapes.complex_view,
    aten.index.Tensor: shapes.index,
    aten.index_select.default: shapes.index_select,
    aten.gather.default: shapes.gather,
    aten.scatter.src: shapes.scatter,
    aten.scatter.value: shapes.scatter,
    aten.scatter_add.default: shapes.scatter,
    aten.scatter_reduce.two: shapes.scatter,
    aten.index_add.default: shapes.index_written,
    aten.index_copy.default: shapes.index_written,
    aten.index_fill.int_Scalar: shapes.index_written,
    aten.embedding.default: shapes.looked_up,
    aten.one_hot.default: shapes.looked_up,
    aten.pad.default: shapes.pad,
    aten.flip.default: shapes.moved_within,
    aten.roll.default: shapes.moved_within,
    operator.getitem: shapes.getitem,
    **dict.fromkeys(CUTS, shapes.cut),
    **dict.fromkeys(VIEWS, shapes.view),
    **dict.fromkeys(elements.REDUCTIONS, elements.reduction),
    **dict.fromkeys(elements.ALONG_ONE_DIM, elements.along_one_dim),
    **dict.fromkeys(
        [
            aten.to.dtype, aten.to.dtype_layout, aten.contiguous.default, aten.clone.default, aten.alias.default, aten.detach.default,
        ],
        elements.same,
    ),
}  # fmt: skip
