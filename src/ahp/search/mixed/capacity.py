"""How many micro-batches all replicas of a pipeline do in a time: floors under every placement of a shape.

A replica whose longest stage takes X has all L layers, so that X is no less than the X in which the best cells have room for them
(``forecast.stage_room``); and in T seconds it does m micro-batches, with a way W through all stages and at most c - 1 forward passes
ahead (``mixed.balance``):

    m <= T / X - W / X + c,    L / X <= sum over its cells of n(X) / X

Nothing of a cell is in W that is not in the sum, so that with rates q = n(X) / X at the least X all R replicas together do

    M <= sum over the best R p cells of q (T / L - a) + R c

The sum over cells is bounded with a price for each cell. The head is work of one stage: as many more layers as it computes in its time.
Where weight gradients are apart (ZB-H1) stage s, of p from 0, does min(p - s, m) forward passes and no weight gradient before its first
gradient comes, which has all forward passes behind it and the gradients of all stages from s on; and it does at most s + 1 weight
gradients after its last gradient, which then goes back through the stages before it. All else of its work lies between, so that with F,
I and G seconds of forward passes and of input and weight gradients, t = F + I + G,

    T >= sum over all stages of (F + I) + m t_s - I_s - min(p - s, m) F_s - min(s + 1, m) G_s

where p - s and s + 1 are p + 1 together: the formula above, with but F + I of the way and c = 1 + (p - 1) max(F, G) / t. No more than m are
done before or after either, so that c <= 1 + (m - 1) (F + G) / t too. In a replica of few micro-batches cells keep fewer of them than these
rates are for: each of its cells counts for as many as that are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from ahp.arrays import Floats, Ints, Mask
from ahp.forecast.cell_columns import BETWEEN, FIRST, LAST, CellColumns
from ahp.forecast.stage_room import ANYWHERE, ROUNDING, Positions, StageRoom
from ahp.schedule.bounds import in_flight
from ahp.search.mixed.replicas import Ahead, Crewed, Crews, longest_s
from ahp.search.mixed.space import SEVERAL, all_forwards_first, splits_backward

FEWER = np.unique(np.round(1.2 ** np.arange(60)).astype(np.int64))
"""Numbers of micro-batches that stages keep, as far as floors tell them apart."""

STEPS = 4
"""In which a time is looked for between two others: each is a bound."""


class Pipelines(NamedTuple):
    """Shapes [n] with p stages (or ranks, under ``SEVERAL``) each under one schedule."""

    rows: Ints
    """Of the columns."""
    replicas: Ints
    total: Ints
    """Micro-batches of all of them."""
    floor_s: Floats
    """What they take at least."""
    limit_s: Floats
    """Where they take more they are not looked at more closely."""

    def where(self, some: Ints) -> Pipelines:
        """Those."""
        return Pipelines(self.rows[some], self.replicas[some], self.total[some], self.floor_s[some], self.limit_s[some])


@dataclass(frozen=True)
class Depth:
    """A number of stages under a schedule."""

    columns: CellColumns
    cells: Ints
    """[N, G] Of each group."""
    schedule: str
    p: int
    least: int
    """Micro-batches that each replica must have."""

    def floors_s(self, of: Pipelines) -> Floats:
        """[n] Seconds that they take at least, without what is added for the slowest rank; as far as that may be below the limit."""
        found = of.floor_s.copy()
        mean = of.total // of.replicas
        heavy = self._counted(mean)
        for number in np.unique(heavy).tolist():
            some = np.flatnonzero(heavy == number)
            found[some] = self._of_all_s(of.where(some), number)
        near = np.flatnonzero(found < of.limit_s)
        if len(near):
            found[near] = self._of_one_s(of.where(near)._replace(floor_s=found[near]))
        return found

    def _of_all_s(self, of: Pipelines, heavy: int) -> Floats:
        """From what all replicas compute, each of which has ``heavy`` micro-batches, or fewer where the schedule allows that."""
        rows, which = np.unique(of.rows, return_inverse=True)
        stages = positions(self.schedule, self.p, heavy)
        room, light = (
            StageRoom.of(self.columns, rows, stages, heavy),
            self.least < heavy and bool(of.replicas.max() > 1),
        )
        holds = room.most
        if light:  # each stage has a cell of the replica with the most
            one = StageRoom.of(self.columns, rows, light_of(stages), 1)
            holds = np.minimum(one.most, holds.max(axis=1, keepdims=True))
        held = _Curves.of(holds, stages.number)
        there = np.flatnonzero(_hold(held, which, self.cells[of.rows], of.replicas, self.p, self.columns.num_layers))
        found = np.full(len(which), np.inf)
        if len(there):
            near = of.where(there)
            ways = self._ways(rows, room, stages, heavy, (near.floor_s.min(), near.limit_s.max()), light=light)
            found[there] = ways.least_s(near, which[there], self.cells[near.rows])
        return found

    def _ways(
        self, rows: Ints, room: StageRoom, stages: Positions, heavy: int, between_s: tuple[float, float], *, light: bool
    ) -> _Ways:
        columns, work = self.columns, self.columns.work
        least_s = room.least_s(columns.num_layers, stages.number)
        there = np.isfinite(least_s)  # a replica has as many micro-batches as the mean, or more
        least_s = np.where(there, least_s, 1.0)
        of_light = (heavy - 1) / self.p if light else 0.0
        of = partial(_Rates.of, room, stages, num_layers=columns.num_layers, head_s=work.head_s[rows], light=of_light)
        if self.schedule == SEVERAL:
            # Each rank waits for the forward passes of the first stages of those before it, of a layer each at least.
            each_s = work.least_forward_share[rows].min(axis=1) * work.layer_s[rows].min(axis=1)
            way_s = each_s[:, None] * (np.cumsum(stages.number) - stages.number)
            at_s = least_s * np.maximum(1.0 - (self.p - 1) * each_s / between_s[0], 1e-6)
            left = np.maximum(1.0 - way_s / between_s[1], 0.0)[:, None]
            return _Ways(there, (of(at_s, left=left, busy=1.0 - work.weight_share[rows].max(axis=1)),))
        late = Late.of(columns, rows, self.schedule, columns.copied_of(heavy)[rows].max(axis=2))
        way_s = np.maximum(room.layer_s[..., 0] - late.layer_s, 0.0)
        filled = of(least_s, layer_s=way_s, ahead=1.0 + (self.p - 1) * late.share)
        return _Ways(there, (filled, of(least_s)) if splits_backward(self.schedule) else (filled,))

    def _of_one_s(self, of: Pipelines) -> Floats:
        """[n] Of the replica with the most micro-batches, each of whose stages has a whole number of layers."""
        found, most = of.floor_s.copy(), -(-of.total // of.replicas)
        counted = self._counted(most)
        for number in np.unique(counted).tolist():
            some = np.flatnonzero(counted == number)
            one = _Replica.of(self, of.rows[some], positions(self.schedule, self.p, number), most[some])
            low, high = of.floor_s[some], of.limit_s[some]
            there = one.can(high)
            for _ in range(STEPS + 2):
                middle = (low + high) / 2
                can = one.can(middle)
                low, high = np.where(can, low, middle), np.where(can, middle, high)
            found[some] = np.where(there, low, of.limit_s[some])
        return found

    def _counted(self, micro_batches: Ints) -> Ints:
        """So many or fewer: of these numbers rooms are looked at."""
        few = 1 << np.log2(np.maximum(micro_batches, 1)).astype(np.int64)
        return few if all_forwards_first(self.schedule) else np.where(micro_batches >= self.p, self.p, few)

    def crewed(self, of: Pipelines, mix: Ints) -> Crewed:
        """The replicas of shapes that are to be looked at more closely."""
        each = list(_each(self._counted(of.total // of.replicas)))
        found = [self._crewed(of.where(some), number, mix) for number, some in each]
        return Crewed.all(found).where(np.argsort(np.concatenate([some for _, some in each])))

    def _crewed(self, of: Pipelines, heavy: int, mix: Ints) -> Crewed:
        """Of those whose replicas have so many micro-batches or more in the mean."""
        columns, work = self.columns, self.columns.work
        rows, which = np.unique(of.rows, return_inverse=True)
        stages = positions(self.schedule, self.p, heavy)
        room = StageRoom.of(columns, rows, stages, heavy)
        fewest = (2 if self.schedule == SEVERAL else 1) * columns.alike  # a layer in each of its stages
        head_s = work.head_s[rows][..., None] * (stages.place == LAST)
        longest = partial(
            longest_s, mix=mix, num_layers=columns.num_layers, fewest=fewest, head_s=head_s, alike=columns.alike
        )
        heavy_s, light_s = longest(room, stages), np.full((len(rows), len(mix)), np.inf)
        if self.least < heavy and bool(of.replicas.max() > 1):
            one = StageRoom.of(columns, rows, light_of(stages), 1)
            light_s = longest(one, stages)
        crews = Crews.of(heavy_s, light_s, heavy, self._ahead(rows, room, heavy), mix, columns.num_layers)
        return Crewed(mix, crews, which, self.cells[of.rows], of.replicas, of.total)

    def _ahead(self, rows: Ints, room: StageRoom, heavy: int) -> Ahead:
        layer_s = room.layer_s.min(axis=2)
        if self.schedule == SEVERAL:
            return Ahead(0 * layer_s, layer_s, np.full(len(rows), np.inf), np.ones(len(rows)))
        late = Late.of(self.columns, rows, self.schedule, self.columns.copied_of(heavy)[rows].max(axis=2))
        way_s = np.maximum(layer_s - late.layer_s, 0.0)
        return Ahead(way_s, layer_s, 1.0 + (self.p - 1) * late.share, np.maximum(late.inside, 1e-9))


def _each(numbers: Ints) -> Iterator[tuple[int, Ints]]:
    """Each number once, and where it is."""
    for number in np.unique(numbers).tolist():
        yield number, np.flatnonzero(numbers == number)


class Late(NamedTuple):
    """What of stages may be done beside the way of a micro-batch."""

    layer_s: Floats
    """[n, G] Seconds of a layer that are not in that way, at most: where weight gradients are apart, of these."""
    share: Floats
    """[n] Of a stage's time, the largest that forward passes before the first gradient have, or weight gradients after the last one."""
    inside: Floats
    """[n] Of a stage's time, what neither has, at least."""

    @classmethod
    def of(cls, columns: CellColumns, rows: Ints, schedule: str, copied_s: Floats) -> Late:
        """``copied_s``: [n, G] seconds in which a layer's gradients are copied, which may be part of its weight gradient."""
        work = columns.work
        if not splits_backward(schedule) and schedule != SEVERAL:
            share = work.forward_share[rows].max(axis=1) * (not all_forwards_first(schedule))
            return cls(np.zeros(copied_s.shape), share, 1.0 - share)
        layer_s, forward, weights = (of[rows] for of in (work.layer_s, work.forward_share, work.weight_share))
        shares = np.stack([np.maximum(forward, weights), np.minimum(forward + weights, 1.0)])
        share, both = ((shares * layer_s + copied_s) / np.maximum(layer_s + copied_s, 1e-300)).max(axis=2)
        return cls(weights * layer_s + copied_s, share, 1.0 - both)


