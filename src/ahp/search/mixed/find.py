"""The best layouts of a mixed cluster: shapes are placed in the order of a floor under all their placements, until none left can win.

Each kind of shape has one queue, as in ``exact``, of the shapes whose floor (``mixed.floors``) is below the best known time. A shape that comes
up is placed (``mixed.solve``), and is settled when all its placements were looked at. The lowest floor of the other shapes gives the gap: how
far from the best the search can be.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count, islice

from ahp.schedule.registry import PLAIN
from ahp.search.certificate import merged
from ahp.search.choices import ScheduleChoice
from ahp.search.mixed.floors import ShapeFloors, ShapeKind
from ahp.search.mixed.lowest import lowest_floor_s
from ahp.search.mixed.nearby_shapes import NearbyShapes
from ahp.search.mixed.queue import Queue
from ahp.search.mixed.several import SeveralTask
from ahp.search.mixed.solve import Placement, Solved, Task
from ahp.search.mixed.space import SEVERAL, MixedSpace, Shape, shape_of, splits_backward
from ahp.search.mixed.tables import LayoutTables, columns_hold
from ahp.search.pairs import Pair, by_time
from ahp.search.problem import Problem
from ahp.search.space import Rule


@dataclass(frozen=True)
class Budget:
    """How much to place where the best cannot be proven. [Empirical] Twice as much took 15 to 40 % longer on eight problems and found nothing better
    in the mean (docs/decisions/mixed-search.md)."""

    shapes: int = 20
    """Shapes of each kind that may win and have too many placements to look at all."""
    forecasts: int = 20
    """Shapes put off until the end that are priced then, the most promising first."""
    exact: int = 750
    """Forecasts after which queues stop. [Empirical] GPT-2 on 4 H100 and 4 A100: 4,000 found the same step time, in 19.6 s instead of 7.2."""
    near: int = 60
    """Shapes near the fastest that are looked at in a row without finding a faster one."""
    every: bool = True
    """Whether to look at all placements of a shape where they are few; else the best of its families stand for them."""
    several: int = 4
    """How many of the fastest shapes with one stage per rank are tried again with several stages per rank."""
    bound: bool = True
    """Whether to find a lower bound of what was not priced (``MixedOutcome.floor_s``)."""


SLACK = 1.15
"""Shapes that cannot win, but whose floor is below this factor times the best time, are placed until the ranking is long enough."""


WINDOW = 512
"""How many pipelines with the lowest floors are compared at once by what they promise, which floors do not include."""


REACH = (4.0, 32.0, 256.0, float("inf"))
"""Search limits as multiples of the least time that any shape can take, tried in turn until a time is known."""


@dataclass
class MixedOutcome:
    """The results of placing shapes in the order of their floors."""

    fitting: list[Pair] = field(default_factory=list)
    """The fastest layout of each shape that fits, the fastest shape first."""
    misfits: list[Pair] = field(default_factory=list)
    rules: tuple[Rule, ...] = ()
    broken: int = 0
    """Shapes that break one of the rules."""
    size: int = 0
    """Legal shapes."""
    twins: int = 0
    """Shapes that run the same as another one; not counted in ``size``."""
    placed: int = 0
    """Shapes that were placed."""
    too_large: int = 0
    """Shapes that do not fit with any placement."""
    forecasts: int = 0
    floor_s: float = float("inf")
    """Every layout that was not priced takes at least this long."""
    any_widths_s: float = float("inf")
    """Every layout with stages of different width takes at least this long."""

    @property
    def left(self) -> int:
        return self.size - self.placed - self.too_large


def find_over(
    asked: Problem,
    spaces: Sequence[MixedSpace],
    budget: Budget,
    best_s: float,
    keep: int,
    seeds: Sequence[Shape] = (),
) -> MixedOutcome:
    """Run ``Finder`` on each space of one problem; the next has to beat the best time so far."""
    found = []
    for space in spaces:
        if space.alike:
            found.append(Finder(asked, space, budget, best_s).run(keep, seeds))
            best_s = min([best_s, *(forecast.step_time_s for _, forecast in found[-1].fitting[:1])])
    return MixedOutcome(
        fitting=by_time(pair for one in found for pair in one.fitting),
        misfits=[pair for one in found for pair in one.misfits],
        rules=merged([tuple(space.rules.values()) for space in spaces]),
        broken=sum(space.size - space.legal for space in spaces),
        size=sum(space.legal for space in spaces),
        twins=sum(space.twins for space in spaces),
        placed=sum(one.placed for one in found),
        too_large=sum(one.too_large for one in found),
        forecasts=sum(one.forecasts for one in found),
        floor_s=min((one.floor_s for one in found), default=float("inf")),
        any_widths_s=min((one.any_widths_s for one in found), default=float("inf")),
    )


class Finder:
    """One search of a mixed problem."""

    def __init__(self, asked: Problem, space: MixedSpace, budget: Budget, best_s: float) -> None:
        """``best_s``: the best time found elsewhere, such as on one group alone."""
        self.asked, self.space, self.budget = asked, space, budget
        self.names = tuple(group.name for group in asked.cluster.groups)
        self.best_s = best_s
        self.floors = ShapeFloors(asked.mixed_pricer, space)
        self.outcome = MixedOutcome(size=space.legal, any_widths_s=self.floors.of_any_widths_s())
        self._waiting: list[tuple[float, int, Task, list[Placement]]] = []
        """Shapes whose most promising placements are not priced yet: (bound, tie-breaker, task, placements)."""
        self._priced: dict[Shape, float] = {}
        """Times of shapes with too many placements to look at all, of which some were priced: the time of the layout that fits, or of the
        first one where none does."""
        self._placed: set[Shape] = set()
        self._unsettled: dict[Shape, float] = {}
        """Placed shapes of which other placements may still win, with their floors."""
        self._near = NearbyShapes(space)
        self._seen: set[Shape] = set()
        """Shapes that were looked at because they are near another."""

    def run(self, keep: int, seeds: Iterable[Shape] = ()) -> MixedOutcome:
        """Place shapes until none left can win or the budget is spent: those near ``seeds``, then each kind, without a pipeline first, then
        those near the fastest. At the end, price what was put off."""
        self._look_nearby(seeds)
        left: dict[ShapeKind, float] = {kind: self._queue(kind, keep) for kind in self.floors.kinds}
        if min([self.outcome.floor_s, *left.values()]) < self.best_s:
            self._look_nearby(shape_of(layout) for layout, _ in self._fastest(keep))
        for kind in sorted(left, key=left.__getitem__):
            limit_s = min(self.outcome.floor_s, self.best_s)
            if self.budget.bound and left[kind] < limit_s:
                lowest_s = lowest_floor_s(self.floors, kind, self.best_s, limit_s, self._may_win)
                self.outcome.floor_s = min(self.outcome.floor_s, lowest_s)
        self._price_waiting(keep)
        self.outcome.fitting = self._fastest()
        return self.outcome

    def _queue(self, kind: ShapeKind, keep: int) -> float:
        """Place the shapes of one kind: among the lowest floors, the most promising first. Until a time is known, the limit rises in steps
        from the least time that any shape can take. Returns the lowest floor of the shapes that are not settled then."""
        queue, placed, limit_s, left_s = Queue(self.floors, kind, 0.0), 0, 0.0, float("inf")
        for times in REACH:
            limit_s = min(self._limit_s(keep), times * self.floors.least_s())
            queue.reach(limit_s)
            placed, waits_s = self._place_from(queue, limit_s, keep, placed)
            left_s = min(left_s, waits_s)
            if self._limit_s(keep) <= limit_s or placed >= self.budget.shapes:
                break
        self.outcome.too_large += queue.too_large
        if limit_s < self.best_s:
            self.outcome.floor_s = min(self.outcome.floor_s, limit_s)
        lowest = queue.pop(self.best_s)
        return min([left_s, *self._unsettled.values(), *([] if lowest is None else [lowest[0]])])

    def _may_win(self, shape: Shape) -> bool:
        """Whether a shape is not settled, and its memory may suffice."""
        settled = shape in self._placed and shape not in self._unsettled
        return not settled and self.columns_hold(self.task(shape))

    def _place_from(self, queue: Queue, limit_s: float, keep: int, hard: int) -> tuple[int, float]:
        """Place what is in a queue. Returns ``hard`` plus the number of shapes with too many placements, and the lowest floor of those that
        came up and were not placed."""
        window, size = list[tuple[float, float, int, Shape]](), 1 if queue.kind == "alone" else WINDOW
        while hard < self.budget.shapes and self.outcome.forecasts < self.budget.exact:
            below_s = min(self._limit_s(keep), limit_s)
            if not window:
                for floor_s, shape in islice(queue.popped(below_s), size):
                    heapq.heappush(window, (self._promise_s(floor_s, shape), floor_s, next(queue.number), shape))
            if not window:
                break
            _, floor_s, _, shape = heapq.heappop(window)
            hard += floor_s < below_s and self._place(floor_s, shape)
        return hard, min((floor_s for _, floor_s, _, _ in window), default=float("inf"))

    def _promise_s(self, floor_s: float, shape: Shape) -> float:
        """Estimated time of a shape if only early forward passes fill its pipeline bubble; not a bound."""
        if shape.schedule != SEVERAL and not splits_backward(shape.schedule):
            return floor_s
        return floor_s * (1.0 + (shape.pipeline - 1) * shape.replicas / self.space.micro_batches(shape.alike))

    def _limit_s(self, keep: int) -> float:
        """Shapes whose floor is above this are not placed."""
        return self.best_s if len(self.outcome.fitting) + len(self._waiting) >= keep else self.best_s * SLACK

    # -- placing ----------------------------------------------------------------------------------------------------

    def _place(self, floor_s: float, shape: Shape) -> bool:
        """Place one shape. Returns whether it may win and has too many placements to look at all."""
        if shape in self._placed:
            return False
        self._placed.add(shape)
        task = self.task(shape)
        if not self.columns_hold(task):
            self.outcome.too_large += 1
            return False
        self._unsettled[shape] = floor_s
        if shape in self._priced:
            return False
        self.outcome.placed += 1
        wins = floor_s < self.best_s
        if wins and self.budget.every and task.few():
            solved = task.solve(self.asked.price, self.best_s)
            self._note(solved)
            if solved.proven:
                del self._unsettled[shape]
            return False
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

    def _fastest(self, count: int | None = None) -> list[Pair]:
        return by_time(self.outcome.fitting)[:count]

    def _look_nearby(self, seeds: Iterable[Shape]) -> None:
        """Look at pipelines near some shapes and near those found, the fastest first, until ``near`` in a row were no faster; near those that do
        not fit while none fits. Then try the fastest with several stages per rank."""
        left, number, any_fits = self.budget.near, count(), False
        heap = [(0.0, next(number), shape) for shape in dict.fromkeys(seeds)]
        while heap and left:
            takes_s, _, near = heapq.heappop(heap)
            if takes_s == float("inf") and any_fits:
                break
            for shape in self._near.of(near):
                if shape.pipeline == 1 or shape in self._seen or not left:
                    continue
                before_s, left = self.best_s, left - 1
                takes_s = self._look_at(shape)
                left = self.budget.near if self.best_s < before_s else left
                any_fits |= takes_s < float("inf")
                heapq.heappush(heap, (takes_s, next(number), shape))
        if self.budget.near:
            for layout, _ in self._fastest(self.budget.several):
                shape = replace(shape_of(layout), schedule=SEVERAL)
                if shape not in self._seen and self._near.legal(shape):
                    self._look_at(shape)

    def _look_at(self, shape: Shape) -> float:
        """Seconds of a shape: its forecast where it may win, else a lower bound; infinite where no placement was found that holds it."""
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
        if solved.misfit is not None:
            self.outcome.misfits.append(solved.misfit)
        if solved.best is not None:
            # A shape with recompute finds the same layout as the one without, where all fits without.
            if solved.best not in self.outcome.fitting:
                self.outcome.fitting.append(solved.best)
            self.best_s = min(self.best_s, solved.best[1].step_time_s)

    def columns_hold(self, task: Task) -> bool:
        """Whether the available cells of each group can hold the model."""
        shape = task.shape
        least, most = int(task.allowed.argmax()), -(-task.total // shape.replicas)
        return columns_hold(task.tables, task.cells, (shape.pipeline, shape.replicas), (min(least, most), most))

    def task(self, shape: Shape) -> Task:
        """The task of placing a shape, with the costs of its cells."""
        task = self._task(shape)
        if shape.schedule != SEVERAL:
            return task

        def of_pipe(pipe: ScheduleChoice) -> LayoutTables:
            update = {"pipeline_parallel_schedule": pipe.schedule, "virtual_stages_per_rank": pipe.virtual}
            return self.floors.tables(shape, shape.layout().model_copy(update=update))

        # Several stages per rank fill pipelines at least as well as weight gradients do, and loops can keep as little as 1F1B.
        one, plain = replace(shape, schedule="InterleavedZeroBubble"), replace(shape, schedule=PLAIN)
        of_one = replace(
            task, shape=one, tables=self.floors.tables(plain), pipes=(ScheduleChoice(one.schedule, 1),),
            fixed=replace(task.fixed, layers=None, recomputed=None),
        )  # fmt: skip
        return SeveralTask(
            **vars(task),
            one=of_one,
            of_pipe=cache(of_pipe),
            legal=lambda pipe, m: self.space.legal_pipe(pipe, shape.pipeline, m),
        )

    def _task(self, shape: Shape) -> Task:
        """The task as far as its schedules do not matter."""
        alike, total, several = shape.alike, self.space.micro_batches(shape.alike), shape.schedule == SEVERAL
        return Task(
            shape=shape,
            tables=self.floors.tables(shape),
            cells=self.space.cells(alike.width),
            names=self.names,
            total=total,
            allowed=self.space.allowed(shape.pipeline, shape.schedule, total),
            fastest_first=self.floors.fastest_first(alike),
            slowest_share=self.floors.slowest(shape.pipeline * shape.replicas * alike.width),
            fixed=self.space.placed.fixed(shape.pipeline, shape.replicas),
            cells_fit=self.floors.pricer.cells_fit,
            pipes=self.space.pipes(shape.pipeline) if several else (ScheduleChoice(shape.schedule, 1),),
        )
