"""Which failures start the workers again, on how many places, and when the run ends with its cause."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ahp import run_history
from ahp.config import Elastic
from ahp.errors import BadInput
from ahp.plan import Parallelism
from ahp.run_files import Status
from ahp.run_history import starts
from ahp.runtime.ranks.environment import ROUND
from ahp.runtime.ranks.hangs import RankMissing
from ahp.runtime.ranks.launch import WorkersEnded
from ahp.runtime.run import failure
from ahp.runtime.run.failure import TrainingFailed
from ahp.runtime.run.folder import RunFolder
from ahp.runtime.run.restarts import SAME_PLACE, Restarts
from ahp.runtime.run.trainer import Trainer
from tests.runtime.run.test_trainer import plan


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def killed(step: int, rank: int = 0, saved: int = 0) -> TrainingFailed:
    return TrainingFailed("worker gone", step=step, kind="SIGKILL", rank=rank, saved_step=saved, may_pass=True)


def test_a_run_that_gets_on_is_started_again_as_often_as_the_window_allows() -> None:
    clock = Clock()
    restarts = Restarts(Elastic(max_restarts=3, restart_window_s=100.0), 4, clock)
    for step in range(12):
        clock.now_s += 40.0
        assert restarts.after(killed(10 * step, rank=step % 2)) == 4
    with pytest.raises(
        TrainingFailed, match=r"started again 3 times within 100 s \(run\.elastic\.max_restarts"
    ) as ended:
        restarts.after(killed(300))
    assert str(ended.value).startswith("worker gone\n")


def test_the_same_failure_of_one_step_ends_the_run() -> None:
    restarts = Restarts(Elastic(), 2)
    fault = TrainingFailed("shapes differ", step=7, kind="RuntimeError", may_pass=True)
    assert [restarts.after(fault), restarts.after(fault)] == [2, 2]
    with pytest.raises(TrainingFailed, match="step 8 failed 3 times in the same way"):
        restarts.after(fault)


def test_a_place_that_loses_its_worker_three_times_in_a_row_is_lost() -> None:
    restarts = Restarts(Elastic(min_workers=3), 4)
    assert [restarts.after(killed(step, rank=2)) for step in (5, 5, 5)] == [4, 4, 3]
    assert [restarts.after(killed(step, rank=0)) for step in (6, 7)] == [3, 3]
    with pytest.raises(TrainingFailed, match=r"2 workers would be left, fewer than run\.elastic\.min_workers = 3"):
        restarts.after(killed(8, rank=0))


def hanging(step: int, rank: int | None) -> TrainingFailed:
    return TrainingFailed("waited for", step=step, kind="RankMissing", rank=rank, saved_step=5, may_pass=True)


def test_a_place_that_hangs_again_and_again_is_lost_but_not_for_one_step() -> None:
    restarts = Restarts(Elastic(), 4)
    assert [restarts.after(hanging(step, 2)) for step in (7, 9, 7)] == [4, 4, 3]
    assert [restarts.after(hanging(step, None)) for step in (7, 9, 7)] == [3, 3, 3], "nobody knows who"
    restarts = Restarts(Elastic(), 4)
    assert [restarts.after(hanging(7, 2)) for _ in range(2)] == [4, 4]
    with pytest.raises(TrainingFailed, match="step 8 failed 3 times in the same way"):
        restarts.after(hanging(7, 2))


def test_the_rank_that_hangs_is_known_to_the_launcher(tmp_path: Path) -> None:
    trainer = Trainer(plan(tmp_path), folder=tmp_path / "run")
    trainer.folder.create()
    trainer.folder.append_metrics({"step": 7})
    failure.record(trainer.folder, 0, RankMissing("rank 2 did not come", [2]))
    why = trainer._why(WorkersEnded({0: 1}))
    assert (why.rank, why.kind, why.step, why.may_pass) == (2, "RankMissing", 7, True)
    failure.forget(trainer.folder)
    failure.record(trainer.folder, 0, RankMissing("ranks 2, 3 did not come", [2, 3]))
    assert trainer._why(WorkersEnded({0: 1})).rank is None
    assert trainer._why(WorkersEnded({1: -9}, "rank 1 is stopped")).rank == 1
    assert trainer._why(WorkersEnded({0: -9, 1: -9}, "ranks 0, 1 are hanging")).rank is None


def lose_a_place(restarts: Restarts, step: int) -> int:
    return [restarts.after(killed(step, rank=0, saved=step - 1)) for _ in range(3)][-1]


def test_a_lost_place_is_tried_again_later_and_later() -> None:
    clock = Clock()
    restarts = Restarts(Elastic(restart_window_s=100.0, max_restarts=100), 4, clock)
    for wait_s in (100.0, 200.0, 400.0):
        assert not restarts.is_due()
        assert lose_a_place(restarts, int(clock.now_s) + 5) == 3
        clock.now_s += wait_s - 1
        assert not restarts.is_due()
        clock.now_s += 1
        assert restarts.is_due()
        assert not restarts.is_due()  # the workers were asked, once
        assert restarts.grown() == 4


def test_workers_that_fail_while_they_are_asked_to_stop_are_started_as_they_were() -> None:
    clock = Clock()
    restarts = Restarts(Elastic(restart_window_s=100.0), 2, clock)
    assert lose_a_place(restarts, 5) == 1
    clock.now_s += 100.0
    assert restarts.is_due()
    assert restarts.after(killed(30)) == 1
    assert restarts.is_due()  # as soon as they are there again


def test_as_many_are_started_as_the_driver_counts() -> None:
    clock, gpus = Clock(), [8]
    restarts = Restarts(Elastic(restart_window_s=100.0), 8, clock, places=lambda: gpus[0])
    gpus[0] = 6
    assert restarts.after(TrainingFailed("CUDA error", step=5, kind="RuntimeError", may_pass=True)) == 6
    clock.now_s += 100.0
    assert not restarts.is_due()  # they are still away
    gpus[0] = 7
    clock.now_s += 100.0
    assert restarts.is_due()
    assert restarts.grown() == 7


def test_a_gpu_to_spare_takes_the_place_of_one_that_loses_its_worker_again_and_again() -> None:
    clock = Clock()
    restarts = Restarts(Elastic(restart_window_s=100.0, max_restarts=100), 4, clock, places=lambda: 6)
    assert restarts.gpus is None
    assert [restarts.after(killed(5, rank=1)) for _ in range(3)] == [4, 4, 4]
    assert restarts.gpus == (0, 2, 3, 4)
    clock.now_s += 100.0
    assert not restarts.is_due(), "no place is missing"
    assert [restarts.after(killed(6, rank=2)) for _ in range(3)] == [4, 4, 4]
    assert restarts.gpus == (0, 2, 4, 5)
    assert [restarts.after(killed(7, rank=3)) for _ in range(3)] == [4, 4, 3], "none is to spare"
    assert restarts.gpus == (0, 2, 4)
    clock.now_s += 100.0
    assert restarts.is_due()
    assert (restarts.grown(), restarts.gpus) == (4, None), "all are tried again"
    restarts.stays(3)
    assert restarts.gpus == (0, 2, 4)


def test_gpus_are_numbered_anew_where_one_has_left_the_bus() -> None:
    gpus = [5]
    restarts = Restarts(Elastic(), 4, Clock(), places=lambda: gpus[0])
    assert [restarts.after(killed(5, rank=1)) for _ in range(3)] == [4, 4, 4]
    gpus[0] = 4
    assert restarts.after(killed(6, rank=0)) == 4
    assert restarts.gpus is None
    gpus[0] = 3
    assert restarts.after(killed(7, rank=0)) == 3


def test_where_more_cannot_be_planned_it_stays_as_it_was() -> None:
    clock = Clock()
    restarts = Restarts(Elastic(restart_window_s=100.0), 4, clock)
    assert lose_a_place(restarts, 5) == 3
    clock.now_s += 100.0
    assert restarts.is_due()
    assert restarts.grown() == 4
    restarts.stays(3)
    clock.now_s += 199.0
    assert not restarts.is_due()
    clock.now_s += 1.0
    assert restarts.is_due()


def test_a_place_that_gets_on_between_its_failures_is_kept() -> None:
    restarts = Restarts(Elastic(), 2)
    assert [restarts.after(killed(10 * n + 5, rank=1, saved=10 * n)) for n in range(6)] == [2] * 6


def test_a_lost_place_is_planned_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def launch(*given: object, num_workers: int, **others: object) -> int:
        started.append(num_workers)
        if num_workers == 2:
            raise WorkersEnded({1: -9})
        RunFolder(tmp_path / "run").write_status(Status("done", 8, None, 0))
        return 0

    monkeypatch.setattr("ahp.runtime.ranks.launch.launch", launch)
    monkeypatch.setenv("AHP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    two = plan(tmp_path / "a.txt", Parallelism(data_parallel_shard_degree=2, zero_stage=3))
    with pytest.raises(TrainingFailed, match="the plan is for 2 workers, and 1 is left"):
        Trainer(two, folder=tmp_path / "alone").run()
    started.clear()
    trainer = Trainer(two, folder=tmp_path / "run", replan=lambda workers: plan(tmp_path / "a.txt"))
    assert trainer.run().status.state == "done"
    assert started == [2, 2, 2, 1]
    assert [start.workers for start in starts(tmp_path / "run" / "starts.jsonl")] == started


def test_workers_are_told_which_gpus_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def launch(module: str, arguments: list[str], **others: object) -> int:
        given.append(json.loads(arguments[1])["gpus"])
        if len(given) <= SAME_PLACE:
            raise WorkersEnded({0: -9})
        RunFolder(tmp_path / "run").write_status(Status("done", 8, None, 0))
        return 0

    monkeypatch.setattr("ahp.runtime.ranks.launch.launch", launch)
    monkeypatch.setattr("ahp.runtime.run.trainer.device_for", lambda plan, workers: "cuda")
    monkeypatch.setattr("ahp.runtime.run.trainer.gpus_left", lambda: 3)
    monkeypatch.setenv("AHP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    two = plan(tmp_path / "a.txt", Parallelism(data_parallel_shard_degree=2, zero_stage=3))
    assert Trainer(two, folder=tmp_path / "run").run().status.state == "done"
    assert given == [None, None, None, [1, 2]]


def test_a_lost_place_that_is_back_is_planned_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers that were left are asked to save when the window is over, and as many as at first go on from there."""
    started: list[int] = []
    folder = RunFolder(tmp_path / "run")

    def launch(*given: object, num_workers: int, stops_when: Callable[[], bool], **others: object) -> int:
        started.append(num_workers)
        if started in ([2], [2, 2], [2, 2, 2]):
            raise WorkersEnded({1: -9})
        if num_workers == 1:
            while not stops_when():
                time.sleep(0.01)
            folder.write_status(Status("interrupted", 4, "stopped by SIGTERM", 143))
        else:
            folder.write_status(Status("done", 8, None, 0))
        return 0

    monkeypatch.setattr("ahp.runtime.ranks.launch.launch", launch)
    monkeypatch.setenv("AHP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    plans = {
        1: plan(tmp_path / "a.txt"),
        2: plan(tmp_path / "a.txt", Parallelism(data_parallel_shard_degree=2, zero_stage=3)),
    }
    trainer = Trainer(plans[2], folder=folder, elastic={"restart_window_s": 0.2}, replan=plans.__getitem__)
    assert trainer.run().status.state == "done"
    assert started == [2, 2, 2, 1, 2]
    history = starts(folder.history_file)
    assert history[3].why == "a lost place is tried again"
    assert not history[3].failed


