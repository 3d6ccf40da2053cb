"""Where the text comes from: the standard library's own source files, or the user's .txt and .jsonl files."""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ahp.errors import BadInput, bad_input

PYTHON_STDLIB = "python-stdlib"
SUFFIXES = (".txt", ".jsonl")

STDLIB_LIMIT_BYTES = 12_000_000
"""[Empirical] About 3 million tokens: several passes of the default job do not exhaust it, a tokenizer trains in seconds."""

STDLIB_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data"}
)
"""Folders that are not the library's own prose: installed packages, tests, and tables of characters or help topics."""


@dataclass(frozen=True)
class TextSource:
    """Files of documents in a fixed order, and what their bytes hash to."""

    name: str
    files: tuple[Path, ...]
    num_bytes: int

    def fingerprint(self) -> str:
        """Hash of every file's bytes in order; the place of the files does not count."""
        digest = hashlib.blake2b(digest_size=16)
        for file in self.files:
            content = file.read_bytes()
            digest.update(f"{file.suffix}:{len(content)};".encode())
            digest.update(content)
        return digest.hexdigest()

    def documents(self) -> Iterator[str]:
        """Every document that is not empty: a file of text is one, a line of .jsonl is one (key ``text``).

        Raises BadInput, naming file and line, where a .jsonl line is not an object with a text.
        """
        for file in self.files:
            if file.suffix == ".jsonl":
                yield from _lines(file)
            else:
                text = file.read_text(encoding="utf-8", errors="replace")
                if text.strip():
                    yield text


def find(data: str) -> TextSource:
    """The files behind ``job.data``. Raises BadInput when there are none or their kind is not read."""
    if data == PYTHON_STDLIB:
        return _source(data, _standard_library())
    path = Path(data).expanduser()
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
        if not files:
            raise bad_input("job.data", data, "the folder holds no file that is read", SUFFIXES)
        return _source(data, files)
    if not path.exists():
        raise bad_input(
            "job.data",
            data,
            "no such file or folder; data sets of a hub are not read yet, save them as .jsonl first",
            [PYTHON_STDLIB, "a .txt or .jsonl file", "a folder of them"],
        )
    if path.suffix == ".parquet":
        raise bad_input("job.data", data, "parquet is not read yet; save it as .jsonl with a key text", SUFFIXES)
    if path.suffix not in SUFFIXES:
        raise bad_input("job.data", data, f"files {path.suffix or 'without a suffix'} are not read", SUFFIXES)
    return _source(data, [path])


def _source(name: str, files: list[Path]) -> TextSource:
    return TextSource(name=name, files=tuple(files), num_bytes=sum(file.stat().st_size for file in files))


def _standard_library() -> list[Path]:
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
            f"job.data = {PYTHON_STDLIB!r}: this Python has no source files under {root}; give a .txt or .jsonl file"
        )
    return chosen


def _lines(file: Path) -> Iterator[str]:
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError):
                text = None
            if not isinstance(text, str):
                raise BadInput(f"job.data: {file} line {number}: a JSON object with a key text was expected")
            if text.strip():
                yield text
