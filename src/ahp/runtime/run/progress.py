"""Shows progress on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from ahp.run_files import read_record

SECONDS_BETWEEN_LINES = 15.0
SECONDS_BETWEEN_LOOKS = 0.2
SHOWN = ("step_time_s", "tokens_per_s")
"""Keys that a line of metrics.jsonl needs, besides its step, to be shown."""
STEPS_OF_RECENT_SPEED = 20
"""[Empirical] Step times per median: enough to be calm, few enough to follow a change."""


class Display:
    """Shows loss, tokens per second, predicted and measured step time, and the time left."""

    def __init__(self, *, steps: int, predicted_s: float | None, console: Console | None = None) -> None:
        self.steps = steps
        self.predicted_s = predicted_s
        self.console = console or Console(stderr=True, highlight=False)
        self.recent: deque[dict[str, Any]] = deque(maxlen=STEPS_OF_RECENT_SPEED)
        self.last_line_s: float | None = None
        self.bar: Progress | None = None
        if self.console.is_terminal:
            self.bar = Progress(BarColumn(bar_width=24), TextColumn("{task.description}"), console=self.console)
            self.task = self.bar.add_task("starting the workers", total=steps)
            self.bar.start()

    def update(self, record: dict[str, Any]) -> None:
        """Show one step's record of metrics.jsonl."""
        self.recent.append(record)
        words = self.words()
        if self.bar is not None:
            self.bar.update(self.task, completed=record["step"], description=words)
            return
        now = time.monotonic()
        due = self.last_line_s is None or now - self.last_line_s >= SECONDS_BETWEEN_LINES
        if due or record["step"] == self.steps:
            self.last_line_s = now
            self.console.print(words, soft_wrap=True)

    def words(self) -> str:
        """The last step's loss, and the speed by the median step time of the last steps, in tokens/s and in seconds."""
        record = self.recent[-1]
        seconds = sorted(r["step_time_s"] for r in self.recent)[len(self.recent) // 2]
        tokens = record["tokens_per_s"] * record["step_time_s"]
        left = (self.steps - record["step"]) * seconds
        predicted = f", predicted {_seconds(self.predicted_s)}" if self.predicted_s is not None else ""
        return (
            f"step {record['step']}/{self.steps}  loss {_loss(record.get('loss'))}  "
            f"{tokens / seconds:,.0f} tokens/s  {_seconds(seconds)} a step{predicted}  "
            f"{int(left) // 60}:{int(left) % 60:02d} left"
        )

    def note(self, text: str) -> None:
        """Print a line between the steps; above the bar if there is one."""
        self.console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()


def _loss(value: float | None) -> str:
    return "left out" if value is None else f"{value:.3f}"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.0f} ms"


@contextmanager
def following(metrics_file: Path, notes_file: Path, display: Display) -> Iterator[None]:
    """Show, in a thread, what another process appends to metrics.jsonl and to its notes from now on."""
    ended = threading.Event()
    begins = {file: file.stat().st_size if file.exists() else 0 for file in (metrics_file, notes_file)}
    thread = threading.Thread(target=_follow, args=(begins, display, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        display.close()


def _follow(offsets: dict[Path, int], display: Display, ended: threading.Event) -> None:
    metrics_file, notes_file = offsets
    finishing = False
    while not finishing:
        finishing = ended.wait(SECONDS_BETWEEN_LOOKS)
        for note in _appended(notes_file, offsets):
            display.note(note.decode(errors="replace"))
        for line in _appended(metrics_file, offsets):
            record = read_record(line)
            if record is not None and all(record.get(key) is not None for key in SHOWN):
                display.update(record)


def _appended(file: Path, offsets: dict[Path, int]) -> list[bytes]:
    """The whole lines after the offset; moves the offset past them."""
    if not file.exists():
        return []
    # Opened again at every look: the writer replaces the file when it starts.
    with file.open("rb") as stream:
        offsets[file] = min(offsets[file], stream.seek(0, os.SEEK_END))  # the writer has taken lines out
        stream.seek(offsets[file])
        text = stream.read()
    whole = text[: text.rfind(b"\n") + 1]
    offsets[file] += len(whole)
    return whole.splitlines()


@contextmanager
def progress(what: str, size: float) -> Iterator[Callable[[float], None]]:
    """Shows how far one job is: a bar on a terminal, a line now and then elsewhere. Yields a function to call with each amount done."""
    console = Console(stderr=True, highlight=False)
    done, last_line_s = 0.0, time.monotonic()
    columns = (BarColumn(bar_width=24), TextColumn("{task.percentage:>3.0f} % {task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=size)

        def advance(amount: float) -> None:
            nonlocal done, last_line_s
            done += amount
            bar.update(task, completed=done)
            if not console.is_terminal and time.monotonic() - last_line_s >= SECONDS_BETWEEN_LINES:
                last_line_s = time.monotonic()
                say(f"{what}: {min(1.0, done / size):.0%}")

        yield advance


def say(text: str) -> None:
    """Print one line about what is going on, on stderr."""
    print(text, file=sys.stderr, flush=True)
