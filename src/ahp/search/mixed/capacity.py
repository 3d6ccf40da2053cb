"""What the replicas of a shape have in common: whether memory holds its layers, and how far each replica is ahead.

A replica whose longest stage takes X for a micro-batch does in T seconds no more micro-batches than

    m <= (T - W) / X + c

where W is the way of a micro-batch through all stages, besides the (m - c) X, and forward passes are at most c - 1 ahead
(``mixed.balance``). With a split backward pass (ZB-H1), stage s (of p, from 0) does min(p - s, m) forward passes and no weight gradient
before its first gradient comes, after all forward passes and the gradients of all stages from s on. It does at most s + 1 weight gradients
after its last gradient, which then goes back through the stages before it. The rest of its work lies between, so with F, I and G the seconds
of forward passes, input gradients and weight gradients, and t = F + I + G,

    T >= sum over all stages of (F + I) + m t_s - I_s - min(p - s, m) F_s - min(s + 1, m) G_s

where p - s and s + 1 add up to p + 1: the formula above, with only F + I in the way and c = 1 + (p - 1) max(F, G) / t. At most m are
done before or after, so c <= 1 + (m - 1) (F + G) / t too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, get_args

import numpy as np

from ahp.arrays import Floats, Ints, Mask
from ahp.forecast.cell_columns import BETWEEN, FIRST, LAST, CellColumns
from ahp.forecast.stage_room import ANYWHERE, ROUNDING, Positions, StageRoom
from ahp.schedule.bounds import in_flight
from ahp.search.mixed.replicas import FINE, FIRST_LOOK, Crewed, Crews, Late, Times, longest_s
from ahp.search.mixed.shapes import Shapes
from ahp.search.mixed.space import SEVERAL, all_forwards_first, splits_backward

FEWER = np.unique(np.round(1.2 ** np.arange(60)).astype(np.int64))
"""The numbers of micro-batches kept by a stage that floors distinguish; numbers between them are rounded down."""

Kind = Literal["V", "loops", "split"]
"""How ranks with several stages go through them: down and up again, in loops, or in loops with a split backward pass."""


@dataclass(frozen=True)
class Depth:
    """Pipelines with ``p`` stages (or ranks, under ``SEVERAL``) under one schedule; the shapes [n] that its methods take are such."""

    columns: CellColumns
    cells: Ints
    """[N, G] Cells of each group."""
    total: Ints
    """[N] Micro-batches of all replicas."""
    schedule: str
    p: int
    kind: Kind | None = None
    """The only kind of schedules with several stages on a rank that is meant; None = any."""

    def hold(self, of: Shapes) -> Mask:
        """[n] Whether memory holds all layers in every replica."""
        found = np.zeros(len(of.rows), dtype=bool)
        for heavy, some in _each(self._counted(of)):
            found[some] = self._hold(of.where(some), heavy)
        return found

    def _hold(self, of: Shapes, heavy: int) -> Mask:
        """The same for shapes whose replicas have ``heavy`` micro-batches or more on average."""
        rows, which = np.unique(of.rows, return_inverse=True)
        stages = positions(self.schedule, self.p, heavy)
        holds = StageRoom.of(self.columns, rows, stages, heavy).most
        if heavy > 1 and bool(of.replicas.max() > 1):  # each stage has a cell of the replica with the most
            one = StageRoom.of(self.columns, rows, light_of(stages), 1)
            holds = np.minimum(one.most, holds.max(axis=1, keepdims=True))
        return _find_room(
            holds, stages.number, which, self.cells[of.rows], of.replicas, self.p, self.columns.num_layers
        )

    def _counted(self, of: Shapes) -> Ints:
        """[n] Mean micro-batches of a replica, rounded down to the numbers for which room is computed."""
        micro_batches = self.total[of.rows] // of.replicas
        few = 1 << np.log2(np.maximum(micro_batches, 1)).astype(np.int64)
        return few if all_forwards_first(self.schedule) else np.where(micro_batches >= self.p, self.p, few)

    def crewed(self, of: Shapes, mix: Ints, times: Times) -> Crewed:
        """The replicas of shapes whose floors are to get closer; for a first look, whatever their micro-batches."""
        if times is FIRST_LOOK:
            return self._crewed(of, (1,), mix, times)
        each = list(_each(self._counted(of)))
        found = [self._crewed(of.where(some), (1, heavy), mix, times) for heavy, some in each]
        return Crewed.all(found).where(np.argsort(np.concatenate([some for _, some in each])))

    def of_each_kind(self) -> list[Depth]:
        """The same pipelines under each kind of schedules."""
        return [replace(self, kind=kind) for kind in (get_args(Kind) if self.schedule == SEVERAL else (None,))]

    def crewed_closely(self, of: Shapes, mix: Ints, times: Times, largest: Ints | None) -> Crewed:
        """The same, closer and slower: with replicas by their micro-batches up to the number from which on they keep no more. ``largest``: [n]
        the layers of the stage with the most."""
        return self._crewed(of, tuple(1 << at for at in range((2 * self.p).bit_length())), mix, times, largest)

    def largest(self, of: Shapes, mix: Ints, limit_s: Floats) -> tuple[Ints, Ints | None]:
        """Shapes, each as often as there are numbers of layers that its largest stage may have within ``limit_s`` [n]: their indices, and these
        numbers; None where layers differ."""
        columns, every = self.columns, np.arange(len(of.rows))
        if not columns.alike:
            return every, None
        layer_s = columns.work.layer_s[of.rows].min(axis=1)
        most = np.minimum(limit_s * of.replicas / (self.total[of.rows] * layer_s), columns.num_layers).astype(np.int64)
        least = -(-columns.num_layers // self.p)
        number = np.maximum(most - least + 1, 0)
        at, first = np.repeat(every, number), np.repeat(np.cumsum(number) - number, number)
        largest = least + np.arange(len(at)) - first
        if not len(at):
            return at, largest
        left = ~self._crewed(of.where(at), (1,), mix, FIRST_LOOK, largest).lack(limit_s[at])
        return at[left], largest[left]

    def _crewed(
        self, of: Shapes, numbers: Sequence[int], mix: Ints, times: Times, largest: Ints | None = None
    ) -> Crewed:
        """The same, with replicas by these ``numbers`` of micro-batches; the shapes' replicas have at least the largest on average if there are two."""
        keys = np.stack([of.rows, 0 * of.rows if largest is None else largest])
        (rows, some), which = np.unique(keys, axis=1, return_inverse=True)
        alone = len(numbers) == 2 and int(of.replicas.max()) == 1  # the one replica has all micro-batches
        most = None if largest is None else some
        crews = tuple(
            self._crews(rows, number, mix, times, most, there=number == numbers[-1] or not alone) for number in numbers
        )
        return Crewed(mix, crews, which.ravel(), self.cells[of.rows], of.replicas, self.total[of.rows])

    def _crews(self, rows: Ints, fewest: int, mix: Ints, times: Times, largest: Ints | None, *, there: bool) -> Crews:
        """Replicas of some rows with ``fewest`` micro-batches or more; ``there``: whether there are any."""
        columns = self.columns
        stages = positions(self.schedule, self.p, fewest, self.kind, exact=times is FINE)
        room = StageRoom.of(columns, rows, stages, fewest)
        longest = np.full((len(rows), len(mix)), np.inf)
        if there:
            layers = (2 if self.schedule == SEVERAL else 1) * columns.alike  # one in each stage of a rank
            head_s = columns.work.head_s[rows][..., None] * stages.head
            longest = longest_s(
                room, stages, mix, columns.num_layers, layers, head_s, times, largest, alike=columns.alike
            )
        layer_s = room.layer_s.min(axis=2)
        late = Late(layer_s, np.full(len(rows), np.inf), np.ones(len(rows)))
        if self.schedule != SEVERAL:
            late = late_of(columns, rows, self.schedule, columns.copied_most_of(fewest)[rows])
        return Crews.of(longest, fewest, late, layer_s, self.p, mix, columns.num_layers)


