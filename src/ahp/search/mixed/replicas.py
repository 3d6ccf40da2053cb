"""What all replicas of a pipeline do in a time, by how many cells of each group each of them has: a linear program.

A replica with k_g cells of group g has all layers, in whole numbers, so that its longest stage takes at least the X in which these cells
have room for them (``forecast.stage_room``). In T seconds it does at most m(k, T) micro-batches, by the formulas of ``mixed.capacity``.
Of a shape, x_k replicas are of mix k:

    most = max sum of x_k m(k, T),   sum of x_k k_g <= cells of group g,   sum of x_k = replicas

Where that is less than there is to do the shape takes more than T. Replicas share one cut, which is left out. In the way W of the
first micro-batch stages of g have at most k_g X / a_g layers, at a_g seconds each and w_g of the way, and whatever is beyond takes w,
the most of its groups:

    W >= w L - sum over groups of (w - w_g) k_g X / a_g

which falls with X by at most S = the sum over X, so that m(k, T) is that at the least X, or S + c.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

from ahp.arrays import Floats, Ints, Mask
from ahp.forecast.stage_room import ROUNDING, Positions, StageRoom

MOST_MIXES = 4000
"""Past so many ways to mix the groups in one replica nothing is said."""

TIMES = 1.025 ** np.arange(40)
"""Times of the longest stage that are told apart, over the least that it may take: finest there, where the best replicas are. Beside those in
which a group has one layer more."""

WHOLE_LAYERS = 12
"""Of each group so many of these."""

PIVOTS = 40
"""Of the simplex method, at most; each gives a bound."""

CLOSE = 1.004
"""Times of shapes are looked for, first at the limit, then half way to it, until they are known but for this factor."""

SMALL = 1e-9
"""What is taken for nothing."""

FOREVER = 1e6
"""Seconds in which stages have whatever memory holds."""

NEVER = -1e7
"""What a replica is worth that cannot be."""

AT_ONCE = 3_000_000
"""Figures of a table that is made at once."""


@lru_cache(maxsize=256)
def mixes(p: int, most: tuple[int, ...]) -> Ints | None:
    """[K, G] Ways to take p cells, at most so many of each group; None where these are too many."""
    if math.prod(min(p, count) + 1 for count in most[1:]) > 100 * MOST_MIXES:
        return None
    found = [
        rest for rest in product(*(range(min(p, count) + 1) for count in most[1:])) if 0 <= p - sum(rest) <= most[0]
    ]
    return np.array([(p - sum(rest), *rest) for rest in found]) if 0 < len(found) <= MOST_MIXES else None


def longest_s(
    room: StageRoom, stages: Positions, mix: Ints, num_layers: int, fewest: int, head_s: Floats, *, alike: bool
) -> Floats:
    """[n, K] Seconds of the longest stage of replicas of some mixes, at least; infinite where they do not hold the layers.

    ``fewest``: layers of each stage, at least; ``head_s``: [n, G, P] seconds of a stage that are not its layers'.
    """
    least_s = room.least_s(num_layers, stages.number)
    found, there = np.full((len(least_s), len(mix)), np.inf), np.flatnonzero(np.isfinite(least_s))
    each, groups = room.mapped(lambda of: of), mix.shape[1]
    size = max(1, AT_ONCE // (groups * (len(TIMES) + WHOLE_LAYERS * groups) * (int(stages.number.sum()) + 1)))
    for first in range(0, len(there), size):
        some = there[first : first + size]
        own = _Stages(each.mapped(lambda of, some=some: of[some]), stages, fewest, head_s[some], alike)
        ever = own.layers(np.full((len(some), 1), FOREVER), mix, np.zeros((len(some), 1), dtype=np.int64))
        holds = ever >= num_layers * (1 - ROUNDING)
        rows, ways = np.flatnonzero(holds.any(axis=1)), np.flatnonzero(holds.any(axis=0))
        if len(rows):
            times = own.where(rows).longest_s(mix[ways], num_layers, least_s[some[rows]])
            found[np.ix_(some[rows], ways)] = np.where(holds[np.ix_(rows, ways)], times, np.inf)
    return found


@dataclass(frozen=True)
class _Stages:
    """What stages of a replica have room for."""

    room: StageRoom
    at: Positions
    fewest: int
    head_s: Floats
    alike: bool

    def where(self, some: Ints) -> _Stages:
        """Of some layouts."""
        return replace(self, room=self.room.mapped(lambda of: of[some]), head_s=self.head_s[some])

    def longest_s(self, mix: Ints, num_layers: int, least_s: Floats) -> Floats:
        """[n, K]"""
        layer_s, n = self.room.layer_s.min(axis=2), len(least_s)
        whole = np.ceil(least_s[:, None] / layer_s)[..., None] + np.arange(WHOLE_LAYERS)
        times = [least_s[:, None] * TIMES, (whole * layer_s[..., None]).reshape(n, -1)]
        grid = np.sort(np.concatenate(times, axis=1), axis=1)
        held, number = self._held(grid), np.arange(n)[:, None]
        low, high = (np.full((n, len(mix)), of) for of in (0, grid.shape[1]))
        for _ in range(int(grid.shape[1]).bit_length()):  # the first of the grid just before which all layers have room
            middle = (low + high) // 2
            layers = _of_mixes(held, mix, np.minimum(middle, grid.shape[1] - 1))
            enough = (layers >= num_layers * (1 - ROUNDING)) | (middle >= high)
            low, high = np.where(enough, low, middle + 1), np.where(enough, middle, high)
        return grid[number, np.maximum(low - 1, 0)]

    def layers(self, grid: Floats, mix: Ints, at: Ints) -> Floats:
        """[n, K] That replicas of some mixes have room for just before a time of the grid [n, Q], ``at`` [n, K or 1]."""
        return _of_mixes(self._held(grid), mix, at)

    def _held(self, grid: Floats) -> Floats:
        """[n, Q, G, p + 1] Layers of so many stages on cells of a group, of those with the most room, just before each time."""
        times = grid * (1 - ROUNDING)
        seconds = np.maximum(times[..., None, None] - self.head_s[:, None], 0.0)
        layers = StageRoom(*(of[:, None] for of in vars(self.room).values())).layers(seconds)
        if self.alike:
            layers = np.floor(layers + ROUNDING)
        falling = np.maximum.accumulate(layers[..., ::-1], axis=-1)[..., ::-1]
        each = np.where(falling < self.fewest, NEVER, falling)
        found = np.zeros((*each.shape[:-1], int(self.at.number.sum()) + 1))
        np.cumsum(np.repeat(each, self.at.number, axis=-1), axis=-1, out=found[..., 1:])
        return found


def _of_mixes(held: Floats, mix: Ints, at: Ints) -> Floats:
    """[n, K] Layers of the cells of each mix, at one of the times [n, K or 1]."""
    n, _, groups, most = held.shape
    flat = held.reshape(n, -1)
    first = at * (groups * most)
    each = [np.take_along_axis(flat, first + (group * most + mix[:, group]), axis=1) for group in range(groups)]
    return np.sum(each, axis=0)


def most(gain: Floats, mix: Ints, cells: Ints, replicas: Ints, enough: Floats) -> Floats:
    """[n] What the best replicas come to together, at most, or something below ``enough`` where that is known.

    The simplex method for all at once, [n]. Any prices of cells give a bound: what cells cost, and for each replica what it is worth beyond
    its own, at most.

    Args:
        gain: [n, K] what a replica of each mix is worth.
        mix: [K, G] cells of each group in it.
        cells: [n, G] that there are; replicas: [n] how many there are to be.
        enough: [n] below that a bound is close enough.
    """
    n, groups = cells.shape
    columns = np.concatenate([mix, np.ones((len(mix), 1), dtype=np.int64)], axis=1).astype(float)
    bound, left = np.full(n, np.inf), np.arange(n)
    bases = _Bases.without_any(cells, replicas)
    for _ in range(PIVOTS):
        prices, number = bases.prices, np.arange(len(left))
        paid = np.maximum(prices[:, :-1], 0.0)
        beyond = gain[left] - prices @ columns.T
        best = beyond.argmax(axis=1)
        more = beyond[number, best]
        each = (gain[left] - paid @ columns[:, :-1].T).max(axis=1) if (prices < 0).any() else more + prices[:, -1]
        bound[left] = np.minimum(bound[left], (paid * cells[left]).sum(axis=1) + replicas[left] * each)
        cheap = prices[:, :-1].argmin(axis=1)
        frees = prices[number, cheap] < -SMALL  # a cell of that group stays free
        going = np.flatnonzero((frees | (more > SMALL)) & (bound[left] >= enough[left]))
        if not len(going):
            break
        entering = np.where(frees[:, None], np.eye(groups + 1)[cheap], columns[best])
        worth = np.where(frees, 0.0, gain[left, best])
        left, bases = left[going], bases.where(going).after(entering[going], worth[going])
    return bound


class _Bases(NamedTuple):
    """What each of [n] programs takes: C = groups + 1 columns, of mixes, of cells that stay free, or of replicas that are left out."""

    inverse: Floats
    """[n, C, C]"""
    taken: Floats
    """[n, C] How many are taken of each."""
    worth: Floats
    """[n, C] Of one of each."""

    @classmethod
    def without_any(cls, cells: Ints, replicas: Ints) -> _Bases:
        """All cells free and all replicas left out."""
        count = np.concatenate([cells, replicas[:, None]], axis=1).astype(float)
        worth = np.zeros(count.shape)
        worth[:, -1] = NEVER
        return cls(np.tile(np.eye(count.shape[1]), (len(count), 1, 1)), count, worth)

    @property
    def prices(self) -> Floats:
        """[n, C] Of a cell of each group and of a replica."""
        return (self.worth[:, None] @ self.inverse)[:, 0]

    def where(self, some: Ints) -> _Bases:
        """Those."""
        return _Bases(self.inverse[some], self.taken[some], self.worth[some])

    def after(self, entering: Floats, worth: Floats) -> _Bases:
        """With as much as there can be of a column [n, C] that is worth so much, [n], in place of what it uses up."""
        along, number = (self.inverse @ entering[..., None])[..., 0], np.arange(len(worth))
        ratio = np.where(along > SMALL, self.taken / np.where(along > SMALL, along, 1.0), np.inf)
        out = ratio.argmin(axis=1)
        step = np.maximum(ratio[number, out], 0.0)
        row = self.inverse[number, out] / along[number, out][:, None]
        inverse, taken = self.inverse - along[..., None] * row[:, None], self.taken - step[:, None] * along
        inverse[number, out], taken[number, out] = row, step
        each = self.worth.copy()
        each[number, out] = worth
        return _Bases(inverse, np.maximum(taken, 0.0), each)


class Ahead(NamedTuple):
    """What [u] layouts do beside the longest stage of a replica."""

    way_s: Floats
    """[u, G] Seconds of a layer in the way of a micro-batch."""
    layer_s: Floats
    """[u, G] Of both passes of it, at least."""
    passes: Floats
    """[u] Micro-batches by which a replica is ahead, with the first one; infinite where no way is known."""
    inside: Floats
    """[u] Of a stage's time, what is done neither before its first gradient nor after its last one, at least."""


