"""Checks whether a file can be written, before time is spent on its content."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ahp.errors import bad_input


def require_writable(path: str | Path, option: str = "-o") -> None:
    """Raises BadInput if the path is a folder, or cannot be written. An existing file must be writable itself (/dev/null is, in a folder that is
    not); for a new one, a file without a name is made in its folder."""
    file = Path(path)
    if file.is_dir():
        raise bad_input(option, str(path), "is a folder; give a file in it")
    if os.access(file, os.W_OK):
        return
    folder = next(parent for parent in file.absolute().parents if parent.exists())  # "/" is always there
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".ahp-"):
            pass
    except OSError as error:
        raise bad_input(option, str(path), f"cannot be written: {folder}: {error.strerror}") from error