def _each(numbers: Ints) -> Iterator[tuple[int, Ints]]:
    """Each number once, with the indices where it occurs."""
    for number in np.unique(numbers).tolist():
        yield number, np.flatnonzero(numbers == number)


def late_of(columns: CellColumns, rows: Ints, schedule: str, copied_s: Floats) -> Late:
    """The late work of some layouts [n]; ``copied_s``: [n, G] seconds in which a layer's gradients are copied, which can be part of its weight
    gradient."""
    work = columns.work
    if not splits_backward(schedule) and schedule != SEVERAL:
        share = work.forward_share[rows].max(axis=1) * (not all_forwards_first(schedule))
        return Late(np.zeros(copied_s.shape), share, 1.0 - share)
    layer_s, forward, weights = (of[rows] for of in (work.layer_s, work.forward_share, work.weight_share))
    shares = np.stack([np.maximum(forward, weights), np.minimum(forward + weights, 1.0)])
    share, both = ((shares * layer_s + copied_s) / np.maximum(layer_s + copied_s, 1e-300)).max(axis=2)
    return Late(weights * layer_s + copied_s, share, 1.0 - both)


@lru_cache(maxsize=4096)
def positions(schedule: str, p: int, m: int, kind: Kind | None = None, *, exact: bool = False) -> Positions:
    """The stages of a replica with m micro-batches or more, those with the most room first. Unless ``exact``, stages that keep about as many
    micro-batches all count as the stage that keeps the fewest. With ``SEVERAL``, it is not known which ranks have the first and the last
    stage; with one ``kind`` of schedules, the head lies on the rank that keeps the fewest."""
    place, last = np.full(p, BETWEEN), np.arange(p) == p - 1
    if schedule == SEVERAL:
        return _alike(np.full(p, ANYWHERE), last[::-1] & (kind is not None), *of_several(p, m, kind), exact=exact)
    place[0], place[-1] = FIRST, LAST
    return _alike(place, last, in_flight(schedule, p, 1, m)[:, 0], exact=exact)


