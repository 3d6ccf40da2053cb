"""The loop of one rank: what it leaves behind when it ends, is stopped, fails, and is started again."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from traceback import StackSummary
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from ahp.errors import BadInput
from ahp.job import Job
from ahp.plan import Plan
from ahp.runtime.files import crc32
from ahp.runtime.ranks.ranks import Ranks
from ahp.runtime.run.folder import RunFolder
from ahp.runtime.run.loop import CannotWrite, DamagedCheckpoints, Diverged, Loop, Settings, has_no_space
from ahp.runtime.run.stop_signal import StopRequest


@dataclass
class Result:
    loss: float
    grad_norm: float = 1.0
    skipped: bool = False
    learning_rate: float = 0.1


class Late(Future[None]):
    """Work that is done when its result is asked for."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self.work = work

    def result(self, timeout: float | None = None) -> None:
        self.work()


class Weight:
    """A model of one number, that each batch pulls at; keeps the interface of ``ahp.parallelize``."""

    def __init__(self) -> None:
        self.value = 8.0
        self.grad_norm = 1.0
        self.before_step: Callable[[int], None] = lambda step: None
        self.while_saving: Callable[[int], None] = lambda step: None
        self.steps = 0

    def rows(self, num_rows: int) -> range:
        return range(num_rows)

    def step(self, part: dict[str, torch.Tensor]) -> Result:
        self.before_step(self.steps + 1)
        self.value = 0.9 * self.value + 0.01 * float(part["input_ids"].sum())
        self.steps += 1
        return Result(loss=self.value, grad_norm=self.grad_norm, skipped=self.grad_norm == float("inf"))

    def evaluate(self, parts: Iterable[dict[str, torch.Tensor]]) -> float:
        return sum(float(part["input_ids"].sum()) for part in parts)

    def find_fault(self, part: dict[str, torch.Tensor], result: Result) -> str:
        return f"the sum of {part['input_ids'].tolist()}"

    @property
    def saver(self) -> Weight:
        return self

    def start(self, folder: Path, complete: Callable[[dict[str, int]], None]) -> Future[None]:
        """Written when the loop asks for the result, as late as can be."""
        value, step = self.value, self.steps

        def write() -> None:
            (folder / "weight.json").write_text(json.dumps([value, step]))
            self.while_saving(step)
            complete({"weight.json": crc32(folder / "weight.json")})

        return Late(write)

    def load(self, folder: Path) -> None:
        self.value, self.steps = json.loads((folder / "weight.json").read_text())

    def memory_bytes(self) -> int:
        return 123


@pytest.fixture
def alone() -> Iterator[Ranks]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Ranks(rank=0, size=1, device=torch.device("cpu"))
    dist.destroy_process_group()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return folder


def batches(step: int, rows: range) -> dict[str, torch.Tensor]:
    ids = torch.arange(4).reshape(2, 2)[rows.start : rows.stop] + step
    return {"input_ids": ids, "labels": ids}


def loop(alone: Ranks, folder: RunFolder, weight: Weight | None = None, **changes: Any) -> Loop:
    values: dict[str, Any] = {
        "parallel": weight or Weight(),
        "batches": batches,
        "plan": Plan(job=Job(steps=10, global_batch_size=2, sequence_length=2)),
        "folder": folder,
        "ranks": alone,
        "settings": Settings(checkpoint_every=4, keep=2),
        "stop": StopRequest(),
        "data_fingerprint": "abc",
    }
    return Loop(**{**values, **changes})


def losses(folder: RunFolder) -> list[float]:
    return [record["loss"] for record in folder.metrics()]


def test_trains_to_the_end_and_saves_on_the_way(alone: Ranks, folder: RunFolder) -> None:
    seen: list[int] = []
    status = loop(alone, folder, on_step=lambda record: seen.append(record["step"])).run()
    assert (status.state, status.step) == ("running", 10)
    assert seen == [record["step"] for record in folder.metrics()] == list(range(1, 11))
    assert [c.step for c in folder.checkpoints()] == [8, 10]
    assert set(folder.metrics()[0]) == {
        "step", "loss", "grad_norm", "learning_rate", "tokens_per_s", "step_time_s", "predicted_step_time_s",
        "memory_bytes",
    }  # fmt: skip
    meta = folder.checkpoints()[-1].meta()
    assert meta["job"]["steps"] == 10
    assert meta["parallelism"]["data_parallel_shard_degree"] == 1
    assert meta["data_fingerprint"] == "abc"


@pytest.mark.parametrize("killed_at", [1, 4, 5, 7, 8, 10])
def test_killed_run_continues_the_same_curve(alone: Ranks, folder: RunFolder, tmp_path: Path, killed_at: int) -> None:
    whole = RunFolder(tmp_path / "whole")
    whole.create()
    loop(alone, whole).run()

    class Killed(BaseException):
        pass

    def die(step: int) -> None:
        if step == killed_at:
            raise Killed

    weight = Weight()
    weight.before_step = die
    with pytest.raises(Killed):
        loop(alone, folder, weight).run()
    assert losses(folder) == losses(whole)[: killed_at - 1]
    loop(alone, folder).run()
    assert losses(folder) == losses(whole)
    assert [record["step"] for record in folder.metrics()] == list(range(1, 11))


