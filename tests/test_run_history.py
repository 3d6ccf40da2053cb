"""What starts.jsonl says of a run, whatever lies in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ahp import run_history
from ahp.run_history import Start, effective_share, starts

BEGAN, LATER = "2026-11-23T10:00:00+00:00", "2026-11-23T10:01:40+00:00"


def test_a_start_and_its_end_are_one() -> None:
    start = Start(BEGAN, "dp2", 2, 5, LATER, 19, 15, "a worker was killed")
    assert (start.seconds, start.steps_lost) == (100.0, 4)


def test_the_file_has_every_start_and_how_it_ended(tmp_path: Path) -> None:
    file = tmp_path / "starts.jsonl"
    assert starts(file) == []
    run_history.began(file, Start(BEGAN, "dp2", 2, 0))
    run_history.ended(file, ended=LATER, last_step=9, saved_step=5, why="killed", failed=True)
    run_history.began(file, Start(LATER, "dp1", 1, 5))
    assert starts(file) == [Start(BEGAN, "dp2", 2, 0, LATER, 9, 5, "killed", True), Start(LATER, "dp1", 1, 5)]


@pytest.mark.parametrize(
    "line", ["", "{", "3", '{"began": 1}', '{"why": "before any"}', '{"began": "x", "plan": "p", "workers": 1, "first_step": 0, "ended": "y"}', "\xff"]
)  # fmt: skip
def test_damaged_lines_are_left_out(tmp_path: Path, line: str) -> None:
    file = tmp_path / "starts.jsonl"
    file.write_bytes(line.encode("latin-1") + b"\n")
    run_history.began(file, Start(BEGAN, "dp2", 2, 0))
    assert starts(file) == [Start(BEGAN, "dp2", 2, 0)]


def test_the_share_of_time_that_counted() -> None:
    history = [Start(BEGAN, "dp2", 2, 0, LATER, 9, 5, "killed"), Start(BEGAN, "dp2", 2, 5, LATER, 15, 15, "done")]
    assert effective_share(history, [{"step_time_s": 10.0}] * 15) == 0.75
    assert effective_share([*history, Start(LATER, "dp1", 1, 15)], []) is None
    assert effective_share([], []) is None
