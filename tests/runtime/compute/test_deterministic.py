"""job.deterministic: on during steps alone, the same curve, and operators without a deterministic kernel refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from ahp.errors import NotExpressible
from ahp.job import Job
from ahp.runtime.compute.deterministic import deterministic, set_environment
from tests.marks import cases
from tests.runtime.models import BUILDERS, JOB, batch
from tests.runtime.test_equality import assert_same_curve, world_size
from tests.runtime.workers import Pool

STEPS = 3
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tp": ("llama", {"tensor_parallel_degree": 2}),
    "zero3": ("custom", {"data_parallel_shard_degree": 2, "zero_stage": 3}),
    "pp": ("gpt2", {"pipeline_parallel_degree": 2, "micro_batch_size": 2}),
    "ring": ("llama", {"context_parallel_degree": 2, "context_parallel_method": "ring"}),
}


def train(rank: int, world: int, model: str, layout: dict[str, Any]) -> dict[str, Any]:
    from ahp.runtime.parallel import parallelize

    with mock.patch.dict(os.environ):
        parallel = parallelize(BUILDERS[model](), {"job": {**JOB, "deterministic": True}, "parallelism": layout})
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    seen: list[bool] = []
    for stage in parallel.stages.values():
        stage.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(torch.are_deterministic_algorithms_enabled()), with_kwargs=True
        )
    results = [parallel.step(parallel.shard(batch(step))) for step in range(STEPS)]
    parallel.evaluate([parallel.shard(batch(0))])
    assert seen
    assert all(seen)
    assert not torch.are_deterministic_algorithms_enabled()
    return {"losses": [r.loss for r in results], "norms": [r.grad_norm for r in results]}


@pytest.mark.parametrize("layout", cases(LAYOUTS))
def test_the_curve_is_that_of_one_process(pool: Pool, plain_run: Callable[..., dict[str, Any]], layout: str) -> None:
    model, degrees = LAYOUTS[layout]
    for found in pool.run(train, world_size(degrees), model, degrees):
        assert_same_curve(found, plain_run(model, STEPS))


def test_the_programs_own_choice_holds_afterwards() -> None:
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark, torch.utils.deterministic.fill_uninitialized_memory
    with deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
        assert (cudnn.deterministic, cudnn.benchmark) == (True, False)
    refused = pytest.raises(NotExpressible, match=r"job\.deterministic = True: put_ does not have a deterministic")
    with refused, deterministic(True):
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.ones(2))
    with pytest.raises(RuntimeError, match="another fault"), deterministic(True):
        raise RuntimeError("another fault")
    assert (cudnn.deterministic, cudnn.benchmark, torch.utils.deterministic.fill_uninitialized_memory) == before
    with deterministic(False):
        assert not torch.are_deterministic_algorithms_enabled()


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.delenv("TORCHINDUCTOR_DETERMINISTIC", raising=False)
    set_environment()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert os.environ.pop("TORCHINDUCTOR_DETERMINISTIC") == "1"


def test_jobs_of_older_runs_have_it_off() -> None:
    old = Job().model_dump(exclude={"deterministic"})
    assert Job.model_validate(old) == Job()
    assert not Job().deterministic
