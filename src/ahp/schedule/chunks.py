"""How the tokens of a micro-batch are cut into chunks for the loss: one rule for runtime and forecast."""

from __future__ import annotations

from itertools import pairwise

Chunk = tuple[slice, slice]
"""Rows and positions, as an index of [batch, sequence]."""


def chunks(batch: int, sequence: int, most_tokens: int) -> list[Chunk]:
    """Chunks of at most so many tokens, as even as can be: some rows whole, or else a part of one row."""
    if most_tokens >= sequence:
        return [(rows, slice(None)) for rows in _even(batch, most_tokens // sequence)]
    return [(slice(row, row + 1), part) for row in range(batch) for part in _even(sequence, most_tokens)]


def num_chunks(batch: int, sequence: int, most_tokens: int) -> int:
    """How many ``chunks`` there are; of a token each these are too many to list."""
    if most_tokens >= sequence:
        return -(-batch // (most_tokens // sequence))
    return batch * -(-sequence // most_tokens)


def _even(length: int, most: int) -> list[slice]:
    count = -(-length // most)
    ends = [length * i // count for i in range(count + 1)]
    return [slice(a, b) for a, b in pairwise(ends)]
