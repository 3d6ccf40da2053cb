"""The training and validation batches of a job: from one text, or from a mixture."""

from __future__ import annotations

from collections.abc import Sequence

from ahp.errors import BadInput, bad_input
from ahp.job import Job
from ahp.runtime.data import tokenizer as tokenizers
from ahp.runtime.data.batches import Batches, Masking
from ahp.runtime.data.corpus import Corpus
from ahp.runtime.data.mixture import Mixture


def fingerprint_of(corpora: Sequence[Corpus]) -> str:
    """The fingerprint of all texts of a job."""
    return "+".join(corpus.fingerprint for corpus in corpora)


def batches_for(job: Job, corpora: Sequence[Corpus], *, masked: bool) -> Batches | Mixture:
    """The batches that a job trains on. ``corpora``: one for each of its texts. Raises BadInput if one is too short, or does not suit the model."""
    trained = []
    for corpus in corpora:
        first = _first_held_out(job, corpus)
        trained.append(corpus if first == len(corpus.tokens) else corpus.part(0, first))
    return _of_texts(job, trained, masked)


def validation_batches_for(
    job: Job, corpora: Sequence[Corpus], other: Corpus | None, *, masked: bool
) -> Batches | Mixture | None:
    """The batches of the text that a job holds out: the end of each of ``corpora``, or ``other``; None if it holds out none.

    Raises BadInput like ``batches_for``.
    """
    if job.validation is None:
        return None
    if other is not None:
        return _batches(job, other, masked, f"job.validation = {job.validation!r}")
    held_out = [corpus.part(_first_held_out(job, corpus), len(corpus.tokens)) for corpus in corpora]
    return _of_texts(job, held_out, masked, f"job.validation = {job.validation!r}")


def _of_texts(job: Job, corpora: Sequence[Corpus], masked: bool, named: str | None = None) -> Batches | Mixture:
    """``named``: the text's name in errors, None = its name in ``job.data``."""
    if isinstance(job.data, str):
        return _batches(job, corpora[0], masked, named or f"job.data = {job.data!r}")
    parts = []
    for stream, (text, corpus) in enumerate(zip(job.data, corpora, strict=True), 1):
        of_text = f"job.data = {text.path!r}" if named is None else f"{named} of {text.path!r}"
        parts.append(_batches(job, corpus, masked, of_text, stream))
    weights = [text.weight for text in job.data]
    return Mixture(parts, weights, seed=job.seed, global_batch_size=job.global_batch_size)


def _first_held_out(job: Job, corpus: Corpus) -> int:
    """The first held-out token of a corpus: where the last documents begin, by the share that the job holds out.

    If that share is no document, or every document, the last tokens are held out.
    """
    count, size = len(corpus.starts), len(corpus.tokens)
    if not isinstance(job.validation, float):
        return size
    documents = round(job.validation * count)
    return int(corpus.starts[count - documents]) if 0 < documents < count else size - round(job.validation * size)


def _batches(job: Job, corpus: Corpus, masked: bool, named: str, stream: int = 0) -> Batches:
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
        stream=stream,
    )
