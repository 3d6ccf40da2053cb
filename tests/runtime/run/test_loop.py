"""The loop of one rank: what it leaves behind when it ends, is stopped, fails, and is started again."""

from __future__ import annotations

import errno
import gzip
import json
import math
import os
import shutil
import signal
import threading
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
from ahp.plan import Forecast, Plan
from ahp.runtime.files import crc32
from ahp.runtime.ranks.ranks import Ranks
from ahp.runtime.ranks.stop_signals import STOP_SIGNALS
from ahp.runtime.run.cannot_write import CannotWrite, has_no_space
from ahp.runtime.run.checkpoints import DamagedCheckpoints, UnreadableCheckpoint
from ahp.runtime.run.folder import Checkpoint, RunFolder
from ahp.runtime.run.loop import MOST_ROLLBACKS, MOST_SKIPPED, Diverged, Loop, Settings
from ahp.runtime.run.stop_signal import StopRequest
from ahp.runtime.weights.same_tensors import OtherTensors


@dataclass
class Result:
    loss: float
    grad_norm: float = 1.0
    skipped: bool = False
    learning_rate: float = 0.1

    @property
    def failed(self) -> bool:
        return not math.isfinite(self.loss) or not (math.isfinite(self.grad_norm) or self.skipped)


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
        self.halts_at_fault = False

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

    def skip_to(self, step: int) -> None:
        self.steps = step


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
        "step", "loss", "grad_norm", "learning_rate", "skipped", "tokens_per_s", "step_time_s", "predicted_step_time_s", "mfu",
        "memory_bytes", "memory_allocated_bytes", "memory_reserved_bytes", "data_wait_s", "checkpoint_wait_s",
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


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_held_out_loss_that_is_no_number_is_null_and_said(
    alone: Ranks, folder: RunFolder, capsys: pytest.CaptureFixture[str], value: float
) -> None:
    """NaN is no JSON: the step's line was taken for damaged, and the step was lost."""
    weight = Weight()
    weight.evaluate = lambda parts: value  # type: ignore[method-assign]
    settings = Settings(checkpoint_every=4, keep=2, validate_every=5)
    loop(alone, folder, weight, settings=settings, validation=batches).run()
    assert [m["step"] for m in folder.metrics()] == list(range(1, 11))
    assert [m["step"] for m in folder.metrics() if m.get("validation_loss", 0) is None] == [5, 10]
    assert f"step 5: the loss on held-out text is {value}" in capsys.readouterr().err


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


def test_every_byte_of_a_checkpoint_is_verified_before_one_is_used(
    alone: Ranks, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop(alone, folder).run()
    flip(folder, 10)
    did: list[tuple[str, str]] = []
    verify, use = Checkpoint.damaged_file, Weight.load

    def damaged_file(self: Checkpoint, part: int = 0, parts: int = 1) -> str | None:
        did.append(("verified", self.path.name))
        return verify(self, part, parts)

    def load(self: Weight, folder: Path) -> None:
        did.append(("used", folder.name))
        use(self, folder)

    monkeypatch.setattr(Checkpoint, "damaged_file", damaged_file)
    monkeypatch.setattr(Weight, "load", load)
    loop(alone, folder).run()
    assert did == [("verified", "step-10"), ("verified", "step-8"), ("used", "step-8")]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KeyError("weight"), "step-10 does not go into the plan's model: KeyError: 'weight'"),
        (
            OtherTensors("it has no a"),
            "step-10 does not go into the plan's model: OtherTensors: it has no a; it is another",
        ),
        (
            CheckpointException("x", {0: (RuntimeError("Missing key in checkpoint: a\nand a trace"), StackSummary())}),
            "step-10 does not go into the plan's model: RuntimeError: Missing key in checkpoint: a; it is another model's",
        ),
    ],
)
def test_a_checkpoint_of_another_model_is_told_in_one_line(
    alone: Ranks, folder: RunFolder, monkeypatch: pytest.MonkeyPatch, error: BaseException, told: str
) -> None:
    def load(self: Weight, folder: Path) -> None:
        raise error

    loop(alone, folder).run()
    monkeypatch.setattr(Weight, "load", load)
    with pytest.raises(UnreadableCheckpoint) as raised:
        loop(alone, folder).run()
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


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


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_signal_ends_with_a_checkpoint_and_the_signals_code(
    alone: Ranks, folder: RunFolder, number: signal.Signals
) -> None:
    before = {n: signal.getsignal(n) for n in STOP_SIGNALS}
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


