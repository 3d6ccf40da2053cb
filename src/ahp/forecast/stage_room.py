"""How many layers stages have room for, in memory and in a given time, from the columns of cells.

A stage of n layers on a cell of group g keeps k micro-batches at once and recomputes as much as its device's memory requires. In X
seconds per micro-batch it has at most

    n(X) = min( X / a,  (X + r b / k) / (a + r (e / k + h)),  max( b / (e + k h), (b - q) / (e + k (h - d)) ) )

layers. Each layer takes a seconds and h bytes per micro-batch, and e bytes of states; recompute saves d bytes of it at r seconds per byte;
b bytes are free for layers; a pass with recompute needs q bytes more at its peak. n is concave, and n(X) / X falls.

Dims: n = layouts, G = groups, K = positions of stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ahp.arrays import Floats, Ints, Mask
from ahp.forecast.cell_columns import BETWEEN, WHOLE, CellColumns
from ahp.forecast.memory import in_tensors

ANYWHERE = -1
"""The place of a stage whose place is not known."""

STEPS = 3
"""Steps of Newton's method, from below on a concave function: each step is a bound."""

ROUNDING = 1e-9
"""Share of a layer by which a whole number of layers can come out too low."""


class Positions(NamedTuple):
    """The stages of one replica, in K groups of equal stages, [K] each."""

    held: Ints
    """The fewest micro-batches that each stage keeps at once; or [n, 1, K] for each layout."""
    place: Ints
    """The stage's place, or ``ANYWHERE``."""
    number: Ints
    """How many stages there are at each position."""
    beside: Ints | int = 0
    """The fewest further micro-batches of which each stage keeps one of its layers."""
    outside: Ints | int = 0
    """The fewest further micro-batches of which each stage keeps what lies besides the layers of a stage."""
    received: Floats | float = 1.0
    """What each stage receives at least, as a multiple of what one stage between others does."""
    head: Mask | bool = False
    """Whether the head is known to lie there."""


