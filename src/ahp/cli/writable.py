"""Checks whether a file can be written, before time is spent on its content."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ahp.errors import bad_input
from ahp.whole_files import unwritable


def require_writable(path: str | Path, option: str = "-o") -> None:
    """Raises BadInput if the path is a folder, begins with a hyphen as it was typed, or cannot be written. A file is written aside and renamed
    (``ahp.whole_files``), so its folder must be writable: a file without a name is made there. What is no file, such as /dev/null, must be writable itself."""
    file = Path(path)
    if str(path) == "-":
        raise bad_input(option, "-", "stdout has the answer for people, or with --json the data; give a file")
    if isinstance(path, str) and path.startswith("-"):
        raise bad_input(option, path, "the next command would take it for an option", [f"./{path}"])
    if file.is_dir():
        raise bad_input(option, str(path), "is a folder; give a file in it")
    if file.exists() and not file.is_file() and os.access(file, os.W_OK):
        return
    folder = next(parent for parent in file.resolve().parents if parent.exists())  # "/" is always there
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".ahp-"):
            pass
    except OSError as error:
        raise unwritable(option, path, error, where=folder) from error
