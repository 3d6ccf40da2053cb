"""What a run says and does when its folder can no longer be written: full, read-only, gone, or an error of the storage that may pass."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ahp.cli import train as command
from ahp.config import Elastic
from ahp.errors import BadInput
from ahp.run_files import Status
from ahp.runtime.ranks.launch import WorkersEnded
from ahp.runtime.run import cannot_write as module
from ahp.runtime.run import worker
from ahp.runtime.run.cannot_write import CannotWrite, cannot_write
from ahp.runtime.run.failure import TrainingFailed, may_pass
from ahp.runtime.run.folder import RunFolder
from ahp.runtime.run.restarts import Restarts
from ahp.runtime.run.trainer import Trainer
from tests.runtime.run.test_trainer import plan


def fault(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    """That of a run which has made 7 steps."""
    found = Trainer(plan(tmp_path), folder=tmp_path / "run")
    found.folder.create()
    found.folder.write_status(Status("running", 0))
    for step in range(1, 8):
        found.folder.append_metrics({"step": step})
    return found


def test_a_folder_that_is_gone_is_told(trainer: Trainer) -> None:
    """It was an internal error of the launcher, which looked for the room on its disk."""
    shutil.rmtree(trainer.folder.path)
    why = trainer._why(WorkersEnded({0: 1}))
    assert "the folder is gone (deleted, moved, or its disk is not mounted any more); bring it back" in str(why)
    assert not why.may_pass
    told = cannot_write(trainer.folder, "metrics.jsonl", fault(errno.ENOENT), 4)
    assert str(told) == str(why)
    assert not told.may_pass


def test_a_folder_that_is_gone_is_not_made_again_for_its_status(tmp_path: Path) -> None:
    """It can be the folder below a disk that is not mounted any more."""
    folder = tmp_path / "run"
    for error in (TrainingFailed("the folder is gone"), CannotWrite("the folder is gone")):
        with pytest.raises(type(error)), command._refusal_in_status(lambda: str(folder)):
            raise error
        assert not folder.exists()


def test_a_disk_that_became_read_only_is_told(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was the name of the file of the workers' notes, which the launcher could not delete."""
    trainer.folder.note("step 7: slow")

    def read_only(*_: Any, **__: Any) -> None:
        raise fault(errno.EROFS)

    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    monkeypatch.setattr(os, "unlink", read_only)
    monkeypatch.setattr(Path, "unlink", read_only)
    why = trainer._why(WorkersEnded({0: 1}))
    told = r"after step 7 it cannot be written any more \(Read-only file system\); start the same command again once it can be written"
    with pytest.raises(TrainingFailed, match=told):
        raise why
    trainer.folder.forget_notes()
    with pytest.raises(BadInput, match="Read-only file system"), trainer.folder.held():
        pass


def test_a_full_disk_is_told_with_the_way_on(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_full", lambda folder: True)
    why = trainer._why(WorkersEnded({0: 1}))
    assert (
        "after step 7 the disk is full; make room there, and start the same command again; the workers' output"
        in str(why)
    )
    assert (why.step, why.kind) == (7, "CannotWrite")
    told = cannot_write(trainer.folder, "checkpoint of step 8", RuntimeError("archive"), 4)
    assert str(told).endswith("the checkpoint of step 4 is kept; make room there, and start the same command again")


ARCHIVE = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
"""What torch's archive writer says of each error of the disk."""


def test_a_limit_of_file_sizes_is_told_and_the_checkpoint_not_written_three_times(trainer: Trainer) -> None:
    told = cannot_write(trainer.folder, "checkpoint of step 8", ARCHIVE, 4)
    assert told.may_pass
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            (trainer.folder.open_checkpoint(8) / "0.distcp").write_bytes(bytes(1 << 17))
        told = cannot_write(trainer.folder, "checkpoint of step 8", ARCHIVE, 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not told.may_pass
    assert (
        "no file may be larger than 65,536 bytes; the checkpoint of step 4 is kept; raise that limit (ulimit -f), and"
        in str(told)
    )


def test_a_quota_is_told_like_a_full_disk_whatever_torch_says(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunFolder, "fault_of_writing", lambda self: fault(errno.EDQUOT))
    told = cannot_write(trainer.folder, "checkpoint of step 8", ARCHIVE, 4)
    assert str(told).endswith(
        "the disk is full; the checkpoint of step 4 is kept; make room there, and start the same command again"
    )
    assert not told.may_pass


@pytest.mark.parametrize(
    ("number", "again"), [(errno.EIO, True), (errno.ESTALE, True), (errno.ENOSPC, False), (errno.EROFS, False)]
)
def test_an_error_of_the_storage_that_may_pass_starts_the_workers_again(
    trainer: Trainer, number: int, again: bool
) -> None:
    told = cannot_write(trainer.folder, "checkpoint of step 8", fault(number), 4)
    assert may_pass(told) == again
    failed = TrainingFailed(str(told), step=8, kind="CannotWrite", saved_step=4, may_pass=told.may_pass)
    restarts = Restarts(Elastic(), 2)
    if again:
        assert [restarts.after(failed), restarts.after(failed)] == [2, 2]
    with pytest.raises(TrainingFailed, match="checkpoint of step 8 cannot be written"):
        restarts.after(failed)


def test_weights_without_room_are_told_like_a_checkpoint_and_not_written_three_times(trainer: Trainer) -> None:
    """The workers were started three times, and the end was that "step 21" of 20 had failed each time."""

    class Parallel:
        def export_hf(self, folder: Path) -> None:
            assert folder.is_dir()
            raise OSError("the weights cannot be written: rank 0: No space left on device") from fault(errno.ENOSPC)

    ranks: Any = SimpleNamespace(is_first=True, barrier=lambda: None)
    corpus: Any = None
    with pytest.raises(
        CannotWrite, match=r"the weights in hf cannot be written, the disk is full; the checkpoint of"
    ) as told:
        worker._export(Parallel(), trainer.folder, trainer.plan, corpus, ranks)
    assert not told.value.may_pass


def test_a_run_goes_on_without_the_logs_that_somebody_deleted(trainer: Trainer) -> None:
    """The lines that a new start takes out of metrics.jsonl are kept in that folder, and it was an internal error."""
    shutil.rmtree(trainer.folder.log_folder)
    trainer._take_up("started again: worker 0 was ended")
    assert trainer.folder.metrics() == []
    assert trainer.folder.cut_metrics_file.exists()


def test_a_link_to_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    """It was "File exists"."""
    (tmp_path / "link").symlink_to("gone")
    with pytest.raises(
        BadInput, match=r"cannot be written \(it is a link to gone, which is not there\); give another run.folder"
    ):
        RunFolder(tmp_path / "link").create()
