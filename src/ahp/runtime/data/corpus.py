"""Text, tokenized once into a memory-mapped file and kept in the user's cache."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ahp.cache import cache_folder
from ahp.errors import BadInput, bad_input
from ahp.runtime.data import tokenizer as tokenizers
from ahp.runtime.data.chat import fingerprint_beside, template_beside
from ahp.runtime.data.documents import Document, Template
from ahp.runtime.data.text import TextSource, find
from ahp.runtime.files import crc32
from ahp.runtime.stoppable import stoppable
from ahp.whole_files import unwritable
from ahp.words import number_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FORMAT = 5
"""Counted up when the cache's files change meaning; an entry of another format is never found."""
FILES = ("tokenizer.json", "tokens.bin", "starts.bin", "scored.bin")
"""Files of an entry besides meta.json; the last only if some token is not scored."""
DOCUMENTS_PER_CALL = 256
"""[Empirical] Enough for the tokenizer's own threads, and only megabytes of text in memory."""

Say = Callable[[str], None]
Progress = Callable[[str, float], AbstractContextManager[Callable[[float], None]]]
"""A progress bar: (what is done, its size) -> a context with a function to call with each amount done."""


class Damaged(BadInput):
    """An entry of the cache is missing, or has changed since it was written."""


@dataclass(frozen=True)
class Corpus:
    """Tokenized documents, one after the other, each ended by the end-of-text token unless its text has its own end."""

    folder: Path
    tokens: np.ndarray
    """uint16 or uint32 [num_tokens], memory-mapped."""
    starts: np.ndarray
    """int64 [num_documents], memory-mapped: where each document begins in ``tokens``, increasing, the first is 0."""
    fingerprint: str
    """Hash of the tokenizer and of the text: two corpora with one fingerprint hold the same tokens."""
    scored: np.ndarray | None = None
    """bool [num_tokens], memory-mapped: which tokens the model is trained to write; None = all of them."""

    def part(self, first: int, end: int) -> Corpus:
        """The tokens ``first`` to ``end`` (exclusive); the rest of a cut document becomes a document of its own."""
        begin, after = np.searchsorted(self.starts, [first, end])
        starts = self.starts[begin:after] - first
        if first < end and (not len(starts) or starts[0] > 0):
            starts = np.insert(starts, 0, 0)
        return replace(
            self,
            tokens=self.tokens[first:end],
            starts=starts,
            scored=None if self.scored is None else self.scored[first:end],
        )

    def tokenizer(self) -> Tokenizer:
        return tokenizers.opened(self.folder / "tokenizer.json")


def prepare(
    data: str,
    vocab_size: int,
    *,
    field: str | None = None,
    key: str = "job.data",
    masked: bool = False,
    tokenizer_file: Path | None = None,
    say: Say | None = None,
    progress: Progress | None = None,
) -> Corpus:
    """The corpus of ``data`` from the cache, every byte compared with its checksum; made now if it is missing, or damaged (with a message).

    ``tokenizer_file`` is a tokenizer.json to use, with the chat template next to it if there is one; None trains a tokenizer
    of at most ``vocab_size`` tokens on the data, with a mask token if ``masked``. ``field`` is the key of a row that holds
    the text, ``key`` the user's key that names ``data``.
    An entry is written aside and renamed, so processes that do this at the same time end with one whole entry.
    """
    source, say = find(data, field, key), say or (lambda _: None)
    entry = cache_folder() / "corpora" / _key(source, vocab_size, masked, tokenizer_file)
    if entry.exists():
        try:
            return _read(entry, verify=True)
        except Damaged as damage:
            say(f"{damage}; it is made again")
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=entry.name + ".tmp-", dir=entry.parent))
    except OSError as error:
        raise unwritable("AHP_CACHE", cache_folder(), error) from None
    maker = _Maker(source, template_beside(tokenizer_file, key), say, progress or _no_progress)
    try:
        maker.write(aside, maker.tokenizer(vocab_size, masked, tokenizer_file))
        return _publish(aside, entry)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise unwritable("AHP_CACHE", cache_folder(), error) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def read(folder: Path, *, verify: bool = True) -> Corpus:
    """Open an entry that ``prepare`` made. Raises Damaged if it is missing or has changed since it was written.

    Without ``verify`` only the files' sizes are checked, not every byte: for ranks that join a rank which has verified it.
    """
    try:
        return _read(folder, verify=verify)
    except Damaged as damage:
        raise Damaged(f"{damage}; start the command again to rebuild it") from None


def _key(source: TextSource, vocab_size: int, masked: bool, tokenizer_file: Path | None) -> str:
    parts = [str(FORMAT), source.fingerprint(), str(vocab_size)]
    if masked and tokenizer_file is None:
        parts.append("masked")
    if tokenizer_file is not None:
        content = tokenizer_file.read_bytes() + fingerprint_beside(tokenizer_file)
        parts.append(hashlib.blake2b(content, digest_size=16).hexdigest())
    return hashlib.blake2b("/".join(parts).encode(), digest_size=16).hexdigest()


def _no_progress(what: str, size: float) -> AbstractContextManager[Callable[[float], None]]:
    return nullcontext(lambda _: None)


