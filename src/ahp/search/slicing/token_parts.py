"""Whether a graph computes each token separately, except in attention: then ranks can hold parts of each sequence.

By the rules of slicing (``ahp.search.slicing.strategies``), every operator must be able to work on separate tokens, one on each of
as many ranks as tokens; only attention reads all tokens. Routers put the tokens of all sequences in one row and sort them to their
experts. What happens to such a row is not checked: ``ahp.graph.sequences`` tells whether sequences mix.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch.fx import Node

from ahp.errors import BadInput
from ahp.graph.capture import Capture
from ahp.graph.sequences import mixes_along
from ahp.search.slicing.aliases import writes
from ahp.search.slicing.placement import (
    Context,
    P,
    Placement,
    R,
    Split,
    Tokens,
    args_of,
    argument,
    is_tensor,
    kwargs_of,
    shape_of,
    tensor_inputs,
)
from ahp.search.slicing.strategies import is_known, strategies
from ahp.search.slicing.strategies.elements import LIKE

aten = torch.ops.aten
ATTENTION = aten.scaled_dot_product_attention.default

BATCH = 2
"""Sequences to trace with: with only one, a row of all tokens would look like a sequence."""

UNIFORM = {
    aten.zeros.default, aten.ones.default, aten.full.default, aten.empty.memory_format,
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default, aten.full_like.default,
}  # fmt: skip
"""Operators that make tensors of one value, of which any part is like the whole."""


VALUES_ALONE = (aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor)
"""Operators that write a part of a tensor (``x[..., :4] = y``)."""


class Special(Enum):
    """Places of tensors that are neither whole nor in parts by token."""

    ROW = "holds the tokens of all sequences in a row, or was computed from such a tensor"
    MADE = "was computed from the sequence's length, so it would differ for a part"


ROW, MADE = Special.ROW, Special.MADE
Place = Placement | Special


@dataclass(frozen=True)
class Attention:
    """The attention calls of a graph."""

    heads: tuple[int, ...]
    """Query heads of each call."""
    drops: bool
    trainable_mask: bool


@dataclass(frozen=True)
class TokenParts:
    """How one kind of block is run on a part of the tokens."""

    dims: dict[int, int | None]
    """The dim that holds tokens, of each tensor in the block's arguments, keyed by the number of that leaf; None where the tensor is
    whole: masks, and tensors without tokens."""
    attention: Attention


def traced_length(shapes: set[int], most: int) -> int:
    """A length near ``most`` that is no size of the model, nor half of one: then a dim of this length holds tokens. A prime, because
    computed sizes are products."""
    for length in range(most, 2, -1):
        if all(length % d for d in range(2, int(length**0.5) + 1)) and not {length, BATCH * length} & shapes:
            return length
    raise BadInput(f"a sequence_length of {most} is too short to share")


def token_parts(capture: Capture | BadInput, length: int) -> TokenParts:
    """How a block, traced with ``BATCH`` sequences of ``length`` tokens, runs on a part of the tokens.

    Raises BadInput when it mixes tokens other than by attention, or computes something from their positions.
    """
    if isinstance(capture, BadInput):
        raise capture
    dims = tuple(_token_dim(shape_of(node), length) for node in capture.activation_nodes())
    check_tokens_apart(capture, dims, length)
    calls = [node for node in capture.nodes if node.target is ATTENTION]
    trainable = capture.with_gradient()
    return TokenParts(
        dict(zip(capture.places, dims, strict=True)),
        Attention(
            heads=tuple(shape_of(args_of(node)[0])[1] for node in calls),
            drops=any(argument(node, 4, "dropout_p", 0.0) for node in calls),
            trainable_mask=any(argument(node, 3, "attn_mask") in trainable for node in calls),
        ),
    )


def _token_dim(shape: tuple[int, ...], length: int) -> int | None:
    """The dim of a tensor that holds tokens, the only one of the sequence's length; None for masks, which have two."""
    dims = [dim for dim, size in enumerate(shape) if size == length]
    return dims[0] if len(dims) == 1 else None


def check_tokens_apart(capture: Capture, dims: tuple[int | None, ...], length: int) -> None:
    """Raise BadInput, which names the operator, when a graph mixes tokens. ``dims``: of each activation, as in ``TokenParts``."""
    context = Context(length, tokens=Tokens(BATCH, length, (1,)))
    placed: dict[Node, Place] = {node: R for node in capture.nodes if node.op in ("placeholder", "get_attr")}
    for node, dim in zip(capture.activation_nodes(), dims, strict=True):
        placed[node] = R if dim is None else Split(dim, (length,), tokens=True)
    for node in capture.nodes:
        if node.op == "call_function":
            inputs = [placed[i] for i in tensor_inputs(node)]
            place = _placed(node, inputs, context)
            if node.target is ATTENTION and inputs[3:] == [MADE]:
                raise BadInput(
                    "a block makes the mask of its attention from the sequence's length, so it would differ for a part; is_causal=True, or a mask "
                    "that the model gives its blocks, does not"
                )
            if place is None and not is_known(node):
                raise BadInput(
                    f"{node.target} has no rule that says whether it reads other tokens than its own, so it does not run on a part of the sequence"
                )
            if place is None:
                raise BadInput(
                    f"{node.target} reads other tokens than its own, or uses their positions, so it cannot run on "
                    "a part of the sequence; only attention may, as torch.nn.functional.scaled_dot_product_attention"
                )
            placed[node] = place


