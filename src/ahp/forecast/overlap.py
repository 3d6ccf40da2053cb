"""How much of a chain of collectives is exposed when each can hide behind the computation of its neighbor.

The cost of gathering ahead, its lower bound (for the search) and what it leaves of the network stand here together: another rule
changes this file alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ahp.arrays import Floats
from ahp.forecast.constants import constants

Figures = Floats | float

CONTENTION = constants.value("contention")
"""Computation slows down by this share while a collective overlaps with it."""


def hidden_s(collective_s: Any, beside_s: Any, overlap: Any) -> Any:
    """Seconds of collectives that overlap with ``beside_s`` seconds of computation, if the share ``overlap`` of the collectives can overlap.
    Numbers or columns."""
    return np.minimum(overlap * collective_s, beside_s)


def shown_s(collective_s: Any, beside_s: Any, overlap: Any) -> Any:
    """Seconds that collectives add to ``beside_s`` seconds of computation, if the share ``overlap`` of the collectives can overlap
    with it: the exposed collectives, and the slowdown by the hidden ones. Numbers or columns.

    A unit adds at least this to ``exposed_ahead_s``, wherever it comes, if no unit computes for longer than ``beside_s``.
    """
    hidden = hidden_s(collective_s, beside_s, overlap)
    return collective_s - hidden + CONTENTION * hidden


def shown_behind_s(total_s: Any, tail_s: Any, overlap: Any) -> Any:
    """Seconds that collectives of ``total_s`` add if the share ``overlap`` of the collectives can overlap with computation and ``tail_s``
    seconds come after it: the tail, and the slowdown by the others. Numbers or columns."""
    return overlap * (tail_s + CONTENTION * (total_s - tail_s)) + (1.0 - overlap) * total_s


def exposed_ahead_s(collectives: ArrayLike, work: ArrayLike, overlap: float) -> Floats:
    """Weights gathered one unit ahead: unit ``i + 1`` is on its way while unit ``i`` computes.

    ``collectives[..., i]`` must end before ``work[..., i]`` starts; the first has nothing to hide behind. ``overlap`` is
    the share that can hide at all. Returns the seconds added to the computation.
    """
    each, beside = np.asarray(collectives, dtype=float), np.asarray(work, dtype=float)
    if not each.shape[-1]:
        return np.zeros(np.broadcast_shapes(each.shape[:-1], beside.shape[:-1]))
    shown = shown_s(each[..., 1:], beside[..., : each.shape[-1] - 1], overlap)
    first = np.broadcast_to(each[..., :1], (*shown.shape[:-1], 1))
    return np.concatenate([first, shown], axis=-1).cumsum(axis=-1)[..., -1]


def left_beside_ahead_s(collectives: Floats, work: Floats, overlap: float) -> Floats:
    """Seconds of each unit's computation [..., i] that weights gathered ahead leave to other collectives on the same network cards.

    Both arguments are in the order of the pass.
    """
    following = np.concatenate([collectives[..., 1:], np.zeros_like(collectives[..., :1])], axis=-1)
    return work - hidden_s(following, work, overlap)


def exposed_behind_s(
    collectives: ArrayLike, work: ArrayLike, overlap: float, *, pieces: ArrayLike = 1, later_s: Figures = 0.0
) -> Floats:
    """Gradients reduced behind the backward pass: ``collectives[..., i]`` is sent once ``work[..., i]`` is done, one after another.

    ``pieces``: equal parts in which each is sent as its work goes on. ``later_s``: what the rank computes afterwards, which hides
    more. Returns the seconds from the end of the computation to the end of the last collective, plus the slowdown by hidden ones.
    """
    each, own, count = np.asarray(collectives, dtype=float), np.asarray(work, dtype=float), np.asarray(pieces)
    if not each.shape[-1]:
        return np.zeros(np.broadcast_shapes(each.shape[:-1], own.shape[:-1]))
    clock = own.cumsum(axis=-1)
    before = np.concatenate([np.zeros_like(clock[..., :1]), clock[..., :-1]], axis=-1)
    # The first piece waits for those before it or for its work, the last one for all of its work.
    earliest = np.maximum(before + own / count + each, clock + each / count)
    finish = np.zeros(earliest.shape[:-1])
    for one, least in zip(np.moveaxis(each, -1, 0), np.moveaxis(earliest, -1, 0), strict=True):
        finish = np.maximum(finish + one, least)
    tail = np.maximum(finish - clock[..., -1] - later_s, 0.0)
    return shown_behind_s(each.cumsum(axis=-1)[..., -1], tail, overlap)


def bucket_ends(elements: Sequence[int], bucket: int) -> list[bool]:
    """Whether a bucket is sent with each unit; ``elements``: of each unit.

    A unit waits for others until they have ``bucket`` elements together; one with as many is sent by itself. 0 = each by itself.
    """
    ends, held = [False] * len(elements), 0
    for at, count in enumerate(elements):
        held += count
        if held < bucket:
            continue
        ends[at], held = True, 0
        if count >= bucket and at:
            ends[at - 1] = True
    if ends:
        ends[-1] = True
    return ends


def in_buckets(units: Floats, ends: NDArray[np.bool_]) -> Floats:
    """Seconds of buckets, at the units [..., S, P] with which they end (``ends`` [S, P]); 0 at other units."""
    found, waiting = np.zeros(units.shape), np.zeros(units.shape[:-1])
    for at in range(units.shape[-1]):
        waiting = waiting + units[..., at]
        found[..., at] = np.where(ends[:, at], waiting, 0.0)
        waiting = np.where(ends[:, at], 0.0, waiting)
    return found
