"""What starts.jsonl says of a run, whatever lies in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ahp import run_history
from ahp.run_history import Start, effect, starts, useful

BEGAN, LATER = "2026-11-23T10:00:00+00:00", "2026-11-23T10:01:40+00:00"


def test_a_start_and_its_end_are_one() -> None:
    start = Start(BEGAN, "dp2", 2, 5, LATER, 19, 15, "a worker was killed")
    assert (start.seconds, start.steps_lost, start.seconds_lost) == (100.0, 4, None)
    metrics = [{"step": step, "step_time_s": 2.0, "tokens_per_s": 10.0} for step in range(1, 20)]
    kept = replace(start, **useful(metrics, 5, 15))
    assert (kept.useful_s, kept.useful_tokens, kept.seconds_lost) == (20.0, 200.0, 80.0)
    assert (kept.plain()["why"], kept.plain()["steps_lost"], kept.plain()["seconds_lost"]) == (start.why, 4, 80.0)


def test_the_file_has_every_start_and_how_it_ended(tmp_path: Path) -> None:
    file = tmp_path / "starts.jsonl"
    assert starts(file) == []
    run_history.began(file, Start(BEGAN, "dp2", 2, 0))
    run_history.ended(file, ended=LATER, last_step=9, saved_step=5, why="killed", failed=True, kind="SIGKILL")
    run_history.began(file, Start(LATER, "dp1", 1, 5))
    assert starts(file) == [
        Start(BEGAN, "dp2", 2, 0, LATER, 9, 5, "killed", True, kind="SIGKILL"),
        Start(LATER, "dp1", 1, 5),
    ]


def test_a_start_whose_newest_checkpoint_was_damaged_began_before_it(tmp_path: Path) -> None:
    file = tmp_path / "starts.jsonl"
    run_history.began_at(file, 4)
    run_history.began(file, Start(BEGAN, "dp2", 2, 6))
    run_history.began_at(file, 4)
    run_history.ended(file, ended=LATER, last_step=5, saved_step=4)
    lines = file.read_text()
    run_history.began_at(file, 4)
    assert starts(file) == [Start(BEGAN, "dp2", 2, 4, LATER, 5, 4)]
    assert file.read_text() == lines


@pytest.mark.parametrize(
    "line", ['{"began": "x", "plan": "p", "workers": 1, "first_step": 0, "useful_s": "long"}', '{"began": "x", "plan": "p", "workers": 1, "first_step": 0, "kind": 3}', "", "{", "3", '{"began": 1}', '{"why": "before any"}', '{"began": "x", "plan": "p", "workers": 1, "first_step": 0, "ended": "y"}', "\xff"]
)  # fmt: skip
def test_damaged_lines_are_left_out(tmp_path: Path, line: str) -> None:
    file = tmp_path / "starts.jsonl"
    file.write_bytes(line.encode("latin-1") + b"\n")
    run_history.began(file, Start(BEGAN, "dp2", 2, 0))
    assert starts(file) == [Start(BEGAN, "dp2", 2, 0)]


def test_the_share_of_time_that_counted() -> None:
    history = [
        Start(BEGAN, "dp2", 2, 0, LATER, 9, 5, "killed", True, 50.0, 5000.0),
        Start(BEGAN, "dp2", 2, 5, LATER, 5, 5, "killed", True, 0.0, 0.0),
        Start(BEGAN, "dp2", 2, 5, LATER, 15, 15, "done", False, 100.0, 10_000.0),
    ]
    found = effect(history)
    assert found is not None
    assert (found.share, found.tokens_per_day_without_failures, found.tokens_per_day) == (0.5, 8_640_000, 4_320_000)
    assert effect([*history, Start(LATER, "dp1", 1, 15)]) == found  # it still runs
    assert effect(history[1:2]) is None
    assert effect([]) is None
