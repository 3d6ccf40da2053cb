"""Names for arrays by what they hold (docstrings give their dims), the distinct rows of a table, and sums of numbers that equal sums of arrays."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import add

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


def added(figures: Iterable[float]) -> float:
    """The sum of figures one after the other, as arrays are added: equal to the last bit. From Python 3.12 on ``sum`` compensates for rounding."""
    return reduce(add, figures, 0.0)


def unique_rows(*columns: Ints) -> tuple[Ints, Ints, Ints]:
    """The distinct rows of a table in the order of first appearance, for every row the index of its distinct row, and where each distinct row
    comes first.

    numpy's own ``unique`` over rows is many times slower.
    """
    number = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, at = np.unique(column, return_inverse=True)
        number = number * len(values) + at
    _, first, at = np.unique(number, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    return np.stack(columns, axis=1)[first[order]], place[at], first[order]
