"""The best layouts of a mixed cluster: shapes in the order of a floor under all their placements, until none left can win.

One queue, as in ``exact``. What all cells have alike stands in it with a floor from its units; when that comes up, its shapes
(stages, replicas, schedule) stand for themselves, with a floor from the stages that the forecast prices; a shape that comes
up is placed (``mixed_solve``). A shape whose placements were all looked at is done. Of the others the lowest floor says how
far from the best the search may be: the gap.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from ahp.forecast.assembly import slowest_share
from ahp.forecast.efficiency import is_cpu
from ahp.forecast.mixed import MixedPricer
from ahp.forecast.step import pricer
from ahp.plan import Forecast, Parallelism
from ahp.search.mixed_bounds import can_hold, columns_hold, floors_alone_s, floors_s, speeds
from ahp.search.mixed_costs import GroupCells, LayoutTables, Work
from ahp.search.mixed_solve import Task
from ahp.search.mixed_space import Alike, MixedSpace, Shape, layout_of
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
    """Shapes whose placements are too many to look at each."""
    forecasts: int = 4000


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
        self.floor_s = float("inf")
        self._heap: list[tuple[float, int, int, int]] = []
        """(floor, 0 = units, 1 = a shape; alike; position of the shape)."""
        self._shapes: dict[int, list[tuple[float, Shape]]] = {}
        self.cells = cache(self._cells)
        self._units_work = cache(self._of_units)
        self._hard = 0

    def run(self, keep: int) -> MixedOutcome:
        """Place shapes until no floor is below the best, ``keep`` fit, or the budget is spent."""
        for index, alike in enumerate(self.space.alike):
            heapq.heappush(self._heap, (self.least_s(alike), 0, index, 0))
        while self._heap:
            floor_s, kind, index, at = self._heap[0]
            if floor_s >= self.best_s and len(self.outcome.fitting) >= keep:
                break
            if self._hard >= self.budget.shapes or self.outcome.forecasts >= self.budget.forecasts:
                break
            heapq.heappop(self._heap)
            if kind == 0:
                self._open(index)
            else:
                self._place(index, at)
        left = self._heap[0][0] if self._heap else float("inf")
        self.outcome.floor_s = min(self.floor_s, left)
        self.outcome.fitting.sort(key=lambda pair: pair[1].step_time_s)
        return self.outcome

    def _slowest(self, devices: int) -> float:
        """What the forecast adds for the slowest of so many devices."""
        on_cpu = any(is_cpu(group.device) for group in self.asked.cluster.groups)
        return 0.0 if on_cpu else slowest_share(devices)

    # -- floors -----------------------------------------------------------------------------------------------------

    def _work_of_units(self, alike: Alike) -> list[Work]:
        return self._units_work(alike._replace(shard=1, zero=0))

    def _of_units(self, alike: Alike) -> list[Work]:
        layout = layout_of(alike, 2)
        return [GroupCells(self.pricer, name, layout, 1).of_units() for name in self.names]

    def least_s(self, alike: Alike) -> float:
        """Seconds that everything which is so alike takes at least, from the units alone."""
        works = self._work_of_units(alike)
        whole = speeds(works).whole_s
        cells = self.space.cells(alike.width)
        return self.space.micro_batches(alike) / float((np.array(cells) / whole).sum())

    def _cells(self, alike: Alike, pipelined: bool, least: int) -> list[GroupCells]:
        layout = layout_of(alike, 2 if pipelined else 1)
        return [GroupCells(self.pricer, name, layout, least) for name in self.names]

    def _open(self, index: int) -> None:
        """Floors of the shapes of one alike, the lowest first."""
        alike = self.space.alike[index]
        found = sorted(self.floors(alike), key=lambda pair: pair[0])
        self._shapes[index] = found
        self._push(index, 0)

    def _push(self, index: int, at: int) -> None:
        if at < len(self._shapes[index]):
            heapq.heappush(self._heap, (self._shapes[index][at][0], 1, index, at))

    def floors(self, alike: Alike) -> Iterator[tuple[float, Shape]]:
        """Of the shapes that the memory does not rule out."""
        grid = self.space.grid(alike.width, self.space.micro_batches(alike))
        alone = grid.pipeline == 1
        yield from self._floors_alone(alike, grid.replicas[alone])
        for schedule in self.space.schedules(2):
            yield from self._floors_of(alike, schedule, grid.pipeline[~alone], grid.replicas[~alone])

    def _floors_alone(self, alike: Alike, replicas: Ints) -> Iterator[tuple[float, Shape]]:
        ones, schedule = np.ones_like(replicas), self.space.schedules(1)[0]
        holds = self._hold(alike, schedule, ones, replicas)
        if not holds.any():
            return
        total, works = self.space.micro_batches(alike), [of.work for of in self.cells(alike, False, 1)]
        whole = np.array([work.beside[3][1] for work in works])
        floors = floors_alone_s(whole, self.space.cells(alike.width), total, replicas[holds])
        floors = floors + min(work.once for work in works)
        yield from self._shapes_of(alike, schedule, floors, ones[holds], replicas[holds])

    def _floors_of(self, alike: Alike, schedule: str, pipeline: Ints, replicas: Ints) -> Iterator[tuple[float, Shape]]:
        total = self.space.micro_batches(alike)
        enough = total >= replicas * self._least(pipeline, schedule)
        pipeline, replicas = pipeline[enough], replicas[enough]
        holds = self._hold(alike, schedule, pipeline, replicas)
        if not holds.any():
            return
        pipeline, replicas = pipeline[holds], replicas[holds]
        # Where a replica may have a single micro-batch stages are not priced for it before they are placed.
        rough = self.space.least(2, schedule) < 2
        works = self._work_of_units(alike) if rough else [of.work for of in self.cells(alike, True, 2)]
        cells = self.space.cells(alike.width)
        floors = floors_s(speeds(works), cells, total, pipeline, replicas, schedule)
        yield from self._shapes_of(alike, schedule, floors, pipeline, replicas)

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

    def _shapes_of(
        self, alike: Alike, schedule: str, floors: Floats, pipeline: Ints, replicas: Ints
    ) -> Iterator[tuple[float, Shape]]:
        share = cache(self._slowest)
        for floor_s, p, r in zip(floors.tolist(), pipeline.tolist(), replicas.tolist(), strict=True):
            if np.isfinite(floor_s):
                yield floor_s * (1.0 + share(p * r * alike.width)), Shape(alike, p, r, schedule)

    # -- placing ----------------------------------------------------------------------------------------------------

    def _place(self, index: int, at: int) -> None:
        floor_s, shape = self._shapes[index][at]
        self._push(index, at + 1)
        task = self.task(shape)
        if not self.columns_hold(task):
            self.outcome.too_large += 1
            return
        solved = task.solve(self.asked.price, self.best_s)
        self.outcome.placed += 1
        self.outcome.forecasts += solved.forecasts
        if solved.refused is not None:
            self.outcome.refused.append(solved.refused)
        if solved.misfit is not None:
            self.outcome.misfits.append(solved.misfit)
        if solved.best is not None:
            self.outcome.fitting.append(solved.best)
            self.best_s = min(self.best_s, solved.best[1].step_time_s)
        if not solved.proven:
            self._hard += 1
            self.floor_s = min(self.floor_s, floor_s)

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
            tables=LayoutTables(dict(enumerate(of_groups)), shape.layout()),
            cells=self.space.cells(alike.width),
            names=self.names,
            total=self.space.micro_batches(alike),
            allowed=self.space.allowed(shape.pipeline, shape.schedule, self.space.micro_batches(alike)),
            fastest_first=tuple(np.argsort(whole, kind="stable").tolist()),
            slowest_share=self._slowest(shape.pipeline * shape.replicas * alike.width),
            fixed=self.space.fixed(shape.replicas),
        )
