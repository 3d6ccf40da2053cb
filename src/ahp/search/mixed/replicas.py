"""What all replicas of a pipeline do in a given time, from the cells of each group that each replica has: a linear program.

A replica with k_g cells of group g holds all layers, in whole numbers, so its longest stage takes at least the time X in which these cells
have room for all layers (``forecast.stage_room``). In T seconds it does at most m(k, T) micro-batches, by the formulas of ``mixed.capacity``.
If x_k replicas of a shape have mix k, together they do at most

    most = max sum of x_k m(k, T),   sum of x_k k_g <= cells of group g,   sum of x_k = replicas

If the shape has more micro-batches than that, it takes more than T. Replicas share one cut. Closely, there is a floor for each number of layers
of its largest stage: no cell has more, and each replica has a cell with so many. The least of these floors holds for every cut. In the way W of
the first micro-batch, stages on g have at most k_g X / a_g layers, at a_g seconds each and w_g of the way. All other layers take w, the
most of any group in the replica:

    W >= w L - sum over groups of (w - w_g) k_g X / a_g

Each second of X lowers this by at most S, the sum divided by X, so m(k, T) is at most its value at the least X, or S + c.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from itertools import product
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ahp.arrays import Floats, Ints, Mask
from ahp.forecast.stage_room import ROUNDING, Positions, StageRoom

MOST_MIXES = 4000
"""With more ways than this to mix the groups in one replica, no bound is computed."""


class Times(NamedTuple):
    """Times that are tried for the longest stage."""

    over_least: Floats
    """As multiples of the least that it can take: finest there, where the best replicas are."""
    whole_layers: int
    """For each group, at how many times with room for one layer more."""

    close: float
    """The bisection for a shape's time starts at the limit and goes on until the time is known within this factor."""


FIRST_LOOK = Times(np.power(1.05, np.arange(14)), 4, np.inf)
ROUGH, FINE = Times(np.power(1.025, np.arange(40)), 12, 1.004), Times(np.power(1.01, np.arange(100)), 60, 1.001)

PIVOTS = 40
"""The most pivots of the simplex method; each gives a bound."""

SMALL = 1e-9
"""Values up to this count as zero."""

FOREVER = 1e6
"""Seconds in which stages have room for all that memory holds."""

NEVER = -1e7
"""What an impossible replica is worth."""

AT_ONCE = 3_000_000
"""The most numbers in a table that is computed at once."""


Columns = TypeVar("Columns", bound=tuple[Any, ...])


def selected(of: Columns, some: Ints | Mask | slice) -> Columns:
    """The selected rows of a named tuple of columns."""
    return type(of)(*(column[some] for column in of))


@lru_cache(maxsize=256)
def mixes(p: int, most: tuple[int, ...]) -> Ints | None:
    """[K, G] Ways to take p cells, at most ``most`` of each group; None where there are too many ways, or none."""
    if math.prod(min(p, count) + 1 for count in most[1:]) > 100 * MOST_MIXES:
        return None
    found = [
        rest for rest in product(*(range(min(p, count) + 1) for count in most[1:])) if 0 <= p - sum(rest) <= most[0]
    ]
    return np.array([(p - sum(rest), *rest) for rest in found]) if 0 < len(found) <= MOST_MIXES else None


