"""What a watcher sees: every step once, also when the writer replaces its file."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from ahp.runtime.run.folder import RunFolder
from ahp.runtime.run.progress import Display, following


def record(step: int, seconds: float = 0.5) -> dict[str, Any]:
    return {"step": step, "loss": 9.0 / step, "tokens_per_s": 8192.0, "step_time_s": seconds}


def display(steps: int, predicted_s: float | None = 0.25) -> tuple[Display, io.StringIO]:
    out = io.StringIO()
    return Display(steps=steps, predicted_s=predicted_s, console=Console(file=out, width=120)), out


def test_line_has_loss_speed_prediction_and_time_left() -> None:
    shown, out = display(steps=241)
    shown.update(record(1))
    assert out.getvalue() == "step 1/241  loss 9.000  8,192 tokens/s  500 ms a step, predicted 250 ms  2:00 left\n"


def test_time_left_is_the_median_so_that_one_slow_step_does_not_count() -> None:
    shown, _ = display(steps=15, predicted_s=None)
    for step, seconds in enumerate([9.0, 1.0, 1.0, 1.0, 1.0], start=1):
        shown.update(record(step, seconds))
    assert shown.words().endswith("1.00 s a step  0:10 left")


def test_both_figures_of_the_speed_are_of_the_same_steps() -> None:
    """A step that was slow once takes neither down; they said 1,106 tokens/s and 970 ms for 4,096 tokens."""
    shown, _ = display(steps=9, predicted_s=None)
    for step, seconds in enumerate([1.0, 1.0, 4.0], start=1):
        shown.update({**record(step, seconds), "tokens_per_s": 4096 / seconds})
    assert "4,096 tokens/s  1.00 s a step" in shown.words()


def test_follower_shows_what_is_appended_once(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (1, 2):
        folder.append_metrics(record(step))
    seen: list[int] = []
    shown, _ = display(steps=9)
    shown.update = lambda line: seen.append(line["step"])  # type: ignore[method-assign]
    with following(folder.metrics_file, folder.notes_file, shown):
        folder.truncate_metrics(2)
        folder.append_metrics(record(3))
        with folder.metrics_file.open("a") as file:
            file.write(json.dumps(record(4))[:20])
            file.flush()
            file.write(json.dumps(record(4))[20:] + "\n")
    assert seen == [3, 4]


def test_follower_says_at_once_what_a_worker_notes(tmp_path: Path) -> None:
    """That a checkpoint is damaged reached the terminal when the run was over."""
    folder = RunFolder(tmp_path)
    folder.create()
    for step in (1, 2, 3):
        folder.append_metrics(record(step))
    shown, out = display(steps=9)
    with following(folder.metrics_file, folder.notes_file, shown):
        folder.note("the checkpoint of step 3 is [damaged]")
        began_s = time.monotonic()
        while "[damaged]" not in out.getvalue():
            assert time.monotonic() - began_s < 120
            time.sleep(0.01)
        folder.truncate_metrics(2)
        time.sleep(0.5)
        folder.append_metrics(record(3))
    assert shown.recent[-1]["step"] == 3


def test_terminal_gets_a_bar() -> None:
    out = io.StringIO()
    shown = Display(steps=4, predicted_s=None, console=Console(file=out, width=120, force_terminal=True))
    shown.update(record(4))
    shown.close()
    assert "step 4/4" in out.getvalue()
    assert "━" in out.getvalue()
