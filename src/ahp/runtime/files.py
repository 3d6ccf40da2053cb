"""Writes files whole or not at all, and checks them by free disk space and by checksum."""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from pathlib import Path

from ahp.errors import bad_input
from ahp.whole_files import write_aside as write_aside

FULL_DISK_BYTES = 1 << 20
"""[Empirical] If a write fails with less than this free, the disk is full, whatever the error says
(torch's archive writer reports a full disk as RuntimeError)."""


def refuse_file(folder: Path) -> None:
    """Raises BadInput for the path of a file where a folder is to be written."""
    if folder.exists() and not folder.is_dir():
        raise bad_input("folder", str(folder), "is a file; give a folder")


def is_full(folder: Path) -> bool:
    """Whether the disk that holds a folder is full. Raises OSError if the folder is gone."""
    return shutil.disk_usage(folder).free < FULL_DISK_BYTES


def write_over(path: Path, text: str) -> None:
    """Overwrite a file in place, for a disk without room for a second file. A crash can leave a mix of old and new text."""
    content = text.encode()
    with path.open("r+b") as file:
        file.write(content.ljust(path.stat().st_size))
        file.truncate(len(content))
        file.flush()
        os.fsync(file.fileno())


def crc32(file: Path) -> int:
    """Checksum of a file's bytes."""
    value = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def read_back(file: Path) -> int:
    """Flush a file to the disk and read it from there. Returns the checksum of its bytes; raises OSError if they differ from what was written."""
    written = crc32(file)
    flush(file)
    if hasattr(os, "posix_fadvise"):  # else the system reads its cached copy
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if crc32(file) != written:
        raise OSError(errno.EIO, f"{file.name} does not read back from the disk as it was written")
    return written


def flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