@dataclass(frozen=True)
class _Maker:
    """Turns a source into the files of an entry."""

    source: TextSource
    template: Template
    say: Say
    progress: Progress

    @property
    def size(self) -> str:
        return f"{self.source.num_bytes / 1e6:.1f} MB of text ({number_of(len(self.source.files), 'file')})"

    def tokenizer(self, vocab_size: int, masked: bool, file: Path | None) -> Tokenizer:
        if file is not None:
            return tokenizers.load(file, vocab_size)
        self.say(f"training a tokenizer of {vocab_size} tokens on {self.size}, once")
        texts = (document.text for document in self._documents("reading for the tokenizer"))
        return tokenizers.train(texts, vocab_size, masked=masked)

    def write(self, aside: Path, tokenizer: Tokenizer) -> None:
        tokenizer.save(str(aside / "tokenizer.json"))
        self.say(f"tokenising {self.size}, once")
        dtype = np.dtype(np.uint16 if tokenizers.end_of_ids(tokenizer) <= 1 << 16 else np.uint32)
        starts: list[int] = []
        num_tokens, all_scored = 0, True
        with (aside / "tokens.bin").open("wb") as tokens_file, (aside / "scored.bin").open("wb") as scored_file:
            for ids, scored in self._encoded(tokenizer):
                starts.append(num_tokens)
                num_tokens += len(ids)
                tokens_file.write(np.asarray(ids, dtype=dtype).tobytes())
                scored_file.write(scored.tobytes())
                all_scored = all_scored and bool(scored.all())
        if num_tokens == 0:
            raise bad_input(self.source.key, self.source.name, "it holds no text")
        if all_scored:
            (aside / "scored.bin").unlink()
        (aside / "starts.bin").write_bytes(np.asarray(starts, dtype=np.int64).tobytes())
        names = [name for name in FILES if (aside / name).exists()]
        meta = {
            "dtype": dtype.name,
            "num_tokens": num_tokens,
            "num_documents": len(starts),
            "bytes": {name: (aside / name).stat().st_size for name in names},
            "crc32": {name: crc32(aside / name) for name in names},
        }
        (aside / "meta.json").write_text(json.dumps({**meta, "crc32_of_this": _crc32_of(meta)}, indent=1))

    def _documents(self, what: str) -> Iterator[Document]:
        with self.progress(what, self.source.num_bytes) as advance:
            for document in self.source.documents(self.template):
                yield document
                advance(document.source_bytes)

    def _encoded(self, tokenizer: Tokenizer) -> Iterator[tuple[list[int], np.ndarray]]:
        """For each document its token ids, and which of them are scored, bool [num_ids]."""
        end = tokenizers.end_of_text(tokenizer)
        documents = self._documents("tokenising")
        while chunk := list(islice(documents, DOCUMENTS_PER_CALL)):
            texts = [piece.text for document in chunk for piece in document.pieces]
            encodings = iter(stoppable(partial(tokenizer.encode_batch, texts, add_special_tokens=False)))
            for document in chunk:
                parts = [(next(encodings).ids, piece.scored) for piece in document.pieces]
                if not document.ended:
                    parts.append(([end], True))
                scored = np.repeat([flag for _, flag in parts], [len(ids) for ids, _ in parts])
                yield [token for ids, _ in parts for token in ids], scored


def _publish(aside: Path, entry: Path) -> Corpus:
    # A damaged entry is moved out of the way first: rename replaces no folder that holds files.
    if entry.exists():
        try:
            return _read(entry, verify=True)  # another process was faster; its entry holds the same bytes
        except Damaged:
            rubbish = Path(tempfile.mkdtemp(prefix=entry.name + ".tmp-", dir=entry.parent))
            entry.rename(rubbish / "damaged")
            shutil.rmtree(rubbish, ignore_errors=True)
    try:
        aside.rename(entry)
    except OSError:
        if not entry.exists():
            raise
    return read(entry)


def _read(folder: Path, *, verify: bool) -> Corpus:
    fault, found = f"cache entry {str(folder)!r}: ", "meta.json is missing or damaged"
    try:
        meta: dict[str, Any] = json.loads((folder / "meta.json").read_bytes())
        if meta.pop("crc32_of_this") != _crc32_of(meta):
            raise Damaged(fault + "meta.json has changed since it was written")
        found = "a file of it is missing"
        for name, size in meta["bytes"].items():
            if (folder / name).stat().st_size != size:
                raise Damaged(f"{fault}{name} is cut")
            if verify and crc32(folder / name) != meta["crc32"][name]:
                raise Damaged(f"{fault}{name} has changed since it was written")
        tokens = np.memmap(folder / "tokens.bin", dtype=meta["dtype"], mode="r", shape=(meta["num_tokens"],))
        starts = np.memmap(folder / "starts.bin", dtype=np.int64, mode="r", shape=(meta["num_documents"],))
        scored = None
        if "scored.bin" in meta["bytes"]:
            scored = np.memmap(folder / "scored.bin", dtype=np.bool_, mode="r", shape=(meta["num_tokens"],))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, Damaged):
            raise
        raise Damaged(fault + found) from None
    mark = f"{meta['crc32']}/{meta['num_tokens']}"
    return Corpus(
        folder=folder,
        tokens=tokens,
        starts=starts,
        fingerprint=hashlib.blake2b(mark.encode(), digest_size=16).hexdigest(),
        scored=scored,
    )


def _crc32_of(meta: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(meta, sort_keys=True).encode())
