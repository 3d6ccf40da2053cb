"""How many layers stages can hold: of one layout, and of many numbers of stages and micro-batches at once."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ahp.search.mixed.space import SEVERAL, all_forwards_first

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FIRST, BETWEEN, LAST, WHOLE = range(4)
"""Places of a stage in its pipeline."""


class Activations(NamedTuple):
    """Bytes of activations that a device of a stage holds at least; each [..., 4], by place."""

    kept: Floats
    """Of each layer and micro-batch in flight."""
    outside: Floats
    """Of each micro-batch in flight, beside its layers."""
    received: Floats
    """Of each micro-batch, in flight or not."""
    once: Floats
    """Of a micro-batch, however many there are."""
    temporary: Floats
    """At the peak of one backward pass beyond what is kept."""


class States(NamedTuple):
    """Bytes of its states, and what it has; each [..., 4]."""

    room: Floats
    """In tensors, that the device has."""
    layer: Floats
    """Of each layer."""
    beside: Floats
    """Beside the layers."""


def most_layers(a: Activations, of: States, num_layers: int, held: Ints, micro_batches: Ints) -> Ints:
    """Layers that a stage can hold at most, of ``num_layers``; below 0 where not even none.

    ``held``: micro-batches that it keeps at once, of ``micro_batches``.
    """
    several = (
        micro_batches > 1
    )  # of one, gradients grow as activations go: it counts as if there were none of the states
    each = held * a.kept + np.where(several, of.layer, 0.0)
    beside = held * a.outside + micro_batches * a.received + a.once + np.where(several, of.beside + a.temporary, 0.0)
    left = of.room - beside
    return np.where(left < 0, -1, np.minimum(np.floor(left / np.maximum(each, 1.0)), num_layers)).astype(np.int64)


def most_micro_batches(a: Activations, of: States, num_layers: int, schedule: str, numbers: Ints, stages: int) -> Ints:
    """[S] Of ``numbers`` the most micro-batches of a replica with which 2, 3, ... stages can hold all layers; 0 where none.

    ``a``, ``of``: [G, 4]; each stage lies on the group that has the most room for it. ``numbers``: [M] rising. More micro-batches
    never leave more room: as many are in flight or more, and as many are received or more.
    """
    found = np.zeros(stages - 1, dtype=np.int64)
    if stages < 2 or not _holds(a, of, num_layers, schedule, numbers[:1], stages).any():
        return found
    holds = _holds(a, of, num_layers, schedule, numbers, stages)
    return np.where(holds, numbers[:, None], 0).max(axis=0)


Bytes = TypeVar("Bytes", Activations, States)


def _at(of: Bytes, place: int) -> Bytes:
    """Of stages in one place, with an axis for micro-batches and one for stages behind the others."""
    return type(of)(*(field[..., place, None, None] for field in of))


def _holds(a: Activations, of: States, num_layers: int, schedule: str, numbers: Ints, stages: int) -> NDArray[np.bool_]:
    """[M, S] Whether 2, 3, ... stages can. What a stage holds depends on its distance from the last one.

    Of ``SEVERAL`` on a rank the rank holds a micro-batch of each at least; which of them are the ends is not known.
    """
    m, depth = numbers[:, None], np.arange(1, stages + 1)[None, :]
    if schedule == SEVERAL:
        each = most_layers(_at(a, BETWEEN), _at(of, BETWEEN), num_layers, np.array(1), m).max(axis=0)
        return (each > 0) & (each * depth[:, 1:] >= num_layers)
    held = np.broadcast_to(m, (len(numbers), stages)) if all_forwards_first(schedule) else np.minimum(depth, m)

    def layers(place: int, held: Ints) -> Ints:
        return most_layers(_at(a, place), _at(of, place), num_layers, held, m).max(axis=0)

    last = layers(LAST, held[:, :1])
    if last.max() < 1:
        return np.zeros((len(numbers), stages - 1), dtype=bool)
    first, between = layers(FIRST, held[:, 1:]), layers(BETWEEN, held[:, 1:])
    before = np.zeros((len(numbers), stages - 1), dtype=np.int64)  # the stages between, up to a depth
    before[:, 1:] = np.cumsum(between, axis=1)[:, :-1]
    none = np.zeros(before.shape, dtype=bool)
    none[:, 1:] = between[:, :-1] < 1  # as more are in flight, rooms shrink with depth
    return (first + before + last >= num_layers) & (first >= 1) & (last >= 1) & ~none
