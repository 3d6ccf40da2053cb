"""Sequences packed from documents, in an order that is a function of (seed, step) alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from ahp.errors import bad_input
from ahp.runtime.data.corpus import Corpus

NOT_SCORED = -100
"""The label that cross-entropy leaves out (torch's default ``ignore_index``)."""


SCORED_SHARE, HIDDEN_SHARE, REPLACED_SHARE = 0.15, 0.8, 0.1
"""Of the tokens, those that a masked model must tell; of these, those hidden and those replaced by any token, the rest
stay as they are (BERT, arXiv 1810.04805, section 3.1)."""
MASK_STREAM = 1 << 63
"""Added to the step where it seeds the masks, so that no epoch's permutation shares a stream with them."""


@dataclass(frozen=True)
class Masking:
    """How tokens are hidden from a masked language model."""

    token: int
    """Id of the token that hides another."""
    vocab_size: int
    """Tokens that may stand in for another."""


class Batches:
    """The global batch of every step: ``batches(step)`` gives it for step 0, 1, 2, ...

    Documents are concatenated and cut into sequences of ``sequence_length``; what is left at the end is not used.
    Every epoch is a permutation of all sequences, drawn from (seed, epoch). Nothing is remembered between steps.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        sequence_length: int,
        global_batch_size: int,
        seed: int,
        masking: Masking | None = None,
    ) -> None:
        self.corpus = corpus
        self.masking = masking
        self.sequence_length = sequence_length
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.num_sequences = len(corpus.tokens) // sequence_length
        if self.num_sequences < global_batch_size:
            raise bad_input(
                "job.data",
                str(len(corpus.tokens)) + " tokens",
                f"they make {self.num_sequences} sequences of job.sequence_length {sequence_length}, fewer than one "
                f"batch of job.global_batch_size {global_batch_size}; give more text or make either smaller",
            )
        # The two epochs that a batch may touch; a cache of a pure function, not a state.
        self._permutation = lru_cache(maxsize=2)(self._draw)

    def __call__(self, step: int) -> dict[str, torch.Tensor]:
        """``input_ids`` and ``labels``, int64 [global_batch_size, sequence_length].

        A label is the token at its own place (models shift them inside), and -100 at the first token of a document:
        it cannot be foretold from the document before it. For a masked model only hidden tokens have a label.
        """
        rows = [self._tokens(self.sequence(step, row)) for row in range(self.global_batch_size)]
        input_ids = torch.from_numpy(np.stack([ids for ids, _ in rows]))
        labels = torch.from_numpy(np.stack([labels for _, labels in rows]))
        if self.masking is not None:
            return self._masked(input_ids, step, self.masking)
        return {"input_ids": input_ids, "labels": labels}

    def _masked(self, ids: torch.Tensor, step: int, masking: Masking) -> dict[str, torch.Tensor]:
        stream = _stream(self.seed, MASK_STREAM + step)
        scored = torch.from_numpy(stream.random(ids.shape) < SCORED_SHARE)
        fate = torch.from_numpy(stream.random(ids.shape))
        anything = torch.from_numpy(stream.integers(masking.vocab_size, size=ids.shape))
        hidden = scored & (fate < HIDDEN_SHARE)
        replaced = scored & (fate >= HIDDEN_SHARE) & (fate < HIDDEN_SHARE + REPLACED_SHARE)
        input_ids = torch.where(hidden, masking.token, torch.where(replaced, anything, ids))
        return {"input_ids": input_ids, "labels": torch.where(scored, ids, NOT_SCORED)}

    def sequence(self, step: int, row: int) -> int:
        """Which sequence of the corpus is row ``row`` of the batch of ``step``."""
        epoch, place = divmod(step * self.global_batch_size + row, self.num_sequences)
        return int(self._permutation(epoch)[place])

    def _draw(self, epoch: int) -> np.ndarray:
        return _stream(self.seed, epoch).permutation(self.num_sequences)

    def _tokens(self, sequence: int) -> tuple[np.ndarray, np.ndarray]:
        first = sequence * self.sequence_length
        last = first + self.sequence_length
        input_ids = self.corpus.tokens[first:last].astype(np.int64)
        labels = input_ids.copy()
        left, right = np.searchsorted(self.corpus.starts, [first, last])
        labels[self.corpus.starts[left:right] - first] = NOT_SCORED
        return input_ids, labels


def _stream(seed: int, number: int) -> np.random.Generator:
    """Random numbers that depend on the two alone; as uint64, because a list with large numbers becomes floats."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, number], dtype=np.uint64)))
