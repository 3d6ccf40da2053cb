"""With ``--json`` stdout has one JSON document: what others print, such as a model of the user's own, goes to stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from contextvars import ContextVar
from typing import TextIO

_KEPT: ContextVar[TextIO | None] = ContextVar("the stdout of a command whose own is stderr", default=None)


@contextmanager
def json_alone() -> Iterator[None]:
    """Inside the block stdout is stderr, also for processes that are started there; ``print_alone`` prints to what was stdout before."""
    with ExitStack() as ends:
        stdout = sys.stdout
        # Where a program has replaced one of them, as a test does, only what Python prints is moved.
        if stdout is sys.__stdout__ and sys.stderr is sys.__stderr__:
            stdout = ends.enter_context(_moved(stdout, sys.stderr))
        ends.callback(_KEPT.reset, _KEPT.set(stdout))
        ends.enter_context(redirect_stdout(sys.stderr))
        yield


def print_alone(text: str) -> None:
    """Print a command's JSON."""
    print(text, file=_KEPT.get() or sys.stdout, flush=True)


@contextmanager
def _moved(stdout: TextIO, stderr: TextIO) -> Iterator[TextIO]:
    """A new file for what stdout writes to, while stdout's number, which other processes inherit, is stderr's."""
    stdout.flush()
    number = stdout.fileno()
    kept = open(os.dup(number), "w", encoding=stdout.encoding, errors=stdout.errors)  # noqa: SIM115
    os.dup2(stderr.fileno(), number)
    try:
        yield kept
    finally:
        os.dup2(kept.fileno(), number)
        with suppress(OSError):  # ``print_alone`` has told of it
            kept.close()
