"""Output of ``ahp check`` and ``ahp export`` as a pipe has it."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _as_wide_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are broken for a terminal's width alone, which pytest's processes have one of; tests of widths set their own."""
    monkeypatch.delenv("COLUMNS", raising=False)
