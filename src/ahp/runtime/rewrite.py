"""From the forward graph of a whole block to the graph that one tensor-parallel rank runs: algorithm apart from use.

Sizes become local, conversions between placements become collectives, and a row-split linear adds its bias once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from ahp.graph.capture import Capture
from ahp.runtime.collectives import gather, sum_gradient, sum_over_ranks
from ahp.search.placement import (
    Partial,
    Placement,
    R,
    Split,
    Strategy,
    args_of,
    cut_dim,
    cut_sizes,
    kwargs_of,
    shape_of,
    tensor_inputs,
)
from ahp.search.slicing import Slicing

aten = torch.ops.aten

_SIZED = {aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.expand.default}
_CUT_BY_SIZE = {aten.split.Tensor, aten.split_with_sizes.default}
_RESHAPED = {aten.flatten.using_ints, aten.unflatten.int}


def rewrite(capture: Capture, slicing: Slicing, group: dist.ProcessGroup) -> GraphModule:
    """The graph for one rank of ``group``; it takes the local parts of the weights and whole activations."""
    return _Rewriter(capture, slicing, group).run()


class _Rewriter:
    def __init__(self, capture: Capture, slicing: Slicing, group: dist.ProcessGroup) -> None:
        self.capture, self.slicing, self.group = capture, slicing, group
        self.degree = group.size()
        self.graph = Graph()
        self.local: dict[Node, Node] = {}
        self.converted: dict[tuple[Node, Placement, bool], Node] = {}
        self.with_gradient = capture.with_gradient()

    def run(self) -> GraphModule:
        for node in self.capture.nodes:
            if node.op == "call_function":
                self.local[node] = self._call(node)
            elif node.op == "output":
                self.graph.output(map_arg(args_of(node)[0], lambda n: self._convert(n, R, divided=False)))
            else:
                self.local[node] = self.graph.node_copy(node, lambda n: self.local[n])
        self.graph.set_codegen(self.capture.graph.graph._codegen)
        module = GraphModule(self.capture.graph, self.graph)
        module.graph.eliminate_dead_code()
        module.recompile()
        return module

    def _call(self, node: Node) -> Node:
        strategy = self.slicing.chosen[node]
        if strategy.adds_bias_after_sum:
            return self._row_with_bias(node, strategy)
        divided = strategy.output != R
        args = iter(
            [self._convert(i, wanted, divided) for i, wanted in zip(tensor_inputs(node), strategy.inputs, strict=True)]
        )
        new_args, new_kwargs = map_arg((args_of(node), kwargs_of(node)), lambda n: next(args))
        new = self.graph.create_node("call_function", node.target, new_args, new_kwargs)
        if divided and isinstance(strategy.output, Split):
            self._localise(node, new, strategy)
        return new

    def _localise(self, node: Node, new: Node, strategy: Strategy) -> None:
        """Replace the sizes among a call's arguments by this rank's."""
        assert isinstance(strategy.output, Split)
        if node.target in _SIZED or node.target in _RESHAPED:
            shape = list(shape_of(node))
            shape[strategy.output.dim] //= self.degree
            target = aten.reshape.default if node.target in _RESHAPED else node.target
            new.target, new.args = target, (new.args[0], shape, *(new.args[2:] if target is node.target else ()))
        if node.target in _CUT_BY_SIZE and strategy.inputs[0] == Split(cut_dim(node), cut_sizes(node)):
            sizes = args_of(node)[1]
            shares = [s // self.degree for s in sizes] if isinstance(sizes, (list, tuple)) else sizes // self.degree
            new.args = (new.args[0], shares, *new.args[2:])

    def _row_with_bias(self, node: Node, strategy: Strategy) -> Node:
        """x and the weight are split along k: multiply, add up over ranks, then add the bias once."""
        x, weight, bias = tensor_inputs(node) if node.target is aten.linear.default else _addmm_order(node)
        wanted = dict(zip(tensor_inputs(node), strategy.inputs, strict=True))
        local_x, local_weight = (self._convert(i, wanted[i], divided=True) for i in (x, weight))
        product = aten.linear.default if node.target is aten.linear.default else aten.mm.default
        partial = self.graph.call_function(product, (local_x, local_weight))
        summed = self.graph.call_function(_bind(sum_over_ranks, group=self.group), (partial,))
        return self.graph.call_function(aten.add.Tensor, (summed, self._convert(bias, R, divided=False)))

    def _convert(self, node: Node, wanted: Placement, divided: bool) -> Node:
        """The local node that holds ``node`` as ``wanted``; whole inputs of divided work get their gradients summed."""
        have = self.slicing.placed[node]
        needs_sum = divided and wanted == R and node in self.with_gradient
        key = (node, wanted, needs_sum)
        if key not in self.converted:
            self.converted[key] = self._conversion(self.local[node], have, wanted, needs_sum)
        return self.converted[key]

    def _conversion(self, local: Node, have: Placement, wanted: Placement, needs_sum: bool) -> Node:
        if have != wanted:
            if isinstance(have, Partial):
                local = self.graph.call_function(_bind(sum_over_ranks, group=self.group), (local,))
            else:
                assert isinstance(have, Split)
                local = self.graph.call_function(
                    _bind(gather, dim=have.dim, segments=have.segments, group=self.group), (local,)
                )
        if needs_sum:
            local = self.graph.call_function(_bind(sum_gradient, group=self.group), (local,))
        return local


def _addmm_order(node: Node) -> tuple[Node, Node, Node]:
    bias, x, weight = tensor_inputs(node)
    return x, weight, bias


def _bind(function: Callable[..., torch.Tensor], **fixed: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function of the tensor alone: fx wants targets with a name, and arguments of plain types."""

    def bound(x: torch.Tensor) -> torch.Tensor:
        return function(x, **fixed)

    bound.__name__ = function.__name__
    return bound
