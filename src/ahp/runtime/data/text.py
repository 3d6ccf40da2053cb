"""The sources of text: the standard library's own source files, the user's files, or a data set of a hub."""

from __future__ import annotations

import codecs
import hashlib
import importlib.util
import json
import os
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ahp.about import install_extra
from ahp.errors import BadInput, bad_input, first_line
from ahp.runtime.data.documents import Document, Piece, Template, documents_of

PYTHON_STDLIB = "python-stdlib"
HUB = "hub:"
"""Prefix of a hub's data set: ``hub:owner/name``, ``hub:owner/name/configuration``, ``hub:owner/name@split``."""
SUFFIXES = (".txt", ".jsonl", ".parquet")
KINDS = (PYTHON_STDLIB, f"a file of {' '.join(SUFFIXES)}", "a folder of such files", "hub:owner/name")

STDLIB_LIMIT_BYTES = 12_000_000
"""[Empirical] About 3 million tokens: several passes of the default job do not exhaust it, a tokenizer trains in seconds."""

STDLIB_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data"}
)
"""Folders that are not the library's own prose: installed packages, tests, and tables of characters or help topics."""

BYTE_ORDER_MARK = "\ufeff"

ROWS_AT_ONCE = 1024
"""[Empirical] Rows of a parquet file read at once: megabytes of text in memory."""


@dataclass(frozen=True)
class TextSource:
    """Files of documents in a fixed order, and the hash of their bytes."""

    name: str
    files: tuple[Path, ...]
    num_bytes: int
    field: str | None = None
    """The key that is read from a row; None = chosen by the row's shape (``ahp.runtime.data.documents``)."""
    rows: Any = None
    """A hub's data set, whose rows are read instead of the files; the files still hold its bytes."""
    split: str | None = None
    """Of a hub's data set: the files also hold the rows of other splits, such as train[10%:] beside train[:10%]."""
    key: str = "job.data"
    """The user's key, by which errors name the text."""

    def fingerprint(self) -> str:
        """Hash of every file's bytes in order; the files' location does not count."""
        digest = hashlib.blake2b(digest_size=16)
        for file in self.files:
            with _refusing_unreadable(file, self.key), file.open("rb") as stream:
                digest.update(f"{file.suffix}:{file.stat().st_size};".encode())
                while block := stream.read(1 << 22):
                    digest.update(block)
        if self.field is not None:
            digest.update(f"field:{self.field}".encode())
        if self.split is not None:
            digest.update(f"split:{self.split}".encode())
        return digest.hexdigest()

    def documents(self, template: Template) -> Iterator[Document]:
        """Every document that is not empty: a .txt file is one, and so is a row of anything else (a conversation can be several).

        Raises BadInput, naming file and line, if a row is of no known shape or bytes are not UTF-8.
        """
        for row, where, size in self._rows():
            if isinstance(row, str):
                if row.strip():
                    yield Document((Piece(row, True),), size)
                continue
            for document in documents_of(row, where, size, template, self.field, self.key):
                _refuse_halves(document.text, f"{self.key}: {where}")
                yield document

    def _rows(self) -> Iterator[tuple[object, str, float]]:
        """Row, its place in words, and its share of the source's bytes."""
        if self.rows is not None:
            for number, row in enumerate(self.rows, start=1):
                yield row, f"{self.name} row {number}", self.num_bytes / len(self.rows)
            return
        for file in self.files:
            with _refusing_unreadable(file, self.key):
                if file.suffix == ".jsonl":
                    yield from _json_lines(file, self.key)
                elif file.suffix == ".parquet":
                    yield from _parquet_rows(file, self.key)
                else:
                    content = file.read_bytes()
                    text = _decoded(content, f"{self.key}: {file}")
                    _refuse_nul(content, f"{self.key}: {file}")
                    yield text, str(file), len(content)


def find(data: str, field: str | None = None, key: str = "job.data") -> TextSource:
    """The files behind ``job.data``, or another key. Raises BadInput if there are none or their kind is not supported."""
    if data == PYTHON_STDLIB:
        return _source(data, _standard_library(key), None, key)
    if data.startswith(HUB):
        return _hub(data, field, key)
    return _source(data, _files(data, key), field, key)


def refuse_missing(data: str, key: str) -> None:
    """Raises BadInput like ``find`` if a path holds no text; data that is not a path is not looked for."""
    if data != PYTHON_STDLIB and not data.startswith(HUB):
        _files(data, key)


def _files(data: str, key: str) -> list[Path]:
    path = Path(data).expanduser()
    if not data:  # an empty variable of a template, which Path takes for the current folder
        raise bad_input(key, data, "it names no text", KINDS)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
        if not files:
            raise bad_input(key, data, "the folder holds no file that is read", SUFFIXES)
    elif not path.exists():
        raise bad_input(key, data, "no such file or folder", KINDS)
    elif path.suffix not in SUFFIXES:
        raise bad_input(key, data, f"files {path.suffix or 'without a suffix'} are not read", SUFFIXES)
    else:
        files = [path]
    if any(file.suffix == ".parquet" for file in files) and importlib.util.find_spec("pyarrow") is None:
        raise _needs_extra(key, data, "reading parquet needs pyarrow")
    return files