def test_workers_that_somebody_else_told_to_stop_are_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, started = RunFolder(tmp_path / "run"), list[int]()

    def launch(*given: object, num_workers: int, **others: object) -> int:
        started.append(num_workers)
        folder.write_status(Status("interrupted", 4, "stopped by SIGTERM", 143))
        return 0

    monkeypatch.setattr("ahp.runtime.ranks.launch.launch", launch)
    monkeypatch.setenv("AHP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    outcome = Trainer(plan(tmp_path / "a.txt"), folder=folder).run()
    assert (outcome.exit_code, started) == (143, [1])


def test_no_restarts_at_all_where_none_are_wanted() -> None:
    with pytest.raises(TrainingFailed, match=r"^worker gone$"):
        Restarts(Elastic(max_restarts=0), 2).after(killed(5))


def test_more_or_fewer_workers_than_wanted_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n")
    two = plan(tmp_path / "a.txt", Parallelism(data_parallel_shard_degree=2, zero_stage=3))
    with pytest.raises(BadInput, match=r"run\.elastic\.max_workers = 1: the plan's degrees make 2 workers"):
        Trainer(two, folder=tmp_path / "run", elastic={"max_workers": 1})
    with pytest.raises(
        BadInput, match=r"run\.elastic\.max_workers = 1: must be at least run\.elastic\.min_workers = 2"
    ):
        Trainer(two, folder=tmp_path / "run", elastic={"min_workers": 2, "max_workers": 1})
    with pytest.raises(
        BadInput, match=r"run\.elastic\.min_workers = 3: the plan's degrees make 2 workers \(valid: 1 to 2\)"
    ):
        Trainer(two, folder=tmp_path / "run", elastic={"min_workers": 3})


@pytest.mark.parametrize(
    ("error", "may_pass"),
    [
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), True),
        (OSError("Stale file handle"), True),
        (RankMissing("rank 3 did not come"), True),
        (BadInput("job.steps = 0"), False),
        (TypeError("no such argument"), False),
        (NotImplementedError("no such operator"), False),
        (RecursionError("too deep"), False),
    ],
)
def test_what_may_be_a_machines_fault(error: BaseException, may_pass: bool, tmp_path: RunFolder) -> None:
    folder = RunFolder(str(tmp_path))
    folder.create()
    failure.record(folder, 0, error)
    known = failure.read(folder)
    assert known is not None
    assert (known.kind, known.may_pass) == (type(error).__name__, may_pass)


