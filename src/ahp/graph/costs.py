"""What one operator costs: floating-point operations, and bytes moved between memory and the processor.

FLOPs follow ``torch.utils.flop_counter``: a multiply-add is two; matrix products, convolutions and attention count, and
element-wise operators are 0 (they cost bytes). Fused attention counts the full square of scores even when the mask is
causal, as torch does: two products forward, five backward (the scores are computed again).

Bytes: every input is read once and every output written once; a view moves nothing; an expanded tensor is read without
its repetitions; a lookup reads the rows that it returns, not the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten

Shape = tuple[int, ...]

LOOKUPS = {"aten.embedding", "aten.index", "aten.index_select", "aten.gather"}
"""Operators that read as many elements of their first input as they return."""

UNWRITTEN = {"aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty", "aten.new_empty_strided"}
"""Operators that reserve memory and write nothing."""

OVERWRITES = {"aten.copy_", "aten.zero_", "aten.fill_"}
"""In-place operators that do not read what they replace."""

PICKS = {"aten.nll_loss_forward", "aten.nll_loss_backward"}
"""Operators that read one log-probability per target, or none: their gradient is zero except at the targets."""


def flops(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """FLOPs of one call, 0 for an operator without a formula."""
    own = OWN_FORMULAS.get(str(func.overloadpacket))
    if own is not None:
        return own(args, out)
    formula = flop_registry.get(func.overloadpacket)
    return int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0


def traffic(
    func: torch._ops.OpOverload, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], is_view: bool
) -> tuple[int, int]:
    """Bytes read and bytes written by one call."""
    name = str(func.overloadpacket)
    if is_view or name in UNWRITTEN:
        return 0, 0
    written = sum(distinct_bytes(t) for t in outputs)
    if name in PICKS:
        targets = next(t for t in inputs if not t.is_floating_point())
        return 2 * distinct_bytes(targets), written
    if name in LOOKUPS:
        return written + sum(distinct_bytes(t) for t in inputs[1:]), written
    read = inputs[1:] if name in OVERWRITES else inputs
    return sum(distinct_bytes(t) for t in read), written


def distinct_bytes(tensor: torch.Tensor) -> int:
    """Bytes behind a tensor's elements, without repetitions by ``expand`` (stride 0)."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride != 0 or size == 0 else 1
    return count * tensor.element_size()


def _attention(args: Sequence[Any], out: Any) -> int:
    query, key, value = (tuple(t.shape) for t in args[:3])
    return sdpa_flop_count(query, _as_many_heads(key, query), _as_many_heads(value, query))


def _attention_backward(args: Sequence[Any], out: Any) -> int:
    grad, query, key, value = (tuple(t.shape) for t in args[:4])
    return sdpa_backward_flop_count(grad, query, _as_many_heads(key, query), _as_many_heads(value, query))


def _as_many_heads(shape: Shape, query: Shape) -> Shape:
    """Grouped-query attention computes as if each query head had its own keys."""
    return (shape[0], query[1], *shape[2:])


def _grouped_mm(args: Sequence[Any], out: Any) -> int:
    """Products of groups: [S, K] x [E, K, N] row by row, or [M, S] x [S, N] -> [E, M, N] (gradient of the weights)."""
    left, right = tuple(args[0].shape), tuple(args[1].shape)
    groups = left[0] if len(left) == 3 and len(right) == 3 else 1
    return 2 * groups * left[-2] * left[-1] * right[-1]


def _grouped_mm_backward(args: Sequence[Any], out: Any) -> int:
    """transformers' fallback: gradients of both factors, from (input [S, K], weight [E, K, N], ...)."""
    rows, columns = args[0].shape
    return 4 * rows * columns * args[1].shape[-1]


def _matrix_vector(args: Sequence[Any], out: Any) -> int:
    matrix = max((a for a in args if isinstance(a, torch.Tensor)), key=lambda t: t.numel())
    return 2 * matrix.numel()


OWN_FORMULAS: dict[str, Callable[[Sequence[Any], Any], int]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten._grouped_mm": _grouped_mm,
    "transformers.grouped_mm_fallback": _grouped_mm,
    "transformers.grouped_mm_fallback_backward": _grouped_mm_backward,
    "aten.mv": _matrix_vector,
    "aten.addmv": _matrix_vector,
    "aten.dot": _matrix_vector,
}
"""Formulas of operators that torch's registry lacks (2.13)."""
