"""The list of a checkpoint's tensors is read as data: nothing that lies in it runs."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from ahp.errors import BadInput
from ahp.runtime.training_state import TrainingState
from ahp.runtime.weights.checkpoint import load, save
from ahp.runtime.weights.metadata import BadMetadata, as_data

TENSORS = {
    "model.a": torch.ones(3, 4),
    "model.b": torch.ones(5, dtype=torch.bfloat16),
    "num_steps_done": torch.tensor(7),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("written")
    dcp.save(TENSORS, checkpoint_id=str(folder), no_dist=True)
    return (folder / ".metadata").read_bytes()


class Command:
    """A pickle that runs a command when it is read."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def test_what_torch_writes_is_read_as_torch_reads_it(written: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(written)
    found, theirs = as_data(tmp_path), FileSystemReader(tmp_path).read_metadata()
    assert found.state_dict_metadata == theirs.state_dict_metadata
    assert found.storage_data == theirs.storage_data
    assert found.planner_data == theirs.planner_data
    assert set(found.state_dict_metadata) == set(TENSORS)


def planner_data(found: Metadata, ran: Path) -> None:
    found.planner_data = Command(f"touch {ran}")


def in_place_of_a_tensor(found: Metadata, ran: Path) -> None:
    found.state_dict_metadata["model.a"] = Command(f"touch {ran}")  # type: ignore[assignment]


def unpickled_later(found: Metadata, ran: Path) -> None:
    """torch reads what is no tensor with ``weights_only=False``."""
    found.state_dict_metadata["model.a"] = BytesStorageMetadata()


def from_elsewhere(found: Metadata, ran: Path) -> None:
    for stored in found.storage_data.values():
        stored.relative_path = "../elsewhere.distcp"


def imported(found: Metadata, ran: Path) -> None:
    found.planner_data = pickle.PickleBuffer  # a class, of a module that has more


@pytest.mark.parametrize("change", [planner_data, in_place_of_a_tensor, unpickled_later, from_elsewhere, imported])
def test_what_would_run_or_lead_elsewhere_is_refused_with_the_files_name(
    written: bytes, tmp_path: Path, change: Callable[[Metadata, Path], None]
) -> None:
    file, ran = tmp_path / ".metadata", tmp_path / "ran"
    metadata = pickle.loads(written)
    change(metadata, ran)
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(BadMetadata) as error:
        load(None, tmp_path)  # type: ignore[arg-type]  # it is not looked at before
    assert str(error.value).startswith(str(file))
    assert not ran.exists()


@pytest.mark.parametrize("text", [b"", b"no pickle", b"cos\nsystem\n(S'exit 1'\ntR.", pickle.dumps({"a": 1})])
def test_what_is_no_list_of_tensors_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(text)
    with pytest.raises(BadMetadata, match=r"\.metadata"):
        as_data(tmp_path)


def test_a_folder_without_a_checkpoint_is_told_as_one(tmp_path: Path) -> None:
    with pytest.raises(
        BadMetadata, match=r"^folder = '.*nowhere': no checkpoint, it has no file \.metadata; give a folder"
    ):
        as_data(tmp_path / "nowhere")


def test_a_file_is_no_folder_to_save_into(tmp_path: Path) -> None:
    """It raised torch's CheckpointException, which is no Exception, with the traces of all ranks."""
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match=r"folder = '.*file': is a file; give a folder"):
        save(cast("TrainingState", None), tmp_path / "file")


def test_cut_and_changed_files_are_refused_or_read_but_nothing_else_happens(written: bytes, tmp_path: Path) -> None:
    file = tmp_path / ".metadata"
    for place in range(0, len(written), 7):
        for text in (written[:place], written[:place] + bytes([written[place] ^ 0x55]) + written[place + 1 :]):
            file.write_bytes(text)
            try:
                assert isinstance(as_data(tmp_path), Metadata)
            except BadMetadata:
                continue
