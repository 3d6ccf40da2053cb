"""What passes a cut between stages of unlike width: pieces, each from the one rank that has it to the one that needs it.

A micro-batch of a replica is [rows, sequence, hidden]; every context rank hands its own part of the sequence to the one of the same number. Of
that a rank has the rows of its shard, and of a row the positions of its tensor rank: with sequence parallelism that is all that it has, else it cuts its part out before it sends, and a receiver gathers the parts
of its tensor group. So every element crosses the cut once, however many ranks hold it on either side.
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
    """What one rank hands another one, or gets from it."""

    peer: int
    """The other rank."""
    rows: range
    positions: range
    """Of the part of the hidden states that this rank has: which it is."""

    def of(self, part: torch.Tensor) -> torch.Tensor:
        """A view."""
        return part[self.rows.start : self.rows.stop, self.positions.start : self.positions.stop]


@dataclass(frozen=True)
class Place:
    """A rank among those of its stage that compute one replica."""

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
    """What ``own`` shares with each rank of the stage on the other side, by shard and tensor rank: in the order of these on both sides.

    ``peers``: those ranks, [shard][tensor rank]. ``rows``, ``positions``: of the micro-batch of a replica.
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
    """One side of such a cut, on one rank."""

    def __init__(
        self, found: list[Piece], part: tuple[int, ...], dtype: torch.dtype, group: dist.ProcessGroup | None
    ) -> None:
        """``part``: shape of this rank's part [rows, positions, hidden]; ``group``: its tensor group, where each of them holds all positions."""
        self.pieces, self.part, self.dtype, self.group = found, part, dtype, group

    @property
    def peers(self) -> list[int]:
        """Of each piece."""
        return [piece.peer for piece in self.pieces]

    def empty(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Room for the pieces."""
        rest = self.part[2:]
        return tuple(
            torch.empty((len(piece.rows), len(piece.positions), *rest), dtype=self.dtype, device=device)
            for piece in self.pieces
        )

    def join(self, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The hidden states that a stage takes, from the pieces that came."""
        whole: torch.Tensor = _Join.apply(self.pieces, self.part, *parts)
        return whole if self.group is None else gather_sequence(whole, self.group)

    def split(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The pieces that go, of the hidden states that a stage gives."""
        part = hidden if self.group is None else cut_sequence(hidden, self.group)
        return _Split.apply(self.pieces, part)  # type: ignore[no-any-return]


def by_micro_batch(rows: torch.Tensor, widths: Sequence[Width], own: Parallelism) -> torch.Tensor:
    """A rank's rows [rows, sequence] in the order of its micro-batches.

    Another stage may divide a micro-batch over more shards, each of which has rows that follow each other; what is one shard here has then
    those of several, and each micro-batch takes some of each. ``widths``: of all pipeline ranks; ``own``: the layout as this one has it.
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
    """Each contiguous and with memory of its own, as messages need it."""
    return tuple(piece.of(part).clone(memory_format=torch.contiguous_format) for piece in found)


class _Join(torch.autograd.Function):
    """A part from its pieces; in backward the pieces of its gradient."""

    @staticmethod
    def forward(ctx: Any, found: list[Piece], shape: tuple[int, ...], *parts: torch.Tensor) -> torch.Tensor:
        ctx.found = found
        return _joined(found, shape, parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *_split(ctx.found, gradients[0])


class _Split(torch.autograd.Function):
    """The pieces of a part; in backward its gradient from theirs."""

    @staticmethod
    def forward(ctx: Any, found: list[Piece], part: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.found, ctx.shape = found, part.shape
        return _split(found, part)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, _joined(ctx.found, ctx.shape, gradients)
