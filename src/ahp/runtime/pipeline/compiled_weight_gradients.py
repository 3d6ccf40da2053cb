"""Separates the weight gradients of compiled blocks from their input gradients, for the schedules that split the backward.

A compiled backward is one call, and nothing inside of it can be deferred. So each product with a weight gets two more inputs,
called probes, of the shapes of its result and of its operand, which do nothing in forward. The gradient of the first is that of
the result, and what comes back as the gradient of the second is the operand itself. The weight's gradient is made from these two
outside of the graph. Nothing is hidden from the compiler, which keeps operands or computes them again as it would without probes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node

from ahp.runtime.pipeline.weight_gradients import ADDMM, LINEAR, WeightGradients, weight_gradient

Run = Callable[..., Any]


@dataclass(frozen=True)
class _Found:
    """A product with a weight in a graph."""

    weight: int
    """Its index among the graph's inputs."""
    transposed: bool
    """The weight is [N, K], as in nn.Linear; else [K, N]."""
    probes: tuple[torch.Tensor, torch.Tensor]
    """One zero expanded to the shape of the result, and one to the shape of the operand."""


class SplitGraph:
    """A torch.compile graph that leaves the gradients of its weights to ``later``."""

    def __init__(self, graph: GraphModule, inputs: Sequence[torch.Tensor], later: WeightGradients) -> None:
        self.later = later
        self.found: list[_Found] = []
        self.graph = self._rewritten(graph, inputs)

    @property
    def probes(self) -> list[torch.Tensor]:
        """The inputs that the graph takes after its own."""
        return [probe for found in self.found for probe in found.probes]

    def forward_context(self, run: Run) -> Run:
        """A function of the graph's own inputs, which adds the probes. ``run``: the compiled graph."""

        if not self.found:
            return run

        def call(*inputs: Any) -> Any:
            weights = [inputs[found.weight] for found in self.found]
            start = torch.empty(0, requires_grad=True)
            return run(*inputs, *_Probes.apply(start, self, weights))

        return call

    def _rewritten(self, graph: GraphModule, inputs: Sequence[torch.Tensor]) -> GraphModule:
        """The rewritten graph: a copy, because torch.compile reads the original again."""
        copied = Graph()
        copied.output(copied.graph_copy(graph.graph, {}))
        placeholders = copied.find_nodes(op="placeholder")
        number = {node: i for i, node in enumerate(placeholders)}
        last = placeholders[-1] if placeholders else None
        for node in list(copied.nodes):
            operands = _operands(node)
            if operands is None or last is None:
                continue
            x, weight, bias, transposed = operands
            if weight not in number or not inputs[number[weight]].requires_grad:
                continue  # frozen, or made from weights in the graph, which then makes their gradients too
            probes = tuple(_standing_for(like) for like in (node, x))
            self.found.append(_Found(number[weight], transposed, probes))  # type: ignore[arg-type]
            of_each = []
            for like in (node, x):
                with copied.inserting_after(last):
                    last = copied.placeholder(f"probe_{node.name}_{len(of_each)}")
                last.meta = {"example_value": like.meta["example_value"]}
                of_each.append(last)
            with copied.inserting_before(node):
                product = copied.call_function(_product, (x, weight, bias, transposed, *of_each))
            product.meta = dict(node.meta)
            node.replace_all_uses_with(product)
            copied.erase_node(node)
        return GraphModule(graph, copied)


def _operands(node: Node) -> tuple[Any, Any, Any, bool] | None:
    """Operand, weight and bias of a product, and whether its weight is transposed; None if the node is no product."""
    if node.target in LINEAR:
        given = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
        return given["input"], given["weight"], given.get("bias"), True
    if node.target in ADDMM and len(node.args) == 3 and not node.kwargs:
        bias, x, weight = node.args
        return x, weight, bias, False
    return None


def _standing_for(node: Node) -> torch.Tensor:
    like = node.meta["example_value"]
    return like.new_zeros(()).expand(like.shape).detach().requires_grad_()


class _Product(torch.autograd.Function):
    """``x @ weight + bias`` within a graph, without a gradient of the weight."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        transposed: bool,
        of_result: torch.Tensor,
        of_operand: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.transposed = transposed
        return F.linear(x, weight, bias) if transposed else torch.addmm(bias, x, weight)  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        of_x = gradient.matmul(weight if ctx.transposed else weight.t()) if ctx.needs_input_grad[0] else None
        of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
        return of_x, None, of_bias, None, gradient, x


def _product(*operands: Any) -> torch.Tensor:
    """``_Product.apply`` under a name of this module: torch 2.15 writes a graph's functions by name, and ``apply`` is in no module."""
    return _Product.apply(*operands)


class _Probes(torch.autograd.Function):
    """Makes the probes; backward leaves the weight gradients, made from what comes back for them, to ``later``."""

    @staticmethod
    def forward(
        ctx: Any, start: torch.Tensor, split: SplitGraph, weights: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        ctx.split, ctx.weights = split, weights
        return tuple(
            torch.zeros((), dtype=probe.dtype, device=probe.device).expand(probe.shape) for probe in split.probes
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, ...]:
        pairs = zip(gradients[::2], gradients[1::2], ctx.split.found, ctx.weights, strict=True)
        for gradient, x, found, weight in pairs:
            ctx.split.later.pending.append(weight_gradient(x, gradient, weight, found.transposed))
        return None, None, None
