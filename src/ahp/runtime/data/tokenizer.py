"""A byte-level BPE tokenizer for the job's own text, of the size of the model's vocabulary."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ahp.errors import bad_input
from ahp.plan import Plan
from ahp.runtime.stoppable import stoppable

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
MASK = "<|mask|>"
NUM_BYTES = 256
SMALLEST_VOCABULARY = NUM_BYTES + 1
"""Every byte and the end of a document: with fewer tokens some text cannot be written."""

END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "<eos>", "</s>", "[SEP]", "<|im_end|>")
"""Names of the end of a document in published tokenizers (GPT-2, Llama 3, Gemma, Llama 2, BERT, Qwen chat). Gemma's name comes before Llama's,
because its tokens can include HTML's tag ``</s>``."""
MASK_NAMES = (MASK, "[MASK]", "<mask>")
"""Names of the token that hides another in published tokenizers (BERT, RoBERTa)."""


BESIDE = ("tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
"""Files next to tokenizer.json, where transformers keeps a chat template and the tokens that it names."""


def train(texts: Iterable[str], vocab_size: int, *, masked: bool = False) -> Tokenizer:
    """Train byte-level BPE (as GPT-2's) of at most ``vocab_size`` tokens; the same texts give the same tokenizer.

    ``masked`` adds the token that a masked language model needs.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < SMALLEST_VOCABULARY:
        raise bad_input("vocab_size", vocab_size, f"a byte-level tokenizer needs at least {SMALLEST_VOCABULARY} tokens")
    tokenizer = Tokenizer(models.BPE())
    # pyright cannot see the setters of the compiled class
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, MASK] if masked else [END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    stoppable(lambda: tokenizer.train_from_iterator(texts, trainer=trainer))
    return tokenizer


def load(file: Path, vocab_size: int) -> Tokenizer:
    """Read a tokenizer.json that came with a model; refuse one that has more tokens than the model can embed."""
    tokenizer = opened(file)
    size = end_of_ids(tokenizer)
    if size > vocab_size:
        raise bad_input(
            "tokenizer",
            str(file),
            f"it has token ids up to {size - 1}, and the model's vocab_size is {vocab_size}; enlarge the model's",
        )
    end_of_text(tokenizer)
    return tokenizer


def opened(file: Path) -> Tokenizer:
    """Read a tokenizer.json, for text of any length. A file can ask for truncation and padding, as set when it was saved: transformers ignores
    that when it tokenizes, and so must we. Raises BadInput for a file that is none."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for a file that it cannot read
        raise bad_input("tokenizer", str(file), f"not a tokenizer.json ({error})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def end_of_ids(tokenizer: Tokenizer) -> int:
    """The largest id of a token, plus 1: more than the number of tokens if some ids have none."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def tokenizer_of(plan: Plan, kept: Path | None = None) -> Path | None:
    """The tokenizer.json next to the given weights (``init_from``), else in the model's folder; None if there is none.

    ``kept``: the run's copy of the files next to its given weights, for when their folder is gone.
    """
    for place in (plan.init_from, None if kept is None else str(kept), plan.model):
        if isinstance(place, str):
            path = Path(place).expanduser()
            file = (path if path.is_dir() else path.parent) / "tokenizer.json"
            if path.exists() and file.is_file():
                return file
    return None


def end_of_text(tokenizer: Tokenizer) -> int:
    """Id of the token that ends a document."""
    return _first(tokenizer, END_NAMES, "the end of a document")


def mask(tokenizer: Tokenizer) -> int:
    """Id of the token that hides another one from a masked language model."""
    return _first(tokenizer, MASK_NAMES, "a hidden word, which a masked language model needs")


def _first(tokenizer: Tokenizer, names: tuple[str, ...], what: str) -> int:
    for name in names:
        token = tokenizer.token_to_id(name)
        if token is not None:
            return token
    raise bad_input("tokenizer", "tokenizer.json", f"it has no token for {what}", names)


def copy_for_transformers(tokenizer_file: Path, folder: Path) -> None:
    """Copy a published tokenizer, with the files next to it (``BESIDE``), into another folder."""
    for name in (tokenizer_file.name, *BESIDE):
        if (tokenizer_file.parent / name).is_file():
            shutil.copyfile(tokenizer_file.parent / name, folder / name)


def save_for_transformers(tokenizer: Tokenizer, folder: Path) -> None:
    """Write what ``transformers.AutoTokenizer.from_pretrained(folder)`` reads."""
    from transformers import PreTrainedTokenizerFast

    special = {"eos_token": tokenizer.id_to_token(end_of_text(tokenizer))}
    hides = next((name for name in MASK_NAMES if tokenizer.token_to_id(name) is not None), None)
    if hides is not None:
        special["mask_token"] = hides
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
