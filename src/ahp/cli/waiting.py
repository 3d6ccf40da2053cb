"""Progress on stderr: a bar, or a line that counts the seconds of what takes longer than a moment."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from time import monotonic
from typing import TextIO

from ahp.runtime.ranks.beside import beside

MOMENT_S = 2.0
"""Seconds before anything is shown."""

EVERY_S = 10.0
"""Seconds between the first two lines if the output is not a terminal; each later wait is twice as long."""


def waiting(what: str, stream: TextIO | None = None, moment_s: float = MOMENT_S) -> AbstractContextManager[None]:
    """Show what is being done while the block runs, once it has run for a moment.

    On a terminal one line counts the seconds and is gone at the end; elsewhere a line is printed now and then.
    """
    out, start_s = stream or sys.stderr, monotonic()
    show = _counting if out.isatty() else _now_and_then

    def after_a_moment(done: threading.Event) -> None:
        if not done.wait(moment_s):
            show(what, out, start_s, done)

    return beside(after_a_moment)


def _counting(what: str, out: TextIO, start_s: float, done: threading.Event) -> None:
    from rich.console import Console

    with Console(file=out).status(what) as status:
        while not done.wait(0.5):
            status.update(f"{what} {monotonic() - start_s:.0f} s")


def _now_and_then(what: str, out: TextIO, start_s: float, done: threading.Event) -> None:
    wait_s = EVERY_S
    print(f"{what} ({monotonic() - start_s:.0f} s so far)", file=out, flush=True)
    while not done.wait(wait_s):
        print(f"{what} ({monotonic() - start_s:.0f} s so far)", file=out, flush=True)
        wait_s *= 2


@contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None]]:
    """A bar on stderr; nothing moves if stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(bar_width=30),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)