def test_a_signal_ends_a_process_that_has_nothing_left_to_save() -> None:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    stop = StopRequest()
    try:
        stop.listen()
        with stop.ending_at_once():
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.pending() == signal.SIGTERM
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_parent_that_has_gone_is_told_from_a_signal(alone: Ranks, folder: RunFolder) -> None:
    """kill -9 of the launcher stood in status.json as SIGTERM, which nobody had sent."""
    assert StopRequest().pending() == 0
    status = loop(alone, folder, stop=StopRequest(parent=os.getppid() + 1)).run()
    assert (status.state, status.step, status.exit_code) == ("interrupted", 1, 128 + signal.SIGKILL)
    assert "the process that started the workers has gone without a word" in (status.cause or "")
    assert [c.step for c in folder.checkpoints()] == [1]


def test_a_running_runs_status_has_the_step_that_it_reached(alone: Ranks, folder: RunFolder) -> None:
    """It had the last checkpoint's."""
    seen: list[int] = []

    def look(record: dict[str, Any]) -> None:
        folder._beat()
        status = folder.status()
        seen.append(status.step if status is not None else -1)

    loop(alone, folder, on_step=look).run()
    assert seen == list(range(1, 11))


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
    assert [record["skipped"] for record in folder.metrics()] == [False] * 5 + [True] + [False] * 4
    assert None not in losses(folder)


# One step ahead of what is known, as on a GPU


def test_a_loop_that_is_ahead_leaves_the_same_behind(alone: Ranks, folder: RunFolder, tmp_path: Path) -> None:
    settings = Settings(checkpoint_every=4, keep=9, validate_every=3, validation_batches=1)
    found = []
    for ahead in (0, 1):
        where = RunFolder(tmp_path / str(ahead))
        where.create()
        loop(alone, where, settings=settings, validation=batches, steps_ahead=ahead).run()
        looks = {m["step"]: m["validation_loss"] for m in where.metrics() if "validation_loss" in m}
        weights = [(c.step, (c.path / "weight.json").read_text()) for c in where.checkpoints()]
        found.append((losses(where), looks, weights))
    assert found[0] == found[1]


def test_a_loop_that_is_ahead_reads_a_step_while_the_next_runs(alone: Ranks, folder: RunFolder) -> None:
    events: list[str] = []
    weight = Weight()
    weight.before_step = lambda step: events.append(f"call {step}")
    one = loop(alone, folder, weight, steps_ahead=1, on_step=lambda record: events.append(f"read {record['step']}"))
    one.run()
    # After the steps with a checkpoint, 4, 8 and 10, nothing is under way.
    assert " ".join(events) == (
        "call 1 call 2 read 1 call 3 read 2 call 4 read 3 read 4 call 5 call 6 read 5 call 7 read 6 call 8 read 7 read 8 "
        "call 9 call 10 read 9 read 10"
    )


def test_a_loop_that_is_ahead_stops_after_the_step_that_runs(alone: Ranks, folder: RunFolder) -> None:
    stop, weight = StopRequest(), Weight()
    weight.before_step = lambda step: setattr(stop, "received", signal.SIGTERM) if step == 6 else None
    status = loop(alone, folder, weight, stop=stop, steps_ahead=1).run()
    assert (status.state, status.step) == ("interrupted", 7)
    assert [c.step for c in folder.checkpoints()] == [4, 7]
    assert len(losses(folder)) == 7
    loop(alone, folder, steps_ahead=1).run()
    assert [record["step"] for record in folder.metrics()] == list(range(1, 11))


# When a loss is no number (run.on_nan)


class Spoiled(Weight):
    """Some steps give a loss that is no number, and change nothing, as those of ``ahp.parallelize``."""

    def __init__(self, *bad: int) -> None:
        super().__init__()
        self.bad = bad
        self.called: list[int] = []
        self.result = Result(loss=float("nan"), grad_norm=float("nan"))

    def step(self, part: dict[str, torch.Tensor]) -> Result:
        self.called.append(self.steps + 1)
        if self.steps + 1 in self.bad:
            self.steps += 1
            return self.result
        return super().step(part)


def expected(*steps: int) -> float:
    """The weight after these steps alone."""
    weight = Weight()
    for step in steps:
        weight.step(batches(step - 1, range(2)))
    return weight.value


