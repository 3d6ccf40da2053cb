"""Step 4: how each tensor of a block is split over the tensor-parallel axis, by dynamic programming over its graph.

The nodes of the traced forward pass are taken in order. A state is what is known about the tensors that are still to
be read: where they lie, and which conversions of them were already paid for. Costs are compared in this order:
arithmetic per rank, weights per rank, bytes moved forward and backward. So the degree is used wherever it can be, and
among the ways to use it the one that moves the least wins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from ahp.errors import BadInput
from ahp.graph.capture import Capture
from ahp.search.placement import (
    Context,
    P,
    Partial,
    Placement,
    R,
    Replicated,
    Split,
    Strategy,
    args_of,
    find_packings,
    shape_of,
    strategies,
    tensor_inputs,
)

if TYPE_CHECKING:
    from torch import nn

    from ahp.graph.operators import ModelGraph

Cost = tuple[int, int, int]
"""FLOPs of matrix products and attention per rank, elements of its weight matrices, bytes that it moves."""

MAX_STATES = 256
"""States kept after each node, cheapest first. Blocks of the hub's families need fewer than 40."""


@dataclass(frozen=True)
class Slicing:
    """The solution for one block: a strategy for every call node, a placement for every weight and node."""

    chosen: dict[Node, Strategy]
    placed: dict[Node, Placement]
    weights: dict[str, Placement]
    matrices: dict[str, str]
    """For the weight of each matrix product with a weight: column (n), row (k) or replicated."""
    cost: Cost


@dataclass(frozen=True)
class _State:
    cost: Cost
    live: dict[Node, Placement]
    paid: frozenset[tuple[Node, Placement | str]]
    history: tuple[Any, ...] = field(repr=False)
    """A linked list of (node, strategy, earlier history)."""


def solve(capture: Capture, degree: int, pinned: dict[str, Placement] | None = None) -> Slicing:
    """The cheapest placement of a block over ``degree`` ranks; its input and output are whole on every rank.

    ``pinned`` fixes the placement of weights (names as in ``capture.names``). Raises BadInput when the block writes
    into tensors in place, which this rewriting cannot follow, or when ``pinned`` cannot be met.
    """
    nodes = capture.nodes
    _refuse_mutation(nodes)
    weights = {node: name for name, node in capture.weight_nodes().items()}
    pinned_nodes = {node: pinned[name] for node, name in weights.items() if pinned is not None and name in pinned}
    inputs = capture.activation_nodes()
    with_gradient = capture.with_gradient()
    context = Context(degree, find_packings(nodes))
    last_use = {i: position for position, node in enumerate(nodes) for i in node.all_input_nodes}

    states = [_State((0, 0, 0), dict.fromkeys(inputs, R), frozenset(), ())]
    for position, node in enumerate(nodes):
        if node.op not in ("call_function", "output"):
            continue
        options = (
            strategies(node, context) if node.op == "call_function" else [Strategy((R,) * len(tensor_inputs(node)), R)]
        )
        found: dict[Any, _State] = {}
        for state in states:
            for option in options:
                after = _step(state, node, option, degree, weights, pinned_nodes, with_gradient)
                if after is None:
                    continue
                after = _forget(after, {i for i in node.all_input_nodes if last_use[i] == position})
                key = (frozenset(after.live.items()), after.paid)
                if key not in found or after.cost < found[key].cost:
                    found[key] = after
        states = sorted(found.values(), key=lambda s: s.cost)[:MAX_STATES]
        if not states:
            raise BadInput(
                f"tensor_parallel_degree = {degree}: no slicing of {node.format_node()} meets the given placements"
            )
    return _unroll(states[0], weights, inputs)


def _step(
    state: _State,
    node: Node,
    option: Strategy,
    degree: int,
    weights: dict[Node, str],
    pinned: dict[Node, Placement],
    with_gradient: set[Node],
) -> _State | None:
    """The state after running ``node`` by ``option``, or None when an input cannot be brought there."""
    flops, elements, moved = state.cost
    live, paid = dict(state.live), set(state.paid)
    divided = option.output != R or option.adds_bias_after_sum
    for source, wanted in zip(tensor_inputs(node), option.inputs, strict=True):
        if source in weights and source not in live:  # a weight's first use decides where it lies
            if wanted == P or pinned.get(source, wanted) != wanted:
                return None
            live[source] = wanted
            if len(shape_of(source)) > 1:  # biases and norms weigh nothing beside what their place makes others move
                elements += _numel(source) // (degree if isinstance(wanted, Split) else 1)
        have = live[source]
        needs_sum = divided and wanted == R and source in with_gradient and not option.adds_bias_after_sum
        conversion: Placement | str | None = wanted if have != wanted else "sum gradient" if needs_sum else None
        if conversion is None or (source, conversion) in paid:
            continue
        if have != wanted and (isinstance(have, Replicated) or not isinstance(wanted, Replicated)):
            return None  # splits start at weights only, and are not changed into other splits
        moved += _conversion_bytes(source, have, degree) if have != wanted else 2 * _ring(source, degree)
        if have != wanted and needs_sum:
            moved += 2 * _ring(source, degree)
        paid.add((source, conversion))
    if option.adds_bias_after_sum:
        moved += 2 * _ring(node, degree)
    flops += _flops(node) // (degree if divided else 1)
    live[node] = option.output
    return _State((flops, elements, moved), live, frozenset(paid), (node, option, state.history))


