"""What a training loop may make the host wait for on a GPU: nothing within a step, a step's numbers when they are read."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ahp.runtime.data.prefetch import Prefetch
from ahp.runtime.parallel import Parallel, parallelize
from ahp.runtime.peak_memory import take_peak
from ahp.runtime.ranks.ranks import Ranks
from ahp.runtime.run.folder import RunFolder
from ahp.runtime.run.loop import Loop, Settings
from ahp.runtime.run.stop_signal import StopRequest
from ahp.runtime.torch_compat import local_tensor
from tests.runtime.models import BUILDERS, JOB, OPTIMIZER, batch

ENGINES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "muon": {"optimizer": {"name": "muon"}},
    "fp16": {"precision": "fp16"},
    "bf16": {"precision": "bf16"},
    "recompute": {"activation_checkpoint": "full"},
    "micro-batches": {"micro_batch_size": 2},
}


def made(
    *, optimizer: dict[str, Any] | None = None, precision: str = "fp32", offload: bool = False, **layout: Any
) -> Parallel:
    job = {**JOB, "precision": precision, "optimizer": {**OPTIMIZER, **(optimizer or {})}}
    return parallelize(
        BUILDERS["llama"](), {"job": job, "parallelism": layout, "engine": {"offload_optimizer": offload}}
    )


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the device is an error."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("kind", ENGINES)
def test_the_host_waits_for_nothing_within_a_step(alone: torch.device, kind: str) -> None:
    parallel = made(**ENGINES[kind])
    for step in range(2):  # kernels and states are made in the first
        parallel.step(parallel.shard(batch(step)))
    parts = [{key: value.pin_memory() for key, value in batch(step).items()} for step in (2, 3)]
    torch.cuda.synchronize()
    with no_waiting():
        results = [parallel.step(part) for part in parts]
    assert [math.isfinite(result.loss) and math.isfinite(result.grad_norm) for result in results] == [True, True]


def test_the_guard_sees_a_wait(alone: torch.device) -> None:
    with no_waiting(), pytest.raises(RuntimeError, match="synchronizing"):
        torch.ones((), device=alone).item()


def test_a_result_waits_for_its_own_step_alone(alone: torch.device) -> None:
    parallel = made()
    first = parallel.step(parallel.shard(batch(0)))
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second of the device's clock, queued after the step
    later = torch.cuda.Event()
    later.record()
    assert math.isfinite(first.loss)
    assert not later.query(), "reading the first step's loss waited for what was queued after it"
    torch.cuda.synchronize()


def weights(parallel: Parallel) -> list[torch.Tensor]:
    moments = [
        value for name in parallel.state.optimizer.shards for value in parallel.state.optimizer.moments(name).values()
    ]
    return [local_tensor(p.detach()).clone() for p in parallel.parameters.values()] + [m.clone() for m in moments]


@pytest.mark.parametrize(
    "kind", [{}, {"optimizer": {"name": "muon"}}, {"offload": True}, {"precision": "fp16"}], ids=str
)
def test_a_step_left_out_on_the_device_is_one_that_was_not_taken(alone: torch.device, kind: dict[str, Any]) -> None:
    ours, other = made(**kind), made(**kind)
    gradients = ours.state.local.gradients

    def poisoned() -> dict[str, torch.Tensor]:
        found = gradients()
        if ours.num_steps_done == 1:
            for gradient in found.values():
                gradient.fill_(math.nan)
        return found

    ours.state.local.gradients = poisoned  # type: ignore[method-assign]
    for step in range(3):
        before = weights(ours)
        result = ours.step(ours.shard(batch(step)))
        if step == 1:
            assert result.failed or result.skipped
            assert all(torch.equal(a, b) for a, b in zip(weights(ours), before, strict=True))
            other.state.num_steps_done += 1
            if "precision" in kind:
                other.state.loss_scale.update(torch.ones((), device=alone))
        else:
            assert math.isfinite(result.grad_norm)
            other.step(other.shard(batch(step)))
    assert all(torch.equal(a, b) for a, b in zip(weights(ours), weights(other), strict=True))


def rows(step: int, wanted: range) -> dict[str, torch.Tensor]:
    return {key: value[wanted.start : wanted.stop] for key, value in batch(step).items()}


def test_rows_come_in_pinned_memory_and_need_no_waiting(alone: torch.device) -> None:
    with Prefetch(rows, range(8), num_steps=3, device=alone) as prefetch:
        for step in range(3):
            made = prefetch.take(step)
            assert all(value.is_pinned() for value in made.values())
            with no_waiting():
                there = {key: value.to(alone, non_blocking=True) for key, value in made.items()}
            assert all(torch.equal(there[key].cpu(), batch(step)[key]) for key in there)


def test_the_peak_of_memory_is_that_since_it_was_last_asked(alone: torch.device) -> None:
    take_peak(alone)
    size = 64 * 2**20
    large = torch.empty(size, dtype=torch.int8, device=alone)
    del large
    with no_waiting():
        peak, later = take_peak(alone), take_peak(alone)
    assert later.allocated_bytes <= peak.allocated_bytes - size
    assert peak.reserved_bytes >= peak.allocated_bytes
    assert later.reserved_bytes >= later.allocated_bytes


def run(device: torch.device, where: RunFolder, steps_ahead: int, settings: Settings) -> None:
    where.create()
    parallel = made()
    Loop(
        parallel=parallel, batches=rows, plan=parallel.plan, folder=where, ranks=Ranks(0, 1, device), settings=settings,
        stop=StopRequest(), data_fingerprint="abc", steps_ahead=steps_ahead,
    ).run()  # fmt: skip


def test_a_loop_that_is_ahead_writes_the_same_numbers(alone: torch.device, tmp_path: Path) -> None:
    found = []
    for ahead in (0, 1):
        where = RunFolder(tmp_path / str(ahead))
        run(alone, where, ahead, Settings(checkpoint_every=6))
        found.append([(m["step"], m["loss"], m["grad_norm"]) for m in where.metrics()])
        assert all(0 < m["memory_allocated_bytes"] <= m["memory_reserved_bytes"] for m in where.metrics())
        assert [c.step for c in where.checkpoints()] == [6, 12, 18, 20][-3:]
    assert found[0] == found[1]


def test_nothing_waits_between_two_steps_but_for_the_numbers_of_the_step_before(
    alone: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the loop itself: taking rows, the step, the exchange with other ranks, memory, and reading what was copied to the host."""
    queue, finish = Loop._queue, Loop._finish

    def guarded_queue(self: Loop, prefetch: Prefetch) -> None:
        if self.done < 3:
            return queue(self, prefetch)
        with no_waiting():
            return queue(self, prefetch)

    def guarded_finish(self: Loop, step: Any) -> None:
        with no_waiting():
            finish(self, step)

    monkeypatch.setattr(Loop, "_queue", guarded_queue)
    monkeypatch.setattr(Loop, "_finish", guarded_finish)
    run(alone, RunFolder(tmp_path / "run"), 1, Settings(checkpoint_every=None))


def test_profile_has_kernels_and_the_history_of_memory(alone: torch.device, tmp_path: Path) -> None:
    where = RunFolder(tmp_path / "run")
    run(alone, where, 1, Settings(checkpoint_every=None, profile_steps=(3, 4)))
    assert {file.name for file in where.profile_folder.iterdir()} == {"rank-0.json.gz", "memory-rank-0.pickle"}
    events = json.loads(gzip.decompress((where.profile_folder / "rank-0.json.gz").read_bytes()))["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
    assert {e["name"] for e in events if str(e.get("name")).startswith("step ")} == {"step 3", "step 4"}
