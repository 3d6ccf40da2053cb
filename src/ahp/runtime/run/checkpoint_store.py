"""Checkpoints in an object store, through fsspec. The manifest is written last and makes a checkpoint whole.

A store has no rename that makes many files appear at once. Here a checkpoint is ``step-N/`` with its files and ``manifest.json``, which holds
the size and checksum of each file. Without the manifest, or with a file of another size, the checkpoint does not count.
"""

from __future__ import annotations

import errno
import json
import re
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ahp.about import install_extra
from ahp.errors import AhpError, bad_input, first_line
from ahp.runtime.files import crc32
from ahp.runtime.run.folder import Checkpoint

MANIFEST = "manifest.json"
FORMAT = 1
"""Format of the manifest; a manifest of another format is not read."""
STREAMS = 4
"""[Empirical] Files in transfer at once: one connection to a store rarely fills a network card."""
READ_BYTES = 1 << 24
"""Bytes read from a store in one request."""
URLS = ("s3://bucket/folder", "gs://bucket/folder", "az://container/folder", "file:///folder")


class Incomplete(AhpError):
    """A checkpoint in the store does not match its manifest."""


class Entry(NamedTuple):
    """A file of a checkpoint."""

    num_bytes: int
    crc32: int


Manifest = Mapping[str, Entry]
"""The files of a checkpoint, keyed by name; meta.json is among them."""


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of one run below a URL. Errors of fsspec, of the store's library and of the network pass through."""

    url: str
    fs: Any
    """fsspec's file system."""
    root: str
    """The URL's path in that file system."""

    @classmethod
    def open(cls, url: str) -> CheckpointStore:
        """Raises BadInput if ``url`` is not a URL, or nothing installed can reach such a store. Does not contact the store yet."""
        import fsspec
        from fsspec.core import url_to_fs

        protocol, there, path = url.partition("://")
        if not there or not path.strip("/"):
            raise bad_input("run.checkpoint_store", url, "it must be the URL of a folder", URLS)
        try:
            fsspec.get_filesystem_class(protocol)
        except ValueError:
            raise bad_input("run.checkpoint_store", url, f"fsspec knows no {protocol}://", URLS) from None
        except ImportError as error:
            rule = f"{protocol}:// needs a library ({error}); {install_extra('object-store')}"
            raise bad_input("run.checkpoint_store", url, rule) from None
        try:
            fs, root = url_to_fs(url, **({"auto_mkdir": True} if protocol in ("file", "local") else {}))
        except Exception as error:  # from the store's own library, which may look for credentials here
            raise bad_input("run.checkpoint_store", url, f"it cannot be opened ({reason(error)})") from None
        return cls(url, fs, root.rstrip("/"))

    def complete(self) -> dict[int, Manifest]:
        """The whole checkpoints, keyed by step: each file has its full size. Their bytes are checked when they are fetched."""
        found = {}
        for step, sizes in self._files().items():
            if MANIFEST not in sizes:
                continue
            try:
                manifest = _parsed(self.fs.cat_file(f"{self._folder(step)}/{MANIFEST}"))
            except FileNotFoundError:  # the checkpoint is being replaced
                continue
            if manifest and all(sizes.get(name) == entry.num_bytes for name, entry in manifest.items()):
                found[step] = manifest
        return found

    def put(self, checkpoint: Checkpoint) -> None:
        """Copy a complete checkpoint from the run's folder, and read every file back. Replaces the store's checkpoint of the same step.

        Raises OSError if a file does not read back as it was first written.
        """
        folder, manifest = self._folder(checkpoint.step), manifest_of(checkpoint)
        self._remove(folder, [MANIFEST])  # from here on the old one does not count

        def put(name: str) -> None:
            self.fs.put_file(str(checkpoint.path / name), f"{folder}/{name}")
            if self._crc32(f"{folder}/{name}") != manifest[name].crc32:
                raise OSError(errno.EIO, f"step-{checkpoint.step}/{name} does not read back as it was written")

        _all_at_once(put, manifest)
        files = {name: entry._asdict() for name, entry in manifest.items()}
        content = json.dumps({"format": FORMAT, "step": checkpoint.step, "files": files}, indent=1)
        self.fs.pipe_file(f"{folder}/{MANIFEST}", content.encode())

    def fetch(self, step: int, manifest: Manifest, folder: Path) -> None:
        """Copy a checkpoint's files into a folder. Raises Incomplete if a file does not match the manifest."""

        def get(name: str) -> None:
            self.fs.get_file(f"{self._folder(step)}/{name}", str(folder / name))
            if crc32(folder / name) != manifest[name].crc32:
                raise Incomplete(f"{name} has changed since it was written")

        _all_at_once(get, manifest)

    def keep_newest(self, keep: int, *, put: int) -> None:
        """Remove all but the ``keep`` newest complete checkpoints and the one just ``put``, including remains of incomplete ones."""
        whole = sorted(self.complete())
        for step, sizes in self._files().items():
            if step not in whole[-keep:] and step != put:
                self._remove(self._folder(step), sorted(sizes, key=lambda name: name != MANIFEST))
                with suppress(OSError):  # most stores have no folders, file:// has
                    self.fs.rmdir(self._folder(step))

    def _folder(self, step: int) -> str:
        return f"{self.root}/step-{step}"

    def _files(self) -> dict[int, dict[str, int]]:
        """The size of every file, keyed by step and name."""
        self.fs.invalidate_cache()
        found: dict[int, dict[str, int]] = {}
        for path, about in self.fs.find(self.root, detail=True).items():
            place = re.fullmatch(r"step-(\d+)/([^/]+)", path.removeprefix(self.root).lstrip("/"))
            if place is not None:
                found.setdefault(int(place[1]), {})[place[2]] = about["size"]
        return found

    def _remove(self, folder: str, names: list[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                self.fs.rm_file(f"{folder}/{name}")

    def _crc32(self, path: str) -> int:
        value = 0
        with self.fs.open(path, "rb", block_size=READ_BYTES) as stream:
            while block := stream.read(READ_BYTES):
                value = zlib.crc32(block, value)
        return value


def manifest_of(checkpoint: Checkpoint) -> Manifest:
    """The manifest of a complete checkpoint in a run's folder."""
    meta, file = checkpoint.meta(), checkpoint.path / "meta.json"
    entries = {name: Entry(size, meta["crc32"][name]) for name, size in meta["files"].items()}
    return {**entries, "meta.json": Entry(file.stat().st_size, crc32(file))}


def reason(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {first_line(error)}"


def _parsed(content: bytes) -> Manifest | None:
    """The manifest; None if it is not valid: anyone who can write to the store can write anything, even a path that leaves the folder."""
    try:
        plain = json.loads(content)
        manifest = {name: Entry(int(e["num_bytes"]), int(e["crc32"])) for name, e in plain["files"].items()}
        plain_names = all(Path(name).name == name for name in manifest)
        return manifest if plain["format"] == FORMAT and "meta.json" in manifest and plain_names else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _all_at_once(work: Any, names: Manifest) -> None:
    """Run ``work(name)`` for each name, ``STREAMS`` at a time. Raises the first error and cancels what has not begun."""
    pool = ThreadPoolExecutor(STREAMS, thread_name_prefix="checkpoint-store")
    try:
        for done in [pool.submit(work, name) for name in names]:
            done.result()
    finally:
        pool.shutdown(cancel_futures=True)
