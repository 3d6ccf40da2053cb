"""Compiled blocks compute what the eager ones do."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from ahp.errors import HardwareMismatch
from ahp.runtime.compiled import CPU_COMPILERS, refuse_without_compiler
from tests.runtime.models import BUILDERS, JOB, batch
from tests.runtime.test_equality import ZERO, assert_same_curve, world_size
from tests.runtime.workers import Pool

STEPS = 10


def train(rank: int, world: int, layout: dict[str, Any]) -> dict[str, Any]:
    from ahp.runtime.parallelize import parallelize

    plan = {"job": JOB, "parallelism": layout, "engine": {"compile": True}}
    parallel = parallelize(BUILDERS["llama"](), plan)
    results = [parallel.step(parallel.shard(batch(step))) for step in range(STEPS)]
    return {
        "losses": [r.loss for r in results],
        "norms": [r.grad_norm for r in results],
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
    }


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, CPU_COMPILERS)), reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_blocks_equal_one_process(pool: Pool, plain_run: Callable[..., dict[str, Any]]) -> None:
    """Under one layout: compiling takes half a minute, and a pipeline's stage or a recomputed block is the same graph."""
    layout = ZERO["zero3"]
    for found in pool.run(train, world_size(layout), layout):
        assert found["graphs"] > 0, "nothing was compiled"
        assert_same_curve(found, plain_run("llama", STEPS))


def train_without_kernels(rank: int, world: int, layout: dict[str, Any]) -> dict[str, Any]:
    """Everything but the compiler of kernels, which takes long."""
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        return train(rank, world, layout)


@pytest.mark.slow
def test_compiled_slices_equal_one_process(pool: Pool, plain_run: Callable[..., dict[str, Any]]) -> None:
    layout = {
        **ZERO["zero3"],
        "data_parallel_shard_degree": 2,
        "tensor_parallel_degree": 2,
        "activation_checkpoint": "full",
    }
    for found in pool.run(train_without_kernels, world_size(layout), layout):
        assert found["graphs"] > 0, "nothing was compiled"
        assert_same_curve(found, plain_run("llama", STEPS))


def test_a_cpu_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(HardwareMismatch, match=r"engine.compile = True.*no-such-compiler"):
        refuse_without_compiler(torch.device("cpu"))
    refuse_without_compiler(torch.device("cuda"))
