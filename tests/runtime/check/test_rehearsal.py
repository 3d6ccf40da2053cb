"""Of workers that fail the cause is always told, whatever they were doing."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ahp.errors import AhpError, BadInput, bad_input
from ahp.plan import Plan
from ahp.runtime.check import rehearsal
from ahp.runtime.ranks import launch
from ahp.runtime.ranks.meeting import NoAnswer
from ahp.runtime.run.stop_signal import Stopped


def test_a_worker_that_fails_before_it_has_joined_leaves_its_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def joined(*_: Any) -> None:
        raise NoAnswer("rank 0 did not come")

    Plan().save(tmp_path / "plan.yaml")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(rehearsal, "joined", joined)
    with pytest.raises(NoAnswer), rehearsal.as_rank([str(tmp_path), "cpu"]):
        pass
    assert (tmp_path / "error-1.txt").read_text() == "1\nrank 0 did not come"


def ends(monkeypatch: pytest.MonkeyPatch, files: dict[str, str], kind: type[AhpError] = AhpError) -> str:
    """What is told of workers that left these files, the earliest first."""

    def start(module: str, arguments: list[str], **_: Any) -> int:
        for number, (name, text) in enumerate(files.items()):
            file = Path(arguments[0], name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            os.utime(file, (number, number))
        raise launch.WorkersEnded({0: 1, 1: 1})

    monkeypatch.setattr(launch, "launch", start)
    with pytest.raises(AhpError) as told:
        rehearsal.on_workers("a_worker", Plan(), "cpu")
    assert type(told.value) is kind
    return str(told.value)


def test_the_first_error_is_the_cause_whichever_rank_left_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"error-2.txt": "", "error-1.txt": "1\nshapes differ", "error-0.txt": "1\nconnection lost"}
    assert ends(monkeypatch, found) == "shapes differ"


def test_a_refusal_by_the_workers_has_its_own_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 would say that the plan computes something else than one process."""
    Plan().save(tmp_path / "plan.yaml")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(rehearsal, "joined", lambda *_: nullcontext(SimpleNamespace(is_first=True)))
    refusal = bad_input("expert_parallel_degree", 2, "must divide data_parallel_shard_degree 1", [1])
    with pytest.raises(BadInput), rehearsal.as_rank([str(tmp_path), "cpu"]):
        raise refusal
    left = (tmp_path / "error-0.txt").read_text()
    with monkeypatch.context() as patched:
        assert ends(patched, {"error-0.txt": left}, BadInput) == str(refusal)


def test_without_an_error_the_logs_have_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "\n".join(f"line {number}" for number in range(7)) + "\nImportError: no such module\n"
    told = ends(monkeypatch, {"log/start-1_x/attempt_0/0/stderr.log": lines})
    assert told == "workers ended with {0: 1, 1: 1}: line 3\nline 4\nline 5\nline 6\nImportError: no such module"
    assert ends(monkeypatch, {}) == "workers ended with {0: 1, 1: 1}: they left no message"


def test_workers_that_a_signal_ended_have_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "launch", lambda *_, **__: signal.SIGTERM)
    with pytest.raises(Stopped, match="SIGTERM"):
        rehearsal.on_workers("a_worker", Plan(), "cpu")
