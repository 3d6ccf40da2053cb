"""Which of many like cases run when."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

import pytest


def cases(all_of_them: Iterable[Any], *, fast: Container[Any] = (), wide: Container[Any] = ()) -> list[Any]:
    """Parameters for ``pytest.mark.parametrize``: slow but for the fast ones; the wide ones only when asked for."""
    found = []
    for case in all_of_them:
        marks = pytest.mark.wide if case in wide else () if case in fast else pytest.mark.slow
        found.append(pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks))
    return found


def skip_where_slices_do_not_compile(layout: Mapping[str, Any]) -> None:
    """Skips a test that compiles the blocks of a layout where the runtime refuses that on this torch."""
    from ahp.runtime.device_limits import compiles_sliced_blocks

    if layout.get("tensor_parallel_degree", 1) > 1 and not compiles_sliced_blocks():
        pytest.skip("engine.compile is refused with tensor parallelism on this torch")
