"""Activations between two stages of different width: each rank sends each piece straight to the rank that needs it.

A replica's micro-batch is [rows, sequence, hidden]. Each context rank sends its part of the sequence to the context rank of the same number: the rows
of its shard and, of each row, the positions of its tensor rank. With sequence parallelism a rank holds no more than that; else it cuts out its part
before it sends, and a receiver gathers the parts of its tensor group. So every element crosses the cut once, however many ranks hold it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ahp.plan import Parallelism
from ahp.runtime.tensor.collectives import cut_sequence, gather_sequence
from ahp.stage_place import Width


@dataclass(frozen=True)
class Piece:
    """A block of hidden states that one rank sends to another, or receives from it."""

    peer: int
    """The other rank."""
    rows: range
    positions: range
    """Where the piece is in this rank's part of the hidden states."""

    def of(self, part: torch.Tensor) -> torch.Tensor:
        """The piece as a view of the part."""
        return part[self.rows.start : self.rows.stop, self.positions.start : self.positions.stop]


@dataclass(frozen=True)
class Place:
    """A rank's place among the ranks of its stage that compute one replica."""

    shard: int
    shards: int
    tensor: int
    tensors: int

    def part(self, rows: int, positions: int) -> tuple[range, range]:
        """Rows and positions of a micro-batch that the rank has; the degrees divide them."""
        return _share(self.shard, self.shards, rows), _share(self.tensor, self.tensors, positions)


def _share(number: int, count: int, size: int) -> range:
    each = size // count
    return range(number * each, (number + 1) * each)


def pieces(own: Place, peers: Sequence[Sequence[int]], rows: int, positions: int) -> list[Piece]:
    """The pieces that ``own`` exchanges with the ranks of the stage on the other side, in the order of their shard and tensor rank.

    ``peers``: those ranks, [shard][tensor rank]. ``rows``, ``positions``: how many a replica's micro-batch has.
    """
    found = []
    mine = own.part(rows, positions)
    for shard, row in enumerate(peers):
        for tensor, peer in enumerate(row):
            theirs = Place(shard, len(peers), tensor, len(row)).part(rows, positions)
            shared = [_common(a, b) for a, b in zip(mine, theirs, strict=True)]
            if all(shared):
                found.append(Piece(peer, *(_within(part, whole) for part, whole in zip(shared, mine, strict=True))))
    return found


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _within(part: range, whole: range) -> range:
    return range(part.start - whole.start, part.stop - whole.start)


class Border:
    """One side of a cut between stages of different width, on one rank."""

    def __init__(
        self, found: list[Piece], part: tuple[int, ...], dtype: torch.dtype, group: dist.ProcessGroup | None
    ) -> None:
        """``part``: shape of this rank's part [rows, positions, hidden]; ``group``: its tensor group if each rank there holds all positions."""
        self.pieces, self.part, self.dtype, self.group = found, part, dtype, group

    @property
    def peers(self) -> list[int]:
        """The other rank of each piece."""
        return [piece.peer for piece in self.pieces]

    def empty(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Empty tensors for the pieces."""
        rest = self.part[2:]
        return tuple(
            torch.empty((len(piece.rows), len(piece.positions), *rest), dtype=self.dtype, device=device)
            for piece in self.pieces
        )

    def join(self, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The hidden states that a stage takes, from the received pieces."""
        whole: torch.Tensor = _Join.apply(self.pieces, self.part, *parts)
        return whole if self.group is None else gather_sequence(whole, self.group)

    def split(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The pieces to send, from the hidden states that a stage returns."""
        part = hidden if self.group is None else cut_sequence(hidden, self.group)
        return _Split.apply(self.pieces, part)  # type: ignore[no-any-return]


def by_micro_batch(rows: torch.Tensor, widths: Sequence[Width], own: Parallelism) -> torch.Tensor:
    """A rank's rows [rows, sequence], reordered by micro-batch.

    Another stage may divide a micro-batch over more shards, each with consecutive rows. One shard here then has the rows of several shards
    there, and each micro-batch takes some rows of each. ``widths``: of all pipeline ranks; ``own``: the layout of this pipeline rank.
    """
    parts = math.lcm(*(shard for shard, _ in widths)) // own.data_parallel_shard_degree
    if parts == 1:
        return rows
    apart = rows.view(parts, -1, own.micro_batch_size // parts, *rows.shape[1:])
    return apart.transpose(0, 1).reshape(rows.shape)


def _joined(found: list[Piece], shape: tuple[int, ...], parts: Sequence[torch.Tensor]) -> torch.Tensor:
    whole = parts[0].new_empty(shape)
    for piece, part in zip(found, parts, strict=True):
        piece.of(whole).copy_(part)
    return whole


def _split(found: list[Piece], part: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Pieces that are contiguous and have their own memory, as messages need."""
    return tuple(piece.of(part).clone(memory_format=torch.contiguous_format) for piece in found)


class _Join(torch.autograd.Function):
    """Joins pieces into a part; backward splits the part's gradient into pieces."""

    @staticmethod
    def forward(ctx: Any, found: list[Piece], shape: tuple[int, ...], *parts: torch.Tensor) -> torch.Tensor:
        ctx.found = found
        return _joined(found, shape, parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *_split(ctx.found, gradients[0])


class _Split(torch.autograd.Function):
    """Splits a part into pieces; backward joins the gradients of the pieces."""

    @staticmethod
    def forward(ctx: Any, found: list[Piece], part: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.found, ctx.shape = found, part.shape
        return _split(found, part)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, _joined(ctx.found, ctx.shape, gradients)
