"""A thread that does something beside a block, such as to check again and again while a launcher waits in torch for its workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager


@contextmanager
def beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run ``work`` in a thread beside the block. Its event is set at the end of the block, which waits for it; ``work`` must not raise."""
    over = threading.Event()
    thread = threading.Thread(target=work, args=(over,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def looking(look: Callable[[], bool | None], *, every_s: float) -> AbstractContextManager[None]:
    """Inside the block, call ``look`` every ``every_s`` seconds until it returns True. ``look`` must not raise."""

    def again(over: threading.Event) -> None:
        while not over.wait(every_s) and not look():
            pass

    return beside(again)
