"""Shapes in the order of their floors, which get closer as shapes come up."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count

import numpy as np

from ahp.search.mixed.floors import ShapeFloors, ShapeKind
from ahp.search.mixed.shapes import Shapes
from ahp.search.mixed.space import Shape

FURTHER = 1.06
"""Shapes whose floor by work is at most this factor times the lowest get floors by memory in the same step."""

FURTHEST = 1e6
"""The largest such factor: it grows while memory holds none of the shapes."""


class Queue:
    """The shapes of one kind in the order of their floors: by work and speed, then by memory, then from priced stages for shapes without a
    pipeline."""

    def __init__(self, floors: ShapeFloors, kind: ShapeKind, limit_s: float) -> None:
        self._floors = floors
        self.kind: ShapeKind = kind
        self._rough = floors.by_work(kind, limit_s)
        """Shapes with floors by work and speed alone, the lowest first."""
        self._limit_s, self._step = limit_s, FURTHER
        self.number = count()  # breaks ties between equal floors
        self._heap: list[tuple[float, int, Shape, bool]] = []
        """Shapes that memory may hold: (floor, tie-breaker, shape, whether its floor is as close as it gets)."""
        self.too_large = 0
        """Shapes that came up and that memory rules out."""

    def reach(self, limit_s: float) -> None:
        """Add the shapes up to a higher limit."""
        more = self._floors.by_work(self.kind, limit_s)
        self._rough = Shapes.all([self._rough, more.where(more.floor_s >= self._limit_s)]).sorted()
        self._limit_s = limit_s

    def pop(self, below_s: float) -> tuple[float, Shape] | None:
        """The next shape and its floor; None where no floor is below ``below_s``. Floors never fall from one pop to the next."""
        while True:
            lowest_s = self._heap[0][0] if self._heap else float("inf")
            if min(self._rough.lowest_s, lowest_s) >= below_s:
                return None
            if self._rough.lowest_s < lowest_s:
                self._by_memory(below_s)
                continue
            floor_s, _, shape, is_close = heapq.heappop(self._heap)
            if is_close:
                return floor_s, shape
            heapq.heappush(self._heap, (max(floor_s, self._floors.closer_s(shape)), next(self.number), shape, True))

    def popped(self, below_s: float) -> Iterator[tuple[float, Shape]]:
        """All shapes that come up, with their floors."""
        while (found := self.pop(below_s)) is not None:
            yield found

    def _by_memory(self, below_s: float) -> None:
        of, self._rough = self._rough.split(min(self._step * self._rough.lowest_s, below_s))
        of = self._floors.by_memory(self.kind, of)
        held = of.where(of.floor_s < np.inf)
        self.too_large += len(of.floor_s) - len(held.floor_s)
        # Where nothing fits so far, take a longer step next: many shapes at once take hardly longer than a few.
        self._step = FURTHER if len(held.floor_s) else min(self._step**2, FURTHEST)
        for at, floor_s in enumerate(held.floor_s.tolist()):
            for shape in self._floors.shapes(self.kind, held, at):
                heapq.heappush(self._heap, (floor_s, next(self.number), shape, self.kind != "alone"))