@dataclass(frozen=True)
class _Replica:
    """One of each of [n] shapes."""

    room: StageRoom
    taken: Ints
    """[n, G, K] Stages of each position that cells of a group may have."""
    micro_batches: Ints
    p: int
    num_layers: int
    alike: bool
    way_s: Floats
    """[n] Of a micro-batch through all stages, where it comes before and after what the longest does."""
    passes: Floats
    """[n] What the longest stage does but for the first micro-batch, in passes there and back."""

    @classmethod
    def of(cls, depth: Depth, rows: Ints, stages: Positions, micro_batches: Ints) -> _Replica:
        """``rows``: of the columns."""
        columns = depth.columns
        room = StageRoom.of(columns, rows, stages, micro_batches)
        before = np.cumsum(stages.number) - stages.number
        taken = np.clip(depth.cells[rows][:, :, None] - before, 0, stages.number)
        way_s, passes = np.zeros(len(rows)), micro_batches.astype(float)
        if depth.schedule != SEVERAL:
            late = Late.of(columns, rows, depth.schedule, columns.copied_of(micro_batches.min())[rows].max(axis=2))
            way_s = columns.num_layers * np.maximum(room.layer_s[..., 0] - late.layer_s, 0.0).min(axis=1)
            passes = np.maximum(micro_batches - 1 - (depth.p - 1) * late.share, (micro_batches - 1) * late.inside)
            passes = np.maximum(passes, 1e-3)
        return cls(room, taken, micro_batches, depth.p, columns.num_layers, columns.alike, way_s, passes)

    def can(self, seconds: Floats) -> Mask:
        """[n] Whether its stages have room for all layers in so many seconds."""
        longest = np.maximum(seconds - self.way_s, 0.0) / self.passes
        layers = self.room.layers(np.minimum(seconds / self.micro_batches, longest))
        layers = _falling(np.floor(layers + ROUNDING) if self.alike else layers)
        enough = (self.taken * (layers > 0)).sum(axis=(1, 2)) >= self.p
        count = np.full(len(seconds), float(self.p))
        held = _priced((self.taken * layers).sum(axis=2), layers[..., 0], count, 0.0)
        return enough & (held >= self.num_layers * (1 - ROUNDING))