class Crews(NamedTuple):
    """Replicas of [u] layouts by their mix, [u, K] each or [u, 1]."""

    longest_s: Floats
    """Seconds of the longest stage."""
    light_s: Floats
    """The same of those with fewer micro-batches than ``heavy``; infinite where there are none."""
    heavy: Floats
    way_s: Floats
    """Seconds of the first micro-batch with that longest stage, at least; it falls by ``fall`` seconds with each second more of it."""
    fall: Floats
    least_way_s: Floats
    """Whatever the longest stage."""
    passes: Floats
    inside: Floats

    @classmethod
    def of(cls, longest_s: Floats, light_s: Floats, heavy: int, ahead: Ahead, mix: Ints, num_layers: int) -> Crews:
        """From what there is by mix and by layout."""
        there, way = mix > 0, ahead.way_s[:, None]
        most_way = np.where(there, way, 0.0).max(axis=2)
        fall = ((most_way[..., None] - way) * mix / ahead.layer_s[:, None]).sum(axis=2)
        least_way_s = np.where(there, way, np.inf).min(axis=2) * num_layers
        way_s = np.maximum(most_way * num_layers - fall * np.where(np.isfinite(longest_s), longest_s, 0.0), least_way_s)
        each = np.full((len(way_s), 1), float(heavy))
        return cls(longest_s, light_s, each, way_s, fall, least_way_s, ahead.passes[:, None], ahead.inside[:, None])

    def micro_batches(self, seconds: Floats) -> Floats:
        """[u, K] What a replica of each mix does in so many seconds, [u]."""
        found = self._whole(seconds[:, None], self.longest_s, self.way_s)
        if np.isfinite(self.light_s).any():
            # Their longest stage may be shorter, so that their way is longer: only the least way holds for both.
            light = self._whole(seconds[:, None], self.light_s, self.least_way_s)
            found = np.maximum(found, np.minimum(light, self.heavy - 1.0))
        return found

    def _whole(self, t: Floats, longest_s: Floats, way_s: Floats) -> Floats:
        found = t / longest_s
        if np.isfinite(self.passes).any():
            left = np.maximum(t - self.least_way_s, 0.0) / longest_s
            close = np.maximum((t - way_s) / longest_s, self.fall) + self.passes
            found = np.minimum.reduce([found, close, left + self.passes, 1.0 + left / self.inside])
            found = np.where(t < self.least_way_s, 0.0, found)
        found = np.floor(found + ROUNDING)
        return np.where(found >= 1, found, NEVER)


