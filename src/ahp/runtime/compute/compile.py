"""Compiles blocks under ``engine.compile``: chains of element-wise operators become single kernels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import nn
from torch.fx import GraphModule

from ahp.errors import BadInput
from ahp.forecast.rules import not_one_graph
from ahp.runtime.compute.recompute import Context, keep_products, recompute
from ahp.runtime.experts.router_outputs import RouterOutputsTaken
from ahp.runtime.pipeline.compiled_weight_gradients import SplitGraph
from ahp.runtime.pipeline.weight_gradients import WeightGradients
from ahp.runtime.tensor.slice import SlicedForward
from ahp.runtime.torch_compat import allow_graphs, compile_graph, why_graph_broke, within_checkpoint, writes_inputs

Forward = Callable[..., Any]
Compiler = Callable[[Forward], Forward]
Backend = Callable[[GraphModule, list[torch.Tensor]], Forward]

BACKEND = "inductor"
"""torch.compile's default backend, by name, for graphs that torch.compile has captured already."""


def compiled(forward: Forward) -> Forward:
    """``forward`` as one graph, or as several if something in it stays outside."""
    return torch.compile(forward, dynamic=False)


def split_backward_compiler(later: WeightGradients | None) -> Compiler:
    """Like ``compiled``, with the gradients of weights left to ``later`` if it is given."""
    if later is None:
        return compiled
    backend = _backend(None, later)
    return lambda forward: torch.compile(forward, dynamic=False, backend=backend)


def selective_recompute_compiler(later: WeightGradients | None = None) -> Compiler:
    """A compiler to one graph that keeps its products for backward, and runs the rest again. The compiled forward raises BadInput
    if it is not one graph."""
    backend = _PRODUCTS_KEPT if later is None else _backend("products", later)

    def compiler(forward: Forward) -> Forward:
        graph = in_one_graph(forward, backend)

        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return graph(*args, **kwargs)
            except GraphBroke as error:
                raise BadInput(not_one_graph(str(error))) from error

        return run

    return compiler


class FullRecomputeCompiler:
    """Compiles each block, equal blocks together, as one graph that keeps only its inputs: backward runs again only what it reads,
    so not the block's last product. If a block is several graphs, each of them would keep its inputs. As soon as one such block
    is found, all blocks are run again from outside, with every graph whole.
    """

    def __init__(self, later: WeightGradients | None = None) -> None:
        self.one_graph = True
        self._backend = _INPUTS_KEPT if later is None else _backend("inputs", later)
        self._graphs = split_backward_compiler(later)

    def __call__(self, forward: Forward) -> Forward:
        """``forward`` as one graph or, once a graph broke, as several."""
        graph, graphs = in_one_graph(forward, self._backend), self._graphs(forward)

        def run(*args: Any, **kwargs: Any) -> Any:
            return graph(*args, **kwargs) if self.one_graph else graphs(*args, **kwargs)

        return run

    def recompute_outside(self, block: nn.Module, forward_context: Context = nullcontext) -> None:
        """Prepare a compiled block, in place, to be run again from outside, within ``forward_context``. To be called after the block got
        all wrappers that must run again too."""
        inside = block.forward
        recompute(block, "full", forward_context)
        outside = block.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            if self.one_graph:
                try:
                    return inside(*args, **kwargs)
                except GraphBroke:
                    self.one_graph = False
            return outside(*args, **kwargs)

        block.forward = run  # type: ignore[method-assign]


class GraphBroke(Exception):
    """A forward that must be one graph is several; the message is the reason."""


def in_one_graph(forward: Forward, backend: Backend) -> Forward:
    """``forward`` as one graph, made by this backend of torch.compile. The compiled forward raises GraphBroke if it is several.

    The backend puts recompute into the graph. A forward that calls ``checkpoint`` itself would not work: function modes around it,
    such as the attention of context ranks, are not seen inside.
    """
    whole = torch.compile(forward, dynamic=False, fullgraph=True, backend=backend)

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return whole(*args, **kwargs)
        except Exception as error:
            if isinstance(broke := getattr(error, "inner_exception", None), GraphBroke):  # in the backend
                raise broke from error
            if (why := why_graph_broke(error)) is None:
                raise
            raise GraphBroke(why) from error

    return run


def refuse_writes(graph: GraphModule, inputs: list[torch.Tensor]) -> None:
    """Raises GraphBroke if a second run would read written values, not the earlier ones."""
    if writes_inputs(graph, inputs):
        raise GraphBroke("it writes into its buffers or its input")


def _backend(kept: Literal["products", "inputs"] | None, later: WeightGradients | None = None) -> Backend:
    """A backend for torch.compile, which also caches graphs by backend: forwards that are to share graphs must get the same one."""

    def make(graph: GraphModule, inputs: list[torch.Tensor]) -> Forward:
        # A frozen block behind frozen embeddings has no backward, and torch's compiler refuses recompute there.
        if not (torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)):
            return compile_graph(graph, inputs, BACKEND)
        if kept is not None:
            refuse_writes(graph, inputs)
        split = None if later is None else SplitGraph(graph, inputs, later)
        if split is not None:
            graph, inputs = split.graph, [*inputs, *split.probes]
        if kept is not None:
            graph = within_checkpoint(graph, keep_products if kept == "products" else None)
        run = compile_graph(graph, inputs, BACKEND)
        return run if split is None else split.forward_context(run)

    return make


_PRODUCTS_KEPT, _INPUTS_KEPT = _backend("products"), _backend("inputs")


def compile_block(block: nn.Module, compiler: Compiler = compiled) -> None:
    """Compile a block's forward, in place, when it is first run. Hooks on the block (FSDP2's) stay outside."""
    allow_graphs()
    forward = block.forward
    if isinstance(forward, SlicedForward):  # it has a graph already, collectives included
        forward.compiler = compiler
    elif isinstance(forward, RouterOutputsTaken):  # collecting router outputs stays outside too
        forward.with_outputs = compiler(forward.with_outputs)
    else:
        block.forward = compiler(forward)  # type: ignore[method-assign]