def positions(schedule: str, p: int, m: int) -> Positions:
    """Of a replica with m micro-batches or more, those with the most room first; of stages that keep about as many, all as if they kept
    as many as the one with the fewest. Of ``SEVERAL`` stages on a rank some are the ends, and which is not known."""
    beside = np.zeros(p, dtype=np.int64)
    if schedule == SEVERAL:
        (held, beside), place = of_several(p, m), np.full(p, ANYWHERE)
    else:
        held, place = in_flight(schedule, p, 1, m)[:, 0], np.full(p, BETWEEN)
        place[0], place[-1] = FIRST, LAST
    held = FEWER[np.searchsorted(FEWER, held, side="right") - 1]
    found, which, count = np.unique(np.stack([held, place]), axis=1, return_inverse=True, return_counts=True)
    least = np.full(len(count), np.iinfo(np.int64).max)
    np.minimum.at(least, which.ravel(), beside)
    return Positions(found[0], found[1], count, least)


def light_of(stages: Positions) -> Positions:
    """The same with one micro-batch."""
    return stages._replace(held=np.ones_like(stages.held), beside=np.zeros_like(stages.held))


def of_several(p: int, m: int) -> tuple[Ints, Ints]:
    """Micro-batches that each rank keeps of all its layers, the fewest first, and of one layer beside, at least; with several stages on
    each of p ranks, of a layer each at least, under any schedule, and m micro-batches or more.

    Ranks keep of one stage h_i at least and of another as many as that and e_i more, where a rank with n layers keeps n h_i + e_i:

        loops    h = min(m, p, 2 i - 1), e = min(m, p) - h      with a split backward h = min(m, p), e = 0
        a V      h = min(m, i), e = min(m, 2 p - i) - h

    so that of the i-th fullest h is the least of these, and e what the least has more with two layers.
    """
    i = np.arange(1, p + 1)
    loops, split, v = np.minimum(np.minimum(m, p), 2 * i - 1), np.full(p, min(m, p)), np.minimum(m, i)
    with_two = np.minimum.reduce([loops + min(m, p), 2 * split, v + np.minimum(m, 2 * p - i)])
    return v, with_two - 2 * v


