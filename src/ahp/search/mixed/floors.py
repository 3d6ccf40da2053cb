"""Floors of the shapes of a space: from columns for all shapes at once, and closer for shapes without a pipeline that may win.

First the work over the speed of all cells, with the time in which pipelines fill: in T seconds each cell of group g, which takes z for the
whole model, does T / z - 1 micro-batches, so R replicas do M <= the sum of these + R (1 + (p - 1) f), where f is the largest share of
forward passes. With a split backward pass, f is the larger share of forward passes and of weight gradients, and the first 1 is the share of
all but weight gradients (``mixed.capacity`` proves both). Then memory rules some out, and a linear program bounds the lowest (``mixed.replicas``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Literal

import numpy as np

from ahp.arrays import Floats, Ints, Mask
from ahp.cached_method import cached_method
from ahp.forecast.assembly import slowest_share
from ahp.forecast.cell_columns import WHOLE, CellColumns, that_have
from ahp.forecast.cells import GroupCells
from ahp.forecast.efficiency import is_cpu
from ahp.forecast.mixed import MixedPricer
from ahp.forecast.stage_room import Positions, StageRoom
from ahp.plan import Parallelism
from ahp.search.mixed.by_replicas import ByReplicas, Layouts
from ahp.search.mixed.capacity import late_of
from ahp.search.mixed.shapes import Shapes
from ahp.search.mixed.space import SEVERAL, Alike, MixedSpace, Shape, layout_of
from ahp.search.mixed.tables import LayoutTables

ShapeKind = Literal["alone", "piped", "several"]
"""Shapes without a pipeline, with one stage per rank, and with several stages per rank."""

ROUNDING = 1e-12
"""The share by which rounding can make a whole number of micro-batches too small."""


class ShapeFloors:
    """Floors of the shapes of a space."""

    def __init__(self, pricer: MixedPricer, space: MixedSpace) -> None:
        self.pricer, self.space = pricer, space
        alikes = space.alike
        choice = [space.has_choice(alike) for alike in alikes]
        self.columns = CellColumns.of(pricer, [layout_of(alike, 2) for alike in alikes], may_choose=choice)
        self._rows = {alike: row for row, alike in enumerate(alikes)}
        self._cells = np.array([space.cells(alike.width) for alike in alikes], dtype=np.int64)
        self._total = np.array([space.micro_batches(alike) for alike in alikes], dtype=np.int64)
        self._width = np.array([alike.width for alike in alikes], dtype=np.int64)
        work = self.columns.work
        self._whole_s = self.columns.num_layers * (work.layer_s + self.columns.copied_of(1).min(axis=2)) + work.head_s
        """[N, G] Seconds of the whole model for one micro-batch."""
        self._layouts = Layouts(self.columns, self._cells, self._total, space.schedules(2))
        self._is_covered = self._covered()
        self._on_cpu = any(is_cpu(group.device) for group in space.asked.cluster.groups)

    @cached_property
    def _by_replicas(self) -> ByReplicas:
        return ByReplicas(self._layouts, self.space.alike)

    def _covered(self) -> Mask:
        """[N] Whether another row has all layouts of this one: stages that can recompute fewer than all of their layers can recompute none."""
        there = set(self.space.alike)
        others = (alike._replace(recompute="full") for alike in self.space.alike)
        return np.array([
            alike.recompute == "none" and other in there and self.space.has_choice(other)
            for alike, other in zip(self.space.alike, others, strict=True)
        ], dtype=bool)  # fmt: skip

    @cached_method
    def slowest(self, devices: int) -> float:
        """The share that the forecast adds for the slowest of ``devices`` devices."""
        return 0.0 if self._on_cpu else slowest_share(devices)

    @property
    def kinds(self) -> tuple[ShapeKind, ...]:
        """The kinds of shapes that the space has."""
        return ("alone", "piped", "several") if SEVERAL in self.space.schedules(2) else ("alone", "piped")

    def least_s(self) -> float:
        """Seconds that the work of any shape takes at least on all cells of the cluster."""
        rate = (self._cells / self._whole_s).sum(axis=1)
        return float((self._total / np.maximum(rate, 1e-300)).min(initial=np.inf))

    def of_any_widths_s(self) -> float:
        """Seconds that a step takes at least where each stage may have another width: all devices of a group compute layers all the time, at the
        width and micro-batch at which they are fastest; the head counts as the fewest layers that take as long on any group."""
        space, work, there = self.space, self.columns.work, self._cells > 0
        sequences = np.array([alike.shard * alike.micro_batch for alike in space.alike])
        rates = np.where(there, (sequences / self._width)[:, None] / np.maximum(work.layer_s, 1e-300), 0.0).max(axis=0)
        layers = self.columns.num_layers + (work.head_s / np.maximum(work.layer_s, 1e-300))[there].min()
        devices = np.array([group.num_devices for group in space.asked.cluster.groups])
        return float(space.asked.job.global_batch_size * layers / (rates @ devices))

    def by_work(self, kind: ShapeKind, limit_s: float) -> Shapes:
        """The shapes of a kind whose floor by work and speed is below a limit, the lowest first. The first of several rows with the same columns
        and shapes stands for all."""
        rows = np.array(list(self._members(kind)), dtype=np.int64)
        return Shapes.all(list(self._blocks(rows, kind, limit_s))).sorted()

    def by_memory(self, kind: ShapeKind, of: Shapes) -> Shapes:
        """The same shapes with floors that count memory: for pipelines, infinite where memory does not hold the layers."""
        if kind == "alone":
            return self._alone(of)
        found = of.floor_s.copy()
        for schedule, p in np.unique(np.stack([of.schedule, of.pipeline]), axis=1).T.tolist():
            some = np.flatnonzero((of.schedule == schedule) & (of.pipeline == p))
            hold = self._layouts.depth(schedule, p).hold(of.where(some))
            found[some[~hold]] = np.inf
        return of._replace(floor_s=found)

    def by_replicas(self, of: Shapes, limit_s: float, *, closely: bool = False) -> Shapes:
        """The same pipelines with floors by what all replicas do together, as far as these are below the limit; ``closely``: higher ones, for
        which many shapes take long."""
        return self._layouts.floors(of, limit_s, closely=True) if closely else self._by_replicas.floors(of, limit_s)

    def shapes(self, kind: ShapeKind, of: Shapes, at: int) -> list[Shape]:
        """The shapes that the entry ``at`` stands for, one for each row."""
        pipeline, replicas = int(of.pipeline[at]), int(of.replicas[at])
        schedule = self.space.schedules(min(pipeline, 2))[int(of.schedule[at])]
        rows = self._members(kind)[int(of.rows[at])]
        return [Shape(self.space.alike[row], pipeline, replicas, schedule) for row in rows]

    @cached_method
    def _members(self, kind: ShapeKind) -> dict[int, list[int]]:
        """Rows that have everything in common, keyed by the first row; without covered rows and twins."""
        there, columns = ~self._is_covered, self.columns.same[int(kind == "alone")]
        if kind != "alone":
            there &= ~np.array([self.space.is_twin(alike) for alike in self.space.alike], dtype=bool)
        found: dict[tuple[int, ...], list[int]] = {}
        for row, *same in np.stack([np.arange(len(there)), columns, self._width, self._total], axis=1)[there].tolist():
            found.setdefault(tuple(same), []).append(row)
        return {rows[0]: rows for rows in found.values()}

    # -- by work and speed --------------------------------------------------------------------------------------------

    def _blocks(self, rows: Ints, kind: ShapeKind, limit_s: float) -> Iterator[Shapes]:
        """Blocks of shapes whose rows share cell width and number of micro-batches, one for each schedule, with floors by work and speed."""
        rate = (self._cells[rows] / self._whole_s[rows]).sum(axis=1)
        rows = rows[self._total[rows] / np.maximum(rate, 1e-300) < limit_s]
        keys = np.stack([self._width[rows], self._total[rows]], axis=1)
        names = self.space.schedules(1 if kind == "alone" else 2)
        for width, total in np.unique(keys, axis=0).tolist():
            own = rows[(keys == (width, total)).all(axis=1)]
            grid = self.space.grid(width, total)
            for schedule, name in enumerate(names):
                if kind != "alone" and (name == SEVERAL) != (kind == "several"):
                    continue
                legal = self.space.runs(grid, name, pipelined=kind != "alone")
                p, r = grid.pipeline[legal], grid.replicas[legal]
                slowest = 1.0 + np.array([self.slowest(count) for count in (p * r * width).tolist()])
                floors = self._work_s(own, name, total, p, r) * slowest
                at, of = np.nonzero(floors < limit_s)
                if len(at):
                    yield Shapes(np.full(len(at), schedule), own[at], p[of], r[of], slowest[of], floors[at, of])

    def _work_s(self, rows: Ints, schedule: str, total: int, pipeline: Ints, replicas: Ints) -> Floats:
        """[n, S] Floors by work and speed, of ``rows`` [n] with each pair [S] of stages and replicas."""
        whole_s, work, num_layers = self._whole_s[rows], self.columns.work, self.columns.num_layers
        if (pipeline == 1).all():
            return work_s(whole_s, self._cells[rows], total, pipeline, replicas, np.ones(len(rows)), ())
        late = late_of(self.columns, rows, schedule, self.columns.copied_of(1)[rows].min(axis=2))
        apart_s = num_layers * late.layer_s + (late.layer_s > 0) * work.weight_share[rows] * work.head_s[rows]
        way, share, inside = 1.0 - (apart_s / whole_s).max(axis=1), late.share[:, None], late.inside[:, None]
        ahead = () if schedule == SEVERAL else ((1.0, 1.0 + share * (pipeline - 1)), (inside, 1.0))
        return work_s(whole_s, self._cells[rows], total, pipeline, replicas, way, ahead)

    def _alone(self, of: Shapes) -> Shapes:
        """Shapes without a pipeline, with floors for as many layers recomputed as memory needs."""
        own, which = np.unique(of.rows, return_inverse=True)
        place = Positions(*(np.array([number]) for number in (1, WHOLE, 1)))
        seconds = StageRoom.of(self.columns, own, place, 1).seconds(np.array(float(self.columns.num_layers)))[..., 0]
        whole_s = (seconds + self.columns.work.head_s[own])[which]
        least_s = whole_micro_batches_s(whole_s, self._cells[of.rows], self._total[of.rows], of.replicas)
        return of._replace(floor_s=np.maximum(least_s * of.slowest, of.floor_s))

    def closer_s(self, shape: Shape) -> float:
        """The floor of a shape without a pipeline, including weight gathering and what comes once per step."""
        row = self._rows[shape.alike]
        whole_s, once_s = self.priced(row)
        least_s = whole_micro_batches_s(
            whole_s[None], self._cells[[row]], self._total[[row]], np.array([shape.replicas])
        )
        return float(least_s[0] + once_s) * (1.0 + self.slowest(shape.replicas * shape.alike.width))

    @cached_method
    def priced(self, row: int) -> tuple[Floats, float]:
        """[G] Seconds of the whole model for one micro-batch on a cell, from priced stages, and seconds of what comes once per step."""
        alike, there = self.space.alike[row], self._cells[row] > 0
        tables = self._tables(alike, layout_of(alike, 1))
        whole_s = tables.least_whole_s(there)
        used = np.flatnonzero(np.isfinite(whole_s)).tolist()
        # More recompute hides more.
        return whole_s, min(
            (of[group].line.once for of in (tables.light, tables.groups) for group in used), default=0.0
        )

    def fastest_first(self, alike: Alike) -> tuple[int, ...]:
        """The groups in the order of their time for a layer."""
        return tuple(np.argsort(self.columns.work.layer_s[self._rows[alike]], kind="stable").tolist())

    # -- what placements cost -----------------------------------------------------------------------------------------

    def tables(self, shape: Shape, layout: Parallelism | None = None) -> LayoutTables:
        """What the cells of a shape cost.

        ``layout``: the shape in one schedule, where it stands for several. Without it, the tables are by rank, not by stage.
        """
        ranks = shape.schedule == SEVERAL and layout is None
        return self._tables(shape.alike, layout or shape.layout(), ranks=ranks)

    def _tables(self, alike: Alike, layout: Parallelism, *, ranks: bool = False) -> LayoutTables:
        pipelined = layout.pipeline_parallel_degree > 1
        light = alike._replace(recompute="none")
        return LayoutTables(
            self.columns, self._rows[alike], self.group_cells(alike, pipelined), layout,
            self.group_cells(light, pipelined) if self.space.has_choice(alike) else (),
            layers=self.space.asked.graph.layers, ranks=ranks,
        )  # fmt: skip

    @cached_method
    def group_cells(self, alike: Alike, pipelined: bool) -> list[GroupCells]:
        layout, names = layout_of(alike, 2 if pipelined else 1), that_have(self.pricer.cluster.groups, alike.width)
        each = {name: GroupCells(self.pricer, name, layout) for name in set(names)}
        return [each[name] for name in names]


def work_s(
    whole_s: Floats,
    cells: Ints,
    total: int,
    pipeline: Ints,
    replicas: Ints,
    way: Floats,
    ahead: Sequence[tuple[Floats | float, Floats | float]],
) -> Floats:
    """[n, S] Seconds that ``total`` micro-batches take at least with ``replicas`` of ``pipeline`` stages, [S]; ``whole_s``, ``cells``: [n, G].

    ``way``: [n] the share of a micro-batch's time that passes one stage after another; ``ahead``: for each bound that uses this way, the share
    of the other micro-batches' time that counts, and by how many micro-batches a replica is ahead: each broadcasts to [n, S].
    """
    order = np.argsort(whole_s, axis=1, kind="stable")
    seconds, there = (np.take_along_axis(of, order, axis=1) for of in (whole_s, cells))
    left = np.broadcast_to((replicas * pipeline).astype(float), (len(seconds), len(pipeline)))
    needs = [share * (total - replicas * by) for share, by in ahead]
    speed, best = np.zeros(left.shape), [np.full(left.shape, np.inf) for _ in ahead]
    for group in range(seconds.shape[1]):
        used = np.minimum(there[:, group, None], left)
        left, speed = left - used, speed + used / seconds[:, group, None]
        needs = [need + used * way[:, None] for need in needs]
        each = [np.maximum(need, 0.0) / np.maximum(speed, 1e-300) for need in needs]
        best = [np.minimum(so_far, np.where(speed > 0, now, np.inf)) for so_far, now in zip(best, each, strict=True)]
    way_s = way * np.where(cells > 0, whole_s, np.inf).min(axis=1)
    all_s = total / np.maximum(speed, 1e-300)
    return np.where(left > 0, np.inf, np.maximum.reduce([all_s, way_s[:, None] + 0 * all_s, *best]))


def whole_micro_batches_s(whole_s: Floats, cells: Ints, total: Ints, replicas: Ints) -> Floats:
    """[n] Seconds that ``total`` micro-batches take at least on ``replicas`` cells, each with a whole number of micro-batches, at least one.

    ``whole_s``: [n, G] seconds of one micro-batch on a cell; infinite where its memory is too small.
    """
    order = np.argsort(whole_s, axis=1, kind="stable")
    seconds, there = (
        np.take_along_axis(of, order, axis=1) for of in (whole_s, np.where(np.isfinite(whole_s), cells, 0))
    )
    ends = np.cumsum(there, axis=1)
    used = np.diff(np.minimum(ends, replicas[:, None]), axis=1, prepend=0)
    fits = (ends[:, -1] >= replicas) & (replicas <= total)
    each = np.where(used > 0, seconds, np.inf)
    slowest = np.where(used > 0, seconds, 0.0).max(axis=1)
    found = np.maximum(total / np.maximum((used / each).sum(axis=1), 1e-300), slowest)
    left = fits.copy()
    while left.any():
        done = np.where(used > 0, np.floor(found[:, None] / each * (1 + ROUNDING)), 0.0)
        left &= (used * done).sum(axis=1) < total
        found = np.where(left, ((done + 1) * each).min(axis=1), found)
    return np.where(fits, found, np.inf)