def _placed(node: Node, inputs: list[Place], context: Context) -> Place | None:
    """Where the output of a call lies; None when it cannot be made of parts."""
    length = context.degree
    if not is_tensor(node):
        return R
    if ROW in inputs:
        dim = _token_dim(shape_of(node), length)
        return ROW if dim is None else Split(dim, (length,), tokens=True)
    if all(place in (R, MADE) for place in inputs):
        return MADE if MADE in inputs else _made(node, inputs, length)
    if node.target is ATTENTION:
        return _attended(inputs, length)
    if node.target in UNIFORM - LIKE:
        return _made(node, inputs, length)
    if writes(node) and node.target in VALUES_ALONE and set(inputs[1:]) <= {R, inputs[0]}:
        return inputs[0]
    for strategy in strategies(node, context):
        if strategy.inputs == tuple(inputs) and isinstance(strategy.output, Split):
            return strategy.output
        if strategy.inputs == tuple(inputs) and strategy.output == P and node.meta["val"].is_floating_point():
            return None  # adds up over tokens
    rows = [place for place in inputs if isinstance(place, Split) and len(place.segments) > 1]
    return ROW if rows and not _mixes(node, rows[0].dim) and not _adds_up(node, inputs) else None


def _adds_up(node: Node, inputs: list[Place]) -> bool:
    """Whether a matrix product adds up over tokens."""
    if node.target not in (aten.matmul.default, aten.mm.default, aten.bmm.default):
        return False
    a, b = inputs
    ranks = [len(shape_of(i)) for i in tensor_inputs(node)]
    return (isinstance(a, Split) and a.dim == ranks[0] - 1) or (isinstance(b, Split) and b.dim == max(ranks[1] - 2, 0))


def _mixes(node: Node, row: int) -> bool:
    """Whether values of all tokens in a row are combined. Whole numbers are allowed: routers count tokens."""
    source, func = tensor_inputs(node)[0].meta["val"], node.target
    if not isinstance(func, torch._ops.OpOverload) or not source.is_floating_point():
        return False
    return mixes_along(row, source, func, args_of(node), kwargs_of(node))


def _made(node: Node, inputs: list[Place], length: int) -> Place:
    """The place of what is made of whole tensors, of nothing, or of a part that gives it its type alone (``x.new_zeros``)."""
    shape = shape_of(node)
    if BATCH * length in shape:
        return ROW
    of_mask = any(place == R and length in shape_of(i) for i, place in zip(tensor_inputs(node), inputs, strict=True))
    if length not in shape or of_mask:
        return R
    dim = _token_dim(shape, length)
    alike = node.target in UNIFORM or node.target is aten.expand.default  # a dim that grew from 1
    return Split(dim, (length,), tokens=True) if dim is not None and alike else MADE


def _attended(inputs: list[Place], length: int) -> Place | None:
    """The place after attention of queries to keys and values of the same tokens, with a mask that is whole or split by keys; else None."""
    tokens = Split(2, (length,), tokens=True)
    masks = (R, Split(3, (length,), tokens=True))
    return tokens if inputs[:3] == [tokens] * 3 and all(place in masks for place in inputs[3:]) else None


def check_numbers(one: Capture | BadInput, other: Capture | BadInput) -> None:
    """Raises BadInput if a graph computes with a number made of the sequence's length, which differs on a part and is in no tensor.

    ``one``, ``other``: the same code, traced with sequences of two lengths.
    """
    if isinstance(one, BadInput) or isinstance(other, BadInput):
        return
    if [node.target for node in _calls(one)] != [node.target for node in _calls(other)]:
        raise BadInput(
            "other operators run for a sequence of another length, and a part of a sequence has another length"
        )
    for a, b in zip(_calls(one), _calls(other), strict=True):
        values = zip(_numbers(a, one), _numbers(b, other), strict=False)
        if any(type(x) is not type(y) or x != y for x, y in values):
            raise BadInput(
                f"{a.target} gets a number computed from the sequence's length, which would differ for a part"
            )


def _calls(capture: Capture) -> list[Node]:
    return [node for node in capture.nodes if node.op == "call_function"]


def _numbers(node: Node, capture: Capture) -> list[object]:
    """The numbers that an operator computes with, without sizes and positions of what it moves."""
    held = [_constant(i, capture) for i in node.all_input_nodes if i.op == "get_attr"]
    given = [x for x in (*args_of(node), *kwargs_of(node).values()) if isinstance(x, (bool, int, float))]
    computes = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
    fills = node.target in UNIFORM
    return [*held, *(x for x in given if computes or fills or isinstance(x, float))]


def _constant(node: Node, capture: Capture) -> object:
    """The value of a one-element tensor that the graph holds, else None."""
    held = getattr(capture.graph, str(node.target), None)
    plain = isinstance(held, torch.Tensor) and held.numel() == 1 and held.device.type != "meta"
    try:
        return held.item() if plain else None  # type: ignore[union-attr]
    except Exception:  # a tensor without data
        return None
