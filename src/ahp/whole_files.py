"""Files that a reader, or a crash, always finds whole: written under another name first, then renamed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ahp.errors import BadInput, bad_input

WAYS_ON = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room there, or ") | {
    errno.EFBIG: "raise the limit of a file's size (ulimit -f), or "
}
"""What a user can do besides giving another path, by the system's error number."""


def unwritable(key: str, path: str | Path, error: OSError, *, where: Path | None = None) -> BadInput:
    """The refusal of a path of the user's that cannot be written. ``where``: the folder that refused, if it is another path."""
    why = str(error.strerror or error).replace("File exists", "a part of its path is a file")
    if (link := Path(path)).is_symlink() and not link.exists():
        why = f"it is a link to {link.readlink()}, which is not there"
    there = f"{where}: " if where is not None and where != Path(path) else ""
    return bad_input(
        key, str(path), f"cannot be written ({there}{why}); {WAYS_ON.get(error.errno or 0, '')}give another {key}"
    )


def save(path: str | Path, content: str | bytes) -> None:
    """``write_aside`` to a path that a user gives; a missing folder is made. Raises BadInput if that cannot be done."""
    path = Path(path)
    if path.is_dir():
        raise bad_input("path", str(path), "is a folder; give a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_aside(path, content)
    except OSError as error:
        raise unwritable("path", path, error) from error


def write_aside(path: Path, content: str | bytes) -> None:
    """Replace a file atomically: a reader, or a crash, sees the old text or the new one. Another process that writes the same file uses its own
    temporary file. A name of a file that is not UTF-8 is written as the system has it."""
    data = content.encode(errors="surrogateescape") if isinstance(content, str) else content
    if path.exists() and not path.is_file():  # /dev/null or a pipe must not be replaced by a file
        path.write_bytes(data)
        return
    path = path.resolve()  # a link stays a link
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