def _falling(values: Floats) -> Floats:
    """[..., K] At least these, falling with the last dim."""
    return np.maximum.accumulate(values[..., ::-1], axis=-1)[..., ::-1]


def _priced(all_: Floats, best: Floats, count: Floats, light: float) -> Floats:
    """[n] The sum over ``count`` [n] of the cells, at most, from what all of each group come to and what its best cell does, [n, G]:
    cells are worth what they do beyond a price, and whoever is taken costs it. ``light``: what each does at least."""
    least = np.full(len(count), np.inf)
    for price in (np.zeros(len(count)), *best.T):
        price = np.maximum(price, light)[:, None]
        share = 1.0 - np.divide(price, best, out=np.ones(best.shape), where=best > price)
        least = np.minimum(least, (share * all_).sum(axis=1) + price[:, 0] * count)
    return least


class _Curves(NamedTuple):
    """Of figures of positions [n, G, K] the sum over the best x of them."""

    values: Floats
    """[n, G, K] Falling."""
    sums: Floats
    """[n, G, K + 1]"""
    ends: Ints
    """[K + 1]"""

    @classmethod
    def of(cls, values: Floats, count: Ints) -> _Curves:
        """From positions of which there are so many, [K]."""
        falling = _falling(values)
        sums = np.concatenate([np.zeros((*values.shape[:-1], 1)), np.cumsum(falling * count, axis=-1)], axis=-1)
        return cls(falling, sums, np.concatenate([[0], np.cumsum(count)]))

    def best(self, which: Ints, group: Ints | int, count: Ints | Floats) -> Floats:
        """[m] The sum over so many, at most all; of the rows ``which``."""
        x = np.minimum(count, self.ends[-1])
        at = np.minimum(np.searchsorted(self.ends, x, side="right") - 1, len(self.ends) - 2)
        return self.sums[which, group, at] + (x - self.ends[at]) * self.values[which, group, at]


