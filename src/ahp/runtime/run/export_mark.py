"""``ahp.json`` beside exported weights: the step that they come from, and the checksum of every other file, so that damage is noticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ahp.runtime.files import crc32

EXPORT_MARK = "ahp.json"


def of_weights(folder: Path, part: int, parts: int) -> dict[str, int]:
    """crc32 of one part of the files of weights, by their names in the folder. Reads every byte, so ranks split the files."""
    names = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*.safetensors"))
    return {name: crc32(folder / name) for name in names[part::parts]}


def write(folder: Path, step: int, known: dict[str, int]) -> None:
    """Mark a complete folder as the weights of ``step``. ``known``: checksums of files that were read already."""
    names = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    found = {name: known.get(name) or crc32(folder / name) for name in names if name != EXPORT_MARK}
    (folder / EXPORT_MARK).write_text(json.dumps({"step": step, "crc32": found}) + "\n")


def step_of(folder: Path) -> int | None:
    """The step that the weights in a folder come from; None if it has no mark that can be read."""
    return _read(folder).get("step")


def damaged_file(folder: Path) -> str | None:
    """The first file of a run's export that is missing or has changed since it was written, by its name in the folder; None if all are whole,
    there is no folder, or an earlier version of AHP wrote it, without checksums. Reads every byte."""
    return EXPORT_MARK if folder.is_dir() and not _read(folder) else changed_file(folder)


def changed_file(folder: Path, ending: str = "") -> str | None:
    """The same for any folder, of which nothing is known without a mark. ``ending``: of the names of the files that matter."""
    for name, value in _read(folder).get("crc32", {}).items():
        if name.endswith(ending) and (not (folder / name).is_file() or crc32(folder / name) != value):
            return name
    return None


def _read(folder: Path) -> dict[str, Any]:
    """The mark; empty if there is none, or it is no mark."""
    try:
        found = json.loads((folder / EXPORT_MARK).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    known = isinstance(found, dict) and type(found.get("step")) is int and isinstance(found.get("crc32", {}), dict)
    return found if known else {}