class Crewed(NamedTuple):
    """Shapes [n] with as many stages."""

    mix: Ints
    """[K, G]"""
    crews: Crews
    which: Ints
    """[n] Of these."""
    cells: Ints
    """[n, G]"""
    replicas: Ints
    total: Ints
    """Micro-batches of all of them."""

    def where(self, some: Ints) -> Crewed:
        """Those."""
        return self._replace(**{key: getattr(self, key)[some] for key in ("which", "cells", "replicas", "total")})

    @classmethod
    def all(cls, each: Sequence[Crewed]) -> Crewed:
        """Of several, one behind the other."""
        crews = Crews(*map(np.concatenate, zip(*(of.crews for of in each), strict=True)))
        firsts = np.cumsum([0, *(len(of.crews.heavy) for of in each)])
        which = np.concatenate([of.which + first for of, first in zip(each, firsts, strict=False)])
        return cls(each[0].mix, crews, which, *map(np.concatenate, zip(*(of[3:] for of in each), strict=True)))

    def hold(self) -> Mask:
        """[n] Whether so many replicas with all layers can be made of the cells, in whatever time."""
        there = np.isfinite(np.minimum(self.crews.longest_s, self.crews.light_s))[self.which]
        gain: Floats = np.where(there, 0.0, NEVER)
        none_left_out: Floats = np.full(len(self.which), -1.0)  # a part of a replica would be worth far less
        return most(gain, self.mix, self.cells, self.replicas, none_left_out) >= none_left_out

    def lack(self, seconds: Floats) -> Mask:
        """[n] Whether they do not do all micro-batches in so many seconds."""
        gain = Crews(*(of[self.which] for of in self.crews)).micro_batches(seconds)
        total = self.total.astype(np.float64)
        return most(gain, self.mix, self.cells, self.replicas, total) < total * (1 - ROUNDING)

    def floors_s(self, floor_s: Floats, limit_s: Floats) -> Floats:
        """[n] Seconds that they take at least, from what is known and as far as that may be below a limit."""
        low, high = np.where(self.hold(), floor_s, np.inf), limit_s.copy()
        left, seconds = np.flatnonzero(np.isfinite(low)), high
        while len(left):
            lack = self.where(left).lack(seconds[left])
            low[left[lack]] = seconds[left[lack]]
            high[left[~lack]] = seconds[left[~lack]]
            seconds = (low + high) / 2
            left = np.flatnonzero(low * CLOSE < high)
        return low