@pytest.mark.parametrize(
    ("ends", "rounds", "stops"),
    [
        ([(7, "RankMissing", "port 1"), (7, "RankMissing", "port 2"), (7, "RankMissing", "port 3")], 4, True),
        ([(7, "RankMissing", "port 1"), (7, "OSError", "port 1"), (7, "RankMissing", "port 1")], 4, False),
        ([(7, "RankMissing", "port 1"), (8, "RankMissing", "port 1"), (7, "RankMissing", "port 1")], 4, False),
        ([(7, "RankMissing", "port 1"), (7, "RankMissing", "port 2")], 3, False),
        ([(7, "RankMissing", "port 1"), (7, "RankMissing", "port 2"), (7, "RankMissing", "port 3")], 1, False),
    ],
    ids=["alike", "another way", "another step", "twice", "started by hand"],
)
def test_several_nodes_stop_where_one_step_fails_three_times_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: list[tuple[int, str, str]], rounds: int, stops: bool
) -> None:
    """What the words of a failure have of ports and ranks does not make it another one."""
    trainer = Trainer(plan(tmp_path), folder=tmp_path / "run")
    trainer.folder.create()
    for step, kind, why in ends:
        run_history.began(trainer.folder.history_file, run_history.Start("2026-11-24T12:00:00+00:00", "dp2", 2, 5))
        found = {"last_step": step, "saved_step": 5, "why": why, "failed": True, "kind": kind}
        run_history.ended(trainer.folder.history_file, ended="2026-11-24T12:01:00+00:00", **found)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", f"ahp{ROUND}{rounds}")
    with ExitStack() as kept:
        if stops:
            kept.enter_context(pytest.raises(TrainingFailed, match="step 8 failed 3 times in the same way: port 3"))
        trainer._refuse_what_fails_alike()


def test_the_history_has_the_first_rank_to_fail_and_not_who_lost_it(tmp_path: Path) -> None:
    trainer = Trainer(plan(tmp_path), folder=tmp_path / "run")
    trainer.folder.create()
    failure.record(trainer.folder, 1, OSError("the disk of rank 1"))
    with pytest.raises(RankMissing), trainer._in_history():
        raise RankMissing("rank 0 lost its connection")
    [start] = starts(trainer.folder.history_file)
    assert (start.why, start.kind, start.failed) == ("rank 1: OSError: the disk of rank 1", "OSError", True)
    with trainer._in_history():
        pass
    assert (starts(trainer.folder.history_file)[-1].kind, starts(trainer.folder.history_file)[-1].failed) == (
        None,
        False,
    )
