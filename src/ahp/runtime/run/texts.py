"""Prepares the texts that a job is trained on, and checks them against the job before anything else of a run starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ahp.errors import bad_input
from ahp.plan import Plan
from ahp.runtime.data.corpus import Corpus, prepare, read
from ahp.runtime.data.text import refuse_missing
from ahp.runtime.data.tokenizer import tokenizer_of
from ahp.runtime.run import export_mark
from ahp.runtime.run.progress import progress, say

if TYPE_CHECKING:
    from ahp.runtime.run.folder import RunFolder


@dataclass(frozen=True)
class Texts:
    """Tokenized text in the cache, the same for every layout."""

    corpora: tuple[str, ...]
    """Folders of the training text, one for each text of ``job.data``."""
    validation: str | None
    """Folder of the held-out text, if that is separate text."""
    fingerprint: str
    """Fingerprint of the training text: a run continues only with the same text."""
    validation_fingerprint: str | None = None
    """The same for the held-out text, if that is separate text."""

    def check(self, *, verify: bool) -> None:
        """Raises Damaged if this node does not see the folders, since its cache may be its own; with ``verify``, also if bytes have changed."""
        for folder in (*self.corpora, self.validation):
            if folder is not None:
                read(Path(folder), verify=verify)


def prepare_texts(plan: Plan, run: RunFolder | None = None) -> Texts:
    """Tokenize the text of a plan's job, or find it in the cache. Uses the plan's model, weights and job, not its layout; and the weights
    only if ``run`` has no checkpoint to continue from.

    Raises BadInput for all that only a worker would notice otherwise: weights of another model, sequences longer than the model takes,
    text that cannot be read, or is less than a batch.
    """
    from ahp.runtime.data.job_batches import batches_for, fingerprint_of, validation_batches_for

    job = plan.job
    for text in job.texts:  # first, because ``what_it_reads`` takes seconds of imports for a new model
        refuse_missing(text, "job.data")
    if isinstance(job.validation, str):
        refuse_missing(job.validation, "job.validation")
    masked, words = what_it_reads(plan.model, job.sequence_length)
    if job.lora is not None and plan.init_from is None:
        say(
            "job.lora: only adapters are trained, and the other weights are random, from job.seed; init_from names trained weights"
        )
    if plan.init_from is not None and not (run and run.checkpoints()):
        _check_weights(plan.model, plan.init_from)
    given, corpora = tokenizer_of(plan, run.given_folder if run else None), list[Corpus]()
    for text in job.texts:
        corpora.append(_prepared(plan, "job.data", text, words, masked, given))
        given = given or corpora[0].folder / "tokenizer.json"
    other = None
    if isinstance(job.validation, str):
        other = _prepared(plan, "job.validation", job.validation, words, masked, given)
    batches_for(job, corpora, masked=masked)
    validation_batches_for(job, corpora, other, masked=masked)
    folders = tuple(str(corpus.folder) for corpus in corpora)
    held_out = (None, None) if other is None else (str(other.folder), other.fingerprint)
    return Texts(folders, held_out[0], fingerprint_of(corpora), held_out[1])


def what_it_reads(model: Any, sequence_length: int) -> tuple[bool, int]:
    """Whether a model's labels are unshifted (a masked model), and its vocabulary size. Kept next to its graphs, so that a second call, e.g.
    of a continued run's launcher, imports no transformers. Raises BadInput if the model cannot be built or takes no sequences that long."""
    from ahp.graph.kept import kept

    def found() -> tuple[bool, int]:
        from ahp.graph.models import build_model, is_masked
        from ahp.graph.positions import refuse_longer

        module = build_model(model, device="meta")
        refuse_longer(module, sequence_length)
        return is_masked(module), vocabulary_size(model)

    key = {"of": "what it reads", "sequence_length": sequence_length}
    masked, words = kept(model, key, found, made_by=Path(__file__).parent)
    return masked, words


def _check_weights(model: Any, folder: str) -> None:
    """Raises BadInput if the weights in a folder are another model's, or AHP exported them and they have changed."""
    from ahp.graph.models import build_model
    from ahp.runtime.weights.pretrained import check_folder

    check_folder(folder, build_model(model, device="meta"))
    if (name := export_mark.changed_file(Path(folder).expanduser(), ".safetensors")) is not None:
        rule = f"{name} has changed since a run exported it; take a whole copy, or delete {export_mark.EXPORT_MARK} there if it is meant"
        raise bad_input("init_from", folder, rule)


def _prepared(plan: Plan, key: str, data: str, words: int, masked: bool, tokenizer_file: Path | None) -> Corpus:
    return prepare(
        data,
        words,
        field=plan.job.data_field,
        key=key,
        masked=masked,
        tokenizer_file=tokenizer_file,
        say=say,
        progress=progress,
    )


def vocabulary_size(model: Any) -> int:
    """Number of tokens that a model can embed: its config's ``vocab_size``, else the rows of its first embedding."""
    from torch import nn

    from ahp.graph.models import build_model, load_config

    config = load_config(model)
    if config is not None:
        return config.get_text_config().vocab_size
    for module in build_model(model, device="meta").modules():
        if isinstance(module, nn.Embedding):
            return module.num_embeddings
    raise bad_input("model", model, "it has no nn.Embedding, so no text can be fed to it")
