"""Where the parts of a tensor lie on the tensor-parallel axis, and the terms in which operators' rules describe this."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every rank holds the whole tensor."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank holds a summand of the tensor."""


@dataclass(frozen=True, slots=True)
class Copied:
    """Every rank holds the whole tensor, and a summand of its gradient: these are added up where it was made from a replicated one."""


@dataclass(frozen=True, slots=True)
class Split:
    """Every rank holds an equal part of each segment of ``dim``.

    One segment is the plain case. Several are a packed projection such as [q | k | v]: each segment is split by
    itself, and a rank's part is [q_r | k_r | v_r].
    """

    dim: int
    segments: tuple[int, ...]
    tokens: bool = False
    """The split began at the tokens of the block's input (m, or the batch), not at the columns or rows of a weight."""

    def at(self, dim: int, segments: tuple[int, ...] | None = None) -> Split:
        """The same split at the dim where an operator puts it."""
        return replace(self, dim=dim, segments=self.segments if segments is None else segments)


Placement = Replicated | Partial | Copied | Split
R, P, C = Replicated(), Partial(), Copied()


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run an operator: the placement that each tensor input must have, and the one that every output gets."""

    inputs: tuple[Placement, ...]
    output: Placement
    adds_bias_after_sum: bool = False
    """The operator is a row-split linear with a bias: the sum over ranks comes first, then the bias, once."""

    @property
    def divides(self) -> bool:
        """Whether the ranks share the operator's work."""
        return self.output not in (R, C) or self.adds_bias_after_sum

    @property
    def reads_whole_in_parts(self) -> bool:
        """Whether a whole input is read by work that the ranks share, so that each has a summand of its gradient."""
        return self.output not in (R, C)


@dataclass(frozen=True)
class Tokens:
    """The dims of a block's input [batch, sequence, hidden] that may be split instead of a weight's."""

    batch: int
    sequence: int
    dims: tuple[int, ...]
    """Which may be split: 0 (the batch), 1 (the sequence, m)."""

    def splits(self, dim: int, size: int) -> Iterator[Split]:
        """Splits of a tensor's ``dim`` into parts of the tokens: as batch or sequence, or as both merged with later dims."""
        if 0 in self.dims and size % self.batch == 0:
            yield Split(dim, (size,), tokens=True)
        if 1 in self.dims and size == self.sequence:
            yield Split(dim, (size,), tokens=True)
        if 1 in self.dims and size % (self.batch * self.sequence) == 0:
            yield Split(dim, (size // self.batch,) * self.batch, tokens=True)  # each sequence after another
            yield Split(dim, (size,), tokens=True)  # each position of all sequences after another

    def may_start(self, split: Split, shape: tuple[int, ...]) -> bool:
        """Whether a whole tensor of this shape may be cut like this: its dim is exactly the batch, the sequence or both merged."""
        if not split.tokens or split.dim > 1:
            return False
        size = shape[split.dim]
        if len(split.segments) == 1 and size == self.batch and split.dim == 0:
            return 0 in self.dims
        return (
            1 in self.dims
            and size in (self.sequence, self.batch * self.sequence)
            and split.segments[0] == self.sequence
        )


@dataclass(frozen=True)
class Context:
    """What the rules need to know besides the node."""

    degree: int
    packings: dict[int, frozenset[tuple[int, ...]]] = field(default_factory=dict)
    """The segment lists into which some operator of the graph cuts a dim, keyed by its size."""
    tokens: Tokens | None = None
    """None = tokens are never split."""

    def splits(self, dim: int, size: int) -> Iterator[Split]:
        """Every split of a dim that the degree divides."""
        for segments in [(size,), *sorted(self.packings.get(size, frozenset()) - {(size,)})]:
            if self.divides(segments):
                yield Split(dim, segments)
        yield from self.token_splits(dim, size)

    def splits_of(self, shape: Sequence[int]) -> Iterator[Split]:
        """Every split of every dim of a tensor, the first dim's first."""
        for dim, size in enumerate(shape):
            yield from self.splits(dim, size)

    def token_splits(self, dim: int, size: int) -> Iterator[Split]:
        """The splits of a dim that hold parts of the tokens."""
        for split in self.tokens.splits(dim, size) if self.tokens is not None else ():
            if self.divides(split.segments):
                yield split

    def divides(self, segments: tuple[int, ...]) -> bool:
        return all(segment % self.degree == 0 for segment in segments)


def args_of(node: Node) -> tuple[Any, ...]:
    """The positional arguments of a call; the operator's rule knows what each can be."""
    return node.args


def kwargs_of(node: Node) -> dict[str, Any]:
    """The keyword arguments of a call."""
    return node.kwargs


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of a call, given by position or by name."""
    return args_of(node)[position] if len(args_of(node)) > position else kwargs_of(node).get(name, default)


def tensor_inputs(node: Node) -> list[Node]:
    """The tensor arguments of a call in order, list arguments (cat, stack) flattened."""
    found: list[Node] = []
    map_arg((args_of(node), kwargs_of(node)), lambda n: found.append(n))
    return found


def shape_of(node: Node) -> tuple[int, ...]:
    """Global shape of a node's (first) output."""
    value = node.meta["val"]
    if isinstance(value, (tuple, list)):
        value = value[0]
    return tuple(value.shape)


def numel_of(node: Node) -> int:
    """Elements of a node's (first) output."""
    return math.prod(shape_of(node))


def is_tensor(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) or (
        isinstance(value, (tuple, list)) and len(value) > 0 and isinstance(value[0], torch.Tensor)
    )