def _alike(place: Ints, head: Mask, held: Ints, *others: Ints | Floats, exact: bool) -> Positions:
    """Stages in the same place that keep (about) as many micro-batches, with the least ``others`` of these stages."""
    held = held if exact else FEWER[np.searchsorted(FEWER, held, side="right") - 1]
    found, which, count = np.unique(np.stack([held, place, head]), axis=1, return_inverse=True, return_counts=True)
    order, first = np.argsort(which.ravel(), kind="stable"), np.cumsum(count) - count
    least = (np.minimum.reduceat(of[order], first) for of in others)
    return Positions(found[0], found[1], count, *least, head=found[2] > 0)


def light_of(stages: Positions) -> Positions:
    """The same stages with one micro-batch."""
    none, outside = np.zeros_like(stages.held), np.minimum(stages.outside, 1)
    return stages._replace(held=np.ones_like(stages.held), beside=none, outside=outside)


def of_several(p: int, m: int, kind: Kind | None = None) -> tuple[Ints, Ints, Ints, Floats]:
    """What each of p ranks with several stages keeps and receives at least, the rank with the fewest micro-batches first, under any schedule
    or those of one ``kind``, with a layer or more per stage and m micro-batches or more: micro-batches of all its layers, further ones of one
    layer, further ones of what a stage keeps besides its layers, and how many times as much as one stage it receives.

    A rank keeps at least h_i micro-batches of one stage and e_i more of another, so with n layers it keeps n h_i + e_i, and
    2 h_i + e_i times what a stage keeps besides its layers:

        loops    h = min(m, p, 2 i - 1), e = min(m, p) - h      with a split backward h = min(m, p), e = 0
        a V      h = min(m, i), e = min(m, 2 p - i) - h

    so under any schedule the i-th rank in this order has the least h of these, and as e what the least with two layers has more. Each stage
    receives once from either side, except for the ends: in loops they are on the first and on the last of these ranks, in a V both on the
    first. The first rank has the last stage, with the head.
    """
    i = np.arange(1, p + 1)
    every = np.full(p, min(m, p))
    of_kinds: dict[Kind, tuple[Ints, Ints, Ints]] = {
        "loops": (np.minimum(every, 2 * i - 1), every, 4 - (i == 1) - (i == p)),
        "split": (every, every, 4 - (i == 1) - (i == p)),
        "V": (np.minimum(m, i), np.minimum(m, 2 * p - i), 4 - 2 * (i == 1)),
    }
    some = [of for name, of in of_kinds.items() if kind in (None, name)]
    held, received = (np.minimum.reduce([of[at] for of in some]) for at in (0, 2))
    with_two = np.minimum.reduce([least + most for least, most, _ in some])
    return held, with_two - 2 * held, with_two - held, received / 2


def _find_room(most: Floats, number: Ints, which: Ints, cells: Ints, replicas: Ints, p: int, num_layers: int) -> Mask:
    """[n] Whether all layers have room. Replicas have the same cut, so a stage has no more layers than the weakest of its cells holds.

    ``most``: [u, G, K] layers that a cell has room for at each position; ``number``: [K] stages at each position; ``which``: [n] indices in u.
    """
    falling = np.maximum.accumulate(most[..., ::-1], axis=-1)[..., ::-1]
    best = np.concatenate([np.zeros((*most.shape[:2], 1)), np.cumsum(np.repeat(falling, number, axis=-1), axis=-1)], -1)
    each, at = best[which][..., -1], np.arange(len(which))
    order = np.argsort(-np.where(cells > 0, each, -1.0), axis=1, kind="stable")
    there = np.cumsum(np.take_along_axis(cells, order, axis=1), axis=1)
    found, before, groups = np.zeros(len(which)), np.zeros(len(which), dtype=np.int64), cells.shape[1]
    for tier in range(groups):
        # Every stage that is not wholly on the stronger groups has a cell on one of these.
        now = np.where(there[:, tier] == there[:, -1], p, np.minimum(there[:, tier] // replicas, p))
        weak = [best[which, order[:, j], now - before] * (cells[at, order[:, j]] > 0) for j in range(tier, groups)]
        found, before = found + np.max(weak, axis=0), now
    return found >= num_layers * (1 - ROUNDING)
