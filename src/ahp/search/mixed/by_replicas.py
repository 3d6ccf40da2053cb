"""Floors of pipelines by what all replicas do together (``mixed.replicas``).

Layouts of one family differ in little else than the bytes of their states, so one floor is computed for the least that any of them needs.
The layouts whose family can stay below the limit get floors of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ahp.arrays import Floats, Ints
from ahp.forecast.cell_columns import CellColumns
from ahp.search.mixed.capacity import Depth
from ahp.search.mixed.replicas import FINE, FIRST_LOOK, ROUGH, Crewed, Times, mixes
from ahp.search.mixed.shapes import Shapes
from ahp.search.mixed.space import Alike

AT_LIMIT = 1 - 1e-9
"""A floor above this share of a limit is at the limit: floors are divided by the factor of the slowest device and multiplied by it again."""


@dataclass(frozen=True)
class Layouts:
    """What floors need of N layouts, or of families of them."""

    columns: CellColumns
    cells: Ints
    """[N, G] Cells of each group."""
    total: Ints
    """[N] Micro-batches of all replicas."""
    schedules: Sequence[str]

    def depth(self, schedule: int, p: int) -> Depth:
        """Pipelines with ``p`` stages."""
        return Depth(self.columns, self.cells, self.total, self.schedules[schedule], p)

    def families(self, family: Ints) -> Layouts:
        """A row for each family, with the least that any of its layouts needs; ``family``: [N]."""
        _, first = np.unique(family, return_index=True)
        return Layouts(self.columns.least_of(family), self.cells[first], self.total[first], self.schedules)

    def floors(self, of: Shapes, limit_s: float, *, closely: bool = False) -> Shapes:
        """The same shapes with floors as far as these are below the limit; ``closely``: higher ones, for which many shapes take long."""
        found, stages = of.floor_s.copy(), of.pipeline[:, None]
        most = np.minimum(self.cells[of.rows], stages)
        alike, which = np.unique(np.concatenate([stages, most], axis=1), axis=0, return_inverse=True)
        for number, (p, *most) in enumerate(alike.tolist()):
            some = np.flatnonzero(which.ravel() == number)
            found[some] = self._floors_s(p, tuple(most), of.where(some), limit_s, closely=closely)
        return of._replace(floor_s=found)

    def _floors_s(self, p: int, most: tuple[int, ...], of: Shapes, limit_s: float, *, closely: bool) -> Floats:
        """[n] Floors of shapes with ``p`` stages and at most ``most`` cells of each group in a replica."""
        if (mix := mixes(p, most)) is None:
            return of.floor_s
        known_s, limits_s = of.floor_s / of.slowest, limit_s / of.slowest
        if closely:
            found = limits_s.copy()
            for schedule in np.unique(of.schedule).tolist():
                some = np.flatnonzero(of.schedule == schedule)
                depth = self.depth(schedule, p)
                found[some] = _closely_s(depth, of.where(some), mix, known_s[some], limits_s[some])
        else:
            found, left = known_s.copy(), np.arange(len(known_s))
            for times in (FIRST_LOOK, ROUGH):  # a first look finds that most take longer than the limit
                crewed = self._crewed(p, of.where(left), mix, times)
                found[left] = crewed.floors_s(known_s[left], limits_s[left], times.close)
                left = left[found[left] < limits_s[left]]
                if not len(left):
                    break
        return np.maximum(found * of.slowest, of.floor_s)

    def _crewed(self, p: int, of: Shapes, mix: Ints, times: Times) -> Crewed:
        crews, order = [], []
        for schedule in np.unique(of.schedule).tolist():
            some = np.flatnonzero(of.schedule == schedule)
            crews.append(self.depth(schedule, p).crewed(of.where(some), mix, times))
            order.append(some)
        return Crewed.all(crews).where(np.argsort(np.concatenate(order)))


def _closely_s(depth: Depth, of: Shapes, mix: Ints, known_s: Floats, limit_s: Floats) -> Floats:
    """[n] Floors from the known ones up to a limit: the least over all numbers of layers that the largest stage may have, and over the kinds of
    schedules. Each of these is looked at more closely only while it may be below the least so far."""
    at, largest = depth.largest(of, mix, limit_s)
    least_s = limit_s.copy()  # with more layers in a stage, all take longer
    for each in depth.of_each_kind():
        found, left = known_s[at], np.arange(len(at))
        for times in (FIRST_LOOK, ROUGH, FINE):
            if not len(left):
                break
            crewed = each.crewed_closely(of.where(at[left]), mix, times, None if largest is None else largest[left])
            found[left] = crewed.floors_s(found[left], least_s[at[left]], times.close)
            left = left[found[left] < least_s[at[left]]]
        np.minimum.at(least_s, at[left], found[left])
    return least_s


class ByReplicas:
    """Floors of layouts, with those of their families first."""

    def __init__(self, each: Layouts, alikes: Sequence[Alike]) -> None:
        """``alikes``: [N] what the cells of each layout have in common."""
        numbers: dict[Alike, int] = {}
        self.family = np.array([numbers.setdefault(_family(alike), len(numbers)) for alike in alikes], dtype=np.int64)
        """[N] The family of each layout."""
        self.each, self.together = each, each.families(self.family)

    def floors(self, of: Shapes, limit_s: float) -> Shapes:
        """The same shapes with floors as far as these are below the limit."""
        keys = np.stack([of.schedule, self.family[of.rows], of.pipeline, of.replicas])
        _, first, which = np.unique(keys, axis=1, return_index=True, return_inverse=True)
        least_s = np.full(len(first), np.inf)
        np.minimum.at(least_s, which.ravel(), of.floor_s)
        families = of.where(first)._replace(rows=self.family[of.rows[first]], floor_s=least_s)
        together_s = self.together.floors(families, limit_s).floor_s[which.ravel()]
        found = of._replace(floor_s=np.maximum(of.floor_s, together_s))
        left = np.flatnonzero(found.floor_s < limit_s * AT_LIMIT)
        found.floor_s[left] = self.each.floors(found.where(left), limit_s).floor_s
        return found


def _family(alike: Alike) -> Alike:
    """What layouts of one family have in common: all but how states are sharded, how tokens are divided and by which attention."""
    return alike._replace(zero=0, sequence_parallel=False, method=None)
