"""Where a rank computes, with the process groups that programs make; and the group that is made where there is none."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ahp
from ahp.errors import BadInput, HardwareMismatch
from ahp.plan import Plan
from ahp.runtime.ranks import device as devices
from ahp.runtime.ranks.ranks import LAUNCHER_VARIABLES, _compare_devices, rank_device
from ahp.runtime.ranks.torch_compat import time_limit
from tests.runtime.models import JOB, MODELS, batch
from tests.runtime.test_equality import assert_same_curve
from tests.runtime.workers import Pool, free_port, place

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*LAUNCHER_VARIABLES, "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def alone(backend: str | None) -> None:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def gpus(monkeypatch: pytest.MonkeyPatch, count: int, current: int = 0) -> None:
    """As many GPUs as that, of which one is the current."""
    monkeypatch.setattr(devices, "num_gpus", lambda: count)
    monkeypatch.setattr("ahp.runtime.ranks.ranks.num_gpus", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


def carrying(monkeypatch: pytest.MonkeyPatch, config: str) -> None:
    """A default group with the backends of a machine that has NCCL."""
    alone("gloo")
    monkeypatch.setattr(dist, "get_backend_config", lambda: config)


@pytest.mark.parametrize("config", ["cuda:nccl", "cpu:gloo,cuda:nccl"])
@pytest.mark.parametrize(
    ("count", "current", "local_rank", "index"),
    [(1, 0, "3", 0), (8, 0, "3", 3), (8, 5, "3", 5), (8, 0, None, 0)],
    ids=["its-own-alone", "of-local-rank", "that-the-program-chose", "no-launcher"],
)
def test_a_group_that_carries_gpus_computes_on_one(
    monkeypatch: pytest.MonkeyPatch, config: str, count: int, current: int, local_rank: str | None, index: int
) -> None:
    carrying(monkeypatch, config)
    gpus(monkeypatch, count, current)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert devices.device_of_group(None) == (torch.device("cuda", index), None)


def test_a_group_for_gpus_without_one_is_refused_or_computes_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 0)
    carrying(monkeypatch, "cuda:nccl")
    with pytest.raises(HardwareMismatch, match=r"cuda:nccl.* needs a GPU on each rank"):
        devices.device_of_group(None)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(devices, "DRIVERS", ())
    assert devices.device_of_group(None) == (CPU, None)


def test_a_wish_that_the_group_does_not_carry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 2)
    carrying(monkeypatch, "cuda:nccl")
    with pytest.raises(
        BadInput, match=r"device = 'cpu': the process group \(cuda:nccl\) does not carry it \(valid: cuda\)"
    ):
        devices.device_of_group(CPU)
    assert devices.device_of_group(torch.device("cuda")) == (GPU, None)
    assert devices.device_of_group(torch.device("cuda:1")) == (torch.device("cuda", 1), None)
    with pytest.raises(HardwareMismatch, match="device cuda:2: this process sees 2 GPUs"):
        devices.device_of_group(torch.device("cuda:2"))


def test_the_cpu_beside_idle_gpus_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 2)
    alone("gloo")
    with pytest.warns(RuntimeWarning, match=r"the CPU beside idle GPUs.*sees 2 GPUs.*group is cpu:gloo.*device='cuda'"):
        assert rank_device(Plan()) == CPU
    with warnings.catch_warnings(action="error"):
        assert rank_device(Plan(), "cpu") == CPU
        monkeypatch.setenv("LOCAL_RANK", "1")  # one for each node is enough
        assert rank_device(Plan()) == CPU


def test_too_few_gpus_are_said_where_no_group_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.warns(RuntimeWarning, match="sees 1 GPU, and 2 workers run on this node"):
        assert rank_device(Plan()) == CPU
    assert dist.get_backend() == "gloo"


def test_a_driver_that_torch_cannot_use_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpus(monkeypatch, 0)
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(devices, "DRIVERS", (str(tmp_path / "nvidiactl"),))  # an absolute path takes /dev's place
    assert f"but torch {torch.__version__} finds no GPU" in (devices.idle_gpus(1) or "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices.idle_gpus(1) is None
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(devices, "DRIVERS", ())
    assert devices.idle_gpus(1) is None


def test_a_process_alone_makes_a_world_of_one() -> None:
    parallel = ahp.parallelize(MODELS["llama"](), {"job": JOB}, device="cpu")
    assert parallel.step(parallel.shard(batch(0))).loss > 0
    assert (dist.get_backend(), dist.get_world_size()) == ("gloo", 1)
    assert time_limit(CPU).total_seconds() == 600


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({}, HardwareMismatch, "multiply to 2 ranks, but this process was started alone.*torchrun --nproc-per-node 2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, BadInput, "LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not in the environment"),
    ],
)
def test_a_start_without_a_launcher_is_refused(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], error: type[Exception], words: str
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    plan = {"job": JOB, "parallelism": {"tensor_parallel_degree": 2}}
    with pytest.raises(error, match=words):
        ahp.parallelize(MODELS["llama"](), plan)
    with pytest.raises(BadInput, match=r"device = 'mps'.*valid: cpu, cuda"):
        ahp.parallelize(MODELS["llama"](), plan, device="mps")
    assert not dist.is_initialized()


def with_group(rank: int, world: int, backend: str | None, port: int, steps: int) -> dict[str, Any]:
    """The curve of two ranks whose program makes this group, or none."""
    dist.barrier()  # one that left would close what another still connects to
    dist.destroy_process_group()
    with mock.patch.dict(os.environ, place(rank, world, port)):
        if backend != "none":
            dist.init_process_group(backend)
        plan = {"job": JOB, "parallelism": {"tensor_parallel_degree": 2, "micro_batch_size": 2}}
        parallel = ahp.parallelize(MODELS["gpt2"](), plan)
        results = [parallel.step(parallel.shard(batch(step))) for step in range(steps)]
    assert parallel.mesh.device == CPU
    return {"losses": [r.loss for r in results], "norms": [r.grad_norm for r in results]}


@pytest.mark.parametrize("backend", ["none", None, "cpu:gloo,cuda:gloo"], ids=["none", "plain", "both"])
def test_the_curve_is_the_same_whatever_group_the_program_makes(
    pool: Pool, plain_run: Any, backend: str | None
) -> None:
    for found in pool.run(with_group, 2, backend, free_port(), 3):
        assert_same_curve(found, plain_run("gpt2", 3))


def test_a_worker_with_another_kind_of_device_ends_at_once() -> None:
    store = dist.HashStore()
    _compare_devices(store, 0, "cuda")
    _compare_devices(store, 1, "cuda")
    with pytest.raises(
        HardwareMismatch, match=r"worker 2 on .* computes on cpu, worker 0 on cuda: this one sees \d GPUs"
    ):
        _compare_devices(store, 2, "cpu")


def built_unlike(rank: int, world: int, folder: str) -> str:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Embedding(128, 8), nn.Linear(8, 128))
    parallel = ahp.parallelize(model, {"job": JOB, "parallelism": {"data_parallel_replicate_degree": 2}})
    message = ""
    try:
        parallel.step(parallel.shard(batch(0)))
    except BadInput as error:
        message = str(error)
    parallel.save(folder)
    parallel.load(folder)
    parallel.step(parallel.shard(batch(0)))
    return message


def test_weights_that_ranks_built_unlike_are_refused_until_others_are_loaded(pool: Pool, tmp_path: Path) -> None:
    for message in pool.run(built_unlike, 2, str(tmp_path / "checkpoint")):
        assert message.startswith("module: 0.weight has other values on other ranks")


@pytest.mark.parametrize("one", [{"nodes": 1, "devices_per_node": 2, "device": "H100"}, {"device": {"base": "H100"}}])
@pytest.mark.parametrize("as_groups", [False, True])
def test_a_plan_for_other_devices_is_refused_however_its_cluster_is_written(
    monkeypatch: pytest.MonkeyPatch, one: dict[str, Any], as_groups: bool
) -> None:
    gpus(monkeypatch, 0)
    whole = {"nodes": 1, "devices_per_node": 2, **one}
    cluster = {"groups": [{"name": "a", **whole}, {"name": "b", **whole}]} if as_groups else whole
    with pytest.raises(HardwareMismatch, match="made for H100-SXM-80GB"):
        devices.device_for(Plan(cluster=cluster), 2)
