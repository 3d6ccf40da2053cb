"""How the tokens of a micro-batch are cut into chunks for the loss: one rule for runtime and forecast."""

from __future__ import annotations

from itertools import pairwise

Chunk = tuple[slice, slice]
"""Rows and positions, as an index of [batch, sequence]."""


def chunks(batch: int, sequence: int, most_tokens: int) -> list[Chunk]:
    """Chunks of at most ``most_tokens`` tokens, as even as possible: some whole rows, or else a part of one row."""
    if most_tokens >= sequence:
        return [(rows, slice(None)) for rows in _even(batch, most_tokens // sequence)]
    return [(slice(row, row + 1), part) for row in range(batch) for part in _even(sequence, most_tokens)]


def num_chunks(batch: int, sequence: int, most_tokens: int) -> int:
    """The number of ``chunks``, without listing them: chunks of one token would be too many."""
    if most_tokens >= sequence:
        return -(-batch // (most_tokens // sequence))
    return batch * -(-sequence // most_tokens)


def _even(length: int, most: int) -> list[slice]:
    count = -(-length // most)
    ends = [length * i // count for i in range(count + 1)]
    return [slice(a, b) for a, b in pairwise(ends)]
