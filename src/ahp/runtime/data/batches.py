"""Sequences cut from documents, in an order that is a function of (seed, step) alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from ahp.errors import BadInput, bad_input
from ahp.job import Job, Packing
from ahp.runtime.data import tokenizer as tokenizers
from ahp.runtime.data.corpus import Corpus

NOT_SCORED = -100
"""The label that cross-entropy leaves out (torch's default ``ignore_index``)."""


SCORED_SHARE, HIDDEN_SHARE, REPLACED_SHARE = 0.15, 0.8, 0.1
"""Of the tokens, those that a masked model must tell; of these, those hidden and those replaced by any token, the rest
stay as they are (BERT, arXiv 1810.04805, section 3.1)."""
MASK_STREAM = 1 << 63
"""Added to the row's number where it seeds the masks, so that no epoch's permutation shares a stream with them."""
PADDING = 0
"""The token that fills a padded sequence: any would do, since nothing before it looks at it and it is not scored."""


@dataclass(frozen=True)
class Masking:
    """How tokens are hidden from a masked language model."""

    token: int
    """Id of the token that hides another."""
    vocab_size: int
    """Tokens that may stand in for another."""


class Batches:
    """The global batch of every step: ``batches(step)`` gives it for step 0, 1, 2, ...; ``batches(step, rows)`` a part.

    ``packed``: documents are concatenated and cut into sequences of ``sequence_length``; what is left at the end is not
    used. ``padded``: a sequence holds one document, or a part of one that is longer, and is filled up.
    Every epoch is a permutation of all sequences, drawn from (seed, epoch). Nothing is remembered between steps, and of
    the tokens only those of the rows that are asked for are read. ``named`` is what errors call the text.
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
    ) -> None:
        self.corpus = corpus
        self.masking = masking
        self.sequence_length = sequence_length
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.document_mask = document_mask
        self.first_rows: np.ndarray | None = None
        """int64 [num_documents + 1], padded only: number of the first sequence of each document, and of all."""
        if packing == "padded":
            lengths = np.diff(corpus.starts, append=len(corpus.tokens))
            self.first_rows = np.concatenate([[0], np.cumsum(-(-lengths // sequence_length))])
            self.num_sequences = int(self.first_rows[-1])
        else:
            self.num_sequences = len(corpus.tokens) // sequence_length
        if self.num_sequences < global_batch_size:
            raise BadInput(
                f"{named}: its {len(corpus.tokens)} tokens make {self.num_sequences} sequences of job.sequence_length "
                f"{sequence_length}, fewer than one batch of job.global_batch_size {global_batch_size}; give more text or make "
                "either smaller"
            )
        # The two epochs that a batch may touch; a cache of a pure function, not a state.
        self._permutation = lru_cache(maxsize=2)(self._draw)

    def __call__(self, step: int, rows: range | None = None) -> dict[str, torch.Tensor]:
        """``input_ids`` and ``labels``, int64 [rows, sequence_length]; ``rows`` of the global batch, None = all.

        A label is the token at its own place (models shift them inside), and -100 at the first token of a document
        (it cannot be foretold from the document before it), at tokens of prompts and at padding. For a masked model only
        hidden tokens have a label. With ``document_mask`` also ``position_ids``, alike: of each token the place in its document, as
        far as that lies in the sequence.
        """
        wanted = range(self.global_batch_size) if rows is None else rows
        pairs = [self._row(step, row) for row in wanted]
        batch = {
            "input_ids": torch.from_numpy(np.stack([ids for ids, _ in pairs])),
            "labels": torch.from_numpy(np.stack([labels for _, labels in pairs])),
        }
        if self.document_mask:
            places = [self._positions(self.sequence(step, row)) for row in wanted]
            batch["position_ids"] = torch.from_numpy(np.stack(places))
        return batch

    def _row(self, step: int, row: int) -> tuple[np.ndarray, np.ndarray]:
        input_ids, labels = self._tokens(self.sequence(step, row))
        if self.masking is None:
            return input_ids, labels
        return self._masked(input_ids, step * self.global_batch_size + row, self.masking)

    def _masked(self, ids: np.ndarray, number: int, masking: Masking) -> tuple[np.ndarray, np.ndarray]:
        stream = _stream(self.seed, MASK_STREAM + number)
        scored = stream.random(ids.shape) < SCORED_SHARE
        fate = stream.random(ids.shape)
        anything = stream.integers(masking.vocab_size, size=ids.shape)
        hidden = scored & (fate < HIDDEN_SHARE)
        replaced = scored & (fate >= HIDDEN_SHARE) & (fate < HIDDEN_SHARE + REPLACED_SHARE)
        input_ids = np.where(hidden, masking.token, np.where(replaced, anything, ids))
        return input_ids, np.where(scored, ids, NOT_SCORED)

    def sequence(self, step: int, row: int) -> int:
        """Which sequence of the corpus is row ``row`` of the batch of ``step``."""
        epoch, place = divmod(step * self.global_batch_size + row, self.num_sequences)
        return int(self._permutation(epoch)[place])

    def _draw(self, epoch: int) -> np.ndarray:
        return _stream(self.seed, epoch).permutation(self.num_sequences)

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
        """Of each token of a packed sequence; what is left of a document that began in the one before counts from 0 too."""
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
        """First and last token of a sequence in the corpus."""
        if self.first_rows is None:
            return sequence * self.sequence_length, (sequence + 1) * self.sequence_length
        document = int(np.searchsorted(self.first_rows, sequence, side="right")) - 1
        starts = self.corpus.starts
        end = int(starts[document + 1]) if document + 1 < len(starts) else len(self.corpus.tokens)
        first = int(starts[document]) + (sequence - int(self.first_rows[document])) * self.sequence_length
        return first, min(first + self.sequence_length, end)


def batches_for(job: Job, corpus: Corpus, *, masked: bool) -> Batches:
    """The batches that a job trains on. Raises BadInput when the text is shorter than one, or does not suit the model."""
    first = _first_held_out(job, corpus)
    trained = corpus if first == len(corpus.tokens) else corpus.part(0, first)
    return _batches(job, trained, masked, f"job.data = {job.data!r}")


def validation_batches_for(job: Job, corpus: Corpus, other: Corpus | None, *, masked: bool) -> Batches | None:
    """The batches of the text that a job holds out: the last of ``corpus``, or ``other``; None for neither.

    Raises BadInput as ``batches_for`` does.
    """
    if job.validation is None:
        return None
    if other is None:
        other = corpus.part(_first_held_out(job, corpus), len(corpus.tokens))
    return _batches(job, other, masked, f"job.validation = {job.validation!r}")


def _first_held_out(job: Job, corpus: Corpus) -> int:
    """The token from which on a corpus is not trained on: where the last documents begin, by the share that the job holds out.

    Where that share is no document, or every document, the last tokens are held out.
    """
    count, size = len(corpus.starts), len(corpus.tokens)
    if not isinstance(job.validation, float):
        return size
    documents = round(job.validation * count)
    return int(corpus.starts[count - documents]) if 0 < documents < count else size - round(job.validation * size)


def _batches(job: Job, corpus: Corpus, masked: bool, named: str) -> Batches:
    masking = None
    if masked:
        if job.packing == "padded":
            rule = "a masked language model would look at the padding; it reads documents one after the other"
            raise bad_input("job.packing", job.packing, rule, ["packed"])
        if corpus.scored is not None:
            rule = "a masked language model has no prompt to read; give it plain text (.txt, or rows with a key text)"
            raise BadInput(f"{named}: {rule}")
        tokenizer = corpus.tokenizer()
        masking = Masking(tokenizers.mask(tokenizer), tokenizer.get_vocab_size())
    return Batches(
        corpus,
        sequence_length=job.sequence_length,
        global_batch_size=job.global_batch_size,
        seed=job.seed,
        masking=masking,
        packing=job.packing,
        document_mask=job.document_mask,
        named=named,
    )


def _stream(seed: int, number: int) -> np.random.Generator:
    """Random numbers that depend on the two alone; as uint64, because a list with large numbers becomes floats."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, number], dtype=np.uint64)))
