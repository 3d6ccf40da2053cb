"""What workers settle before any process group is made: no time limit while the others live, a cause when one ends."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ahp.errors import BadInput
from ahp.plan import Parallelism, Plan
from ahp.run_files import Status
from ahp.runtime.ranks.preflight import NoAnswer
from ahp.runtime.ranks.preparation import Preparation
from ahp.runtime.run.folder import RunFolder
from ahp.runtime.run.stop_signal import Stopped
from ahp.runtime.run.texts import Texts
from ahp.runtime.run.trainer import Outcome
from tests.runtime.preparing import as_rank
from tests.runtime.run.test_trainer import plan
from tests.runtime.run.test_trainer import text as text  # a fixture
from tests.runtime.workers import Pool, free_port, place

HEARTBEAT_S, SILENT_S = 0.05, 2.0


def together(work: Callable[[Preparation], Any], size: int = 3) -> list[Any]:
    """``work`` on workers that share a store; of each what it returned or raised."""
    store, found = dist.HashStore(), [None] * size

    def run(rank: int) -> None:
        workers = Preparation((store, rank, size), heartbeat_s=HEARTBEAT_S, silent_s=SILENT_S)
        try:
            found[rank] = work(workers)
        except BaseException as error:
            found[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.slow
def test_the_first_decides_for_all_however_long_it_takes() -> None:
    def work(workers: Preparation) -> list[str]:
        def decide() -> str:
            assert workers.is_first
            time.sleep(1.2 * SILENT_S)
            return "the first's"

        return [workers.decided_by_first(decide, str), workers.decided_by_first(lambda: f"{workers.rank}", str)]

    assert together(work) == [["the first's", "0"]] * 3


class StoreOfNobody(dist.HashStore):
    """A store whose process goes while a worker works."""

    gone = False

    def add(self, key: str, value: int) -> int:
        if self.gone:
            raise RuntimeError("Connection was likely closed")
        return super().add(key, value)

    def set(self, key: str, value: str) -> None:
        if self.gone:
            raise RuntimeError("Connection was likely closed")
        super().set(key, value)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_is_stopped_as_the_store_goes_says_that_it_was_stopped(rank: int) -> None:
    store = StoreOfNobody()
    workers = Preparation((store, rank, 2))

    def stopped() -> None:
        store.gone = True
        raise Stopped(15)

    with pytest.raises(Stopped):
        (workers.decided_by_first if workers.is_first else workers.done_by_all)(stopped)


def test_a_decision_that_finds_the_store_gone_says_so() -> None:
    store = StoreOfNobody()
    workers = Preparation((store, 0, 2))
    with pytest.raises(NoAnswer, match="the store that workers find each other by is gone"):
        workers.decided_by_first(lambda: setattr(store, "gone", True))


def test_what_the_first_decides_goes_through_the_store_as_data(tmp_path: Path) -> None:
    """Whoever reaches a store can write into it."""
    decided = (
        Plan(parallelism=Parallelism(tensor_parallel_degree=3, recomputed_layers_per_stage=None)),
        Texts(("a", "c"), None, "b"),
    )
    kind = tuple[Plan, Texts | None]
    assert together(lambda workers: workers.decided_by_first(lambda: decided, kind)) == [decided] * 3
    outcome = Outcome(tmp_path, Status("done", 10, None, 0), already_done=True)
    assert together(lambda workers: workers.decided_by_first(lambda: outcome, Outcome | None)) == [outcome] * 3

    def work(workers: Preparation) -> None:
        if workers.is_first:
            workers.store.set(workers._next(), pickle.dumps((Touch(tmp_path / "ran"), 0)))  # type: ignore[arg-type]
        else:
            workers.decided_by_first(lambda: None)

    assert all(isinstance(found, ValueError) for found in together(work)[1:])
    assert not (tmp_path / "ran").exists()


@dataclass
class Touch:
    """A pickle that makes a file when it is read."""

    file: Path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


@pytest.mark.slow
def test_none_goes_on_before_all_are_done() -> None:
    done: list[int] = []

    def work(workers: Preparation) -> int:
        def own() -> int:
            time.sleep(0.6 * workers.rank * SILENT_S)
            done.append(workers.rank)
            return 10 * workers.rank

        result = workers.done_by_all(own)
        assert sorted(done) == [0, 1, 2]
        return result

    assert together(work) == [0, 10, 20]


@pytest.mark.parametrize(
    ("error", "code"),
    [(BadInput("no such text"), 2), (RuntimeError("a fault"), 1), (Stopped(15), 143), (SystemExit(7), 7)],
)
def test_an_error_of_the_first_ends_the_others_with_its_exit_code(error: BaseException, code: int) -> None:
    def decide() -> None:
        raise error

    first, *others = together(lambda workers: workers.decided_by_first(decide))
    assert first is error
    assert [type(other) for other in others] == [SystemExit, SystemExit]
    assert [other.code for other in others] == [code, code]


def test_an_error_of_another_is_told_by_the_first() -> None:
    def work(workers: Preparation) -> None:
        def own() -> None:
            if workers.rank == 2:
                raise BadInput("no such text here")

        workers.done_by_all(own)

    first, second, third = together(work)
    assert isinstance(first, NoAnswer)
    assert (str(first), first.exit_code) == ("worker 2 ended while it prepared the run: no such text here", 2)
    assert isinstance(second, SystemExit)
    assert isinstance(third, BadInput)


@pytest.mark.slow
def test_a_first_that_has_gone_is_named() -> None:
    def work(workers: Preparation) -> None:
        if workers.is_first:
            with workers._heartbeats():  # as one that is killed while it decides
                time.sleep(SILENT_S)
            return
        workers.decided_by_first(lambda: None)

    _, *others = together(work)
    for other in others:
        assert isinstance(other, NoAnswer)
        assert "worker 0 on " in str(other)
        assert "was not heard of for" in str(other)


@pytest.fixture
def agent() -> Iterator[dict[str, str]]:
    """A store as torchrun's agent keeps it, outlasting every worker; the variables that say so."""
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    yield {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    del store


def variables(given: dict[str, str], size: int = 2) -> list[dict[str, str]]:
    """The launcher's of each rank, and where this process keeps its caches."""
    cache = {"AHP_CACHE": os.environ["AHP_CACHE"]}
    return [{**place(rank, size), **given, **cache} for rank in range(size)]


@pytest.fixture
def folder(tmp_path: Path, text: Path) -> Path:
    sharded = Parallelism(data_parallel_shard_degree=2, zero_stage=3)
    plan(text, sharded, steps=2).save(tmp_path / "plan.yaml")
    return tmp_path


def test_a_run_is_prepared_for_longer_than_collectives_wait(pool: Pool, folder: Path, agent: dict[str, str]) -> None:
    for code, error in pool.run(as_rank, 2, folder, "long", variables(agent)):
        assert code == 0, error
    status = RunFolder(folder / "run").status()
    assert status is not None
    assert (status.state, status.step) == ("done", 2)


def test_a_preparation_that_fails_ends_all_with_its_exit_code(pool: Pool, folder: Path) -> None:
    """Where the first worker keeps the store itself."""
    given = variables({"MASTER_PORT": str(free_port())})
    (first, why), (second, silence) = pool.run(as_rank, 2, folder, "fails", given)
    assert (first, second) == (2, 2)
    assert "the text is bad" in why
    assert "the text is bad" not in silence
    status = RunFolder(folder / "run").status()
    assert status is not None
    assert (status.state, status.exit_code, status.cause) == ("failed", 2, "the text is bad")


@pytest.mark.slow
def test_a_first_worker_that_is_killed_ends_the_others(folder: Path, agent: dict[str, str]) -> None:
    """In processes of their own."""
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.runtime.preparing", str(folder), "killed"], env={**os.environ, **of_rank, **paths},
            stderr=subprocess.PIPE, text=True,
        )
        for of_rank in variables(agent)
    ]  # fmt: skip
    _, why = (worker.communicate()[1] for worker in workers)
    assert [worker.returncode for worker in workers] == [-9, 1]
    assert "worker 0 on " in why
    assert "was not heard of for" in why
