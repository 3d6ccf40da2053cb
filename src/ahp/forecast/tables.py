"""Look-ups in what probe measured: attention by its shape, element-wise operators by their size.

Each table is the one measured with the nearest number of workers computing at once; every look-up works in logarithms.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any, Literal

from ahp.cluster.model import Measurements

PRECISION_OF: dict[str, str] = {
    "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8",
    "float64": "fp32",
}  # fmt: skip
"""The name of a precision in a job, keyed by torch's name of the dtype."""

Points = list[tuple[float, float]]
"""(bytes or elements, seconds) in rising order."""


def nearest_workers(samples: Iterable[Any], workers: int) -> list[Any]:
    """The samples with the nearest number of workers, by ratio; the larger number where two are equally near."""
    found = list(samples)
    if not found:
        return []
    nearest = min((s.workers for s in found), key=lambda w: (abs(math.log(w / workers)), -w))
    return [s for s in found if s.workers == nearest]


def interpolate(table: Points, size: float) -> float:
    """Seconds at a size.

    Linear in log-log between two sizes, constant below the smallest (latency), proportional above the largest.
    """
    first, last = table[0], table[-1]
    if size <= first[0]:
        return first[1]
    if size >= last[0]:
        return last[1] * size / last[0]
    at = bisect_left(table, (size, 0.0))
    (x0, y0), (x1, y1) = table[at - 1], table[at]
    part = math.log(size / x0) / math.log(x1 / x0)
    return math.exp((1 - part) * math.log(y0) + part * math.log(y1))


class ElementWise:
    """Seconds of element-wise operators, without the least time that every operator takes."""

    def __init__(self, measured: Measurements | None, workers: int) -> None:
        self._tables: dict[tuple[str, str], Points] = {}
        samples = measured.element_wise if measured else ()
        for key in {(s.kind, PRECISION_OF.get(s.dtype, s.dtype)) for s in samples}:
            alike = [s for s in samples if (s.kind, PRECISION_OF.get(s.dtype, s.dtype)) == key]
            # ``add`` by bytes moved (two read, one written), so that it stands for operators of other arities.
            scale = 3 * (4 if key[1] == "fp32" else 2) if key[0] == "add" else 1
            self._tables[key] = sorted((scale * s.elements, s.seconds) for s in nearest_workers(alike, workers))

    def seconds(self, kind: Literal["add", "silu"], size: float, precision: str) -> float | None:
        """``add``: to move ``size`` bytes with next to no arithmetic. ``silu``: of an exponential and a division for each of ``size`` elements.
        None where nothing was measured."""
        table = self._tables.get((kind, precision))
        if table is None:
            return None
        # Proportional below the smallest size: the rest of its latency is counted elsewhere, as the launch.
        return table[0][1] * size / table[0][0] if size < table[0][0] else interpolate(table, size)


class Attention:
    """FLOP/s of causal fused attention, on the FLOPs it really does."""

    def __init__(self, measured: Measurements | None, workers: int) -> None:
        self._rates: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
        for s in nearest_workers(measured.attention if measured else (), workers):
            key: tuple[str, str] = s.phase, str(PRECISION_OF.get(s.dtype, s.dtype))
            # Two products forward and five backward; a causal mask leaves half of each.
            products = 2 if s.phase == "forward" else 5
            flops = products * 2.0 * s.heads * s.sequence**2 * s.head_dim / 2
            self._rates.setdefault(key, []).append((math.log(s.sequence), math.log(s.head_dim), flops / s.seconds))

    def rate(self, sequence: float, head_dim: float, precision: str, *, backward: bool) -> float | None:
        """FLOP/s averaged over measured shapes, weighted by inverse square distance in log space; None where nothing was measured."""
        rates = self._rates.get(("backward" if backward else "forward", precision))
        if not rates:
            return None
        x, y = math.log(max(sequence, 1.0)), math.log(max(head_dim, 1.0))
        weights = [1.0 / ((a - x) ** 2 + (b - y) ** 2 + 1e-9) for a, b, _ in rates]
        return math.exp(sum(w * math.log(r[2]) for w, r in zip(weights, rates, strict=True)) / sum(weights))