def longest_s(
    room: StageRoom,
    stages: Positions,
    mix: Ints,
    num_layers: int,
    fewest: int,
    head_s: Floats,
    times: Times,
    largest: Ints | None = None,
    *,
    alike: bool,
) -> Floats:
    """[n, K] Seconds of the longest stage in replicas of each mix, at least; infinite where they do not hold the layers.

    ``fewest``: layers of each stage, at least; ``head_s``: [n, G, P] seconds of a stage besides its layers; ``largest``: [n] the layers of the
    stage with the most, where they are known.
    """
    least_s = room.least_s(num_layers, stages.number)
    found, there = np.full((len(least_s), len(mix)), np.inf), np.flatnonzero(np.isfinite(least_s))
    most = np.full(len(least_s), num_layers) if largest is None else largest
    every, groups = _Stages(room.mapped(lambda of: of), stages, fewest, head_s, most, alike), mix.shape[1]
    tried = len(times.over_least) + times.whole_layers * groups
    size = max(1, AT_ONCE // (groups * tried * (int(stages.number.sum()) + 1)))
    for first in range(0, len(there), size):
        some = there[first : first + size]
        own = every.where(some)
        ever = own.layers(np.full((len(some), 1), FOREVER), mix, np.zeros((len(some), 1), dtype=np.int64))
        holds = ever >= num_layers * (1 - ROUNDING)
        rows, ways = np.flatnonzero(holds.any(axis=1)), np.flatnonzero(holds.any(axis=0))
        if len(rows):
            longest = own.where(rows).longest_s(mix[ways], num_layers, least_s[some[rows]], times)
            found[np.ix_(some[rows], ways)] = np.where(holds[np.ix_(rows, ways)], longest, np.inf)
    if largest is not None:  # some cell has the stage with the most layers
        each_s = room.seconds(largest[:, None, None].astype(float)).min(axis=2)[:, None]
        found = np.maximum(found, np.where(mix > 0, each_s, np.inf).min(axis=2))
    return found


@dataclass(frozen=True)
class _Stages:
    """The room for layers in the stages of a replica."""

    room: StageRoom
    at: Positions
    fewest: int
    head_s: Floats
    largest: Ints
    alike: bool

    def where(self, some: Ints) -> _Stages:
        """The same for the selected layouts."""
        room = self.room.mapped(lambda of: of[some])
        return replace(self, room=room, head_s=self.head_s[some], largest=self.largest[some])

    def longest_s(self, mix: Ints, num_layers: int, least_s: Floats, times: Times) -> Floats:
        """[n, K] Seconds of the longest stage for each mix, at least."""
        layer_s, n = self.room.layer_s.min(axis=2), len(least_s)
        whole = np.ceil(least_s[:, None] / layer_s)[..., None] + np.arange(times.whole_layers)
        tried = [least_s[:, None] * times.over_least, (whole * layer_s[..., None]).reshape(n, -1)]
        grid = np.sort(np.concatenate(tried, axis=1), axis=1)
        held, number = self._held(grid), np.arange(n)[:, None]
        low, high = (np.full((n, len(mix)), of) for of in (0, grid.shape[1]))
        for _ in range(int(grid.shape[1]).bit_length()):  # the first grid time before which all layers have room
            middle = (low + high) // 2
            layers = _of_mixes(held, mix, np.minimum(middle, grid.shape[1] - 1))
            enough = (layers >= num_layers * (1 - ROUNDING)) | (middle >= high)
            low, high = np.where(enough, low, middle + 1), np.where(enough, middle, high)
        return grid[number, np.maximum(low - 1, 0)]

    def layers(self, grid: Floats, mix: Ints, at: Ints) -> Floats:
        """[n, K] Layers that replicas of each mix have room for just before the time with index ``at`` [n, K or 1] in the grid [n, Q]."""
        return _of_mixes(self._held(grid), mix, at)

    def _held(self, grid: Floats) -> list[Floats]:
        """[n, Q, G, p + 1] Layers that the 0 to p roomiest stages have room for on cells of a group, just before each time; where the stage of the
        head is known, the roomiest others, and then these and that stage together."""
        times = grid * (1 - ROUNDING)
        seconds = np.maximum(times[..., None, None] - self.head_s[:, None], 0.0)
        layers = StageRoom(*(of[:, None] for of in vars(self.room).values())).layers(seconds)
        layers = np.minimum(np.floor(layers + ROUNDING) if self.alike else layers, self.largest[:, None, None, None])
        each, head = np.where(layers < self.fewest, NEVER, layers), np.broadcast_to(self.at.head, layers.shape[-1:])
        falling = np.maximum.accumulate(each[..., ~head][..., ::-1], axis=-1)[..., ::-1]
        number = self.at.number[~head]
        number[-1] += head.any()  # one more than there is, which no replica with a head takes
        found = np.zeros((*layers.shape[:-1], int(number.sum()) + 1))
        np.cumsum(np.repeat(falling, number, axis=-1), axis=-1, out=found[..., 1:])
        if not head.any():
            return [found]
        none = np.full((*layers.shape[:-1], 1), NEVER)
        return [found, np.concatenate([none, found[..., :-1] + each[..., head]], axis=-1)]


def _of_mixes(held: list[Floats], mix: Ints, at: Ints) -> Floats:
    """[n, K] Layers that the cells of each mix have room for, at the time with index ``at`` [n, K or 1]."""
    n, times, groups, most = held[0].shape
    first = (np.arange(n)[:, None] * times + at) * (groups * most)
    each = [first + (group * most + mix[:, group]) for group in range(groups)]
    found, *with_head = ([of.ravel().take(one) for one in each] for of in held)
    total = reduce(np.add, found)
    for of in with_head:
        total += reduce(np.maximum, [one - other for one, other in zip(of, found, strict=True)])
    return total


def most(gain: Floats, mix: Ints, cells: Ints, replicas: Ints, enough: Floats) -> Floats:
    """[n] An upper bound on what all replicas can be worth together, made closer only until it is below ``enough``.

    Runs the simplex method on all [n] programs at once. Any prices of cells give a bound: the price of all cells, plus for each replica the
    most that any mix is worth beyond the price of its cells.

    Args:
        gain: [n, K] what a replica of each mix is worth.
        mix: [K, G] cells of each group in a mix.
        cells: [n, G] available cells; replicas: [n] how many replicas to make.
        enough: [n] a bound below this is close enough.
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
    """Bases of [n] programs: C = groups + 1 columns each, for mixes, for cells that stay free, or for replicas that are left out."""

    inverse: Floats
    """[n, C, C]"""
    taken: Floats
    """[n, C] How many of each column are taken."""
    worth: Floats
    """[n, C] What one of each column is worth."""

    @classmethod
    def without_any(cls, cells: Ints, replicas: Ints) -> _Bases:
        """All cells free and all replicas left out."""
        count = np.concatenate([cells, replicas[:, None]], axis=1).astype(float)
        worth = np.zeros(count.shape)
        worth[:, -1] = NEVER
        return cls(np.tile(np.eye(count.shape[1]), (len(count), 1, 1)), count, worth)

    @property
    def prices(self) -> Floats:
        """[n, C] Prices of a cell of each group, and of a replica."""
        return (self.worth[:, None] @ self.inverse)[:, 0]

    where = selected

    def after(self, entering: Floats, worth: Floats) -> _Bases:
        """The bases with as much as possible of an ``entering`` column [n, C] with this worth [n], in place of the column that it uses up."""
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


class Late(NamedTuple):
    """The work of a stage that can be done outside the way of a micro-batch."""

    layer_s: Floats
    """[n, G] Seconds of a layer that are not in that way, at most: those of weight gradients, with a split backward pass."""
    share: Floats
    """[n] The largest share of a stage's time in forward passes before the first gradient, or in weight gradients after the last one; infinite
    where no way is known."""
    inside: Floats
    """[n] The share of a stage's time in neither, at least."""


class Crews(NamedTuple):
    """Replicas of [u] layouts with ``fewest`` micro-batches or more by their mix, each [u, K] or [u, 1]."""

    longest_s: Floats
    """Seconds of the longest stage; infinite where there is no such replica."""
    fewest: Floats
    way_s: Floats
    """Seconds of the first micro-batch with that longest stage, at least; each second more of the stage lowers this by ``fall`` seconds."""
    fall: Floats
    least_way_s: Floats
    """The same for any longest stage."""
    passes: Floats
    """Micro-batches by which a replica is ahead, counting the first one."""
    inside: Floats

    @classmethod
    def of(
        cls, longest_s: Floats, fewest: int, late: Late, layer_s: Floats, p: int, mix: Ints, num_layers: int
    ) -> Crews:
        """Crews of ``p`` stages, from figures by mix and by layout; ``layer_s``: [u, G] seconds of both passes of a layer, at least."""
        each = np.full((len(longest_s), 1), float(fewest))
        one = (1.0 + (p - 1) * late.share[:, None], np.maximum(late.inside[:, None], 1e-9))
        there, way = mix > 0, np.maximum(layer_s - late.layer_s, 0.0)[:, None]
        if not way.any():
            none = np.zeros(each.shape)
            return cls(longest_s, each, none, none, none, *one)
        most_way = np.where(there, way, 0.0).max(axis=2)
        fall = ((most_way[..., None] - way) * mix / layer_s[:, None]).sum(axis=2)
        least_way_s = np.where(there, way, np.inf).min(axis=2) * num_layers
        way_s = np.maximum(most_way * num_layers - fall * np.where(np.isfinite(longest_s), longest_s, 0.0), least_way_s)
        return cls(longest_s, each, way_s, fall, least_way_s, *one)

    def micro_batches(self, seconds: Floats) -> Floats:
        """[u, K] The most micro-batches that a replica of each mix does in ``seconds`` [u]; ``NEVER`` where these are below ``fewest``."""
        t = seconds[:, None]
        found = t / self.longest_s
        if np.isfinite(self.passes).any():
            left = np.maximum(t - self.least_way_s, 0.0) / self.longest_s
            close = np.maximum((t - self.way_s) / self.longest_s, self.fall) + self.passes
            found = np.minimum.reduce([found, close, left + self.passes, 1.0 + left / self.inside])
            found = np.where(t < self.least_way_s, 0.0, found)
        found = np.floor(found + ROUNDING)
        return np.where(found >= self.fewest, found, NEVER)


class Crewed(NamedTuple):
    """Shapes [n] with the same number of stages."""

    mix: Ints
    """[K, G]"""
    crews: tuple[Crews, ...]
    """By the fewest micro-batches of a replica, which is 1 in the first: replicas with more than others keep more."""
    which: Ints
    """[n] Index of each shape's layout in each of ``crews``."""
    cells: Ints
    """[n, G]"""
    replicas: Ints
    total: Ints
    """Micro-batches of all replicas."""

    def where(self, some: Ints) -> Crewed:
        """The selected shapes."""
        return self._replace(**{key: getattr(self, key)[some] for key in ("which", "cells", "replicas", "total")})

    @classmethod
    def all(cls, each: Sequence[Crewed]) -> Crewed:
        """The shapes of each, one after another."""
        of_crews = zip(*(of.crews for of in each), strict=True)
        crews = tuple(Crews(*map(_joined, zip(*some, strict=True))) for some in of_crews)
        firsts = np.cumsum([0, *(len(of.crews[0].fewest) for of in each)])
        which = np.concatenate([of.which + first for of, first in zip(each, firsts, strict=False)])
        return cls(each[0].mix, crews, which, *map(np.concatenate, zip(*(of[3:] for of in each), strict=True)))

    def hold(self) -> Mask:
        """[n] Whether the cells can form all replicas, each with all layers, however long they take."""
        there = np.logical_or.reduce([np.isfinite(crews.longest_s) for crews in self.crews])[self.which]
        gain: Floats = np.where(there, 0.0, NEVER)
        none_left_out: Floats = np.full(len(self.which), -1.0)  # a replica left out in part is worth far less
        return most(gain, self.mix, self.cells, self.replicas, none_left_out) >= none_left_out

    def lack(self, seconds: Floats) -> Mask:
        """[n] Whether the replicas cannot do all micro-batches in ``seconds``."""
        gain, below = np.full((len(seconds), len(self.mix)), NEVER), np.full((len(seconds), 1), np.inf)
        for crews in reversed(self.crews):
            own = selected(crews, self.which)
            there = own.fewest < below  # else the crews above stand for these too
            gain = np.maximum(gain, np.where(there, np.minimum(own.micro_batches(seconds), below - 1.0), NEVER))
            below = own.fewest
        enough = self.total.astype(np.float64) * (1 - ROUNDING)
        return most(gain, self.mix, self.cells, self.replicas, enough) < enough

    def floors_s(self, floor_s: Floats, limit_s: Floats, close: float) -> Floats:
        """[n] Seconds that the shapes take at least, from the known ``floor_s`` up to ``limit_s``; infinite where their cells do not suffice."""
        low, high = np.where(self.hold(), floor_s, np.inf), limit_s.copy()
        left, seconds = np.flatnonzero(np.isfinite(low)), high
        while len(left):
            lack = self.where(left).lack(seconds[left])
            low[left[lack]] = seconds[left[lack]]
            high[left[~lack]] = seconds[left[~lack]]
            seconds = (low + high) / 2
            left = np.flatnonzero(low * close < high)
        return low


def _joined(each: Sequence[Floats]) -> Floats:
    """Rows of each, one after another, each with all columns."""
    most = max(of.shape[1] for of in each)
    return np.concatenate([np.broadcast_to(of, (len(of), most)) for of in each])