def _source(name: str, files: list[Path], field: str | None, key: str) -> TextSource:
    return TextSource(name, tuple(files), sum(file.stat().st_size for file in files), field, key=key)


def _needs_extra(key: str, data: str, what: str) -> BadInput:
    return bad_input(key, data, f"{what}; {install_extra('data')}")


def _hub(data: str, field: str | None, key: str) -> TextSource:
    """A data set that the ``datasets`` library downloads, or has in its cache."""
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise _needs_extra(key, data, "data sets of a hub need the library datasets") from None
    name, _, split = data.removeprefix(HUB).partition("@")
    parts = name.split("/")
    if len(parts) not in (1, 2, 3) or not all(parts):
        raise bad_input(key, data, "expected hub:owner/name, hub:owner/name/configuration or hub:owner/name@split")
    path, configuration, split = "/".join(parts[:2]), (parts[2] if len(parts) == 3 else None), split or "train"
    try:
        rows = datasets.load_dataset(path, configuration, split=split)
    except Exception as error:  # the library raises whatever its readers and the network raise
        raise bad_input(key, data, f"it cannot be loaded ({type(error).__name__}: {error})") from None
    files = [Path(part["filename"]) for part in rows.cache_files]
    if not files:  # their bytes tell one version of the data from another
        raise bad_input(key, data, "it lies in no file; save it as .jsonl or .parquet")
    return replace(_source(data, files, field, key), rows=rows, split=split)


def _standard_library(key: str) -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[Path] = []
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in STDLIB_LEFT_OUT)
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    chosen: list[Path] = []
    total = 0
    for file in sorted(found, key=lambda f: f.relative_to(root).as_posix()):
        total += file.stat().st_size
        if total > STDLIB_LIMIT_BYTES:
            break
        chosen.append(file)
    if not chosen:
        raise BadInput(
            f"{key} = {PYTHON_STDLIB!r}: this Python has no source files under {root}; give a .txt or .jsonl file"
        )
    return chosen


def _json_lines(file: Path, key: str) -> Iterator[tuple[object, str, float]]:
    end = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            begin, end = end, end + len(line)
            if not line.strip():
                continue
            where = f"{file} line {number}"
            text = _decoded(line, f"{key}: {where}", begin)
            try:
                yield json.loads(text), where, len(line)
            except (ValueError, RecursionError) as error:
                raise BadInput(f"{key}: {where}: not JSON ({error})") from None


def _decoded(content: bytes, where: str, begin: int = 0) -> str:
    """Decode bytes that lie ``begin`` bytes after the start of their file, without the mark with which editors on Windows begin files. Raises
    BadInput if they are not UTF-8."""
    try:
        text = content.decode("utf-8")
        return text if begin else text.removeprefix(BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        byte, offset = content[error.start], begin + error.start
        if begin == 0 and content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            fix = "it begins as UTF-16 does: iconv -f UTF-16 -t UTF-8 FILE > NEW"
        else:
            fix = "if it is Latin-1: iconv -f LATIN1 -t UTF-8 FILE > NEW"
        raise BadInput(
            f"{where}: byte 0x{byte:02x} at offset {offset} is not UTF-8, and text must be (valid: UTF-8; {fix})"
        ) from None


def _refuse_nul(content: bytes, where: str) -> None:
    """Refuse the byte 0, which UTF-8 allows and no text has: such a file is a binary, or text of 16 or 32 bits a character."""
    if (offset := content.find(0)) >= 0:
        raise BadInput(
            f"{where}: byte 0x00 at offset {offset} is no text (valid: UTF-8 without it; if it is UTF-16: "
            "iconv -f UTF-16LE -t UTF-8 FILE > NEW)"
        )


def _refuse_halves(text: str, where: str) -> None:
    """Refuse one half of a UTF-16 pair: JSON can hold it, but it is no character and no tokenizer takes it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadInput(
            f"{where}: \\u{ord(text[error.start]):04x} at character {error.start} is half of a pair, no character of its own "
            "(valid: the pair, or neither half)"
        ) from None


def _parquet_rows(file: Path, key: str) -> Iterator[tuple[object, str, float]]:
    import pyarrow.parquet  # pyright: ignore[reportMissingImports]

    try:
        table = pyarrow.parquet.ParquetFile(file)
        size = file.stat().st_size / max(1, table.metadata.num_rows)
        number = 0
        for batch in table.iter_batches(batch_size=ROWS_AT_ONCE):
            for row in batch.to_pylist():
                number += 1
                yield row, f"{file} row {number}", size
    except (
        pyarrow.ArrowException,
        OSError,
        UnicodeDecodeError,
    ) as error:  # pages that are damaged, text that is not UTF-8
        raise BadInput(f"{key}: {file}: not a parquet file that can be read ({first_line(error)})") from None


@contextmanager
def _refusing_unreadable(file: Path, key: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BadInput(f"{key}: {file}: cannot be read ({error.strerror or error})") from None