@pytest.mark.parametrize("ahead", [0, 1])
def test_stop_names_the_step_and_lets_no_later_one_change_a_weight(alone: Ranks, folder: RunFolder, ahead: int) -> None:
    weight = Spoiled(6)
    with pytest.raises(Diverged, match=r"step 6: loss = nan.*the sum of \[\[5, 6\], \[7, 8\]\].*step 4 is kept"):
        loop(alone, folder, weight, steps_ahead=ahead).run()
    assert weight.halts_at_fault
    assert weight.called[-1] == 6 + ahead
    assert len(losses(folder)) == 5


@pytest.mark.parametrize("ahead", [0, 1])
def test_skip_leaves_the_update_out_and_goes_on(
    alone: Ranks, folder: RunFolder, capsys: pytest.CaptureFixture[str], ahead: int
) -> None:
    weight = Spoiled(6)
    settings = Settings(checkpoint_every=4, on_nan="skip")
    loop(alone, folder, weight, settings=settings, steps_ahead=ahead).run()
    assert not weight.halts_at_fault
    assert weight.value == expected(1, 2, 3, 4, 5, 7, 8, 9, 10)
    assert [(m["step"], m["loss"], m["grad_norm"]) for m in folder.metrics() if m["skipped"]] == [(6, None, None)]
    assert "step 6: loss = nan, gradient norm = nan: its update is left out" in capsys.readouterr().err


class NothingScored(Result):
    failed = False


