"""Products with a weight in 8 bits, by torchao's dynamic tensorwise recipe: its casts, its scales, its products.

x [T, K], weight [N, K] and the gradient of the output [T, N] are each multiplied by a scale that brings their largest element
to the largest that 8 bits hold (e4m3; e5m2 for the gradient), cast, and multiplied in pairs by ``torch._scaled_mm``, which
divides by the scales again. torchao's Float8Linear does the same for a tensor that one rank holds whole. Here

- a rank can have a part: the largest element is found over all ranks that have parts, so the scales are those of one device;
- the gradient of the weight can wait, for the schedules that split the backward (``later``);
- a scale is found once, and the gradient cast once, for both products that read them.

The casts, scales and products of torchao are not all public: no other file uses them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchao.float8 import GemmInputRole, LinearMMConfig, ScaledMMConfig  # pyright: ignore[reportMissingImports]
from torchao.float8.config import e4m3_dtype, e5m2_dtype  # pyright: ignore[reportMissingImports]
from torchao.float8.float8_training_tensor import (  # pyright: ignore[reportMissingImports]
    hp_tensor_and_scale_to_float8,
)
from torchao.float8.float8_utils import amax_to_scale, tensor_to_amax  # pyright: ignore[reportMissingImports]

from ahp.runtime.pipeline.weight_gradients import WeightGradients

Groups = tuple[dist.ProcessGroup, ...]

# torchao's own choice (Float8LinearConfig): fast sums for the output only. Rows of zeros pad odd numbers of tokens.
_FAST, _EXACT = (
    ScaledMMConfig(emulate=False, use_fast_accum=fast, fp8_output=False, pad_inner_dim=True) for fast in (True, False)
)
RECIPE = LinearMMConfig(output=_FAST, grad_input=_EXACT, grad_weight=_EXACT)


@dataclass(frozen=True)
class Parts:
    """Over which ranks the operands of a product are spread; empty if every rank has the whole."""

    input: Groups = ()
    weight: Groups = ()
    output: Groups = ()


@dataclass(frozen=True)
class Product:
    """Computes ``x [..., K] @ weight + bias`` in 8 bits. The bias is added to the result, in its precision."""

    transposed: bool
    """The weight is [N, K], as in nn.Linear; else [K, N]."""
    parts: Parts = Parts()
    later: WeightGradients | None = None
    """Where the gradient of the weight waits; None = it is computed together with the gradient of x."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out: torch.Tensor = _Function.apply(x, weight, self)  # type: ignore[assignment]
        return out if bias is None else out + bias.to(out.dtype)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, product: Product) -> torch.Tensor:
        x_scale = _scale(x, e4m3_dtype, product.parts.input)
        weight_scale = _scale(weight, e4m3_dtype, product.parts.weight)
        # Saved in 16 bits: other operators keep x anyway, and FSDP2 the weight. Copies in 8 bits would come on top.
        ctx.save_for_backward(x, weight, x_scale, weight_scale)
        ctx.product = product
        # Not the saved one: the gradient goes to this very tensor, and a recomputed block would give another.
        ctx.weight = weight if product.later is not None else None
        rows = _input(x, x_scale)
        columns = _weight(weight, weight_scale)
        out = torch.mm(rows, columns.t() if product.transposed else columns)
        return out.reshape(*x.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, x_scale, weight_scale = ctx.saved_tensors
        product: Product = ctx.product
        gradient = gradients[0].reshape(-1, gradients[0].shape[-1])
        scale = _scale(gradient, e5m2_dtype, product.parts.output)
        cast = hp_tensor_and_scale_to_float8(gradient, scale, e5m2_dtype, RECIPE, GemmInputRole.GRAD_OUTPUT)

        def of_weight() -> torch.Tensor:
            found = torch.mm(cast.t(), _input(x, x_scale))
            return found if product.transposed else found.t()

        of_x = None
        if ctx.needs_input_grad[0]:
            columns = _weight(weight, weight_scale)
            of_x = torch.mm(cast, columns if product.transposed else columns.t()).reshape(x.shape)
        if not ctx.needs_input_grad[1]:
            return of_x, None, None
        if product.later is None:
            return of_x, of_weight(), None
        # Goes through the operators that made the weight from its parameter (a DTensor's local part) to the parameter's gradient.
        product.later.pending.append(lambda: torch.autograd.backward(ctx.weight, of_weight()))
        return of_x, None, None


def _scale(x: torch.Tensor, dtype: torch.dtype, groups: Groups) -> torch.Tensor:
    """The scale of a tensor that this rank has a part of. Collective over the groups."""
    largest = tensor_to_amax(x.detach())
    for group in groups:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return amax_to_scale(largest, dtype)


def _input(x: torch.Tensor, scale: torch.Tensor) -> Any:
    rows = x.detach().reshape(-1, x.shape[-1])
    return hp_tensor_and_scale_to_float8(rows, scale, e4m3_dtype, RECIPE, GemmInputRole.INPUT)


def _weight(weight: torch.Tensor, scale: torch.Tensor) -> Any:
    return hp_tensor_and_scale_to_float8(weight.detach(), scale, e4m3_dtype, RECIPE, GemmInputRole.WEIGHT)
