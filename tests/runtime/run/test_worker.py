"""What a rank does before it meets the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ahp import run_history
from ahp.graph import models
from ahp.job import Job
from ahp.plan import Plan
from ahp.run_files import Status
from ahp.runtime.ranks import ranks
from ahp.runtime.run import failure, worker
from ahp.runtime.run.folder import RunFolder
from ahp.runtime.run.stop_signal import StopRequest
from ahp.runtime.run.worker import WorkerSettings, run_rank


def test_a_rank_imports_what_its_model_needs_before_others_can_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    did: list[str] = []

    def joined(*_: Any, **__: Any) -> None:
        did.append("joined")
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "build_model", lambda *_, **__: did.append("built"))
    monkeypatch.setattr(ranks, "joined", joined)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: did.append(f"GPU {number}"))
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", "1")
    folder = RunFolder(tmp_path)
    folder.create()
    order = WorkerSettings(corpora=("",), device="cpu", checkpoint_every=5, keep=1)
    for settings in (order, replace(order, gpus=(0, 2))):
        with pytest.raises(KeyboardInterrupt):
            run_rank(Plan(model={}, job=Job()), folder, settings, StopRequest())
    assert did == ["built", "joined", "GPU 2", "built", "joined"]


@pytest.mark.parametrize("others_went_on", [False, True])
def test_a_rank_that_wakes_after_the_others_have_started_again_leaves_their_folder_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others_went_on: bool
) -> None:
    """Its node was stopped, or its network cut."""
    folder = RunFolder(tmp_path)
    folder.create()
    began = run_history.Start("2026-01-01T00:00:00+00:00", "dp2", 2, 0)
    run_history.began(folder.history_file, began)

    @contextmanager
    def joined(*_: Any, **__: Any) -> Iterator[Any]:
        yield SimpleNamespace(is_first=False, from_first=lambda value: 1)

    def train(*_: Any) -> None:
        if others_went_on:
            run_history.began(folder.history_file, began)
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(models, "build_model", lambda *_, **__: None)
    monkeypatch.setattr(ranks, "joined", joined)
    monkeypatch.setattr(worker, "_train", train)
    monkeypatch.setenv("RANK", "1")
    order = WorkerSettings(corpora=("",), device="cpu", checkpoint_every=5, keep=1)
    with pytest.raises(RuntimeError, match="Connection closed"):
        run_rank(Plan(model={}, job=Job()), folder, order, StopRequest())
    assert (failure.read(folder) is None, folder.status() is None) == (others_went_on, others_went_on)


def test_a_rank_that_wakes_in_the_middle_of_its_checkpoint_does_not_write_into_that_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node was stopped, and the others have come to the same step again: its file had the name of theirs, in the same folder."""
    folder, others = RunFolder(tmp_path), RunFolder(tmp_path)
    folder.create()
    others.start = 2

    @contextmanager
    def joined(*_: Any, **__: Any) -> Iterator[Any]:
        yield SimpleNamespace(is_first=False, from_first=lambda value: 1)

    def train(plan: Plan, module: Any, folder: RunFolder, *_: Any) -> Status:
        (others.open_checkpoint(8) / "__1_0.distcp").write_bytes(b"theirs")
        place = folder.aside_for(8)
        place.mkdir(exist_ok=True)
        (place / "__1_0.distcp").write_bytes(b"its own, and longer")
        return Status("running", 8)

    monkeypatch.setattr(models, "build_model", lambda *_, **__: None)
    monkeypatch.setattr(ranks, "joined", joined)
    monkeypatch.setattr(worker, "_train", train)
    order = WorkerSettings(corpora=("",), device="cpu", checkpoint_every=5, keep=1)
    run_rank(Plan(model={}, job=Job()), folder, order, StopRequest())
    found = others.commit_checkpoint(8, {"crc32": {}, "job": {}, "model": {}}, keep=1)
    assert (found.path / "__1_0.distcp").read_bytes() == b"theirs"
    others.discard_unfinished()
    assert [path.name for path in others.checkpoints_folder.iterdir()] == ["step-8"]
