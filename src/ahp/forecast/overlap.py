"""How much of a chain of collectives shows, when each may hide behind the computation of its neighbour."""

from __future__ import annotations

from collections.abc import Sequence

CONTENTION = 0.189
"""Computation slows down by this share while a collective runs beside it: mean over A100, H100, MI2xx
(arXiv 2507.03114)."""


def hidden_s(collective_s: float, beside_s: float, overlap: float) -> float:
    """What of collectives runs beside ``beside_s`` seconds of computation, of which the share ``overlap`` may."""
    return min(overlap * collective_s, beside_s)


def shown_s(collective_s: float, beside_s: float, overlap: float) -> float:
    """What shows of collectives of which the share ``overlap`` may hide behind ``beside_s`` seconds of computation, with
    what they slow that down."""
    hidden = hidden_s(collective_s, beside_s, overlap)
    return collective_s - hidden + CONTENTION * hidden


def exposed_ahead_s(collectives: Sequence[float], work: Sequence[float], overlap: float) -> float:
    """Weights gathered one unit ahead: unit ``i + 1`` is on its way while unit ``i`` computes.

    ``collectives[i]`` must end before ``work[i]`` starts; the first has nothing to hide behind. ``overlap`` is
    the share that can hide at all. Seconds added to the computation.
    """
    exposed = collectives[0] if collectives else 0.0
    for collective, before in zip(collectives[1:], work, strict=False):
        exposed += shown_s(collective, before, overlap)
    return exposed


def exposed_behind_s(collectives: Sequence[float], work: Sequence[float], overlap: float) -> float:
    """Gradients reduced behind the backward pass: unit ``i`` is sent once ``work[i]`` is done, one after another.

    Seconds from the end of the computation to the end of the last collective, and what the hidden ones slow down.
    """
    clock = finish = 0.0
    for collective, own in zip(collectives, work, strict=True):
        clock += own
        finish = max(finish, clock) + collective
    total = sum(collectives)
    tail = finish - clock
    return overlap * (tail + CONTENTION * (total - tail)) + (1.0 - overlap) * total