@dataclass(frozen=True)
class StageRoom:
    """The room for layers: each field is [n, G, K], or broadcasts to it."""

    layer_s: Floats
    again_s: Floats
    """Seconds of recompute per byte that it saves."""
    free: Floats
    """Bytes for layers and what they keep."""
    held: Ints
    states: Floats
    """Bytes of each layer, besides the activations it keeps."""
    kept: Floats
    """Bytes kept of each layer and micro-batch, with as little recompute as the layout allows."""
    most: Floats
    """The most layers that memory allows, however many are recomputed."""
    remade: Floats
    """Bytes at the peak of a pass that recomputes, beyond one that does not."""

    @classmethod
    def of(cls, columns: CellColumns, rows: Ints, at: Positions, micro_batches: int | Ints) -> StageRoom:
        """The room of some layouts, [n], in replicas with ``micro_batches`` or more, which never leave more room: one number, or [n]
        numbers above 1."""
        held, k, m = columns.held, at.held, np.reshape(micro_batches, (-1, 1, 1))

        anywhere = at.place[0] == ANYWHERE

        def of_place(field: Floats) -> Floats:
            """[..., K] from [..., P]."""
            return field[..., [BETWEEN]] if anywhere else field[..., at.place]

        def least(field: Floats) -> Floats:
            return field[rows, ..., :WHOLE].min(axis=-1)[..., None] if anywhere else of_place(field[rows])

        def most(field: Floats) -> Floats:
            return field[rows, ..., :WHOLE].max(axis=-1)[..., None] if anywhere else of_place(field[rows])

        states = columns.one if m.min() == 1 else columns.several
        layer, beside, room = least(states.layer)[:, None], least(states.beside)[:, None], least(columns.room)
        at_head = np.maximum(least(held.at_head) + least(states.at_head)[:, None], 0.0)
        plain, remade = (
            np.maximum(least(of) + least(states.in_layers)[:, None], at_head) for of in (held.in_layers, held.in_again)
        )
        plain = np.minimum(plain, remade)
        room = room - plain - m * at.received * of_place(held.received[rows]) - least(held.once)
        holds, counts = (room - beside) / layer, 1.0
        if m.min() == 1:
            # Gradients grow as activations go: the larger of both is in tensors, and the allocator keeps the smaller for other streams.
            grown = least(states.grown)[:, None]
            layer = layer - most(states.layer_gradients)[:, None] + grown
            beside = beside - most(states.gradients_beside)[:, None] + least(states.grown_beside)[:, None]
            counts = np.where(grown > 0.0, in_tensors(1.0), 1.0)
        kept, dropped = (counts * of[rows][..., None] for of in (held.kept, held.dropped))
        free = room - beside - counts * (k + at.outside) * least(held.outside)
        free = free - at.beside * columns.share[rows].min(axis=1)[:, None, None] * (kept - dropped)
        some = np.maximum(free / (layer + k * kept), (free + plain - remade) / (layer + k * (kept - dropped)))
        holds = np.minimum(holds, some)
        if columns.alike:
            holds = np.where(holds < 1.0 - ROUNDING, 0.0, holds)
        work, copied_s = columns.work, columns.copied_of(m.min())[rows]
        return cls(
            work.layer_s[rows][..., None] + of_place(copied_s),
            work.again_s_per_byte[rows][..., None], free, k, layer, kept, np.maximum(holds, 0.0), remade - plain,
        )  # fmt: skip

    def mapped(self, each: Callable[[Floats], Floats]) -> StageRoom:
        """The room with ``each`` applied to every figure, broadcast to [n, G, K]."""
        layer_s, again_s, free, held, *others = map(each, np.broadcast_arrays(*vars(self).values()))
        return StageRoom(layer_s, again_s, free, held.astype(np.int64), *others)

    @property
    def _slow_s(self) -> Floats:
        """Seconds of one more layer where recompute must save all the bytes that it adds."""
        return self.layer_s + self.again_s * (self.states / self.held + self.kept)

    def layers(self, seconds: Floats) -> Floats:
        """[n, G, K] The most layers in ``seconds`` per micro-batch, which is [n] or broadcasts to the result."""
        x = seconds[:, None, None] if seconds.ndim == 1 else seconds
        lighter = (x + self.again_s * self.free / self.held) / self._slow_s
        return np.maximum(np.minimum(np.minimum(x / self.layer_s, lighter), self.most), 0.0)

    def saved_bytes(self, layers: Floats) -> Floats:
        """[n, G, K] Bytes of each micro-batch in flight that stages with ``layers`` must save by recompute."""
        without = layers * (self.states / self.held + self.kept) - self.free / self.held
        return np.where(without > 0.0, np.maximum(without + self.remade / self.held, 0.0), 0.0)

    def hold(self, layers: Floats) -> NDArray[np.bool_]:
        """[n, G, K] Whether memory holds ``layers``, however many are recomputed."""
        return layers <= self.most + ROUNDING

    def seconds(self, layers: Floats) -> Floats:
        """[n, G, K] Least seconds per micro-batch of stages with ``layers``; infinite where memory does not hold them."""
        seconds = layers * self.layer_s + self.again_s * self.saved_bytes(layers)
        return np.where(self.hold(layers), seconds, np.inf)

    def best(self) -> StageRoom:
        """[n, 1, K] At least as much room as any group has."""

        least, most = (partial(of, axis=1, keepdims=True) for of in (np.min, np.max))
        return StageRoom(
            least(self.layer_s), least(self.again_s), most(self.free), self.held, least(self.states), least(self.kept),
            most(self.most), least(self.remade),
        )  # fmt: skip

    def least_s(self, num_layers: int, count: Ints) -> Floats:
        """[n] Least seconds of the longest stage of a replica that has all layers; ``count``: [K] stages of each position."""
        best = self.best()
        seconds = num_layers / (count / best.layer_s + 0 * best.most).sum(axis=(1, 2))
        for _ in range(STEPS):
            lacks = num_layers - (count * best.layers(seconds)).sum(axis=(1, 2))
            slope = (count * best._slope(seconds)).sum(axis=(1, 2))
            more = np.divide(lacks, slope, out=np.full(len(lacks), np.inf), where=slope > 0)
            seconds = np.where(lacks > ROUNDING, np.minimum(seconds + more, 1e300), seconds)
        return np.where(seconds < 1e299, seconds, np.inf)

    def _slope(self, seconds: Floats) -> Floats:
        """[n, 1, K] Layers gained per further second."""
        x = seconds[:, None, None]
        plain, lighter = x / self.layer_s, (x + self.again_s * self.free / self.held) / self._slow_s
        rising = np.where(plain < lighter, 1.0 / self.layer_s, 1.0 / self._slow_s)
        return np.where(np.minimum(plain, lighter) < self.most, rising, 0.0)
