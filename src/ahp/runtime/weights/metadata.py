"""Reads a checkpoint's ``.metadata``, the list of where each tensor lies, as data.

torch writes it as a pickle, and reading a pickle can run code. Here it may name only the classes of such a list.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ahp.errors import AhpError
from ahp.runtime.torch_compat import metadata_names

METADATA = ".metadata"
"""torch's name for it."""


class BadMetadata(AhpError):
    """A file that is no list of a checkpoint's tensors, or has more in it than such a list."""


class DataReader(FileSystemReader):
    """torch's reader of checkpoints, with the metadata read as data."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.metadata = as_data(folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = metadata_names(module, name)
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which could run when it is read")
        return found


def as_data(folder: Path) -> Metadata:
    """The metadata of a checkpoint. Raises BadMetadata with the file's name for anything that AHP does not write."""
    file, found = folder / METADATA, None
    if not file.is_file():
        raise BadMetadata(
            f"folder = {str(folder)!r}: no checkpoint, it has no file {METADATA}; give a folder that was saved"
        )
    try:
        with file.open("rb") as stream:
            found = _Unpickler(stream).load()
        reason = _why_not(found)
    except Exception as error:  # whatever a damaged pickle leads to
        reason = str(error) if isinstance(error, pickle.UnpicklingError) else f"{type(error).__name__}: {error}"
    if reason is not None:
        raise BadMetadata(f"{file} is no list of a checkpoint's tensors and is not used: {reason}")
    assert found is not None
    return found


def _why_not(found: Any) -> str | None:
    if not isinstance(found, Metadata):
        return f"it is a {type(found).__name__}"
    for name, what in found.state_dict_metadata.items():
        # torch unpickles every entry that is no tensor, whatever it is.
        if not isinstance(what, TensorStorageMetadata):
            return f"{name} is no tensor"
    for stored in found.storage_data.values():
        if Path(stored.relative_path).name != stored.relative_path:
            return f"a tensor would be read from {stored.relative_path}, outside of the checkpoint"
    return None
