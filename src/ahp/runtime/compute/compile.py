"""Blocks as compiled kernels: element-wise chains in one piece, under ``engine.compile``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import nn
from torch.fx import GraphModule

from ahp.errors import BadInput
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
"""torch.compile's own choice, by name for a graph that it has made already."""


def compiled(forward: Forward) -> Forward:
    """``forward`` as one graph, or as several where something in it stays outside."""
    return torch.compile(forward, dynamic=False)


def split_backward_compiler(later: WeightGradients | None) -> Compiler:
    """As ``compiled``, with the gradients of weights left to ``later`` where it is given."""
    if later is None:
        return compiled
    backend = _backend(None, later)
    return lambda forward: torch.compile(forward, dynamic=False, backend=backend)


def selective_recompute_compiler(later: WeightGradients | None = None) -> Compiler:
    """A compiler of forwards to one graph that keeps its products for backward, and runs the rest again. Where it is not one graph
    what is returned raises BadInput."""
    backend = _PRODUCTS_KEPT if later is None else _backend("products", later)

    def compiler(forward: Forward) -> Forward:
        graph = _one_graph(forward, backend)

        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return graph(*args, **kwargs)
            except GraphBroke as error:
                rule = "with engine.compile = True a block must be one graph, and something breaks it"
                raise BadInput(f"activation_checkpoint = 'selective': {rule}: {error} (valid: none, full)") from error

        return run

    return compiler


class FullRecomputeCompiler:
    """Compiles blocks, alike ones together, as one graph that keeps nothing but what enters it: backward runs again what it reads,
    and so no block's last product. Of a block in several graphs each would keep what enters it. As soon as one block is found to
    be so, all of them are run again from outside, every graph of theirs whole.
    """

    def __init__(self, later: WeightGradients | None = None) -> None:
        self.one_graph = True
        self._backend = _INPUTS_KEPT if later is None else _backend("inputs", later)
        self._graphs = split_backward_compiler(later)

    def __call__(self, forward: Forward) -> Forward:
        """``forward`` as one graph or, once a graph broke, as several."""
        graph, graphs = _one_graph(forward, self._backend), self._graphs(forward)

        def run(*args: Any, **kwargs: Any) -> Any:
            return graph(*args, **kwargs) if self.one_graph else graphs(*args, **kwargs)

        return run

    def recompute_outside(self, block: nn.Module, forward_context: Context = nullcontext) -> None:
        """Be ready, in place, to run a compiled block again from outside, within ``forward_context``. To be done outside of what else it must
        run again within."""
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
    """What was to be one graph is several; says why."""


def _one_graph(forward: Forward, backend: Backend) -> Forward:
    """``forward`` as one graph, made by this backend of torch.compile. What is returned raises GraphBroke.

    Its backend puts recompute into the graph. That the forward calls ``checkpoint`` itself would not do: function modes around it,
    which attention of context ranks is, are not seen inside.
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


def _backend(kept: Literal["products", "inputs"] | None, later: WeightGradients | None = None) -> Backend:
    """torch.compile tells graphs apart by it too: what is to share them is given the same one."""

    def make(graph: GraphModule, inputs: list[torch.Tensor]) -> Forward:
        # Of a block that trains nothing, behind embeddings that train nothing, there is no backward: torch's compiler refuses recompute there.
        if not (torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)):
            return compile_graph(graph, inputs, BACKEND)
        if kept is not None and writes_inputs(graph, inputs):
            # What is run again would read what was written, not what there was before.
            raise GraphBroke("it writes into its buffers")
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
    if isinstance(forward, SlicedForward):  # its graph is known already, collectives and all
        forward.compiler = compiler
    elif isinstance(forward, RouterOutputsTaken):  # what it keeps for later stays outside too
        forward.with_outputs = compiler(forward.with_outputs)
    else:
        block.forward = compiler(forward)  # type: ignore[method-assign]
