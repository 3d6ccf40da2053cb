"""Text, tokenised once into a memory-mapped file and kept in the user's cache."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ahp.errors import BadInput
from ahp.runtime.data import tokenizer as tokenizers
from ahp.runtime.data.text import TextSource, find

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FORMAT = 1
"""Counts up when the cache's files change meaning; an entry of another format is never found."""
DOCUMENTS_PER_CALL = 256
"""[Empirical] Enough for the tokenizer's own threads, and only megabytes of text in memory."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Corpus:
    """Tokenised documents, one after the other, each ended by the end-of-text token."""

    folder: Path
    tokens: np.ndarray
    """uint16 or uint32 [num_tokens], memory-mapped."""
    starts: np.ndarray
    """int64 [num_documents]: where each document begins in ``tokens``, increasing, the first is 0."""
    fingerprint: str
    """Hash of the tokenizer and of the text: two corpora with one fingerprint hold the same tokens."""

    def tokenizer(self) -> Tokenizer:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))


def cache_folder() -> Path:
    """``$AHP_CACHE``, else ``~/.cache/ahp``."""
    given = os.environ.get("AHP_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "ahp"


def prepare(
    data: str,
    vocab_size: int,
    *,
    masked: bool = False,
    tokenizer_file: Path | None = None,
    say: Say | None = None,
) -> Corpus:
    """The corpus of ``data`` from the cache, made now when it is not there or is damaged.

    ``tokenizer_file`` is a tokenizer.json to use; None trains one of at most ``vocab_size`` tokens on the data, with
    the token that hides others if ``masked``.
    It is written aside and renamed, so processes that do this at the same time end with one whole entry.
    """
    say = say or (lambda _: None)
    source = find(data)
    entry = cache_folder() / "corpora" / _key(source, vocab_size, masked, tokenizer_file)
    corpus = _read(entry)
    if corpus is not None:
        return corpus
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=entry.name + ".tmp-", dir=entry.parent))
    except OSError as error:
        raise BadInput(f"AHP_CACHE = {str(cache_folder())!r}: cannot be written ({error.strerror})") from None
    try:
        _write(aside, source, vocab_size, masked, tokenizer_file, say)
        return _publish(aside, entry)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def read(folder: Path) -> Corpus:
    """Open an entry that ``prepare`` made. Raises BadInput when it is missing or damaged."""
    corpus = _read(folder)
    if corpus is None:
        raise BadInput(f"cache entry {str(folder)!r}: missing or damaged; start the command again to rebuild it")
    return corpus


def _key(source: TextSource, vocab_size: int, masked: bool, tokenizer_file: Path | None) -> str:
    parts = [str(FORMAT), source.fingerprint(), str(vocab_size)]
    if masked and tokenizer_file is None:
        parts.append("masked")
    if tokenizer_file is not None:
        parts.append(hashlib.blake2b(tokenizer_file.read_bytes(), digest_size=16).hexdigest())
    return hashlib.blake2b("/".join(parts).encode(), digest_size=16).hexdigest()


def _write(
    aside: Path, source: TextSource, vocab_size: int, masked: bool, tokenizer_file: Path | None, say: Say
) -> None:
    size = f"{source.num_bytes / 1e6:.1f} MB of text ({len(source.files)} files)"
    if tokenizer_file is not None:
        tokenizer = tokenizers.load(tokenizer_file, vocab_size)
    else:
        say(f"training a tokenizer of {vocab_size} tokens on {size}, once")
        tokenizer = tokenizers.train(source.documents(), vocab_size, masked=masked)
    tokenizer.save(str(aside / "tokenizer.json"))
    say(f"tokenising {size}, once")
    end = tokenizers.end_of_text(tokenizer)
    dtype = np.dtype(np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32)
    starts: list[int] = []
    num_tokens = 0
    with (aside / "tokens.bin").open("wb") as file:
        for ids in _encode(tokenizer, source):
            starts.append(num_tokens)
            num_tokens += len(ids) + 1
            file.write(np.asarray([*ids, end], dtype=dtype).tobytes())
    (aside / "starts.bin").write_bytes(np.asarray(starts, dtype=np.int64).tobytes())
    meta = {
        "dtype": dtype.name,
        "num_tokens": num_tokens,
        "num_documents": len(starts),
        "crc32": {name: _crc32(aside / name) for name in ("tokenizer.json", "tokens.bin", "starts.bin")},
    }
    (aside / "meta.json").write_text(json.dumps(meta, indent=1))


def _encode(tokenizer: Tokenizer, source: TextSource) -> Iterator[list[int]]:
    documents = source.documents()
    while chunk := list(islice(documents, DOCUMENTS_PER_CALL)):
        for encoding in tokenizer.encode_batch(chunk, add_special_tokens=False):
            yield encoding.ids


def _publish(aside: Path, entry: Path) -> Corpus:
    # A damaged entry is moved out of the way first: rename replaces no folder that holds files.
    if entry.exists() and _read(entry) is None:
        rubbish = Path(tempfile.mkdtemp(prefix=entry.name + ".tmp-", dir=entry.parent))
        entry.rename(rubbish / "damaged")
        shutil.rmtree(rubbish, ignore_errors=True)
    try:
        aside.rename(entry)
    except OSError:
        # Another process was faster; its entry holds the same bytes.
        if not entry.exists():
            raise
    return read(entry)


def _read(folder: Path) -> Corpus | None:
    try:
        meta: dict[str, Any] = json.loads((folder / "meta.json").read_text())
        if any(_crc32(folder / name) != value for name, value in meta["crc32"].items()):
            return None
        tokens = np.memmap(folder / "tokens.bin", dtype=meta["dtype"], mode="r", shape=(meta["num_tokens"],))
        starts = np.fromfile(folder / "starts.bin", dtype=np.int64)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    mark = f"{meta['crc32']}/{meta['num_tokens']}"
    return Corpus(
        folder=folder,
        tokens=tokens,
        starts=starts,
        fingerprint=hashlib.blake2b(mark.encode(), digest_size=16).hexdigest(),
    )


def _crc32(file: Path) -> int:
    value = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            value = zlib.crc32(block, value)
    return value
