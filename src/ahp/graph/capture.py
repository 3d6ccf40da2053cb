"""The forward pass of one block as an executable graph of framework operators (torch.fx), with global shapes.

Slicing decides on this graph and the runtime rewrites it; the operator trace with costs is in ``trace``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from ahp.graph.effects import AsInGraph
from ahp.graph.fake_mode import as_on_data
from ahp.graph.functional import COMPOSED, simplify
from ahp.graph.torch_compat import FakeTensor, FakeTensorMode, pytree, scripts_as_python


@dataclass(frozen=True)
class TensorLike:
    """Shape, dtype and device of a tensor that need not exist."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorLike:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad)


@dataclass(frozen=True)
class Capture:
    """``graph(weights, activations)``: the block's forward; weights by ``names``, activations as ``tensor_leaves`` gives them."""

    graph: GraphModule
    names: tuple[str, ...]
    """Parameters, then buffers, in the order in which the graph takes them."""
    output_spec: pytree.TreeSpec
    trainable: tuple[bool, ...]
    """For each activation, whether a gradient flows back to it."""
    places: tuple[int, ...]
    """For each activation, its index among the leaves of the call's arguments, counting those that are not tensors."""

    @property
    def nodes(self) -> list[Node]:
        return list(self.graph.graph.nodes)

    def weight_nodes(self) -> dict[str, Node]:
        """The placeholder of each weight."""
        return dict(zip(self.names, self._placeholders(), strict=False))

    def activation_nodes(self) -> list[Node]:
        """The placeholders of the activations, in order."""
        return self._placeholders()[len(self.names) :]

    def with_gradient(self) -> set[Node]:
        """Nodes through which a gradient flows to a weight or to an input of the block (floating-point paths only)."""
        sources = {n for n in self.weight_nodes().values() if n.meta["val"].is_floating_point()}
        sources |= {n for n, trainable in zip(self.activation_nodes(), self.trainable, strict=True) if trainable}
        return _depends_on(self.nodes, sources)

    def _placeholders(self) -> list[Node]:
        return [n for n in self.nodes if n.op == "placeholder"]


def weights_of(block: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name. A tensor with several names has its first, because it has one placement."""
    return {**dict(block.named_parameters()), **dict(block.named_buffers())}


def tensor_leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among a call's arguments, including nested ones, in a fixed order."""
    return [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]


def capture(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: dict[str, TensorLike] | None = None
) -> Capture:
    """Trace ``block(*args, **kwargs)`` on fake tensors.

    ``shapes`` replaces the shapes of weights of which only the local part is in memory. The arguments can be fake themselves. The
    graph sets the gradient mode as the block does, so it is valid for the mode of this call. It writes into buffers as the block
    does. Raises NotInGraph, and whatever the block raises: data-dependent control flow cannot be traced.
    """
    fakes = [leaf for leaf in tensor_leaves(args, kwargs) if isinstance(leaf, FakeTensor)]
    # A tensor that is neither a parameter nor a buffer (a table made in ``__init__``) is a constant of the graph.
    mode = fakes[0].fake_mode if fakes else FakeTensorMode(allow_non_fake_inputs=True)
    wanted = {name: TensorLike.of(tensor) for name, tensor in weights_of(block).items()} | (shapes or {})
    leaves, spec = pytree.tree_flatten((args, kwargs))
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    output_spec: list[pytree.TreeSpec] = []

    def forward(weights: list[torch.Tensor], activations: list[torch.Tensor]) -> list[Any]:
        filled = list(leaves)
        for i, activation in zip(where, activations, strict=True):
            filled[i] = activation
        call_args, call_kwargs = pytree.tree_unflatten(filled, spec)
        held = dict(zip(wanted, weights, strict=True))
        out = functional_call(block, held, call_args, call_kwargs, tie_weights=True)
        _write_back(held, dict(zip(wanted, weights, strict=True)))
        flat, tree = pytree.tree_flatten(out)
        output_spec[:] = [tree]
        return flat

    # A capture can happen while a checkpointed block counts what its forward saves: it must not see what is saved here.
    unseen = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
    with as_on_data(block), mode, unseen, AsInGraph(), scripts_as_python():
        weights = [_fake(like) for like in wanted.values()]
        activations = [_fake(TensorLike.of(leaves[i])) for i in where]
        graph = make_fx(forward, COMPOSED, tracing_mode="real", pre_dispatch=True)(weights, activations)
    simplify(graph.graph)
    graph.recompile()
    return Capture(graph, tuple(wanted), output_spec[0], tuple(leaves[i].requires_grad for i in where), tuple(where))


def _write_back(after: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> None:
    """A buffer that the block has replaced by another tensor (``self.mean = ...``) takes that tensor's values."""
    changed = [name for name, tensor in after.items() if tensor is not before[name]]
    if changed:
        with torch.no_grad():
            for name in changed:
                before[name].copy_(after[name])


def _fake(like: TensorLike) -> torch.Tensor:
    tensor = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    return tensor.requires_grad_(like.requires_grad) if like.requires_grad else tensor


def _depends_on(nodes: Iterable[Node], sources: set[Node]) -> set[Node]:
    found = set(sources)
    for node in nodes:
        if node.op == "call_function" and any(i in found for i in node.all_input_nodes):
            value = node.meta.get("val")
            first = value[0] if isinstance(value, (list, tuple)) and value else value
            if node.target is operator.getitem or (
                isinstance(first, torch.Tensor) and (first.is_floating_point() or first.is_complex())
            ):
                found.add(node)
    return found
