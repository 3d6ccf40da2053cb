"""Keys of the job beside a plan: those that do not change it are taken, the others refused with the way that works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ahp.cli.following import default_data_words
from ahp.cli.plan_job import ANY_PLAN, with_job
from ahp.cli.train import read_request
from ahp.errors import BadInput
from ahp.forecast.step import price
from ahp.graph.kept import analyze
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism, Plan
from tests.search.small import small

PLAN = Plan(model="tiny", job=Job(), parallelism=Parallelism(), cluster=None)
OTHER = {
    "job.data": "a.txt", "job.data_field": "text", "job.validation": 0.1, "job.steps": 5, "job.seed": 3,
    "job.optimizer.learning_rate": 1e-4, "job.optimizer.betas": [0.9, 0.99], "job.optimizer.eps": 1e-7,
    "job.optimizer.weight_decay": 0.0, "job.optimizer.warmup_steps": 3, "job.optimizer.schedule": "wsd",
    "job.optimizer.decay_share": 0.3, "job.optimizer.grad_clip": 0.5,
}  # fmt: skip


def test_a_file_of_a_plan_takes_them(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    PLAN.save(file)
    request = read_request(str(file), {"job.steps": 5, "run.folder": "r"})
    assert request.plan is not None
    assert (request.plan.job.steps, request.run.folder) == (5, "r")


@pytest.mark.slow
def test_no_forecast_depends_on_them() -> None:
    assert OTHER.keys() == set(ANY_PLAN)
    job = with_job(PLAN, "plan.yaml", OTHER).job
    assert job.optimizer.decay_share == 0.3
    cluster = small("llama", "1x2xH100-SXM-80GB").cluster
    layout = Parallelism(data_parallel_shard_degree=2, zero_stage=1)
    one, other = (price(analyze("tiny", of), cluster, of, layout, EngineChoice()).forecast for of in (PLAN.job, job))
    assert one == other


@pytest.mark.parametrize(
    "key", ["job.global_batch_size", "job.precision", "job.optimizer.name", "parallelism.zero_stage"]
)
def test_what_may_change_the_plan_is_refused(key: str) -> None:
    flag = key.replace("_", "-")  # as the command's help writes it
    with pytest.raises(
        BadInput, match=rf"--{flag}: plan.yaml is a plan, .*plan again with the key \(valid here: .*--job.steps"
    ):
        with_job(PLAN, "plan.yaml", {key: 1})


def test_a_value_that_is_none_is_refused() -> None:
    with pytest.raises(BadInput, match=r"steps = 0"):
        with_job(PLAN, "plan.yaml", {"job.steps": 0})


def test_training_on_the_text_of_a_trial_is_said() -> None:
    assert "200 steps on python-stdlib" in (default_data_words(Job()) or "")
    assert default_data_words(Job(data="a.txt")) is None


def test_a_runs_folder_is_told_how_it_goes_on(tmp_path: Path) -> None:
    """Other commands take it; ahp train said only that it is no file."""
    Plan().save(tmp_path / "plan.yaml")
    folder = re.escape(str(tmp_path))
    told = rf"config = '{folder}': a run's folder; .*ahp train {folder}/plan.yaml --run.folder {folder}"
    with pytest.raises(BadInput, match=told):
        read_request(str(tmp_path), {})