def _conversion_bytes(node: Node, have: Placement, degree: int) -> int:
    """Bytes that a rank sends: all-reduce of a partial sum, all-gather of a split one (backward is free of sending)."""
    return (2 if isinstance(have, Partial) else 1) * _ring(node, degree)


def _ring(node: Node, degree: int) -> int:
    """Bytes of one ring pass over a node's global tensor."""
    value = node.meta["val"]
    values = value if isinstance(value, (list, tuple)) else [value]
    return sum(v.numel() * v.element_size() for v in values) * (degree - 1) // degree


def _forget(state: _State, dead: set[Node]) -> _State:
    live = {node: placement for node, placement in state.live.items() if node not in dead}
    paid = frozenset(item for item in state.paid if item[0] not in dead)
    return _State(state.cost, live, paid, state.history)


def _unroll(state: _State, weights: dict[Node, str], inputs: list[Node]) -> Slicing:
    chosen: dict[Node, Strategy] = {}
    history = state.history
    while history:
        node, strategy, history = history
        chosen[node] = strategy
    placed: dict[Node, Placement] = dict.fromkeys(inputs, R)
    for node, strategy in reversed(chosen.items()):
        for source, placement in zip(tensor_inputs(node), strategy.inputs, strict=True):
            if source in weights:
                placed.setdefault(source, placement)
        placed[node] = strategy.output
    matrices = {
        weights[matrix]: _word(placed[matrix], columns)
        for node in chosen
        for matrix, columns in _weight_matrix(node)
        if matrix in weights
    }
    return Slicing(chosen, placed, {name: placed.get(node, R) for node, name in weights.items()}, matrices, state.cost)


def _weight_matrix(node: Node) -> Iterator[tuple[Node, int]]:
    """The argument of a product that may be a weight, and which of its dims counts the columns n."""
    aten = torch.ops.aten
    if node.target is aten.linear.default:
        yield args_of(node)[1], 0
    elif node.target is aten.addmm.default:
        yield args_of(node)[2], 1
    elif node.target in (aten.matmul.default, aten.mm.default):
        yield args_of(node)[1], 1


def _word(placement: Placement, columns: int) -> str:
    if not isinstance(placement, Split):
        return "replicated"
    return "column" if placement.dim == columns else "row"


def _flops(node: Node) -> int:
    """Multiply-adds times two of the products whose arithmetic the degree divides."""
    aten = torch.ops.aten
    if node.target is aten.linear.default:
        return 2 * _numel(node) * shape_of(args_of(node)[1])[1]
    if node.target is aten.addmm.default:
        return 2 * _numel(node) * shape_of(args_of(node)[2])[0]
    if node.target in (aten.matmul.default, aten.mm.default, aten.bmm.default):
        return 2 * _numel(node) * shape_of(args_of(node)[0])[-1]
    if node.target is aten.scaled_dot_product_attention.default:
        return 4 * _numel(node) * shape_of(args_of(node)[1])[-2]
    return 0


def _numel(node: Node) -> int:
    count = 1
    for size in shape_of(node):
        count *= size
    return count


def _refuse_mutation(nodes: list[Node]) -> None:
    for node in nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable and tensor_inputs(node):
            raise BadInput(
                f"tensor_parallel_degree: the block writes in place ({node.target}), which cannot be sliced; use ZeRO or pipeline stages instead"
            )


# ------------------------------------------------------------------------------------------------ for people


def slicing(graph: ModelGraph | nn.Module, tensor_parallel_degree: int) -> dict[str, str]:
    """How every linear and embedding of a model is split, by module name; ``*`` stands for the layer numbers.

    Values: ``column`` (n), ``row`` (k), ``replicated``. Raises BadInput for a degree below 2 or a model whose blocks
    cannot be traced.
    """
    from ahp.search.slice_model import slice_model

    return slice_model(graph, tensor_parallel_degree).by_module()
