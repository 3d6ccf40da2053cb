"""Throughput of the storage under a folder."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

CHUNK_BYTES = 4 * 2**20


def throughput(folder: str | Path, size_bytes: int) -> tuple[float | None, float | None]:
    """(write, read) in bytes per second of one file, sequential; None for what cannot be measured.

    Writing counts until ``fsync`` returns. Before reading, the kernel is asked to drop the file from the page cache;
    file systems may ignore that (overlay and network ones do), and a virtual disk has the host's cache behind it, so
    the read figure is an upper bound. None for both when less than ten times ``size_bytes`` is free, or the folder is not writable.
    """
    statistics = os.statvfs(folder)
    if statistics.f_bavail * statistics.f_frsize < 10 * size_bytes or not os.access(folder, os.W_OK):
        return None, None
    # Random, so that file systems that compress or share blocks have to write them.
    chunk = os.urandom(CHUNK_BYTES)
    chunks = max(1, size_bytes // CHUNK_BYTES)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".ahp-probe-", buffering=0) as file:
        start = time.perf_counter()
        for _ in range(chunks):
            file.write(chunk)
        os.fsync(file.fileno())
        written = time.perf_counter() - start
        if not hasattr(os, "posix_fadvise"):
            return chunks * CHUNK_BYTES / written, None
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        start = time.perf_counter()
        while file.read(CHUNK_BYTES):
            pass
        read = time.perf_counter() - start
    return chunks * CHUNK_BYTES / written, chunks * CHUNK_BYTES / read
