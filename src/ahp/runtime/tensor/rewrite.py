"""Rewrites the forward graph of a whole block into the graph that one tensor-parallel rank runs (``slice`` uses it).

Sizes become local, conversions between placements become collectives, and a row-split linear adds its bias once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from ahp.graph.capture import Capture
from ahp.graph.experts import EXPERTS
from ahp.runtime.compute.fp8 import InGraph
from ahp.runtime.tensor.collectives import step_function
from ahp.runtime.tensor.sliced_dropout import drops, with_own_numbers
from ahp.runtime.torch_compat import sets_gradient_mode, take_codegen
from ahp.search.slicing.conversion import Step, steps
from ahp.search.slicing.packing import CUTS, cut_dim, cut_sizes, slice_range
from ahp.search.slicing.placement import P, Placement, R, Split, Strategy, args_of, kwargs_of, shape_of, tensor_inputs
from ahp.search.slicing.solve import Slicing
from ahp.search.slicing.strategies.elements import MEANS

aten = torch.ops.aten

SIZED = {aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.expand.default}
RESHAPED = {aten.flatten.using_ints, aten.unflatten.int}


def rewrite(
    capture: Capture,
    slicing: Slicing,
    group: dist.ProcessGroup,
    experts: Mapping[str, Callable[..., torch.Tensor]],
    fp8: InGraph | None = None,
) -> GraphModule:
    """The graph for one rank of ``group``; it takes the local parts of the weights, and activations as the slicing has them.

    ``experts``: what to call instead of the operator that stands for a module of experts, keyed by path. ``fp8``: which products
    it computes in 8 bits, None = none.
    """
    return _Rewriter(capture, slicing, group, experts, fp8).run()


class _Rewriter:
    def __init__(
        self,
        capture: Capture,
        slicing: Slicing,
        group: dist.ProcessGroup,
        experts: Mapping[str, Callable[..., torch.Tensor]],
        fp8: InGraph | None,
    ) -> None:
        self.capture, self.slicing, self.group, self.experts, self.fp8 = capture, slicing, group, experts, fp8
        self.degree = group.size()
        self.graph = Graph()
        self.local: dict[Node, Node] = {}
        self.converted: dict[tuple[Node, Step, bool], Node] = {}
        """Converted tensors; the last part of the key is whether gradients are recorded: autograd passes no collective run under ``no_grad``."""
        self.makes_gradients = True
        self.with_gradient = capture.with_gradient()

    def run(self) -> GraphModule:
        for node in self.capture.nodes:
            if node.op == "call_function":
                self.local[node] = self._call(node)
                if sets_gradient_mode(node.target):
                    self.makes_gradients = bool(args_of(node)[0])
            elif node.op == "output":
                self._output(node)
            else:
                self.local[node] = self.graph.node_copy(node, lambda n: self.local[n])
        take_codegen(self.graph, self.capture.graph.graph)
        module = GraphModule(self.capture.graph, self.graph)
        module.graph.eliminate_dead_code()
        module.recompile()
        return module

    def _output(self, node: Node) -> None:
        strategy = self.slicing.chosen[node]
        wanted = iter(strategy.inputs)
        self.graph.output(map_arg(args_of(node)[0], lambda n: self._convert(n, next(wanted), strategy)))

    def _call(self, node: Node) -> Node:
        strategy = self.slicing.chosen[node]
        if strategy.adds_bias_after_sum:
            return self._row_with_bias(node, strategy)
        converted = [
            self._convert(i, wanted, strategy) for i, wanted in zip(tensor_inputs(node), strategy.inputs, strict=True)
        ]
        if node.target is EXPERTS:
            return self.graph.call_function(_calling(self.experts[args_of(node)[3]]), tuple(converted))
        if _shares_heads(node, strategy):
            converted[1:3] = (self._shared_head(node, keys) for keys in converted[1:3])
        args = iter(converted)
        new_args, new_kwargs = map_arg((args_of(node), kwargs_of(node)), lambda n: next(args))
        target = self._product(node, strategy, node.target)
        new = self.graph.create_node("call_function", target, new_args, new_kwargs)
        if strategy.divides:
            return self._localised(node, new, strategy)
        return new

    def _product(self, node: Node, strategy: Strategy, target: Any) -> Any:
        """``target``, or a function of the same arguments that computes the product in 8 bits."""
        product = None if self.fp8 is None else self.fp8.product(self.capture, node, strategy, self.group)
        if product is None:
            return target

        def run(*args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
            if target is aten.addmm.default:
                bias, x, weight = args
                return product(x, weight, bias)
            return product(*args, **kwargs)

        return _named(run, "fp8_product")

    def _shared_head(self, attention: Node, whole: Node) -> Node:
        """The key head that this rank's query heads share, when there are fewer key heads than ranks."""
        heads = shape_of(args_of(attention)[1])[1]
        mine = self.group.rank() * heads // self.degree
        return self.graph.call_function(aten.slice.Tensor, (whole, 1, mine, mine + 1))

    def _localised(self, node: Node, new: Node, strategy: Strategy) -> Node:
        """Adapt a call to this rank's part: sizes among its arguments become local, random numbers the rank's own."""
        if node.target in MEANS and strategy.output == P and strategy.inputs[0] != P:
            return self.graph.call_function(aten.div.Tensor, (new, self.degree))  # a mean over a part of the elements
        if drops(node.target, args_of(node), kwargs_of(node)):
            new.target = with_own_numbers(node.target, self.group.rank())  # type: ignore[arg-type]
        if isinstance(strategy.output, Split) and (node.target in SIZED or node.target in RESHAPED):
            shape = list(shape_of(node))
            shape[strategy.output.dim] //= self.degree
            target = aten.reshape.default if node.target in RESHAPED else node.target
            new.target, new.args = target, (new.args[0], shape, *(new.args[2:] if target is node.target else ()))
        elif node.target in CUTS and isinstance(split := strategy.inputs[0], Split) and split.dim == cut_dim(node):
            shares = [size // self.degree for size in cut_sizes(node)]
            new.target, new.args, new.kwargs = aten.split_with_sizes.default, (new.args[0], shares, split.dim), {}
        elif node.target is aten.slice.Tensor and strategy.inputs[0] != strategy.output:
            dim, start, end = slice_range(node)
            new.args, new.kwargs = (new.args[0], dim, start // self.degree, end // self.degree), {}
        return new

    def _row_with_bias(self, node: Node, strategy: Strategy) -> Node:
        """x and the weight are split along k: multiply, add up over ranks, then add the bias once."""
        x, weight, bias = tensor_inputs(node) if node.target is aten.linear.default else _addmm_order(node)
        wanted = dict(zip(tensor_inputs(node), strategy.inputs, strict=True))
        local_x, local_weight = (self._convert(i, wanted[i], strategy) for i in (x, weight))
        product = aten.linear.default if node.target is aten.linear.default else aten.mm.default
        result = self.graph.call_function(self._product(node, strategy, product), (local_x, local_weight))
        for step in steps(P, strategy.output, needs_sum=False) or ():
            result = self.graph.call_function(_named(step_function(step, self.group), step.kind), (result,))
        return self.graph.call_function(aten.add.Tensor, (result, self._convert(bias, R, strategy)))

    def _convert(self, node: Node, wanted: Placement, reader: Strategy) -> Node:
        """The local node that holds ``node`` as ``wanted``; whole inputs of shared work get their gradients summed."""
        needs_sum = wanted == R and reader.reads_whole_in_parts and node in self.with_gradient
        way = steps(self.slicing.placed[node], wanted, needs_sum=needs_sum)
        assert way is not None, f"{node.format_node()} cannot become {wanted}"
        local = self.local[node]
        for step in way:
            local = self._stepped(node, step, local)
        return local

    def _stepped(self, node: Node, step: Step, local: Node) -> Node:
        """``local`` after one step, once for all readers."""
        known = self.converted.get((node, step, True))
        if known is None and not self.makes_gradients:
            known = self.converted.get((node, step, False))
        if known is None:
            function = _named(step_function(step, self.group), step.kind)
            known = self.converted[node, step, self.makes_gradients] = self.graph.call_function(function, (local,))
        return known


def _addmm_order(node: Node) -> tuple[Node, Node, Node]:
    bias, x, weight = tensor_inputs(node)
    return x, weight, bias


def _named(function: Callable[..., torch.Tensor], name: str) -> Callable[..., torch.Tensor]:
    """fx refers to targets by their names."""
    function.__name__ = name
    return function


def _calling(experts: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A named function for fx, because a module has no name."""
    return _named(lambda *values: experts(*values), "experts")


def _shares_heads(node: Node, strategy: Strategy) -> bool:
    """Whether a node is attention with split query heads, and with whole keys and values of fewer heads than ranks."""
    if node.target is not aten.scaled_dot_product_attention.default or not isinstance(strategy.output, Split):
        return False
    return strategy.inputs[:3] == (strategy.output, R, R)
