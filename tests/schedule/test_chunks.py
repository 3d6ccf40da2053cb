"""Chunks of tokens cover a micro-batch once, and none is larger than asked."""

import pytest

from ahp.schedule.chunks import chunks, num_chunks


@pytest.mark.parametrize("tokens", [1, 3, 8, 9, 16, 17, 40, 1000])
def test_every_token_is_in_one_chunk(tokens: int) -> None:
    batch, sequence = 5, 8
    found = [
        [(row, column) for row in range(batch)[rows] for column in range(sequence)[columns]]
        for rows, columns in chunks(batch, sequence, tokens)
    ]
    assert sorted(token for chunk in found for token in chunk) == [
        (row, column) for row in range(batch) for column in range(sequence)
    ]
    assert max(map(len, found)) <= tokens
    assert num_chunks(batch, sequence, tokens) == len(found)


def test_chunks_are_even() -> None:
    assert chunks(1, 10, 9) == [(slice(0, 1), slice(0, 5)), (slice(0, 1), slice(5, 10))]
    assert [rows for rows, _ in chunks(5, 8, 33)] == [slice(0, 2), slice(2, 5)]
