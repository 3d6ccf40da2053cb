"""The best layouts of a mixed cluster: shapes in the order of a floor under all their placements, until none left can win.

One queue, as in ``exact``. What all cells have alike stands in it with a floor from its units; when that comes up, its shapes
(stages, replicas, schedule) stand for themselves, with a floor from the stages that the forecast prices; a shape that comes
up is placed (``mixed.solve``). A shape whose placements were all looked at is done. Of the others the lowest floor says how
far from the best the search may be: the gap.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ahp.forecast.assembly import slowest_share
from ahp.forecast.efficiency import is_cpu
from ahp.forecast.mixed import MixedPricer
from ahp.forecast.step import pricer
from ahp.plan import Forecast, Parallelism
from ahp.search.mixed.bounds import Speeds, can_hold, columns_hold, floors_alone_s, floors_s, speeds
from ahp.search.mixed.costs import GroupCells, LayoutTables
from ahp.search.mixed.solve import Placement, Solved, Task
from ahp.search.mixed.space import Alike, MixedSpace, Shape, layout_of
from ahp.search.problem import Problem
from ahp.search.space import Rule

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
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


SLACK = 1.15
"""Shapes of which no placement can win, but is slower by less than this, are placed until the ranking is long enough."""


class Entry(NamedTuple):
    """A shape in the queue."""

    promise_s: float
    """What it takes where everything goes round; not a bound."""
    floor_s: float
    shape: Shape


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
        self.asked, self.space, self.budget, self.pricer = asked, space, budget, found
        self.names = tuple(group.name for group in asked.cluster.groups)
        self.best_s = best_s
        rules = tuple(space.rules.values())
        self.outcome = MixedOutcome(rules=rules, size=space.legal, broken=space.size - space.legal)
        self.cells = cache(self._cells)
        self._unit_speeds = cache(self._of_units)
        self._waiting: list[tuple[float, int, Task, list[Placement]]] = []
        """Shapes with their most promising placements, not priced yet: (its bound, a number of their own, ...)."""

    def run(self, keep: int) -> MixedOutcome:
        """Place shapes until none left can win, or the budget is spent: first those without a pipeline."""
        for entries in (self.alone, self.piped):
            self._queue(entries, keep)
        self._price_waiting(keep)
        self.outcome.fitting.sort(key=lambda pair: pair[1].step_time_s)
        return self.outcome

    def _queue(self, entries: Callable[[Alike, float], Iterator[Entry]], keep: int) -> None:
        """Place the shapes of one kind in the order of their promise."""
        heap: list[tuple[float, int, int]] = [(self.least_s(alike), i, -1) for i, alike in enumerate(self.space.alike)]
        heapq.heapify(heap)
        opened: dict[int, list[Entry]] = {}
        hard = 0
        while heap and hard < self.budget.shapes and self.outcome.forecasts < self.budget.exact:
            least_s, index, at = heapq.heappop(heap)
            if at < 0:
                if least_s < self._limit_s(keep):
                    found = entries(self.space.alike[index], self._limit_s(keep))
                    opened[index] = sorted(self._may_win(found, keep), key=lambda entry: entry[:2])
            elif self._may_win([opened[index][at]], keep):
                hard += self._place(opened[index][at])
            if at + 1 < len(opened.get(index, ())):
                heapq.heappush(heap, (opened[index][at + 1].promise_s, index, at + 1))
        for least_s, index, at in heap:
            left = [entry.floor_s for entry in opened[index][at:]] if at >= 0 else [least_s]
            self.outcome.floor_s = min([self.outcome.floor_s, *left])

    def _limit_s(self, keep: int) -> float:
        """Floors above this are of no interest."""
        return self.best_s if len(self.outcome.fitting) + len(self._waiting) >= keep else self.best_s * SLACK

    def _may_win(self, entries: Iterable[Entry], keep: int) -> list[Entry]:
        return [entry for entry in entries if entry.floor_s < self._limit_s(keep)]

    def _slowest(self, devices: int) -> float:
        """What the forecast adds for the slowest of so many devices."""
        on_cpu = any(is_cpu(group.device) for group in self.asked.cluster.groups)
        return 0.0 if on_cpu else slowest_share(devices)

    # -- floors -----------------------------------------------------------------------------------------------------

    def _speeds(self, alike: Alike) -> Speeds:
        """Of the units alone, however states are shared: known before memory is asked for and cells are priced."""
        return self._unit_speeds(alike._replace(shard=1, zero=0))

    def _of_units(self, alike: Alike) -> Speeds:
        layout = layout_of(alike, 2)
        return speeds([GroupCells(self.pricer, name, layout, 1).of_units() for name in self.names])

    def least_s(self, alike: Alike) -> float:
        """Seconds that everything which is so alike takes at least, from the units alone."""
        whole = self._speeds(alike).whole_s
        cells = self.space.cells(alike.width)
        return self.space.micro_batches(alike) / float((np.array(cells) / whole).sum())

    def _at_full_speed_s(self, alike: Alike, replicas: Ints) -> Floats:
        """[N] Seconds that so many cells take at least for all micro-batches, the fastest of them."""
        whole, cells = self._speeds(alike).whole_s, np.array(self.space.cells(alike.width))
        order = np.argsort(whole, kind="stable")
        ends = np.cumsum(cells[order])
        used = np.diff(np.minimum(ends[None, :], replicas[:, None]), prepend=0, axis=1)
        return self.space.micro_batches(alike) / (used / whole[order]).sum(axis=1)

    def _cells(self, alike: Alike, pipelined: bool, least: int) -> list[GroupCells]:
        layout = layout_of(alike, 2 if pipelined else 1)
        return [GroupCells(self.pricer, name, layout, least) for name in self.names]

    def floors(self, alike: Alike) -> Iterator[Entry]:
        """The shapes of one alike that the memory does not rule out."""
        yield from self.alone(alike)
        yield from self.piped(alike)

    def alone(self, alike: Alike, limit_s: float = float("inf")) -> Iterator[Entry]:
        """Those without a pipeline whose floor may be below the limit."""
        grid = self.space.grid(alike.width, self.space.micro_batches(alike))
        replicas = grid.replicas[grid.pipeline == 1]
        replicas = replicas[self._at_full_speed_s(alike, replicas) < limit_s]
        ones, schedule = np.ones_like(replicas), self.space.schedules(1)[0]
        holds = self._hold(alike, schedule, ones, replicas)
        if not holds.any():
            return
        total, works = self.space.micro_batches(alike), [of.work for of in self.cells(alike, False, 1)]
        whole = np.array([work.beside[3][1] for work in works])
        floors = floors_alone_s(whole, self.space.cells(alike.width), total, replicas[holds])
        floors = floors + min(work.once for work in works)
        yield from self._entries(alike, schedule, floors, floors, ones[holds], replicas[holds])

    def piped(self, alike: Alike, limit_s: float = float("inf")) -> Iterator[Entry]:
        """Those with one."""
        total, cells = self.space.micro_batches(alike), self.space.cells(alike.width)
        grid = self.space.grid(alike.width, total)
        several = grid.pipeline > 1
        for schedule in self.space.schedules(2):
            pipeline, replicas = grid.pipeline[several], grid.replicas[several]
            enough = total >= replicas * self._least(pipeline, schedule)
            pipeline, replicas = pipeline[enough], replicas[enough]
            near = floors_s(self._speeds(alike), cells, total, pipeline, replicas, schedule) < limit_s
            pipeline, replicas = pipeline[near], replicas[near]
            holds = self._hold(alike, schedule, pipeline, replicas)
            if not holds.any():
                continue
            pipeline, replicas = pipeline[holds], replicas[holds]
            # Where a replica may have a single micro-batch stages are not priced for it before they are placed.
            rough = self.space.least(2, schedule) < 2
            found = self._speeds(alike) if rough else speeds([of.work for of in self.cells(alike, True, 2)])
            floors = floors_s(found, cells, total, pipeline, replicas, schedule)
            promise = floors_s(found, cells, total, pipeline, replicas, "GPipe")
            yield from self._entries(alike, schedule, promise, floors, pipeline, replicas)

    def _least(self, pipeline: Ints, schedule: str) -> Ints:
        found = {p: self.space.least(p, schedule) for p in np.unique(pipeline).tolist()}
        return np.array([found[p] for p in pipeline.tolist()], dtype=np.int64)

    def _hold(self, alike: Alike, schedule: str, pipeline: Ints, replicas: Ints) -> Bools:
        """Whether the memory leaves a shape possible; counts those that it does not."""
        if not len(pipeline):
            return np.zeros(0, dtype=bool)
        layout = layout_of(alike, int(pipeline.max()), 1, schedule)
        have = [
            of
            for of, count in zip(
                self.cells(alike, int(pipeline.max()) > 1, 2), self.space.cells(alike.width), strict=True
            )
            if count
        ]
        most = -(-self.space.micro_batches(alike) // replicas)  # one replica has so many, at least
        holds = can_hold(have, [of.room_bytes(layout) for of in have], schedule, most, pipeline)
        self.outcome.too_large += int((~holds).sum())
        return holds

    def _entries(
        self, alike: Alike, schedule: str, promise: Floats, floors: Floats, pipeline: Ints, replicas: Ints
    ) -> Iterator[Entry]:
        share = cache(self._slowest)
        of_shapes = zip(promise.tolist(), floors.tolist(), pipeline.tolist(), replicas.tolist(), strict=True)
        for promise_s, floor_s, p, r in of_shapes:
            if floor_s < float("inf"):
                more = 1.0 + share(p * r * alike.width)
                yield Entry(promise_s * more, floor_s * more, Shape(alike, p, r, schedule))

    # -- placing ----------------------------------------------------------------------------------------------------

    def _place(self, entry: Entry) -> bool:
        """Place one shape; whether its placements were too many to look at each."""
        task = self.task(entry.shape)
        if not self.columns_hold(task):
            self.outcome.too_large += 1
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
                self._note(task.first_that_fits(self.asked.price, found))
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
            self._note(task.first_that_fits(self.asked.price, found))

    def _note(self, solved: Solved) -> None:
        self.outcome.forecasts += solved.forecasts
        if solved.refused is not None:
            self.outcome.refused.append(solved.refused)
        if solved.misfit is not None:
            self.outcome.misfits.append(solved.misfit)
        if solved.best is not None:
            self.outcome.fitting.append(solved.best)
            self.best_s = min(self.best_s, solved.best[1].step_time_s)

    def columns_hold(self, task: Task) -> bool:
        """Whether the cells that there are of each group can hold the model."""
        shape = task.shape
        most = -(-task.total // shape.replicas)
        return columns_hold(task.tables, task.cells, (shape.pipeline, shape.replicas), most)

    def task(self, shape: Shape) -> Task:
        """A shape with what its cells cost, to be placed."""
        alike = shape.alike
        least = min(2, self.space.least(shape.pipeline, shape.schedule))
        of_groups = self.cells(alike, shape.pipeline > 1, least)
        whole = [float(of.over_runs(3 if shape.pipeline == 1 else 2, 1)[0, -1]) for of in of_groups]
        return Task(
            shape=shape,
            tables=LayoutTables(of_groups, shape.layout()),
            cells=self.space.cells(alike.width),
            names=self.names,
            total=self.space.micro_batches(alike),
            allowed=self.space.allowed(shape.pipeline, shape.schedule, self.space.micro_batches(alike)),
            fastest_first=tuple(np.argsort(whole, kind="stable").tolist()),
            slowest_share=self._slowest(shape.pipeline * shape.replicas * alike.width),
            fixed=self.space.fixed(shape.replicas),
        )
