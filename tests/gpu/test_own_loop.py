"""A loop of the user's own on a GPU: the group that ahp.parallelize makes, the random numbers of its steps, and the same digits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ahp
from tests.runtime.models import JOB, batch
from tests.runtime.test_own_loop import gpt2_with_dropout
from tests.runtime.workers import free_port, place

STEPS = 4


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As torchrun --nproc-per-node 1 starts a process."""
    for name, value in {**place(0, 1, free_port()), "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def train(job: dict[str, Any] | None = None, seed: int = 0) -> tuple[list[float], list[float]]:
    """Losses, and what the program drew on the GPU between steps."""
    parallel = ahp.parallelize(
        gpt2_with_dropout(), {"job": {**JOB, **(job or {})}, "parallelism": {"micro_batch_size": 2}}
    )
    assert parallel.mesh.device == torch.device("cuda", 0)
    torch.manual_seed(seed)
    losses, drawn = [], []
    for step in range(STEPS):
        losses.append(parallel.step(parallel.shard(batch(step))).loss)
        drawn.append(torch.rand((), device="cuda").item())
    return losses, drawn


@pytest.mark.parametrize("launched", [True, False], ids=["torchrun", "alone"])
def test_parallelize_makes_the_group(launched: bool, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("started" if launched else "no_launcher")
    losses, _ = train()
    assert (dist.get_backend(), dist.get_world_size()) == ("nccl", 1)
    assert all(torch.tensor(losses).isfinite())


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch, started: None) -> None:
    for name in (*place(0, 1), "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name)


@pytest.mark.parametrize("backend", [None, "nccl", "cpu:gloo,cuda:nccl"])
def test_groups_of_the_programs_own_compute_on_the_gpu(started: None, backend: str | None) -> None:
    dist.init_process_group(backend)
    losses, _ = train()
    assert all(torch.tensor(losses).isfinite())


def test_the_programs_seed_changes_no_step_and_steps_do_not_change_what_it_draws(started: None) -> None:
    (one, drawn), (other, _) = train(seed=1), train(seed=2)
    assert one == pytest.approx(other, rel=1e-5)
    generator = torch.Generator("cuda").manual_seed(1)
    assert drawn == [torch.rand((), device="cuda", generator=generator).item() for _ in range(STEPS)]


DIGITS = """
import torch
from tests.gpu.test_own_loop import train
losses, _ = train({"deterministic": True, "precision": "bf16"})
print([loss.hex() for loss in losses])
torch.distributed.destroy_process_group()
"""


def test_two_deterministic_starts_have_the_same_digits() -> None:
    """In processes of their own: cuBLAS reads its workspaces' sizes once."""
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    found = [
        subprocess.run(
            [sys.executable, "-c", DIGITS], env={**os.environ, **paths}, capture_output=True, text=True, check=True
        )
        for _ in range(2)
    ]
    assert found[0].stdout == found[1].stdout
    assert "0x1" in found[0].stdout


SEGMENTS = """
import torch
from tests.gpu.test_own_loop import train
train()
assert torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
torch.distributed.destroy_process_group()
"""


def test_segments_grow_where_the_program_set_nothing() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    ended = subprocess.run(
        [sys.executable, "-c", SEGMENTS], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
