"""A run that stops and goes on under another layout, beside the same run without a stop: what both computed, and their checkpoints."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ahp.runtime.optimizer.offload import NUM_SLOTS, HostMoments
from tests.runtime.models import OPTIMIZER
from tests.runtime.test_equality import world_size
from tests.runtime.workers import Pool

VOCABULARY, SEQUENCE, BATCH = 96, 24, 12
"""Divisible by 2, 3, 4 and 6."""
STEPS = 6
"""Of the job."""

TOLERANCES = {"fp32": (1e-5, 1e-4), "bf16": (4e-3, 2e-2), "fp16": (5e-4, 2.5e-3)}
"""Relative, at the first step and at the last, as those of tests/runtime/test_equality.py, compute/test_bf16.py and
optimizer/test_fp16.py: layouts add up in another order. A run that goes on under its own layout has the same digits."""

RATES = {"fp32": 3e-3, "bf16": 3e-4, "fp16": 3e-4}
"""Lower where one flipped rounding is a part in thousands of a weight: a high rate makes another curve of it."""

Rows = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Restart:
    """``first`` and ``then``: layouts."""

    build: Callable[[], nn.Module] | partial[nn.Module]
    first: dict[str, Any]
    then: dict[str, Any]
    stop: int = 3
    """Steps before the stop."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    loss_scale: float | None = None
    """At the start of a run in fp16; None = the usual one."""
    offloaded: tuple[bool, bool] = (False, False)
    """Whether AdamW's moments are in host memory before the stop, and after it."""
    frozen: tuple[str, int, int] | None = None
    """Parameters with this in their name are not trained in the steps from the first number on and before the second."""

    def plan(self, layout: dict[str, Any]) -> dict[str, Any]:
        job = {
            "sequence_length": SEQUENCE, "global_batch_size": BATCH, "steps": STEPS, "precision": "fp32",
            "optimizer": {**OPTIMIZER, "learning_rate": RATES[self.precision], "warmup_steps": 2, "schedule": "cosine", **self.optimizer},
        }  # fmt: skip
        return {"job": {**job, **self.job}, "parallelism": layout, "engine": self.engine}

    @property
    def compares(self) -> bool:
        """Whether the layouts differ; a run that goes on under its own layout has the same digits."""
        return self.first != self.then

    @property
    def precision(self) -> str:
        return self.job.get("precision", "fp32")


def batch(step: int, job: dict[str, Any]) -> Rows:
    """Rows with very different numbers of scored tokens; where the job masks documents, two or three in a row."""
    num_rows, length = job.get("global_batch_size", BATCH), job.get("sequence_length", SEQUENCE)
    generator = torch.Generator().manual_seed(1000 + step)
    input_ids = torch.randint(0, VOCABULARY, (num_rows, length), generator=generator)
    labels = input_ids.clone()
    for row in range(num_rows):
        labels[row, : (row * 5 + step) % (length - 4)] = -100
    if not job.get("document_mask"):
        return {"input_ids": input_ids, "labels": labels}
    positions = torch.arange(length).repeat(num_rows, 1)
    for row in range(1, num_rows):  # the first row is one document
        for start in sorted({(row * 7 + step) % (length - 2) + 1, 5 + row % (length - 6)}):
            positions[row, start:] = torch.arange(length - start)
    return {"input_ids": input_ids, "labels": labels, "position_ids": positions}


def run(rank: int, world: int, restart: Restart, *how: Any) -> dict[str, Any]:
    """Runs in each worker: ``trained``, with Muon's products in fp32 where layouts are compared. In bf16 a rounding of fp32 becomes one of 4e-3
    of some elements, ten times as much with each step; nothing else of AHP that takes a step calls ``Tensor.bfloat16``."""
    in_fp32 = mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.float) if restart.compares else nullcontext()
    # Cores stand in for a device; weights of these models are cut into several buckets.
    on_cores = mock.patch("ahp.runtime.device_limits.refuse_without_host")
    bucket = mock.patch.dict(HostMoments.__init__.__kwdefaults__, bucket_bytes=NUM_SLOTS * 4096)
    with in_fp32, on_cores, bucket:
        return trained(restart, *how)


def trained(
    restart: Restart, layout: dict[str, Any], start: int, steps: int, source: str, folder: str
) -> dict[str, Any]:
    """``steps`` steps from ``start`` on, after loading ``source`` where there is one. A checkpoint is written to ``folder`` at the step of the stop."""
    from ahp.errors import AhpError
    from ahp.runtime.parallel import parallelize

    torch.manual_seed(0)
    module = restart.build()
    if source:  # whatever the module was built with must not matter
        for parameter in module.parameters():
            parameter.data.normal_()
    try:
        plan = restart.plan(layout)
        plan["engine"] = {**plan["engine"], "offload_optimizer": restart.offloaded[bool(source)]}
        parallel = parallelize(module, plan)
    except AhpError as error:
        return {"refused": str(error)}
    if restart.loss_scale is not None:
        parallel.state.loss_scale.value = restart.loss_scale
    if source:
        parallel.load(source)
    found: dict[str, Any] = {"losses": [], "norms": [], "skipped": []}
    for step in range(start, start + steps):
        if step == restart.stop:
            parallel.save(folder)
        if restart.frozen is not None:
            part, begins, ends = restart.frozen
            for name, parameter in parallel.parameters.items():
                parameter.requires_grad_(part not in name or not begins <= step < ends)
        rows = batch(step, restart.job)
        result = parallel.step(parallel.shard(rows))
        found["losses"].append(result.loss)
        found["norms"].append(None if result.skipped else result.grad_norm)
        found["skipped"].append(result.skipped)
    return found


class Refused(Exception):
    """A layout that cannot run, as ``parallelize`` says."""


def check(pool: Pool, restart: Restart, folder: Path, *, steps: int = STEPS) -> None:
    """Compare loss and gradient norm of every step after the restart, and what the two checkpoints hold."""
    saved, again = folder / "first", folder / "then"
    whole = _run(pool, restart, restart.first, 0, steps, "", saved)
    after = _run(pool, restart, restart.then, restart.stop, steps - restart.stop, str(saved), again)
    assert_same_state(stored(again), stored(saved))
    first, last = TOLERANCES[restart.precision] if restart.compares else (0.0, 0.0)
    assert after["skipped"] == whole["skipped"][restart.stop :], "another step was left out"
    for key in ("losses", "norms"):
        for step, (a, b) in enumerate(zip(after[key], whole[key][restart.stop :], strict=True)):
            if a is None:
                continue
            assert math.isfinite(b), f"{key}, step {step + restart.stop}: {b}"
            allowed = first + (last - first) * step / (steps - 1)
            assert abs(a - b) <= allowed * abs(b), (
                f"{key}, step {step + restart.stop}: {a} instead of {b}, {abs(a / b - 1):.1e} off"
            )


def _run(
    pool: Pool, restart: Restart, layout: dict[str, Any], start: int, steps: int, source: str, folder: Path
) -> dict[str, Any]:
    results = pool.run(run, world_size(layout), restart, layout, start, steps, source, str(folder))
    if "refused" in results[0]:
        raise Refused(results[0]["refused"])
    assert all(result == results[0] for result in results), "ranks disagree"
    return results[0]


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    metadata = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    found = {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():  # that there is no process group
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(found, checkpoint_id=str(folder), no_dist=True)
    return found


def assert_same_state(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """A checkpoint that was loaded and saved at once, under whatever layout, is the one that it came from."""
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), f"{name} is another after a restart"
