"""Floors of the shapes of what is alike, each time better known: by units, by what memory leaves, by stages that are priced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ahp.forecast.assembly import slowest_share
from ahp.forecast.efficiency import is_cpu
from ahp.forecast.mixed import MixedPricer
from ahp.plan import Parallelism
from ahp.search.mixed.bounds import Speeds, floors_alone_s, floors_s, paced_s, speeds
from ahp.search.mixed.columns import Columns
from ahp.search.mixed.costs import GroupCells, that_have
from ahp.search.mixed.holding import WHOLE
from ahp.search.mixed.space import SEVERAL, Alike, MixedSpace, Shape, layout_of, splits_backward
from ahp.search.mixed.tables import LayoutTables

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


Of = Literal["alone", "piped", "several"]
"""Without a pipeline, with a stage on each rank, with several."""


class Entry(NamedTuple):
    """A shape in the queue."""

    promise_s: float
    """What it takes where everything goes round; not a bound."""
    floor_s: float
    shape: Shape


class Shapes(NamedTuple):
    """Numbers of stages (or ranks, under ``SEVERAL``) and replicas under one schedule, [N] each."""

    schedule: str
    pipeline: Ints
    replicas: Ints
    slowest: Floats
    """By what the forecast multiplies for the slowest of the devices."""
    paced_s: Floats
    """Seconds that they take at least, as each stage has a layer (``bounds.paced_s``); 0 where that was not asked."""

    def where(self, mask: Bools) -> Shapes:
        """Those."""
        return Shapes(self.schedule, self.pipeline[mask], self.replicas[mask], self.slowest[mask], self.paced_s[mask])

    def entries(self, alike: Alike, promise_s: Floats, floors_s: Floats, limit_s: float) -> Iterator[Entry]:
        """Those below a limit, [N] seconds."""
        near = floors_s < limit_s
        columns = (of[near].tolist() for of in (promise_s, floors_s, self.pipeline, self.replicas))
        for promise, floor, p, r in zip(*columns, strict=True):
            yield Entry(promise, floor, Shape(alike, p, r, self.schedule))


@dataclass(frozen=True)
class Kind:
    """The shapes without a pipeline, or those with one stage on each rank, or with several."""

    least_s: Floats
    """[N] Seconds that those of each alike take at least."""
    promise_s: Floats
    """[N] The same where all layers are recomputed, if any are: in this order they come up."""
    near: Callable[[Alike, float], tuple[float, float]]
    """The promise and the floor of those below a limit, by the units alone."""
    entries: Callable[[Alike, float], Iterator[Entry]]
    """Of these those that are below it by their stages; asked after ``near``, once."""
    skipped: Bools
    """[N] Whether its shapes are none of the space (``space.is_twin``)."""


class Near(NamedTuple):
    """What may be below a limit."""

    kept: list[Shapes]
    promise_s: float
    floor_s: float
    too_large: int


class ShapeFloors:
    """Floors under the shapes of a space."""

    def __init__(self, pricer: MixedPricer, space: MixedSpace) -> None:
        self.pricer, self.space, self.columns = pricer, space, Columns(pricer, space)
        self.too_large = 0
        """Shapes of those looked at that no placement makes fit."""
        self.cells = cache(self._cells)
        self._shapes = cache(self._all_shapes)
        self._kept: dict[tuple[Alike, Of], list[Shapes]] = {}
        self._by_units: dict[tuple[object, Of], Near] = {}
        self._may: dict[tuple[object, ...], list[Shapes]] = {}
        """What may be below the limit as it was when first asked, by all that this depends on: what recomputes has it in common."""

    def slowest(self, devices: int) -> float:
        """What the forecast adds for the slowest of so many devices."""
        on_cpu = any(is_cpu(group.device) for group in self.space.asked.cluster.groups)
        return 0.0 if on_cpu else slowest_share(devices)

    @cached_property
    def alone(self) -> Kind:
        """Without a pipeline."""
        least_s, promise_s = (self.columns.alone_s(recomputing=every) for every in (False, True))
        return Kind(least_s, promise_s, partial(self._near, "alone"), self._entries_alone, np.zeros(len(least_s), bool))

    @cached_property
    def piped(self) -> Kind:
        """With a stage on each rank."""
        return self._pipelines("piped", splits=any(splits_backward(s) for s in self.space.schedules(2)))

    @cached_property
    def several(self) -> Kind:
        """With several."""
        return self._pipelines("several", splits=True)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Those that the space has."""
        return (self.alone, self.piped, *((self.several,) if SEVERAL in self.space.schedules(2) else ()))

    def _pipelines(self, of: Of, *, splits: bool) -> Kind:
        least_s, promise_s = (self.columns.piped_s(splits=splits, recomputing=every) for every in (False, True))
        twins = np.array([self.space.is_twin(alike) for alike in self.space.alike], dtype=bool)
        return Kind(least_s, promise_s, partial(self._near, of), partial(self._entries_piped, of), twins)

    def least_s(self, alike: Alike) -> float:
        """Seconds that everything which is so alike takes at least, from the units alone."""
        at = self.space.alike.index(alike)
        return min(float(kind.least_s[at]) for kind in self.kinds)

    def of(self, alike: Alike) -> Iterator[Entry]:
        """The shapes of one alike that the memory does not rule out."""
        for kind in self.kinds:
            kind.near(alike, float("inf"))
            yield from kind.entries(alike, float("inf"))

    def _near(self, of: Of, alike: Alike, limit_s: float) -> tuple[float, float]:
        """The promise and the floor of the shapes that may be below the limit and that the memory leaves possible; the shapes are
        kept. Counts those that it does not leave."""
        key = self.columns.same(alike), of
        if key not in self._by_units:  # the limit never rises: what was kept for one before is all that may be below
            self._by_units[key] = self._near_by_units(of, alike, limit_s)
        found = self._by_units[key]
        self.too_large += found.too_large
        self._kept[alike, of] = found.kept
        if of != "alone" or not found.kept:
            return found.promise_s, found.floor_s
        return self._near_alone(alike, limit_s)

    def _near_by_units(self, of: Of, alike: Alike, limit_s: float) -> Near:
        """By the units alone, and by memory."""
        speeds, cells = self.columns.speeds(alike), self.columns.cells(alike, pipelined=of != "alone")
        recomputing = self.columns.recomputing(alike)
        total = self.space.micro_batches(alike)
        kept: list[Shapes] = []
        promise_s, floor_s, too_large = float("inf"), float("inf"), 0
        key = id(speeds), cells, alike.width, total, of  # the columns keep their speeds
        if key not in self._may:
            self._may[key] = list(self._below(limit_s, speeds, cells, total, self._shapes(alike.width, total, of)))
        for may in self._may[key]:
            holds = self.columns.holds(alike, may.schedule, -(-total // may.replicas), may.pipeline)
            too_large += int((~holds).sum())
            if holds.any():
                kept.append(may.where(holds))
                promise = self._floors_s(recomputing, cells, total, kept[-1]._replace(schedule="GPipe"))
                floors = self._floors_s(speeds, cells, total, kept[-1])
                promise_s, floor_s = min(promise_s, float(promise.min())), min(floor_s, float(floors.min()))
        return Near(kept, promise_s, floor_s, too_large)

    def _below(
        self, limit_s: float, speeds: Speeds, cells: Sequence[int], total: int, of: Sequence[Shapes]
    ) -> Iterator[Shapes]:
        """The shapes that may be below a limit, by the units alone."""
        for shapes in of:
            may = shapes.where(self._floors_s(speeds, cells, total, shapes) < limit_s)
            if len(may.replicas) and may.pipeline[0] > 1:
                paced = paced_s(speeds, cells, total, may.pipeline, may.replicas) * may.slowest
                may = may._replace(paced_s=paced).where(paced < limit_s)
            if len(may.replicas):
                yield may

    def _near_alone(self, alike: Alike, limit_s: float) -> tuple[float, float]:
        """The floor of the kept shapes without a pipeline, with what gathers weights beside the layers."""
        kept, least_s, tables = [], float("inf"), self._whole(alike)
        by_units, by_stages = (cache(partial(tables.least_whole_s, of)) for of in (_by_units, _by_stages))
        for shapes in self._kept[alike, "alone"]:
            floors = self._alone_s(alike, shapes, by_units())
            if float(floors.min()) < limit_s:  # else no stage is priced for them
                floors = self._alone_s(alike, shapes, by_stages())
            kept.append(shapes.where(floors < limit_s))
            least_s = min(least_s, float(floors.min()))
        self._kept[alike, "alone"] = [shapes for shapes in kept if len(shapes.replicas)]
        return least_s, least_s

    def _whole(self, alike: Alike) -> LayoutTables:
        """Of the groups whose devices can hold the whole model."""
        there = self.columns.cells(alike, pipelined=False)
        groups, light = (
            [of for of, count in zip(cells, there, strict=True) if count]
            for cells in (self.cells(alike, False, 1), self._light(alike, False, 1))
        )
        return LayoutTables(groups, layout_of(alike, 1), light if self.space.has_choice(alike) else ())

    def _alone_s(self, alike: Alike, shapes: Shapes, whole_s: Floats) -> Floats:
        """``whole_s``: of a cell of each of these groups for one micro-batch."""
        there = [count for count in self.columns.cells(alike, pipelined=False) if count]
        found = floors_alone_s(whole_s, there, self.space.micro_batches(alike), shapes.replicas)
        return found * shapes.slowest

    def _floors_s(self, speeds: Speeds, cells: Sequence[int], total: int, shapes: Shapes) -> Floats:
        found = floors_s(speeds, cells, total, shapes.pipeline, shapes.replicas, shapes.schedule)
        return np.maximum(found * shapes.slowest, shapes.paced_s)

    def _all_shapes(self, width: int, total: int, of: Of) -> tuple[Shapes, ...]:
        """The legal ones of cells so wide, by schedule."""
        grid, slowest = self.space.grid(width, total), cache(self.slowest)
        found = []
        for schedule in self._schedules(of):
            least = {p: self.space.least(p, schedule) for p in np.unique(grid.pipeline).tolist()}
            legal = self.space.runs(grid, schedule, pipelined=of != "alone")
            legal &= total >= grid.replicas * np.array([least[p] for p in grid.pipeline.tolist()], dtype=np.int64)
            pipeline, replicas = grid.pipeline[legal], grid.replicas[legal]
            devices = (pipeline * replicas * width).tolist()
            more = 1.0 + np.array([slowest(count) for count in devices])
            found.append(Shapes(schedule, pipeline, replicas, more, np.zeros(len(more))))
        return tuple(found)

    def _schedules(self, of: Of) -> tuple[str, ...]:
        if of == "alone":
            return self.space.schedules(1)
        return tuple(s for s in self.space.schedules(2) if (s == SEVERAL) == (of == "several"))

    def _entries_alone(self, alike: Alike, limit_s: float) -> Iterator[Entry]:
        """The shapes without a pipeline that were kept, with floors from the stages that the forecast prices."""
        for shapes in self._kept.pop((alike, "alone")):
            tables = self._whole(alike)
            floors = self._alone_s(alike, shapes, tables.least_whole_s(lambda of: of.work.beside[WHOLE][1]))
            once_s = min(of.work.once for of in (*tables.light, *tables.groups))
            floors = floors + once_s * shapes.slowest
            yield from shapes.entries(alike, floors, floors, limit_s)

    def _entries_piped(self, of: Of, alike: Alike, limit_s: float) -> Iterator[Entry]:
        """Those with one."""
        cells, total = self.columns.cells(alike, pipelined=True), self.space.micro_batches(alike)
        for shapes in self._kept.pop((alike, of)):
            # Where a replica may have a single micro-batch stages are not priced for it before they are placed.
            rough = self.space.least(2, shapes.schedule) < 2
            found, promised = self.columns.speeds(alike), self.columns.recomputing(alike)
            if not rough:
                ways = self._light(alike, True, 2), self.cells(alike, True, 2)
                found, promised = (speeds([of.work for of in cells]) for cells in ways)
            floors = self._floors_s(found, cells, total, shapes)
            promise = self._floors_s(promised, cells, total, shapes._replace(schedule="GPipe"))
            yield from shapes.entries(alike, promise, floors, limit_s)

    def tables(self, shape: Shape, least: int, layout: Parallelism | None = None) -> LayoutTables:
        """What the cells of a shape cost, whose replicas have ``least`` micro-batches at least.

        ``layout``: one of its schedules, where it stands for several. Without, the tables are of what ranks have.
        """
        pipelined = shape.pipeline > 1
        light = self._light(shape.alike, pipelined, least) if self.space.has_choice(shape.alike) else ()
        ranks = shape.schedule == SEVERAL and layout is None
        return LayoutTables(self.cells(shape.alike, pipelined, least), layout or shape.layout(), light, ranks=ranks)

    def _light(self, alike: Alike, pipelined: bool, least: int) -> list[GroupCells]:
        """The cells with as little recomputed as there may be."""
        return self.cells(alike._replace(recompute="none") if self.space.has_choice(alike) else alike, pipelined, least)

    def _cells(self, alike: Alike, pipelined: bool, least: int) -> list[GroupCells]:
        layout, names = layout_of(alike, 2 if pipelined else 1), that_have(self.pricer.cluster.groups, alike.width)
        return [GroupCells(self.pricer, name, layout, least) for name in names]


def _by_units(cells: GroupCells) -> float:
    """Seconds of the whole model for one micro-batch."""
    return cells.units_s


def _by_stages(cells: GroupCells) -> float:
    return cells.least_alone_s
