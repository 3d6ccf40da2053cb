"""Trackers get what metrics.jsonl gets; one that is not installed is refused before anything starts."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ahp.errors import BadInput
from ahp.plan import Plan
from ahp.runtime.run.trackers import Trackers, check
from ahp.runtime.run.trainer import Trainer

RECORDS = [
    {"step": 7, "loss": 2.5, "predicted_step_time_s": None, "mfu": None, "skipped": False},
    {"step": 8, "loss": 2.0, "validation_loss": 2.25},
]


def test_wandb_is_given_every_figure_and_the_same_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []
    logged: list[tuple[int, dict[str, float]]] = []
    finished: list[bool] = []

    def init(**settings: Any) -> SimpleNamespace:
        started.append(settings)
        return SimpleNamespace(
            log=lambda figures, step: logged.append((step, figures)), finish=lambda: finished.append(True)
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    for _ in range(2):
        trackers = Trackers(["wandb"], tmp_path / "run", Plan(), print)
        assert len(started) == len(finished)
        for record in RECORDS:
            trackers.log(record)
        trackers.close()
    assert logged == [(7, {"loss": 2.5, "skipped": 0.0}), (8, {"loss": 2.0, "validation_loss": 2.25})] * 2
    assert started[0] == started[1]
    assert (started[0]["name"], started[0]["resume"]) == ("run", "allow")
    assert started[0]["config"]["job"]["steps"] == 200
    assert len(finished) == 2


def test_tensorboard_begins_where_the_run_goes_on_and_has_each_step_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[str, float, int]] = []
    made: list[tuple[str, int]] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            made.append((folder, purge_step))

        def add_scalar(self, key: str, value: float, step: int) -> None:
            written.append((key, value, step))

        def flush(self) -> None:
            written.append(("flushed", 0, 0))

        def close(self) -> None:
            written.append(("closed", 0, 0))

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    trackers = Trackers(["tensorboard", "tensorboard"], tmp_path, Plan(), print)
    for record in RECORDS:
        trackers.log(record)
    trackers.close()
    assert made == [(str(tmp_path / "tensorboard"), 7)]
    assert written == [
        ("loss", 2.5, 7),
        ("skipped", 0.0, 7),
        ("flushed", 0, 0),
        ("loss", 2.0, 8),
        ("validation_loss", 2.25, 8),
        ("flushed", 0, 0),
        ("closed", 0, 0),
    ]


@pytest.mark.parametrize("fails", ["init", "log", "close"])
def test_a_run_goes_on_without_a_tracker_that_fails(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the run, after it had started its workers three times."""
    logged: list[int] = []
    notes: list[str] = []

    def call(name: str, step: int | None = None) -> None:
        if name == fails:
            raise OSError("the service does not answer\nits trace")
        if step is not None:
            logged.append(step)

    run = SimpleNamespace(log=lambda figures, step: call("log", step), finish=lambda: call("close"))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: call("init") or run))
    trackers = Trackers(["wandb"], tmp_path, Plan(), notes.append)
    for record in RECORDS:
        trackers.log(record)
    trackers.close()
    assert logged == ([7, 8] if fails == "close" else [])
    assert notes == [
        "run.track: wandb failed, and the run goes on without it (OSError: the service does not answer); metrics.jsonl has every figure"
    ]


def test_a_tensorboard_that_cannot_be_imported_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # its import raises ModuleNotFoundError
    with pytest.raises(BadInput, match=r"run\.track = \['tensorboard'\]: tensorboard cannot be imported: ModuleNot"):
        Trainer(Plan(), track=["tensorboard"])


def test_what_the_trainer_is_given_from_python_is_checked_as_the_config_is() -> None:
    with pytest.raises(BadInput, match=r"run\.checkpoint_every = 'daily': must be 1 step or more, a time, or auto"):
        Trainer(Plan(), checkpoint_every="daily")
    with pytest.raises(
        BadInput, match=r"run\.on_nan = 'ignore': there is no such value \(valid: stop, skip, rollback\)"
    ):
        Trainer(Plan(), on_nan="ignore")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"run\.profile\.steps = \[10, 201\]: the job has 200 steps"):
        Trainer(Plan(), profile={"steps": [10, 201]})
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"keep": "3"}, "run.keep = '3': must be a whole number"),
        ({"track": "wandb"}, "run.track = 'wandb': must be a list"),
        ({"collective_timeout_s": float("nan")}, "run.collective_timeout_s = nan: must be a finite number"),
        ({"folder": ""}, "run.folder = '': must name a folder"),
        ({"extend": "maybe"}, "run.extend = 'maybe': must be true or false"),
    )
    for given, told in wrong:
        with pytest.raises(BadInput, match=re.escape(told)):
            Trainer(Plan(), **given)


def test_what_is_not_installed_is_refused_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"run\.track = \['wandb'\].*'adaptive-hybrid-parallelism\[track\]'"):
        Trainer(Plan(), track=["wandb"])
    with pytest.raises(BadInput, match=r"mlflow is no tracker \(valid: tensorboard, wandb\)"):
        check(["mlflow"])
    check([])


def test_wandb_without_a_login_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended the run after the machine was measured, the text tokenised, and a step made."""

    class Error(Exception):
        pass

    def login() -> bool:
        if "WANDB_MODE" not in os.environ:
            raise Error("No API key configured.\nUse `wandb login`")
        return False

    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(login=login, Error=Error))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(
        BadInput, match=r"run\.track = \['wandb'\]: wandb: No API key configured\. \(valid: WANDB_MODE=offline"
    ):
        Trainer(Plan(), track=["wandb"])
    monkeypatch.setenv("RANK", "1")  # a rank that logs nothing
    check(["wandb"])
    monkeypatch.delenv("RANK")
    monkeypatch.setenv("WANDB_MODE", "offline")
    check(["wandb"])
