"""What takes longer than a moment says so on stderr."""

from __future__ import annotations

from io import StringIO
from time import sleep

from ahp.cli.waiting import waiting


def test_a_moment_passes_without_a_word() -> None:
    out = StringIO()
    with waiting("searching", out, moment_s=30.0):
        pass
    assert not out.getvalue()


def test_what_takes_longer_is_said() -> None:
    out = StringIO()
    with waiting("searching", out, moment_s=0.01):
        for _ in range(500):
            if out.getvalue():
                break
            sleep(0.01)
    assert out.getvalue() == "searching (0 s so far)\n"
