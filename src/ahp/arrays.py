"""Names for arrays by what they hold (a docstring says their dims), and sums that equal theirs."""

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
    """Figures added up one after the other, as arrays of them are: to the same bit. From Python 3.12 on ``sum`` makes up for what it rounds off."""
    return reduce(add, figures, 0.0)
