"""The generators of Python and NumPy, from which a forward may draw too. torch's own tools keep the state of torch's generators alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

State = tuple[Any, Any]


def state() -> State:
    """Of the generators behind ``random.random`` and ``numpy.random.random``."""
    return random.getstate(), np.random.get_state()


@contextmanager
def from_state(start: State) -> Iterator[None]:
    """Within, the generators go on from ``start``; afterwards from where they were."""
    before = state()
    _set(start)
    try:
        yield
    finally:
        _set(before)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within, the generators start from ``seed``; afterwards they go on from where they were."""
    before = state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        _set(before)


def drawn_since(before: State) -> str | None:
    """The module whose generator gave numbers since then, None = neither."""
    python, (_, numbers, *place) = before
    _, now, *place_now = np.random.get_state()
    if random.getstate() != python:
        return "random"
    return None if place_now == place and np.array_equal(now, numbers) else "numpy.random"


def _set(to: State) -> None:
    random.setstate(to[0])
    np.random.set_state(to[1])
