"""Which of many like cases run when."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def cases(all_of_them: Iterable[Any], *, fast: Container[Any] = (), wide: Container[Any] = ()) -> list[Any]:
    """Parameters for ``pytest.mark.parametrize``: slow but for the fast ones; the wide ones only when asked for."""
    found = []
    for case in all_of_them:
        marks = pytest.mark.wide if case in wide else () if case in fast else pytest.mark.slow
        found.append(pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks))
    return found
