"""Files that are whole or absent, and how a disk or a checksum says that they are not."""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from pathlib import Path

from ahp.whole_files import write_aside as write_aside

FULL_DISK_BYTES = 1 << 20
"""[Empirical] With less than this free, a write that failed failed for want of space, whatever its message says
(torch's archive writer reports a full disk as RuntimeError)."""


def is_full(folder: Path) -> bool:
    """Whether the disk behind a folder takes nothing more."""
    return shutil.disk_usage(folder).free < FULL_DISK_BYTES


def write_over(path: Path, text: str) -> None:
    """Replace a file where it lies, which takes no more room: for a disk that takes no file beside it. A crash may leave half of each."""
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
    """Put a file onto the disk, and read it from there: the checksum of its bytes. Raises OSError where they are not those that were written."""
    written = crc32(file)
    flush(file)
    if hasattr(os, "posix_fadvise"):  # else the system reads its copy in memory
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
