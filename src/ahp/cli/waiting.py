"""Shows on stderr what is being done, if it takes longer than a moment: a line that counts the seconds."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TextIO

MOMENT_S = 2.0
"""Seconds before anything is shown."""

EVERY_S = 10.0
"""Seconds between the first two lines if the output is not a terminal; each later wait is twice as long."""


Show = Callable[[str, TextIO, float, threading.Event], None]


@contextmanager
def waiting(what: str, stream: TextIO | None = None, moment_s: float = MOMENT_S) -> Iterator[None]:
    """Show what is being done while the block runs, once it has run for a moment.

    On a terminal one line counts the seconds and is gone at the end; elsewhere a line is printed now and then.
    """
    out, done = stream or sys.stderr, threading.Event()
    show = _counting if out.isatty() else _now_and_then
    beside = threading.Thread(target=_after, args=(moment_s, done, show, what, out, monotonic()), daemon=True)
    beside.start()
    try:
        yield
    finally:
        done.set()
        beside.join()


def _after(moment_s: float, done: threading.Event, show: Show, what: str, out: TextIO, start_s: float) -> None:
    if not done.wait(moment_s):
        show(what, out, start_s, done)


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
