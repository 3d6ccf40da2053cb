"""Sequences cut from documents, in an order that depends only on (seed, step)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from ahp.errors import BadInput
from ahp.job import Packing
from ahp.runtime.data.corpus import Corpus

NOT_SCORED = -100
"""The label that cross-entropy ignores (torch's default ``ignore_index``)."""


SCORED_SHARE, HIDDEN_SHARE, REPLACED_SHARE = 0.15, 0.8, 0.1
"""Share of the tokens that a masked model must predict; shares of these that are hidden, and replaced by a random token. The
rest stay as they are (BERT, arXiv 1810.04805, section 3.1)."""
MASK_STREAM = 1 << 63
"""Added to a row's number to seed its masks, so that no epoch's permutation shares a stream with them."""
TEXT_STREAMS = 1 << 40
"""Number of epochs for which each text of a mixture has random streams."""
PADDING = 0
"""The token that fills a padded sequence: any token would do, since no token before it attends to it and it is not scored."""


@dataclass(frozen=True)
class Masking:
    """How tokens are hidden from a masked language model."""

    token: int
    """Id of the token that hides another."""
    vocab_size: int
    """Number of tokens that can replace another."""


Row = dict[str, np.ndarray]
"""int64 [sequence_length] for each key of a batch."""


class Batches:
    """The global batch of every step: ``batches(step)`` returns it for step 0, 1, 2, ...; ``batches(step, rows)`` a part of it.

    ``packed``: documents are concatenated and cut into sequences of ``sequence_length``; the rest at the end is not used.
    ``padded``: a sequence holds one document, or a part of a longer one, and is filled up.
    Every epoch is a permutation of all sequences, drawn from (seed, epoch). No state is kept between steps, and only the
    tokens of the requested rows are read. ``named`` is the text's name in errors.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        sequence_length: int,
        global_batch_size: int,
        seed: int,
        masking: Masking | None = None,
        packing: Packing = "packed",
        document_mask: bool = False,
        named: str = "job.data",
        stream: int = 0,
    ) -> None:
        """``stream``: the number of this text in a mixture, from 1; 0 = no mixture, so that the text must fill a batch."""
        self.stream = stream
        self.corpus = corpus
        self.masking = masking
        self.sequence_length = sequence_length
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.document_mask = document_mask
        self.first_rows: np.ndarray | None = None
        """int64 [num_documents + 1], padded only: the number of each document's first sequence, then that of all sequences."""
        if packing == "padded":
            lengths = np.diff(corpus.starts, append=len(corpus.tokens))
            self.first_rows = np.concatenate([[0], np.cumsum(-(-lengths // sequence_length))])
            self.num_sequences = int(self.first_rows[-1])
        else:
            self.num_sequences = len(corpus.tokens) // sequence_length
        if self.num_sequences < (1 if stream else global_batch_size):
            fewer = "" if stream else f", fewer than one batch of job.global_batch_size {global_batch_size}"
            raise BadInput(
                f"{named}: its {len(corpus.tokens)} tokens make {self.num_sequences} sequences of job.sequence_length "
                f"{sequence_length}{fewer}; give more text or make {'it' if stream else 'either'} smaller"
            )
        if corpus.scored is not None and not corpus.scored.any():
            raise BadInput(
                f"{named}: none of its tokens is scored, so there is nothing to learn (valid: rows with a text or a completion, or conversations "
                "with an answer of the role assistant)"
            )
        # The two epochs that a batch can touch; a cache of a pure function, not a state.
        self._permutation = lru_cache(maxsize=2)(self._draw)

    def __call__(self, step: int, rows: range | None = None) -> dict[str, torch.Tensor]:
        """``input_ids`` and ``labels``, int64 [rows, sequence_length]; ``rows`` of the global batch, None = all.

        A label is the token at its own place (models shift labels inside), and -100 at the first token of a document (the
        document before cannot predict it), at tokens of prompts and at padding. For a masked model only the drawn tokens
        (``SCORED_SHARE``) have a label. With ``document_mask`` also ``position_ids`` of the same shape: each token's place in
        the part of its document that lies in the sequence.
        """
        wanted = range(self.global_batch_size) if rows is None else rows
        first = step * self.global_batch_size
        return stacked([self.row(first + row, first + row) for row in wanted])

    def row(self, index: int, number: int) -> Row:
        """The ``index``-th sequence that is read from this text, from 0. ``number``: the row's number in the run, which seeds its masks."""
        sequence = self._sequence(index)
        input_ids, labels = self._tokens(sequence)
        if self.masking is not None:
            input_ids, labels = self._masked(input_ids, number, self.masking)
        found = {"input_ids": input_ids, "labels": labels}
        return found | {"position_ids": self._positions(sequence)} if self.document_mask else found

    def _masked(self, ids: np.ndarray, number: int, masking: Masking) -> tuple[np.ndarray, np.ndarray]:
        stream = random_stream(self.seed, MASK_STREAM + number)
        scored = stream.random(ids.shape) < SCORED_SHARE
        fate = stream.random(ids.shape)
        anything = stream.integers(masking.vocab_size, size=ids.shape)
        hidden = scored & (fate < HIDDEN_SHARE)
        replaced = scored & (fate >= HIDDEN_SHARE) & (fate < HIDDEN_SHARE + REPLACED_SHARE)
        input_ids = np.where(hidden, masking.token, np.where(replaced, anything, ids))
        return input_ids, np.where(scored, ids, NOT_SCORED)

    def _sequence(self, index: int) -> int:
        epoch, place = divmod(index, self.num_sequences)
        return int(self._permutation(epoch)[place])

    def _draw(self, epoch: int) -> np.ndarray:
        return random_stream(self.seed, self.stream * TEXT_STREAMS + epoch).permutation(self.num_sequences)

    def _tokens(self, sequence: int) -> tuple[np.ndarray, np.ndarray]:
        first, last = self._place(sequence)
        input_ids = np.full(self.sequence_length, PADDING, dtype=np.int64)
        labels = np.full(self.sequence_length, NOT_SCORED, dtype=np.int64)
        input_ids[: last - first] = self.corpus.tokens[first:last]
        labels[: last - first] = input_ids[: last - first]
        if self.corpus.scored is not None:
            labels[: last - first][~self.corpus.scored[first:last]] = NOT_SCORED
        labels[self._starts(first, last)] = NOT_SCORED
        return input_ids, labels

    def _positions(self, sequence: int) -> np.ndarray:
        """Positions of the tokens of a packed sequence; the rest of a document that began in the sequence before counts from 0 too."""
        places = np.arange(self.sequence_length)
        begun = np.zeros(self.sequence_length, dtype=np.int64)
        starts = self._starts(*self._place(sequence))
        begun[starts] = starts
        return places - np.maximum.accumulate(begun)

    def _starts(self, first: int, last: int) -> np.ndarray:
        """Where documents begin in the tokens ``first .. last``, counted from ``first``."""
        left, right = np.searchsorted(self.corpus.starts, [first, last])
        return self.corpus.starts[left:right] - first

    def _place(self, sequence: int) -> tuple[int, int]:
        """First token of a sequence in the corpus, and its end (exclusive)."""
        if self.first_rows is None:
            return sequence * self.sequence_length, (sequence + 1) * self.sequence_length
        document = int(np.searchsorted(self.first_rows, sequence, side="right")) - 1
        starts = self.corpus.starts
        end = int(starts[document + 1]) if document + 1 < len(starts) else len(self.corpus.tokens)
        first = int(starts[document]) + (sequence - int(self.first_rows[document])) * self.sequence_length
        return first, min(first + self.sequence_length, end)


def random_stream(seed: int, number: int) -> np.random.Generator:
    """Random numbers that depend only on ``seed`` and ``number``; as uint64, because a list with large numbers becomes floats."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, number], dtype=np.uint64)))


def stacked(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """Rows as a batch, int64 [rows, sequence_length]."""
    return {key: torch.from_numpy(np.stack([row[key] for row in rows])) for key in rows[0]}
