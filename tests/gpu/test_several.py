"""Several GPUs under ``ahp train``: killed, and the same command again has the curve of a run that was not. As many of eight as there are."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ahp.plan import Plan, validated
from ahp.runtime.run.folder import RunFolder
from tests.runtime.test_equality import world_size

MODEL = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 128,
}  # fmt: skip
EXPERTS = {**MODEL, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
STEPS, EVERY = 60, 10
TOLERANCE = 1e-4
"""fp32; reductions of NCCL and of the optimizer may add up in another order after a restart."""
LIMIT_S = 600.0
"""[Empirical] Of one wait: a start takes half a minute, the steps seconds."""


def layouts(num_devices: int) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Model and layout over a power of two of devices, at most eight."""
    tensor = max(1, num_devices // 2)
    return {
        "zero3": (MODEL, {"data_parallel_shard_degree": num_devices, "zero_stage": 3}),
        "tensor": (MODEL, {"tensor_parallel_degree": num_devices, "enable_sequence_parallel": True}),
        "pipeline-x-tensor": (MODEL, {"pipeline_parallel_degree": 2, "tensor_parallel_degree": tensor, "micro_batch_size": 2}),
        "experts": (EXPERTS, {"data_parallel_shard_degree": num_devices, "expert_parallel_degree": num_devices}),
    }  # fmt: skip


def plan_of(model: dict[str, Any], layout: dict[str, Any]) -> Plan:
    job = {"sequence_length": 128, "global_batch_size": 8, "steps": STEPS, "precision": "fp32"}
    return validated(Plan, {"model": model, "job": job, "parallelism": layout}, "plan")


def started(plan: Plan, folder: Path) -> subprocess.Popen[bytes]:
    """``ahp train`` on a plan."""
    file = folder.with_suffix(".yaml")
    plan.save(file)
    keys = ["--run.folder", str(folder), "--run.checkpoint_every", str(EVERY), "--run.sample", "false"]
    return subprocess.Popen([sys.executable, "-m", "ahp", "train", str(file), *keys])


def finish(process: subprocess.Popen[bytes]) -> None:
    try:
        assert process.wait(LIMIT_S) == 0
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Launcher and workers, at once and without a word, as where a node goes: a worker whose launcher is gone would save first."""
    with contextlib.suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(process.pid)
        for one in [launcher, *launcher.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
    process.wait()


def kill_between_checkpoints(process: subprocess.Popen[bytes], run: RunFolder) -> int:
    """Ends a run that has a checkpoint and steps beyond it; the step of the checkpoint."""
    until = time.monotonic() + LIMIT_S
    try:
        while not (run.checkpoints() and len(run.metrics()) > run.checkpoints()[-1].step + 1):
            assert process.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < until, "the run has no checkpoint yet"
            time.sleep(0.02)
    finally:
        end(process)
    return run.checkpoints()[-1].step


def curve(run: RunFolder) -> list[tuple[float, float]]:
    records = run.metrics()
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    return [(record["loss"], record["grad_norm"]) for record in records]


def check(plan: Plan, folder: Path) -> None:
    whole, killed = RunFolder(folder / "whole"), RunFolder(folder / "killed")
    finish(started(plan, whole.path))
    saved = kill_between_checkpoints(started(plan, killed.path), killed)
    assert EVERY <= saved < STEPS
    finish(started(plan, killed.path))
    for step, (found, expected) in enumerate(zip(curve(killed), curve(whole), strict=True), start=1):
        assert found == pytest.approx(expected, rel=TOLERANCE), f"step {step}; the checkpoint was of {saved}"


@pytest.mark.parametrize("name", layouts(8))
def test_a_killed_run_goes_on_as_one_that_was_not(name: str, tmp_path: Path) -> None:
    there = torch.cuda.device_count()
    if there < 2:
        pytest.skip("several GPUs are needed")
    model, layout = layouts(min(8, 1 << (there.bit_length() - 1)))[name]
    plan = plan_of(model, layout)
    assert world_size(layout) <= there
    check(plan, tmp_path)
