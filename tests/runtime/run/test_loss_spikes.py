"""Spikes of the loss and of the gradient norm are marked, and nothing else is."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from ahp.job import Job
from ahp.plan import Plan
from ahp.runtime.run.folder import RunFolder
from ahp.runtime.run.loss_spikes import FIRST_STEPS, KEPT, WINDOW_STEPS, LossSpikes
from ahp.runtime.run.trainer import Trainer
from tests.runtime.hanging import CONFIG


def curve(steps: int, *, noise: float = 0.02, norm_noise: float = 0.2) -> list[dict[str, Any]]:
    """As training goes: the loss falls from 10 to 3, the norm is spread log-normally."""
    draw = random.Random(0)
    return [
        {
            "step": step,
            "loss": 3 + 7 * math.exp(-step / 100) + draw.gauss(0, noise),
            "grad_norm": math.exp(draw.gauss(0, norm_noise)),
        }
        for step in range(1, steps + 1)
    ]


def spikes(records: list[dict[str, Any]], warmup_steps: int = 0) -> LossSpikes:
    found = LossSpikes(warmup_steps)
    found.read(records)
    return found


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.2])
def test_a_curve_that_falls_with_noise_has_none(noise: float) -> None:
    assert spikes(curve(2000, noise=noise)).kept == []


def test_a_spike_of_either_is_found_with_its_step_and_the_median_before() -> None:
    records = curve(800)
    records[699]["loss"] += 1.0
    records[749]["grad_norm"] = 40.0
    loss, norm = spikes(records).kept
    assert (loss["step"], loss["of"], loss["value"]) == (700, "loss", records[699]["loss"])
    assert 3 < loss["median"] < 3.1
    assert (norm["step"], norm["of"]) == (750, "grad_norm")


def test_nothing_at_the_start_is_one() -> None:
    records = curve(FIRST_STEPS)
    for record in records[1::3]:
        record["loss"] *= 5
    assert spikes(records).kept == []
    warm = curve(120)
    warm[79]["loss"] = 90.0
    assert [one["step"] for one in spikes(warm).kept] == [80]
    assert spikes(warm, warmup_steps=60).kept == [], "fewer than fifty steps after the warm-up"


def test_steps_that_were_left_out_have_no_loss_and_are_no_spike() -> None:
    records = curve(100)
    records[79] |= {"loss": None, "grad_norm": None}
    assert spikes(records).kept == []


def test_a_level_that_stays_becomes_the_usual_one() -> None:
    records = curve(900)
    for record in records[400:]:
        record["loss"] += 4.0
    found = LossSpikes(0)
    marked = [record["step"] for record in records if found.after(record)]
    assert marked[0] == 401
    assert marked[-1] <= 401 + WINDOW_STEPS
    assert len(found.kept) == KEPT


def test_a_spike_is_told_once() -> None:
    records = curve(200)
    for record in records[150:155]:
        record["loss"] = 20.0
    found, told = LossSpikes(0), []
    for record in records:
        found.after(record)
        told += [news] if (news := found.news(record["step"])) else []
    (one,) = told
    assert one.startswith("step 151: a spike: loss 20, the median before was ")


@pytest.mark.slow
@pytest.mark.usefixtures("launched_on_pool")
def test_a_learning_rate_that_is_far_too_high_is_seen_in_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second start, with the other rate, knows the steps of the first one from metrics.jsonl."""
    monkeypatch.setenv("AHP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(Path(__file__).read_text() * 4)
    folder, calm, wild = RunFolder(tmp_path / "run"), FIRST_STEPS + 2, 6
    trained(folder, tmp_path / "text.txt", calm, 1e-3)
    assert json.loads(folder.status_file.read_text())["loss_spikes"] == []
    trained(folder, tmp_path / "text.txt", calm + wild, 3.0)
    status = json.loads(folder.status_file.read_text())
    marked = [record["step"] for record in folder.metrics() if record.get("loss_spike")]
    assert marked
    assert calm < marked[0] <= calm + wild
    assert marked == [spike["step"] for spike in status["loss_spikes"] if spike["of"] == "loss"]
    assert status["state"] == "done"


def trained(folder: RunFolder, text: Path, steps: int, rate: float) -> None:
    optimizer = {"learning_rate": rate, "warmup_steps": 0, "schedule": "constant"}
    job = {"data": str(text), "steps": steps, "global_batch_size": 4, "sequence_length": 16, "precision": "fp32"}
    plan = Plan(model=CONFIG, job=Job.model_validate({**job, "optimizer": optimizer}))
    Trainer(plan, folder=folder.path, checkpoint_every=1000, extend=True).run()