def test_a_batch_without_a_scored_token_is_told_and_stops_nothing(
    alone: Ranks, folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    weight = Spoiled(6)
    weight.result = NothingScored(loss=float("nan"), grad_norm=0.0, skipped=True)
    loop(alone, folder, weight).run()
    assert [(m["step"], m["loss"], m["grad_norm"]) for m in folder.metrics() if m["skipped"]] == [(6, None, None)]
    assert "step 6: no token of its batch is scored, so its update is left out" in capsys.readouterr().err


def test_skip_stops_when_so_many_in_a_row_are_bad(alone: Ranks, folder: RunFolder) -> None:
    plan = Plan(job=Job(steps=40, global_batch_size=2, sequence_length=2))
    settings = Settings(checkpoint_every=4, on_nan="skip")
    # The first bad steps are one too few, then a good one starts the count anew.
    bad = (*range(5, 4 + MOST_SKIPPED), *range(20, 40))
    with pytest.raises(Diverged, match=rf"step {19 + MOST_SKIPPED}: .*{MOST_SKIPPED} updates in a row were left out"):
        loop(alone, folder, Spoiled(*bad), settings=settings, plan=plan).run()


@pytest.mark.parametrize("ahead", [0, 1])
def test_rollback_takes_the_weights_of_the_checkpoint_and_goes_on_behind_the_bad_batch(
    alone: Ranks, folder: RunFolder, ahead: int
) -> None:
    weight = Spoiled(7)
    seen: list[str | None] = []

    def look(record: dict[str, Any]) -> None:
        status = folder.status()
        seen.append(status.cause if status else None)

    settings = Settings(checkpoint_every=4, on_nan="rollback")
    loop(alone, folder, weight, settings=settings, steps_ahead=ahead, on_step=look).run()
    assert weight.value == expected(1, 2, 3, 4, 8, 9, 10)
    assert [m["step"] for m in folder.metrics()] == list(range(1, 11))
    assert [(m["step"], m["loss"], m["rolled_back_to"]) for m in folder.metrics() if m["skipped"]] == [(7, None, 4)]
    assert "step 7: loss = nan, gradient norm = nan: back to the weights of step 4" in str(seen[6])


def test_rollback_before_the_first_checkpoint_goes_back_to_the_start(alone: Ranks, folder: RunFolder) -> None:
    weight = Spoiled(2)
    loop(alone, folder, weight, settings=Settings(checkpoint_every=4, on_nan="rollback")).run()
    assert weight.value == expected(*range(3, 11))


def test_rollback_stops_when_other_batches_fail_from_the_same_weights(alone: Ranks, folder: RunFolder) -> None:
    weight = Spoiled(*range(6, 11))
    with pytest.raises(
        Diverged, match=rf"step {6 + MOST_ROLLBACKS}: .*went back to step 4 {MOST_ROLLBACKS} times.*step 4 is kept"
    ):
        loop(alone, folder, weight, settings=Settings(checkpoint_every=4, on_nan="rollback")).run()


# What a step's record says


class Clock:
    """In the place of ``time``: moves when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        for module in ("loop", "checkpoints"):
            monkeypatch.setattr(f"ahp.runtime.run.{module}.time", self)

    def perf_counter(self) -> float:
        return self.now_s

    def take(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.mark.parametrize(("ahead", "saved"), [(0, [4, 8, 10]), (1, [5, 10])])
def test_checkpoints_come_by_the_time(
    alone: Ranks, folder: RunFolder, monkeypatch: pytest.MonkeyPatch, ahead: int, saved: list[int]
) -> None:
    """A step takes a second; one step ahead, the step that was due is known when the next one runs."""
    clock, weight = Clock(monkeypatch), Weight()
    weight.before_step = lambda step: clock.take(1.0)
    settings = Settings(checkpoint_every=None, checkpoint_every_s=4.0, keep=9)
    loop(alone, folder, weight, settings=settings, steps_ahead=ahead, on_step=lambda record: clock.take(1e-6)).run()
    assert [c.step for c in folder.checkpoints()] == saved


def test_checkpoints_come_when_they_lose_the_least(
    alone: Ranks, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes 20 s, a checkpoint 2 s, a failure is expected every 1600 s: one a minute first, then every 80 s."""
    clock = Clock(monkeypatch)

    class Copied(Weight):
        def start(self, folder: Path, complete: Callable[[dict[str, int]], None]) -> Future[None]:
            clock.take(2.0)
            return super().start(folder, complete)

    weight = Copied()
    weight.before_step = lambda step: clock.take(20.0)
    settings = Settings(checkpoint_every=None, failures_per_s=1 / 1600, keep=9)
    plan = Plan(job=Job(steps=16, global_batch_size=2, sequence_length=2))
    loop(alone, folder, weight, settings=settings, plan=plan).run()
    assert [c.step for c in folder.checkpoints()] == [3, 7, 11, 15, 16]
    assert "checkpoints every 80.0 s: training waits 2.00 s for one" in folder.notes_file.read_text()


def test_seconds_of_steps_add_up_to_what_a_user_waits(
    alone: Ranks, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, weight = Clock(monkeypatch), Weight()
    weight.before_step = lambda step: clock.take(2.0)
    weight.while_saving = lambda step: clock.take(5.0)

    def slow(step: int, rows: range) -> dict[str, torch.Tensor]:
        clock.take(0.0 if step else 0.5)  # the thread makes the others while steps run
        return batches(step, rows)

    def look(step: int, rows: range) -> dict[str, torch.Tensor]:
        clock.take(3.0)
        return batches(step, rows)

    settings = Settings(checkpoint_every=4, validate_every=5, validation_batches=1)
    began_s = clock.now_s
    loop(alone, folder, weight, settings=settings, batches=slow, validation=look).run()
    records = folder.metrics()
    assert [m["data_wait_s"] for m in records] == [0.5] + [0.0] * 9
    # The writing of step 4 is waited for where that of step 8 begins, which is before step 9 ends.
    assert [m["checkpoint_wait_s"] for m in records] == [0.0] * 8 + [5.0, 0.0]
    assert [m["step_time_s"] for m in records] == [2.5] + [2.0] * 7 + [7.0, 2.0]
    assert {m["step"]: m["validation_time_s"] for m in records if "validation_loss" in m} == {5: 3.0, 10: 3.0}
    spent = sum(m["step_time_s"] + m.get("validation_time_s", 0.0) for m in records)
    assert clock.now_s - began_s - spent == pytest.approx(2 * 5.0), "the last two checkpoints, after the last step"
    assert all(m["tokens_per_s"] == pytest.approx(4 / m["step_time_s"]) for m in records)


def test_mfu_is_the_forecasts_at_the_forecasts_speed(
    alone: Ranks, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, weight = Clock(monkeypatch), Weight()
    weight.before_step = lambda step: clock.take(2.0)
    forecast = Forecast(
        step_time_s=0.5, step_time_low_s=0.4, step_time_high_s=0.6, tokens_per_s_per_device=8.0, mfu=0.4, mfu_peak="a peak",
        memory_allocated_bytes=1, memory_reserved_bytes=1, fit_probability=1.0, fits=True, step={}, memory={},
    )  # fmt: skip
    plan = Plan(job=Job(steps=10, global_batch_size=2, sequence_length=2), forecast=forecast)
    loop(alone, folder, weight, plan=plan).run()
    assert folder.metrics()[-1]["mfu"] == pytest.approx(0.4 * 0.5 / 2.0)


def test_without_a_forecast_no_peak_is_known(alone: Ranks, folder: RunFolder) -> None:
    loop(alone, folder).run()
    assert {m["mfu"] for m in folder.metrics()} == {None}


def test_memory_is_that_of_the_step(alone: Ranks, folder: RunFolder) -> None:
    large = 400 * 2**20
    weight = Weight()

    def fill(step: int) -> None:
        if step == 5:
            torch.empty(large, dtype=torch.int8).fill_(1)

    weight.before_step = fill
    loop(alone, folder, weight).run()
    by_step = {m["step"]: m for m in folder.metrics()}
    assert by_step[5]["memory_allocated_bytes"] > by_step[4]["memory_allocated_bytes"] + 0.9 * large
    assert by_step[6]["memory_allocated_bytes"] < by_step[5]["memory_allocated_bytes"] - 0.9 * large
    assert by_step[6]["memory_reserved_bytes"] == by_step[6]["memory_allocated_bytes"]
    assert by_step[10]["memory_bytes"] == by_step[5]["memory_bytes"] == by_step[5]["memory_allocated_bytes"]


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(("steps", "seen"), [((3, 5), (3, 4, 5)), ((1, 1), (1,)), ((9, 10), (9, 10))])
def test_profile_has_the_steps_that_were_asked_for(
    alone: Ranks, folder: RunFolder, ahead: int, steps: tuple[int, int], seen: tuple[int, ...]
) -> None:
    weight = Weight()
    weight.before_step = lambda step: torch.ones(3).cumsum(0).sum()  # an operator that nothing else of the loop has
    settings = Settings(checkpoint_every=4, profile_steps=steps)
    loop(alone, folder, weight, settings=settings, steps_ahead=ahead).run()
    (file,) = folder.profile_folder.iterdir()
    assert file.name == "rank-0.json.gz"
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    names = [event.get("name") for event in events]
    assert {name for name in names if str(name).startswith("step ")} == {f"step {step}" for step in seen}
    assert names.count("aten::cumsum") == len(seen)


def test_a_profile_stays_when_a_restart_makes_some_of_its_steps_again(alone: Ranks, folder: RunFolder) -> None:
    """That of steps 3 to 5 became one of step 5."""
    settings = Settings(checkpoint_every=4, profile_steps=(3, 5))
    weight = Spoiled(7)
    folder.profile_folder.mkdir()
    (folder.profile_folder / "rank-1.json.gz").write_bytes(b"of a rank that is no more")
    with pytest.raises(Diverged):
        loop(alone, folder, weight, settings=settings).run()
    (file,) = folder.profile_folder.iterdir()
    whole = file.read_bytes()
    loop(alone, folder, settings=settings).run()
    assert file.read_bytes() == whole
    file.unlink()
    for checkpoint in folder.checkpoints()[1:]:
        shutil.rmtree(checkpoint.path)
    loop(alone, folder, settings=settings).run()
    assert file.is_file(), "what is left of the steps is better than nothing"


def test_no_thread_is_left_and_no_profile_after_an_error(alone: Ranks, folder: RunFolder) -> None:
    weight = Spoiled(6)
    before = set(threading.enumerate())
    with pytest.raises(Diverged):
        loop(alone, folder, weight, settings=Settings(profile_steps=(5, 8))).run()
    assert set(threading.enumerate()) == before
    assert not folder.profile_folder.exists()


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


def test_a_checkpoint_that_cannot_be_written_is_told_in_one_line(alone: Ranks, folder: RunFolder) -> None:
    """It was the traces of all ranks, pages long, on stderr and in status.json."""
    weight = Weight()

    def fail(step: int) -> None:
        raise CheckpointException("save", {0: (OSError(errno.EFBIG, "File too large"), StackSummary())})

    weight.while_saving = fail
    with pytest.raises(
        CannotWrite,
        match=r"checkpoint of step 4 cannot be written, OSError: \[Errno \d+\] File too large; start the same command again once it can be written$",
    ):
        loop(alone, folder, weight).run()


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
    with pytest.raises(BadInput, match=r"job\.validation.*changed since step 10"):
        loop(alone, folder, validation_fingerprint="other").run()