def _hold(most: _Curves, which: Ints, cells: Ints, replicas: Ints, p: int, num_layers: int) -> Mask:
    """[n] Whether memory holds all layers: replicas have the same cut, so that a stage has no more than the weakest of its cells."""
    each, at = most.sums[which][..., -1], np.arange(len(which))
    order = np.argsort(-np.where(cells > 0, each, -1.0), axis=1, kind="stable")
    there = np.cumsum(np.take_along_axis(cells, order, axis=1), axis=1)
    found, before, groups = np.zeros(len(which)), np.zeros(len(which), dtype=np.int64), cells.shape[1]
    for tier in range(groups):
        # Of the stages that are not wholly on the stronger groups each has a cell on one of these.
        now = np.where(there[:, tier] == there[:, -1], p, np.minimum(there[:, tier] // replicas, p))
        weak = [most.best(which, order[:, j], now - before) * (cells[at, order[:, j]] > 0) for j in range(tier, groups)]
        found, before = found + np.max(weak, axis=0), now
    return found >= num_layers * (1 - ROUNDING)


@dataclass(frozen=True)
class _Rates:
    """What [u] replicas do in a time, one way to bound it."""

    curves: _Curves
    """Layers a second."""
    layer_s: Floats
    """[u, G] Of each layer, what a micro-batch is on its way; 0 where that is not counted."""
    layers: Floats
    """[u] Layers of a micro-batch, with the head."""
    more: Floats
    """[u] Layers a second that each replica does more than its cells: the head's stage."""
    light: float
    """Micro-batches of replicas with few, by stage."""
    ahead: Floats | None = None
    """[u] Micro-batches by which each replica is ahead."""
    busy: Floats | None = None
    """[u] Of the time of a micro-batch in a stage, the share in which it is nowhere else."""

    @classmethod
    def of(
        cls, room: StageRoom, stages: Positions, at_s: Floats,
        *, num_layers: int, head_s: Floats, light: float, layer_s: Floats | None = None, left: Floats | float = 1.0, **more: Floats,
    ) -> _Rates:  # fmt: skip
        """``at_s``: [u] what stages take, at least; ``left``: [u, 1, K] the share of the time that each position has, at most."""
        at, head = at_s[:, None, None], head_s[:, :, None]
        rates = room.layers(at_s) / at * left
        beside_s = np.maximum(at - head, at * 1e-6)
        with_head = room.layers(beside_s) / beside_s
        of_head = np.where(with_head > 0, head * with_head, np.inf).min(axis=(1, 2))
        layers = num_layers + np.where(np.isfinite(of_head), of_head, 0.0)
        none = np.zeros(rates.shape[:2])
        return cls(
            _Curves.of(rates, stages.number), none if layer_s is None else none + layer_s, layers,
            (with_head * left - rates).max(axis=(1, 2)), light, **more,
        )  # fmt: skip

    def doing(self, of: Pipelines, which: Ints, cells: Ints) -> _Doing:
        """Of shapes; ``which``: of which replicas."""
        groups = range(cells.shape[1])
        found = [of.replicas * self.curves.best(which, g, cells[:, g] / of.replicas) for g in groups]
        count: Floats = (of.replicas * self.curves.ends[-1]).astype(float)
        if self.busy is not None and not self.light:
            count = np.asarray(np.minimum(count, of.total / self.busy[which]))
        return _Doing(self, of, which, np.stack(found, axis=1), count)


@dataclass(frozen=True)
class _Doing:
    rates: _Rates
    of: Pipelines
    which: Ints
    found: Floats
    """[n, G] Layers a second of all cells of each group."""
    count: Floats
    """[n] Cells that are busy, at most."""

    def __call__(self, seconds: Floats) -> Floats:
        """[n] Micro-batches in so many seconds, at most."""
        rates, which = self.rates, self.which
        per_layer = seconds / rates.layers[which]
        times = np.maximum(per_layer[:, None] - rates.layer_s[which], 0.0)
        cells = _priced(times * self.found, times * rates.curves.values[which, :, 0], self.count, rates.light)
        ahead = 0.0 if rates.ahead is None else rates.ahead[which]
        return cells + self.of.replicas * (ahead + rates.more[which] * per_layer)


class _Ways(NamedTuple):
    """Of [u] layouts."""

    there: Mask
    """Whether any replica holds all layers."""
    rates: tuple[_Rates, ...]

    def least_s(self, of: Pipelines, which: Ints, cells: Ints) -> Floats:
        """[n] In which they do all micro-batches, at least."""
        doing = [rates.doing(of, which, cells) for rates in self.rates]
        low, high = of.floor_s, of.limit_s
        done = [np.minimum.reduce([each(seconds) for each in doing]) for seconds in (low, high)]
        for _ in range(STEPS):
            rising = np.maximum(done[1] - done[0], 1e-300)
            middle = low + (high - low) * np.clip((of.total - done[0]) / rising, 0.02, 1.0)
            now = np.minimum.reduce([each(middle) for each in doing])
            under = now < of.total
            low, high = np.where(under, middle, low), np.where(under, high, middle)
            done = [np.where(under, now, done[0]), np.where(under, done[1], now)]
        return np.where(self.there[which], low, np.inf)
