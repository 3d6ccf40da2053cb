"""Of workers that fail the cause is always told, whatever they were doing."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ahp.errors import AhpError
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
    assert (tmp_path / "error-1.txt").read_text() == "rank 0 did not come"


def ends(monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> str:
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
    return str(told.value)


def test_the_first_error_is_the_cause_whichever_rank_left_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"error-2.txt": "", "error-1.txt": "shapes differ", "error-0.txt": "connection lost"}
    assert ends(monkeypatch, found) == "shapes differ"


def test_without_an_error_the_logs_have_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "\n".join(f"line {number}" for number in range(7)) + "\nImportError: no such module\n"
    told = ends(monkeypatch, {"log/start-1_x/attempt_0/0/stderr.log": lines})
    assert told == "workers ended with {0: 1, 1: 1}: line 3\nline 4\nline 5\nline 6\nImportError: no such module"
    assert ends(monkeypatch, {}) == "workers ended with {0: 1, 1: 1}: they left no message"


def test_workers_that_a_signal_ended_have_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "launch", lambda *_, **__: signal.SIGTERM)
    with pytest.raises(Stopped, match="SIGTERM"):
        rehearsal.on_workers("a_worker", Plan(), "cpu")
