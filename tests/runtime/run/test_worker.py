"""What a rank does before it meets the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ahp.graph import models
from ahp.job import Job
from ahp.plan import Plan
from ahp.runtime.ranks import ranks
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
