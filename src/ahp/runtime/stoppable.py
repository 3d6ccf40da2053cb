"""Compiled code that takes minutes, run so that a signal stops the program at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")
THREAD = "ahp-compiled"


def stoppable(work: Callable[[], Result]) -> Result:
    """The result of ``work``, which must release Python's lock where it takes long. Python handles a signal between two instructions of the main
    thread, so a call of compiled code there would hold back SIGTERM until it returns, and Slurm or Kubernetes kill after 30 s.

    If a signal's handler raises, ``work`` is left to run until the process ends (``is_left``); nobody sees its result.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    results: list[Result] = []
    errors: list[BaseException] = []
    over = threading.Lock()
    over.acquire()

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)
        over.release()

    thread = threading.Thread(target=run, name=THREAD, daemon=True)
    thread.start()
    over.acquire()  # one call: a signal within Event.wait() can find its lock released, and one in join() would mark the thread as ended
    thread.join()
    for error in errors:
        raise error
    return results[0]


def is_left() -> bool:
    """Whether work still runs that was stopped. The interpreter cannot end in order then: it would end the thread inside the compiled code."""
    return any(thread.name == THREAD for thread in threading.enumerate())
