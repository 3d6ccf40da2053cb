"""How much of a chain of collectives shows, when each may hide behind the computation of its neighbour."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ahp.forecast import constants

Floats = NDArray[np.float64]
Figures = Floats | float

CONTENTION = constants.value("contention")
"""Computation slows down by this share while a collective runs beside it."""


def hidden_s(collective_s: float, beside_s: float, overlap: float) -> float:
    """What of collectives runs beside ``beside_s`` seconds of computation, of which the share ``overlap`` may."""
    return min(overlap * collective_s, beside_s)


def shown_s(collective_s: float, beside_s: float, overlap: float) -> float:
    """What shows of collectives of which the share ``overlap`` may hide behind ``beside_s`` seconds of computation, with
    what they slow that down."""
    return _slowed_s(collective_s, hidden_s(collective_s, beside_s, overlap))


def hidden_columns_s(collective_s: Figures, beside_s: Figures, overlap: Figures) -> Floats:
    """``hidden_s`` of many at once."""
    return np.minimum(overlap * collective_s, beside_s)


def shown_columns_s(collective_s: Floats, beside_s: Figures, overlap: Figures) -> Floats:
    """``shown_s`` of many at once."""
    return _slowed_s(collective_s, hidden_columns_s(collective_s, beside_s, overlap))


def _slowed_s(collective_s: Any, hidden: Any) -> Any:
    return collective_s - hidden + CONTENTION * hidden


def shown_behind_s(total_s: Any, tail_s: Any, overlap: Any) -> Any:
    """What shows of collectives that take ``total_s``, of which the share ``overlap`` may run beside computation, where ``tail_s``
    of them comes after it: that, and what the others slow it down. One number or columns."""
    return overlap * (tail_s + CONTENTION * (total_s - tail_s)) + (1.0 - overlap) * total_s


def exposed_ahead_s(collectives: Sequence[float], work: Sequence[float], overlap: float) -> float:
    """Weights gathered one unit ahead: unit ``i + 1`` is on its way while unit ``i`` computes.

    ``collectives[i]`` must end before ``work[i]`` starts; the first has nothing to hide behind. ``overlap`` is
    the share that can hide at all. Seconds added to the computation.
    """
    exposed = collectives[0] if collectives else 0.0
    for collective, before in zip(collectives[1:], work, strict=False):
        exposed += shown_s(collective, before, overlap)
    return exposed


def exposed_behind_s(
    collectives: Sequence[float],
    work: Sequence[float],
    overlap: float,
    *,
    pieces: Sequence[int] | None = None,
    later_s: float = 0.0,
) -> float:
    """Gradients reduced behind the backward pass: ``collectives[i]`` is sent once ``work[i]`` is done, one after another.

    ``pieces``: equal parts in which each is sent as its work goes on; None = one. ``later_s``: what the rank computes
    afterwards, which hides more. Seconds from the end of the computation to the end of the last collective, and what the
    hidden ones slow down.
    """
    clock = finish = 0.0
    for collective, own, count in zip(collectives, work, pieces or [1] * len(work), strict=True):
        # The first piece waits for those before it or for its work, the last one for all of its work.
        finish = max(finish + collective, clock + own / count + collective, clock + own + collective / count)
        clock += own
    total = sum(collectives)
    tail = max(0.0, finish - clock - later_s)
    return shown_behind_s(total, tail, overlap)


class Sent(NamedTuple):
    """What is sent at once, or in equal pieces."""

    collective_s: float
    work_s: float
    """Of the units whose gradients it is."""
    pieces: int = 1


def in_buckets(units: Iterable[tuple[int, Sent]], bucket: int) -> list[Sent]:
    """Units, with their elements, as they are sent: one waits for others until they are as many elements as ``bucket``, one that
    has as many is sent by itself. 0 = each by itself."""
    sent: list[Sent] = []
    waiting: list[Sent] = []
    held = 0
    for count, unit in units:
        if count < bucket:
            waiting.append(unit)
            held += count
            if held < bucket:
                continue
        sent += _together(waiting)
        if count >= bucket:
            sent.append(unit)
        waiting, held = [], 0
    return sent + _together(waiting)


def _together(waiting: list[Sent]) -> list[Sent]:
    """One of all of them, if there are any."""
    return [Sent(sum(unit.collective_s for unit in waiting), sum(unit.work_s for unit in waiting))] if waiting else []
