"""A signal that comes while compiled code runs stops the program at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from ahp.errors import BadInput
from ahp.runtime.data import corpus, tokenizer
from ahp.runtime.data.documents import Document, Piece
from ahp.runtime.run.stop_signal import Stopped, stops_at_once
from ahp.runtime.stoppable import THREAD, is_left, stoppable


def test_a_signal_does_not_wait_for_the_work() -> None:
    """A file of 57 MB was tokenized for 41 s after SIGTERM: the whole file is one call of the library."""
    over, begun = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        over.wait()

    def stop() -> None:
        begun.wait()
        time.sleep(0.2)  # until the main thread waits
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop).start()
    with pytest.raises(Stopped), stops_at_once():
        stoppable(work)
    assert is_left()
    over.set()
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join()
    assert not is_left()


def test_results_and_errors_are_those_of_the_work() -> None:
    def refused() -> None:
        raise BadInput("no")

    assert stoppable(lambda: 7) == 7
    with pytest.raises(BadInput, match="no"):
        stoppable(refused)
    assert not is_left()


def test_tokenizers_are_trained_and_used_so(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    for module in (tokenizer, corpus):
        monkeypatch.setattr(module, "stoppable", lambda work: (calls.append(work), work())[1])
    tokenizer.train(["a few words"], 300)
    assert len(calls) == 1

    class Told:
        def token_to_id(self, name: str) -> int:
            return 0

        def encode_batch(self, texts: list[str], **_: Any) -> list[Any]:
            return [SimpleNamespace(ids=[1, 2]) for _ in texts]

    source: Any = SimpleNamespace(num_bytes=1, documents=lambda template: [Document((Piece("a", True),), 1.0)])
    template: Any = None
    maker = corpus._Maker(source, template, lambda said: None, corpus._no_progress)
    told: Any = Told()
    assert [ids for ids, _ in maker._encoded(told)] == [[1, 2, 0]]
    assert len(calls) == 2


ENDS = """
import sys, threading
from ahp.cli import main
from ahp.runtime.stoppable import THREAD
threading.Thread(target=threading.Event().wait, name=THREAD).start()
main.main = lambda: 143
main.program()
"""


def test_a_command_ends_although_such_work_is_left() -> None:
    """A thread that is no daemon stands for compiled code that does not end: Python would wait for it."""
    ended = subprocess.run([sys.executable, "-c", ENDS], timeout=500)
    assert ended.returncode == 143
