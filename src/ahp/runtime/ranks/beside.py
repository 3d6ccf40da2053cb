"""A thread that checks something again and again, while a launcher waits in torch for its workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def looking(look: Callable[[], bool], *, every_s: float) -> Iterator[None]:
    """Inside the block, call ``look`` every ``every_s`` seconds until it returns True. ``look`` must not raise."""
    over = threading.Event()

    def again() -> None:
        while not over.wait(every_s) and not look():
            pass

    thread = threading.Thread(target=again, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