def test_held_out_text_is_looked_at_every_so_often_and_at_the_end(alone: Ranks, folder: RunFolder) -> None:
    settings = Settings(checkpoint_every=4, keep=2, validate_every=4, validation_batches=2)
    loop(alone, folder, settings=settings, validation=batches).run()
    looks = {m["step"]: m["validation_loss"] for m in folder.metrics() if "validation_loss" in m}
    assert looks == dict.fromkeys((4, 8, 10), 6.0 + 10.0)


def test_half_written_checkpoint_is_swept_away(alone: Ranks, folder: RunFolder) -> None:
    aside = folder.open_checkpoint(4)
    (aside / "weight.json").write_text("[99.0, 4]")
    loop(alone, folder).run()
    assert not aside.exists()
    assert len(losses(folder)) == 10


def test_a_flipped_byte_is_named_and_the_checkpoint_before_is_used(
    alone: Ranks, folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    loop(alone, folder).run()
    expected = losses(folder)
    flip(folder, 10)
    loop(alone, folder).run()
    said = capsys.readouterr().err
    assert "the checkpoint of step 10 is damaged: weight.json has changed" in said
    assert "step-10.damaged" in said
    assert losses(folder) == expected
    assert [c.step for c in folder.checkpoints()] == [8, 10]
    assert folder.checkpoints()[-1].damaged_file() is None
    for step in (8, 10):
        flip(folder, step)
    with pytest.raises(DamagedCheckpoints, match="every checkpoint is damaged"):
        loop(alone, folder).run()


def flip(folder: RunFolder, step: int) -> None:
    file = folder.checkpoints_folder / f"step-{step}" / "weight.json"
    content = file.read_bytes()
    file.write_bytes(content[:3] + bytes([content[3] ^ 1]) + content[4:])


def test_a_cut_checkpoint_is_named(alone: Ranks, folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    loop(alone, folder).run()
    (folder.checkpoints_folder / "step-10" / "weight.json").write_text("[")
    loop(alone, folder).run()
    assert "step-10 is not complete and is passed over" in capsys.readouterr().err
    assert len(losses(folder)) == 10


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_with_a_checkpoint_and_the_signals_code(
    alone: Ranks, folder: RunFolder, number: signal.Signals
) -> None:
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    stop, weight = StopRequest(), Weight()
    weight.before_step = lambda step: os.kill(os.getpid(), number) if step == 6 else None
    try:
        stop.listen()
        status = loop(alone, folder, weight, stop=stop).run()
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
    assert (status.state, status.step, status.exit_code) == ("interrupted", 6, 128 + number)
    assert folder.status() == status
    assert [c.step for c in folder.checkpoints()] == [4, 6]
    loop(alone, folder).run()
    assert [record["step"] for record in folder.metrics()] == list(range(1, 11))


def test_parent_that_has_gone_counts_as_sigterm() -> None:
    assert StopRequest().pending() == 0
    assert StopRequest(parent=os.getppid() + 1).pending() == signal.SIGTERM


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_loss_that_is_no_number_stops_and_names_the_step(alone: Ranks, folder: RunFolder, bad: float) -> None:
    weight = Weight()

    def spoil(step: int) -> None:
        if step == 6:
            weight.value = bad

    weight.before_step = spoil
    with pytest.raises(
        Diverged, match=r"step 6: loss = (nan|inf).*the sum of \[\[5, 6\], \[7, 8\]\].*step 4 is kept.*learning_rate"
    ):
        loop(alone, folder, weight).run()
    assert [c.step for c in folder.checkpoints()] == [4]
    assert len(losses(folder)) == 5


def test_a_step_that_overflowed_fp16_is_left_out_and_training_goes_on(alone: Ranks, folder: RunFolder) -> None:
    weight = Weight()
    weight.before_step = lambda step: setattr(weight, "grad_norm", float("inf") if step == 6 else 1.0)
    loop(alone, folder, weight).run()
    assert [record["grad_norm"] for record in folder.metrics()] == [1.0] * 5 + [None] + [1.0] * 4


NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("error", [NO_SPACE, CheckpointException("save", {0: (NO_SPACE, StackSummary())})])
def test_full_disk_keeps_the_checkpoint_before(alone: Ranks, folder: RunFolder, error: BaseException) -> None:
    weight = Weight()

    def fail_at_8(step: int) -> None:
        if step == 8:
            raise error

    weight.while_saving = fail_at_8
    with pytest.raises(
        CannotWrite, match=r"checkpoint of step 8 .* the disk is full; the checkpoint of step 4 is kept"
    ):
        loop(alone, folder, weight).run()
    assert [path.name for path in folder.checkpoints_folder.iterdir()] == ["step-4"]
    loop(alone, folder).run()
    assert [record["step"] for record in folder.metrics()] == list(range(1, 11))


def test_full_disk_behind_other_errors_is_seen() -> None:
    class FromAllRanks(Exception):
        failures = {1: (OSError(errno.ENOSPC, "no space"), "stack")}  # noqa: RUF012

    wrapped = RuntimeError("saving failed")
    wrapped.__cause__ = OSError(errno.EDQUOT, "quota")
    assert has_no_space(FromAllRanks())
    assert has_no_space(wrapped)
    assert not has_no_space(OSError(errno.EACCES, "denied"))


def test_other_text_does_not_continue_a_run(alone: Ranks, folder: RunFolder) -> None:
    loop(alone, folder).run()
    with pytest.raises(BadInput, match=r"job\.data.*changed since step 10"):
        loop(alone, folder, data_fingerprint="other").run()
