"""Names for arrays by what they hold (docstrings give their dims), and sums of numbers that equal sums of arrays."""

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
