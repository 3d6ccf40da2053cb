"""The best layouts of a mixed cluster: shapes in the order of a floor under all their placements, until none left can win.

One queue, as in ``exact``. What all cells have alike stands in it with a floor from its units, then with one from the shapes that its
memory leaves; when that comes up, its shapes (stages, replicas, schedule) stand for themselves, with a floor from the stages that the
forecast prices (``mixed.floors``); a shape that comes up is placed (``mixed.solve``). A shape whose placements were all looked at is done. Of the others the lowest floor says how
far from the best the search may be: the gap.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from typing import Any

import numpy as np

from ahp.forecast.mixed import MixedPricer
from ahp.forecast.step import pricer
from ahp.plan import Forecast, Parallelism
from ahp.search.choices import ScheduleChoice
from ahp.search.mixed.bounds import columns_hold
from ahp.search.mixed.floors import Entry, Kind, ShapeFloors
from ahp.search.mixed.nearby_shapes import NearbyShapes
from ahp.search.mixed.several import SeveralTask
from ahp.search.mixed.solve import Placement, Solved, Task
from ahp.search.mixed.space import SEVERAL, MixedSpace, Shape, shape_of
from ahp.search.mixed.tables import LayoutTables
from ahp.search.problem import Problem
from ahp.search.space import Rule

Pair = tuple[Parallelism, Forecast]


@dataclass(frozen=True)
class Budget:
    """How much is placed where the best cannot be proven."""

    shapes: int = 150
    """Shapes whose placements are too many to look at each, with a pipeline and without."""
    forecasts: int = 40
    """Forecasts of these, the most promising first."""
    exact: int = 4000
    """Forecasts of the others."""
    near: int = 150
    """Shapes near the fastest that are looked at without finding a faster one."""
    several: int = 8
    """Of the fastest with one stage on each rank so many are looked at with several."""


SLACK = 1.15
"""Shapes of which no placement can win, but is slower by less than this, are placed until the ranking is long enough."""


UNITS, NEAR = -2, -1
"""How well what is alike is known, before its shapes stand in the queue themselves."""


@dataclass
class MixedOutcome:
    """What placing shapes in the order of their floor found."""

    fitting: list[Pair] = field(default_factory=list)
    """Of each shape the fastest that fits, fastest first."""
    misfits: list[Pair] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    rules: tuple[Rule, ...] = ()
    broken: int = 0
    """Shapes that break one of them."""
    size: int = 0
    """Legal shapes."""
    twins: int = 0
    """Shapes that run the same as another, none of the legal ones."""
    placed: int = 0
    """Shapes that were placed."""
    too_large: int = 0
    """Shapes that no placement makes fit."""
    forecasts: int = 0
    floor_s: float = float("inf")
    """No layout that was not priced takes less than this."""

    @property
    def left(self) -> int:
        return self.size - self.placed - self.too_large


class Finder:
    """One search of a mixed problem."""

    def __init__(self, asked: Problem, space: MixedSpace, budget: Budget, best_s: float) -> None:
        """``best_s``: what was found elsewhere, on one group alone."""
        found = pricer(asked.graph, asked.cluster, asked.job, asked.engine)
        assert isinstance(found, MixedPricer), "one group is searched as a plain cluster"
        self.asked, self.space, self.budget = asked, space, budget
        self.names = tuple(group.name for group in asked.cluster.groups)
        self.best_s = best_s
        rules = tuple(space.rules.values())
        self.outcome = MixedOutcome(rules=rules, size=space.legal, broken=space.size - space.legal, twins=space.twins)
        self.floors = ShapeFloors(found, space)
        self._waiting: list[tuple[float, int, Task, list[Placement]]] = []
        """Shapes with their most promising placements, not priced yet: (its bound, a number of their own, ...)."""
        self._priced: dict[Shape, float] = {}
        """Shapes with too many placements to look at each, of which some were priced: the time of the one that fits, or where none does
        of the first."""
        self._near = NearbyShapes(space)
        self._seen: set[Shape] = set()
        """Those that were looked at for being near another."""

    def run(self, keep: int, seeds: Iterable[Shape] = ()) -> MixedOutcome:
        """Place shapes until none left can win, or the budget is spent: first those near ``seeds``, then without a pipeline; and at the
        end those near the fastest."""
        self._look_nearby(seeds)
        for kind in self.floors.kinds:
            self._queue(kind, keep)
        if self.outcome.floor_s < self.best_s:
            self._look_nearby(shape_of(layout) for layout, _ in self._fastest(keep))
        self._price_waiting(keep)
        self.outcome.too_large += self.floors.too_large
        self.outcome.fitting.sort(key=lambda pair: pair[1].step_time_s)
        return self.outcome

    def _queue(self, kind: Kind, keep: int) -> None:
        """Place the shapes of one kind in the order of their promise.

        What is alike comes up three times, each time better known: by its units; by the shapes that its memory leaves; and
        with their floors, for which its stages are priced.
        """
        there = np.flatnonzero((kind.promise_s < np.inf) & ~kind.skipped)
        heap = [(float(kind.promise_s[i]), i, UNITS) for i in there.tolist()]
        heapq.heapify(heap)
        floors_s = dict[int, float]()
        opened: dict[int, list[Entry]] = {}
        hard, lowest_s = 0, float("inf")
        while heap and hard < self.budget.shapes and self.outcome.forecasts < self.budget.exact:
            promise_s, index, at = heapq.heappop(heap)
            alike, limit_s = self.space.alike[index], self._limit_s(keep)
            if at == UNITS and kind.least_s[index] < limit_s:
                promise_s, floors_s[index] = kind.near(alike, limit_s)
                if floors_s[index] < limit_s:
                    heapq.heappush(heap, (promise_s, index, NEAR))
            elif at == NEAR and floors_s[index] < limit_s:
                found = self._may_win(kind.entries(alike, limit_s), keep)
                opened[index] = sorted(found, key=lambda entry: entry[:2])
                # One that promises more than all before is placed at once: a good time known early leaves more out.
                if found and opened[index][0].promise_s < lowest_s:
                    lowest_s = opened[index][0].promise_s
                    hard += self._place(opened[index].pop(0))
            elif at >= 0 and self._may_win([opened[index][at]], keep):
                hard += self._place(opened[index][at])
            if index in opened and at + 1 < len(opened[index]):
                heapq.heappush(heap, (opened[index][at + 1].promise_s, index, at + 1))
        self._leave(kind, heap, floors_s, opened)

    def _leave(
        self, kind: Kind, heap: list[tuple[float, int, int]], floors_s: dict[int, float], opened: dict[int, list[Entry]]
    ) -> None:
        """The lowest floor of what stays in the queue. What is not known well enough to say is looked at more closely."""
        number = count()  # of equal floors the first
        left: list[tuple[float, int, int, Shape | None]] = []
        for _, index, at in heap:
            if at < 0:
                left.append((floors_s.get(index, float(kind.least_s[index])), next(number), index, None))
            else:
                left += [(entry.floor_s, next(number), index, entry.shape) for entry in opened[index][at:]]
        heapq.heapify(left)
        while left and left[0][0] < self.outcome.floor_s:
            floor_s, _, index, shape = heapq.heappop(left)
            alike = self.space.alike[index]
            if shape is not None and self.columns_hold(self.task(shape)):
                self.outcome.floor_s = floor_s
            elif shape is not None:
                self.outcome.too_large += 1
            elif index not in floors_s:
                floors_s[index] = kind.near(alike, self.outcome.floor_s)[1]
                heapq.heappush(left, (floors_s[index], next(number), index, None))
            else:
                for entry in kind.entries(alike, self.outcome.floor_s):
                    heapq.heappush(left, (entry.floor_s, next(number), index, entry.shape))

    def _limit_s(self, keep: int) -> float:
        """Floors above this are of no interest."""
        return self.best_s if len(self.outcome.fitting) + len(self._waiting) >= keep else self.best_s * SLACK

    def _may_win(self, entries: Iterable[Entry], keep: int) -> list[Entry]:
        return [entry for entry in entries if entry.floor_s < self._limit_s(keep)]

    # -- placing ----------------------------------------------------------------------------------------------------

    def _place(self, entry: Entry) -> bool:
        """Place one shape; whether its placements were too many to look at each."""
        task = self.task(entry.shape)
        if not self.columns_hold(task):
            self.outcome.too_large += 1
            return False
        if entry.shape in self._priced:
            self.outcome.floor_s = min(self.outcome.floor_s, entry.floor_s)
            return False
        self.outcome.placed += 1
        wins = entry.floor_s < self.best_s
        if wins and task.few():
            solved = task.solve(self.asked.price, self.best_s)
            self._note(solved)
            if not solved.proven:
                self.outcome.floor_s = min(self.outcome.floor_s, entry.floor_s)
            return False
        self.outcome.floor_s = min(self.outcome.floor_s, entry.floor_s)
        found = task.promising()
        if found:
            at_least_s = found[0].at_least_s
            if wins and at_least_s < min([self.best_s, *(waits[0] for waits in self._waiting)]):
                self._first_that_fits(task, found)
            else:
                heapq.heappush(self._waiting, (at_least_s, self.outcome.placed, task, found))
        return wins

    def _price_waiting(self, keep: int) -> None:
        """Price what was put off, the most promising first."""
        for _ in range(self.budget.forecasts):
            if not self._waiting:
                return
            at_least_s, _, task, found = heapq.heappop(self._waiting)
            if at_least_s >= self.best_s and len(self.outcome.fitting) >= keep:
                return
            self._first_that_fits(task, found)

    def _fastest(self, count: int) -> list[Pair]:
        return sorted(self.outcome.fitting, key=lambda pair: pair[1].step_time_s)[:count]

    def _look_nearby(self, seeds: Iterable[Shape]) -> None:
        """Look at pipelines near some shapes, and near what these find, the least time first, until so many were no faster. Then at
        the fastest with several stages on each rank."""
        left, number = self.budget.near, count()
        heap = [(0.0, next(number), shape) for shape in dict.fromkeys(seeds)]
        while heap and left:
            for shape in self._near.of(heapq.heappop(heap)[2]):
                if shape.pipeline == 1 or shape in self._seen or not left:
                    continue
                before_s, left = self.best_s, left - 1
                takes_s = self._look_at(shape)
                left = self.budget.near if self.best_s < before_s else left
                if takes_s < float("inf"):
                    heapq.heappush(heap, (takes_s, next(number), shape))
        if self.budget.near:
            for layout, _ in self._fastest(self.budget.several):
                shape = replace(shape_of(layout), schedule=SEVERAL)
                if shape not in self._seen and self._near.legal(shape):
                    self._look_at(shape)

    def _look_at(self, shape: Shape) -> float:
        """Seconds of a shape: by its forecast where it may win, else at least; infinite where nothing was found that holds it."""
        self._seen.add(shape)
        task = self.task(shape)
        found = task.promising() if self.columns_hold(task) else []
        if not found:
            return float("inf")
        if found[0].at_least_s >= self.best_s or task.few():  # the queue looks at all placements where they are few
            return found[0].at_least_s
        self.outcome.placed += 1
        self._first_that_fits(task, found)
        return self._priced[shape]

    def _first_that_fits(self, task: Task, found: list[Placement]) -> None:
        solved = task.first_that_fits(self.asked.price, found)
        self._note(solved)
        priced = solved.best or solved.misfit
        self._priced[task.shape] = priced[1].step_time_s if priced else float("inf")

    def _note(self, solved: Solved) -> None:
        self.outcome.forecasts += solved.forecasts
        if solved.refused is not None:
            self.outcome.refused.append(solved.refused)
        if solved.misfit is not None:
            self.outcome.misfits.append(solved.misfit)
        if solved.best is not None:
            # A shape that recomputes finds what the one without has, where all fits so.
            if solved.best not in self.outcome.fitting:
                self.outcome.fitting.append(solved.best)
            self.best_s = min(self.best_s, solved.best[1].step_time_s)

    def columns_hold(self, task: Task) -> bool:
        """Whether the cells that there are of each group can hold the model."""
        shape = task.shape
        least, most = int(task.allowed.argmax()), -(-task.total // shape.replicas)
        return columns_hold(task.tables, task.cells, (shape.pipeline, shape.replicas), (min(least, most), most))

    def task(self, shape: Shape) -> Task:
        """A shape with what its cells cost, to be placed."""
        if shape.schedule != SEVERAL:
            return Task(**self._facts(shape))
        pipes, least = self.space.pipes(shape.pipeline), self._least(shape)

        def of_pipe(pipe: ScheduleChoice) -> LayoutTables:
            update = {"pipeline_parallel_schedule": pipe.schedule, "virtual_stages_per_rank": pipe.virtual}
            return self.floors.tables(shape, least, shape.layout().model_copy(update=update))

        # Weight gradients fill no more than what several stages on a rank fill.
        facts = self._facts(shape)
        one = replace(shape, schedule="InterleavedZeroBubble")
        return SeveralTask(
            **facts,
            one=Task(**{**facts, "shape": one, "tables": self.floors.tables(one, least), "fixed": facts["fixed"].without_stages()}),
            pipes=pipes,
            of_pipe=cache(of_pipe),
            legal=lambda pipe, m: self.space.legal_pipe(pipe, shape.pipeline, m),
        )  # fmt: skip

    def _least(self, shape: Shape) -> int:
        """Micro-batches of a replica, as far as costs know them apart."""
        return min(2, self.space.least(shape.pipeline, shape.schedule))

    def _facts(self, shape: Shape) -> dict[str, Any]:
        alike, total = shape.alike, self.space.micro_batches(shape.alike)
        tables = self.floors.tables(shape, self._least(shape))
        return {
            "shape": shape,
            "tables": tables,
            "cells": self.space.cells(alike.width),
            "names": self.names,
            "total": total,
            "allowed": self.space.allowed(shape.pipeline, shape.schedule, total),
            "fastest_first": tuple(np.argsort(tables.whole_s, kind="stable").tolist()),
            "slowest_share": self.floors.slowest(shape.pipeline * shape.replicas * alike.width),
            "fixed": self.space.fixed(shape.pipeline, shape.replicas),
            "cells_fit": self.floors.pricer.cells_fit,
        }
