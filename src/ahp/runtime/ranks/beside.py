"""A thread beside a launcher, which waits in torch for its workers: it looks at something again and again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def looking(look: Callable[[], bool], *, every_s: float) -> Iterator[None]:
    """Within, call ``look`` every so often, until it says that it has seen enough. It must not raise."""
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
