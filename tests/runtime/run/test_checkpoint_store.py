"""Checkpoints in an object store: whole once their manifest is there, whatever fails in the middle."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock
from uuid import uuid4

import fsspec
import pytest

from ahp.errors import BadInput
from ahp.plan import Plan
from ahp.run_files import Status
from ahp.runtime.files import crc32
from ahp.runtime.run import stored_checkpoints
from ahp.runtime.run.checkpoint_store import MANIFEST, CheckpointStore, Incomplete, manifest_of
from ahp.runtime.run.folder import Checkpoint, RunFolder
from ahp.runtime.run.stored_checkpoints import StoredCheckpoints
from ahp.runtime.run.trainer import Trainer


class Died(BaseException):
    """Whoever wrote was killed."""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return folder


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CheckpointStore]:
    url = f"memory://{uuid4().hex}/run" if request.param == "memory" else f"file://{tmp_path}/bucket/run"
    store = CheckpointStore.open(url)
    yield store
    if request.param == "memory" and store.fs.exists(store.root):
        store.fs.rm(store.root, recursive=True)


def save(
    folder: RunFolder, step: int, keep: int = 3, job: dict[str, Any] | None = None, model: Any = "tiny"
) -> Checkpoint:
    """As a run does it."""
    aside = folder.open_checkpoint(step)
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        (aside / name).write_bytes(f"{name} of {step} ".encode() * 50)
    checksums = {file.name: crc32(file) for file in aside.iterdir()}
    return folder.commit_checkpoint(step, {"crc32": checksums, "job": job or {}, "model": model}, keep)


def content(checkpoint: Checkpoint) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in checkpoint.path.iterdir()}


def path_of(store: CheckpointStore, step: int, name: str) -> str:
    return f"{store.root}/step-{step}/{name}"


def failing(store: CheckpointStore, method: str, at: int, error: BaseException) -> Any:
    """Within, the store raises at the call of that number, counted from 1, and at those that follow."""
    works: Callable[..., Any] = getattr(store.fs, method)
    calls = iter(range(1, 1_000))

    def call(*arguments: Any, **keywords: Any) -> Any:
        if next(calls) >= at:
            raise error
        return works(*arguments, **keywords)

    return mock.patch.object(store.fs, method, call)


def other_run(folder: RunFolder, name: str) -> RunFolder:
    found = RunFolder(folder.path.with_name(name))
    found.create()
    return found


# the store


def test_a_checkpoint_comes_back_as_it_was(store: CheckpointStore, folder: RunFolder) -> None:
    assert store.complete() == {}
    saved = save(folder, 5)
    store.put(saved)
    assert store.complete() == {5: manifest_of(saved)}
    there = other_run(folder, "there")
    StoredCheckpoints(store, there, keep=3).fetch()
    (found,) = there.checkpoints()
    assert content(found) == content(saved)
    assert found.damaged_file() is None


@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_checkpoint_of_which_the_writer_was_killed_does_not_count(
    store: CheckpointStore, folder: RunFolder, at: int
) -> None:
    store.put(save(folder, 5))
    with failing(store, "put_file", at, Died()), pytest.raises(Died):
        store.put(save(folder, 10))
    with failing(store, "pipe_file", 1, Died()), pytest.raises(Died):
        store.put(save(folder, 15))
    assert list(store.complete()) == [5]
    there = other_run(folder, "there")
    StoredCheckpoints(store, there, keep=3).fetch()
    assert [found.step for found in there.checkpoints()] == [5]
    store.put(save(folder, 20))
    store.keep_newest(2, put=20)
    assert sorted(store.complete()) == [5, 20]
    assert sorted(store._files()) == [5, 20], "what was left of others is gone"


def test_one_that_is_replaced_does_not_count_meanwhile(store: CheckpointStore, folder: RunFolder) -> None:
    store.put(save(folder, 5))
    with failing(store, "put_file", 2, Died()), pytest.raises(Died):
        store.put(save(folder, 5))
    assert store.complete() == {}


def test_the_newest_are_kept(store: CheckpointStore, folder: RunFolder) -> None:
    for step in (5, 10, 100, 200, 15):
        store.put(save(folder, step, keep=9))
        store.keep_newest(2, put=step)
    assert sorted(store.complete()) == [15, 100, 200], "never the one that was just put"
    left = [path.rpartition("/")[2] for path in store.fs.ls(store.root, detail=False)]
    assert sorted(left) == ["step-100", "step-15", "step-200"], "no empty folder is left"


def test_a_store_that_returns_other_bytes_is_told(store: CheckpointStore, folder: RunFolder) -> None:
    def put(local: str, there: str, put: Callable[[str, str], None] = store.fs.put_file) -> None:
        put(local, there)
        if there.endswith("__1_0.distcp"):
            store.fs.pipe_file(there, flipped(store.fs.cat_file(there)))

    with mock.patch.object(store.fs, "put_file", put), pytest.raises(OSError, match=r"step-5/__1_0\.distcp does not"):
        store.put(save(folder, 5))
    assert store.complete() == {}


def flipped(given: bytes) -> bytes:
    return given[:3] + bytes([given[3] ^ 16]) + given[4:]


def test_a_flipped_byte_is_named_and_the_checkpoint_before_is_used(
    store: CheckpointStore, folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (5, 10):
        store.put(save(folder, step))
    path = path_of(store, 10, "__0_0.distcp")
    store.fs.pipe_file(path, flipped(store.fs.cat_file(path)))
    with pytest.raises(Incomplete, match=r"__0_0\.distcp has changed"):
        store.fetch(10, store.complete()[10], other_run(folder, "scratch").log_folder)
    there = other_run(folder, "there")
    StoredCheckpoints(store, there, keep=3).fetch()
    assert [found.step for found in there.checkpoints()] == [5]
    assert not list(there.checkpoints_folder.glob("*.tmp"))
    said = capsys.readouterr().err
    assert "the checkpoint of step 10 in" in said
    assert "__0_0.distcp has changed since it was written) and is passed over" in said


def test_a_cut_file_is_seen_without_a_read(store: CheckpointStore, folder: RunFolder) -> None:
    store.put(save(folder, 5))
    path = path_of(store, 5, ".metadata")
    store.fs.pipe_file(path, store.fs.cat_file(path)[:-1])
    assert store.complete() == {}


@pytest.mark.parametrize("name", ["../../plan.yaml", "/etc/passwd", "a/b", "..", ""])
def test_a_manifest_leads_to_no_other_folder(store: CheckpointStore, folder: RunFolder, name: str) -> None:
    store.put(save(folder, 5))
    path = path_of(store, 5, MANIFEST)
    plain = json.loads(store.fs.cat_file(path))
    plain["files"][name] = {"num_bytes": 1, "crc32": 1}
    store.fs.pipe_file(path, json.dumps(plain).encode())
    assert store.complete() == {}


@pytest.mark.parametrize(
    "given", [b"", b"{", b"[]", b'{"format": 1}', b'{"format": 2, "files": {}}', b"[" * 9999, b"\xff"]
)
def test_what_is_no_manifest_does_not_count(store: CheckpointStore, folder: RunFolder, given: bytes) -> None:
    store.put(save(folder, 5))
    store.fs.pipe_file(path_of(store, 5, MANIFEST), given)
    assert store.complete() == {}


# the run


def test_new_checkpoints_are_copied_beside_the_run_and_the_newest_at_its_end(
    store: CheckpointStore, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_checkpoints, "LOOK_S", 0.01)
    kept = StoredCheckpoints(store, folder, keep=2)
    with kept.kept_up():
        for step in (5, 10, 15):
            save(folder, step, keep=2)
            while kept.copied is None or kept.copied[0] != step:
                time.sleep(0.001)  # and the store is not read meanwhile: fsspec's memory is not made for two threads
        save(folder, 20, keep=2)
    assert sorted(store.complete()) == [15, 20]
    assert store.complete()[20] == manifest_of(folder.checkpoints()[-1])
    told = json.loads((folder.path / "checkpoint_store.json").read_text())
    assert told == {"url": store.url, "step": 20, "failures": 0, "last_failure": None}


def test_a_store_that_fails_is_said_counted_and_tried_again(
    store: CheckpointStore, folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = StoredCheckpoints(store, folder, keep=2)
    save(folder, 5)
    with failing(store, "put_file", 2, PermissionError("Access Denied")):
        assert not kept._copy_newest()
        assert not kept._copy_newest()
    said = capsys.readouterr().err
    assert f"the checkpoint of step 5 is not in {store.url} (PermissionError: Access Denied); training goes on" in said
    assert kept.failures == 2
    assert folder.checkpoints()[-1].damaged_file() is None
    with kept.kept_up():
        pass
    assert list(store.complete()) == [5]
    assert f"{store.url} failed 2 times, last: PermissionError: Access Denied" in capsys.readouterr().err


def test_a_checkpoint_that_goes_while_it_is_copied_is_no_failure(store: CheckpointStore, folder: RunFolder) -> None:
    kept = StoredCheckpoints(store, folder, keep=1)
    save(folder, 5)

    def put(*_: Any) -> None:
        save(folder, 10, keep=1)
        raise FileNotFoundError("__0_0.distcp")

    with mock.patch.object(CheckpointStore, "put", put):
        assert kept._copy_newest()
    assert kept._copy_newest()
    assert (list(store.complete()), kept.failures) == ([10], 0)


def test_nothing_is_copied_twice(store: CheckpointStore, folder: RunFolder) -> None:
    save(folder, 5)
    assert StoredCheckpoints(store, folder, keep=1)._copy_newest()
    again = StoredCheckpoints(store, folder, keep=1)
    again.fetch()
    with failing(store, "put_file", 1, Died()):
        assert again._copy_newest()


def test_the_newer_of_folder_and_store_is_used(store: CheckpointStore, folder: RunFolder) -> None:
    for step in (5, 10):
        store.put(save(folder, step))
    here = other_run(folder, "here")
    save(here, 5)
    StoredCheckpoints(store, here, keep=3).fetch()
    assert [found.step for found in here.checkpoints()] == [5, 10]
    save(here, 15)
    with failing(store, "get_file", 1, Died()):
        StoredCheckpoints(store, here, keep=3).fetch()


def test_no_start_at_step_0_beside_a_store_that_cannot_be_asked(
    store: CheckpointStore, folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = StoredCheckpoints(store, folder, keep=3)
    with (
        failing(store, "find", 1, ConnectionError("no route")),
        pytest.raises(BadInput, match=r"run\.checkpoint_store = .*cannot be read \(ConnectionError: no route\)"),
    ):
        kept.fetch()
    store.put(save(folder, 5))
    with failing(store, "find", 1, ConnectionError("no route")):
        kept.fetch()
    assert "going on with the run's folder, from step 5" in capsys.readouterr().err
    path = path_of(store, 5, "__0_0.distcp")
    store.fs.pipe_file(path, flipped(store.fs.cat_file(path)))
    with pytest.raises(BadInput, match="none of its checkpoints can be used"):
        StoredCheckpoints(store, other_run(folder, "new"), keep=3).fetch()


def test_a_run_that_is_done_still_gives_the_store_its_last_checkpoint(folder: RunFolder, tmp_path: Path) -> None:
    plan, store = Plan(), CheckpointStore.open(f"file://{tmp_path}/bucket")
    save(folder, plan.job.steps, job=plan.job.model_dump(mode="json"), model=plan.model)
    folder.write_status(Status("done", plan.job.steps, None, 0))
    outcome = Trainer(plan, folder=folder.path, checkpoint_store=store.url).run()
    assert outcome.already_done
    assert list(store.complete()) == [plan.job.steps]


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("bucket/run", "it must be the URL of a folder"),
        ("s3://", "it must be the URL of a folder"),
        ("s4://bucket/run", "fsspec knows no s4://"),
    ],
)
def test_what_is_no_store_is_refused_at_once(url: str, rule: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        Trainer(Plan(), folder=tmp_path, checkpoint_store=url)
    assert f"run.checkpoint_store = {url!r}: {rule}" in str(caught.value)
    assert "s3://bucket/folder" in str(caught.value)


def test_a_store_without_its_library_names_the_extra(tmp_path: Path) -> None:
    missing = ImportError("Install s3fs to access S3")
    with (
        mock.patch.object(fsspec, "get_filesystem_class", side_effect=missing),
        pytest.raises(
            BadInput,
            match=r"Install s3fs to access S3\); install the extra: pip install 'adaptive-hybrid-parallelism\[object-store\]'",
        ),
    ):
        Trainer(Plan(), folder=tmp_path, checkpoint_store="s3://bucket/run")
