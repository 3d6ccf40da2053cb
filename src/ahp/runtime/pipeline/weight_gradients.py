"""Separates weight gradients from input gradients, as the split-backward schedules need.

torch's own split walks the autograd graph at every micro-batch, looks for weights that FSDP2 may have freed, and would
run a recomputed block again for each of its weights. Here a product with a weight computes the gradient of its input in
backward and defers the gradient of the weight (the weight-gradient store of arXiv 2401.10241); everything else, such as
biases and norms, gets its gradients at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten
LINEAR = {F.linear, aten.linear.default}
ADDMM = {torch.addmm, aten.addmm.default}
PRODUCTS = LINEAR | ADDMM
MOVES = {
    "AccumulateGrad", "_ToTorchTensorBackward", "_SumGradientBackward", "ToCopyBackward0", "CloneBackward0", "AliasBackward0", "ViewBackward0",
    "UnsafeViewBackward0", "TBackward0", "TransposeBackward0", "PermuteBackward0", "SplitBackward0", "SplitWithSizesBackward0",
    "SliceBackward0", "SelectBackward0", "UnbindBackward0", "SqueezeBackward1", "UnsqueezeBackward0",
}  # fmt: skip
"""Autograd nodes allowed between a parameter and its product. They keep nothing for backward, so gradients can pass them at any time and any
number of times."""


class WeightGradients:
    """Weight gradients that the last backward deferred, until ``take`` hands them over."""

    def __init__(self) -> None:
        self.pending: list[Callable[[], None]] = []

    def take(self) -> Callable[[], None]:
        """One function that computes all pending gradients; torch calls this ``dw_builder``."""
        pending, self.pending = self.pending, []

        @torch.no_grad()
        def run() -> None:
            while pending:
                pending.pop()()  # what a product kept is freed as soon as it is done

        return run


class Deferring(TorchFunctionMode):
    """Within, products with a trainable weight leave its gradient to ``later``."""

    def __init__(self, later: WeightGradients) -> None:
        super().__init__()
        self.later = later

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The first test is the cheapest: every operator of a forward passes here, and few are products.
        # Products of a compiled graph are handled in runtime/pipeline/compiled_weight_gradients.py.
        if func not in PRODUCTS or torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        if func in LINEAR and torch.is_grad_enabled() and _waits(_operand(1, "weight", args, kwargs)):
            return _linear(self.later, *args, **(kwargs or {}))
        if func in ADDMM and torch.is_grad_enabled() and len(args) == 3 and not kwargs and _waits(args[2]):
            bias, x, weight = args
            return _Product.apply(x, weight, bias, False, self.later)
        return func(*args, **(kwargs or {}))


def _waits(weight: torch.Tensor) -> bool:
    """Whether the gradient of a weight can be computed later: the weight is a parameter or a view of one. The graph of a computed weight is freed
    by then, and its gradient may go on to the stage's input."""
    if not weight.requires_grad or weight.dim() != 2:
        return False
    node = weight.grad_fn
    while node is not None:
        if type(node).__name__ not in MOVES:
            return False
        node = node.next_functions[0][0] if node.next_functions else None
    return True


def _operand(position: int, name: str, args: Any, kwargs: Any) -> torch.Tensor:
    return args[position] if len(args) > position else kwargs[name]


def _linear(
    later: WeightGradients, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return _Product.apply(input, weight, bias, True, later)  # type: ignore[no-any-return]


def weight_gradient(
    x: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor, transposed: bool
) -> Callable[[], None]:
    """A function that adds to the gradient of a product's weight. x [..., K], gradient of the result [..., N], weight [N, K]
    when ``transposed``, else [K, N]."""

    def finish() -> None:
        rows, outputs = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        first, second = (outputs.t(), rows) if transposed else (rows.t(), outputs)
        if (total := _sum_of(weight)) is not None and total.dtype == first.dtype == second.dtype == torch.float32:
            total.addmm_(first, second)
            return
        # Goes through the operators that made the weight from its parameter (a DTensor's local part) to the parameter's gradient.
        torch.autograd.backward(weight, first.mm(second))

    return finish


def _sum_of(weight: torch.Tensor) -> torch.Tensor | None:
    """The sum of earlier micro-batches' gradients, if a product can be added to it in place: saves a tensor of the weight's size, and its
    reading and writing. Hooks have nothing to do for a gradient that exists already (runtime/shard/replicas.py)."""
    total = weight.grad if weight.is_leaf else None
    return total if type(total) is torch.Tensor else None


class _Product(torch.autograd.Function):
    """``x [..., K] @ weight + bias``; weight [N, K] when ``transposed``, else [K, N]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        transposed: bool,
        later: WeightGradients,
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        # Not saved by autograd: the gradient goes to this very tensor, and a recomputed block would give another.
        ctx.weight, ctx.transposed, ctx.later = weight, transposed, later
        if transposed:
            # For three dims torch returns a view of a matrix, and a model could not write in place into a view made in here.
            product = F.linear(x, weight, bias)
            return torch.ops.aten._unsafe_view(product, product.shape)
        assert bias is not None
        return torch.addmm(bias, x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,), (gradient,) = ctx.saved_tensors, gradients
        weight, transposed = ctx.weight, ctx.transposed

        ctx.later.pending.append(weight_gradient(x, gradient, weight, transposed))
        wants_x, _, wants_bias, _, _ = ctx.needs_input_grad
        of_x = gradient.matmul(weight if transposed else weight.t()) if wants_x else None
        of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0) if wants_bias else None
        return of_x, None, of_bias, None, None
