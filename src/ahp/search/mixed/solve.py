"""Placements of one shape: all placements in the order of a bound if they are few, else the best of the families."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise
from math import comb
from operator import le
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ahp.arrays import Floats, Ints, Mask
from ahp.errors import BadInput, NotExpressible
from ahp.plan import Forecast, Parallelism, StagePlace
from ahp.schedule.patterns import stage_ranks
from ahp.schedule.registry import of_ranks
from ahp.search.choices import ScheduleChoice
from ahp.search.fewest import fewest, said_plainly
from ahp.search.mixed.balance import balance, ends_s
from ahp.search.mixed.given import Fixed
from ahp.search.mixed.matrices import Kind, Matrix, families, matrices, num_matrices
from ahp.search.mixed.space import Shape
from ahp.search.mixed.tables import LayoutTables
from ahp.search.stages import cuts

ALL_PLACEMENTS = 20_000
"""Up to this many matrices x cuts x ways to share the micro-batches, all placements are looked at."""

ROWS = 20_000
"""Replicas whose bounds are computed together."""

ORDERS = 24
"""The most orders of a layout's replicas that are priced where all placements are; they differ only in which replicas share a node."""

PRICED = 3
"""The most members of the families that are priced for one shape, until one fits."""

EXACT = 300
"""The most forecasts of a shape whose placements are all looked at; beyond it the best is not proven."""


Price = Callable[[Parallelism], Forecast]
CellsFit = Callable[[Parallelism], Callable[[int, Sequence[int]], Sequence[bool]]]
"""Maps a layout to a function of a replica and the layers that each stage recomputes: whether each cell fits."""


class Row(NamedTuple):
    """One replica."""

    kind: Kind
    micro_batches: int
    recomputed: tuple[int, ...] | None = None
    """Layers that each stage recomputes; None = all, where the layout recomputes any."""


class Ends(NamedTuple):
    """Bounds of replicas, [...]."""

    least_s: Floats
    """When the replica is done, at least."""
    fits: Mask
    recomputed: Ints
    """[..., S] Layers that each stage recomputes, at least."""


@dataclass(frozen=True)
class Placement:
    """Where the cells of a shape lie, its cut into stages, and the micro-batches of each replica."""

    rows: tuple[Row, ...]
    layers: tuple[int, ...]
    at_least_s: float
    pipe: ScheduleChoice

    def of(self, shape: Shape, names: tuple[str, ...]) -> Parallelism:
        """The layout of ``shape`` with this placement."""
        pipe = self.pipe
        ranks = stage_ranks(pipe.schedule, shape.pipeline, pipe.virtual)
        columns = zip(*([row.kind[rank] for rank in ranks] for row in self.rows), strict=True)
        some = zip(*(row.recomputed or (None,) * len(self.layers) for row in self.rows), strict=True)
        stages = tuple(
            StagePlace(
                group=_one_if_alike(tuple(names[group] for group in column)),
                layers=layers,
                recomputed_layers=_one_if_alike(counts),
            )
            for column, layers, counts in zip(columns, self.layers, some, strict=True)
        )
        return shape.layout().model_copy(
            update={
                "pipeline_parallel_schedule": pipe.schedule,
                "virtual_stages_per_rank": pipe.virtual,
                "stages": stages,
                "micro_batches_per_replica": tuple(row.micro_batches for row in self.rows),
            }
        )


def _one_if_alike(values: tuple[Any, ...]) -> Any:
    return values[0] if len(set(values)) == 1 else values


@dataclass
class Solved:
    """What is known about a shape's placements."""

    best: tuple[Parallelism, Forecast] | None = None
    """The fastest priced layout that fits."""
    misfit: tuple[Parallelism, Forecast] | None = None
    """The priced layout with the lowest bound that does not fit."""
    forecasts: int = 0
    proven: bool = False
    """Whether every placement that was not priced takes at least as long as the time to beat or the best found."""


@dataclass(frozen=True)
class Task:
    """One shape to place."""

    shape: Shape
    tables: LayoutTables
    cells: tuple[int, ...]
    """Cells of each group."""
    names: tuple[str, ...]
    """Names of the groups."""
    total: int
    """Micro-batches of all replicas."""
    allowed: NDArray[np.bool_]
    """[M + 1] Whether a replica can have m micro-batches."""
    fastest_first: tuple[int, ...]
    slowest_share: float
    """Share of the pipelines' time that the forecast adds for the slowest rank."""
    fixed: Fixed
    cells_fit: CellsFit
    pipes: tuple[ScheduleChoice, ...]
    """The schedules that the shape stands for."""

    def solve(self, price: Price, beat_s: float) -> Solved:
        """Price every placement that may take less than ``beat_s``, in the order of the bound; only where they are few."""
        found = sorted(self.all(beat_s), key=lambda placement: placement.at_least_s)
        solved = Solved(proven=True)
        for placement in found:
            limit_s = beat_s if solved.best is None else min(beat_s, solved.best[1].step_time_s)
            if placement.at_least_s >= limit_s:
                break
            if solved.forecasts >= EXACT:
                solved.proven = False
                break
            lightest, every = self._lightest(price, placement)
            solved.proven &= every
            for light in lightest:
                for layout in self._orders(light):
                    self._price(price, layout, solved)
        return solved

    def _lightest(self, price: Price, placement: Placement) -> tuple[list[Placement], bool]:
        """The placement with each choice of recomputed layers that may be the fastest, and whether these are all such choices."""
        return [self._with_fewest(price, placement)], True

    def _with_fewest(self, price: Price, placement: Placement) -> Placement:
        """The placement with the fewest layers recomputed that fit by the forecast's memory, where the search chooses them."""
        if not self._is_open:
            return placement
        try:
            if price(self._layout(placement)).fits:  # mostly the bound's numbers are enough
                return placement
            fits = self.cells_fit(placement.of(self.shape, self.names))
        except (BadInput, NotExpressible):
            return placement  # pricing it gives the reason
        known: dict[Row, tuple[int, ...]] = {}
        for replica, row in enumerate(placement.rows):
            if row not in known and row.recomputed is not None:
                known[row] = self._fewest(placement, row.recomputed, partial(fits, replica))
        return replace(placement, rows=tuple(row._replace(recomputed=known[row]) for row in placement.rows))

    def _fewest(
        self, placement: Placement, at_least: tuple[int, ...], fits: Callable[[Sequence[int]], Sequence[bool]]
    ) -> tuple[int, ...]:
        """Layers that each stage of one replica recomputes; ``fits``: whether each cell fits with these numbers."""
        return fewest(fits, at_least, placement.layers)

    @property
    def _is_open(self) -> bool:
        """Whether the search chooses how many layers are recomputed."""
        return self.tables.has_choice and self.fixed.recomputed is None

    def _layout(self, placement: Placement) -> Parallelism:
        layout = placement.of(self.shape, self.names)
        return said_plainly(layout) if self._is_open else layout

    def promising(self) -> list[Placement]:
        """The members of the families with the lowest bounds."""
        return sorted(self.of_families(), key=lambda placement: placement.at_least_s)[:PRICED]

    def first_that_fits(self, price: Price, found: list[Placement]) -> Solved:
        """Price placements until one fits."""
        solved = Solved()
        for placement in found:
            self._price(price, self._layout(self._with_fewest(price, placement)), solved)
            if solved.best is not None:
                break
        return solved

    def _price(self, price: Price, layout: Parallelism, solved: Solved) -> None:
        try:
            forecast = price(layout)
        except (BadInput, NotExpressible):
            return
        solved.forecasts += 1
        if not forecast.fits:
            solved.misfit = solved.misfit or (layout, forecast)
        elif solved.best is None or forecast.step_time_s < solved.best[1].step_time_s:
            solved.best = layout, forecast

    def few(self) -> bool:
        """Whether placements are few enough to look at all."""
        shape, layers = self.shape, self.tables.num_layers
        depths = [shape.pipeline * pipe.virtual for pipe in self.pipes]
        ways = sum(comb(max(layers - 1, 0), n - 1) for n in depths) if self.fixed.layers is None else len(depths)
        ways *= comb(self.total - 1, shape.replicas - 1) if self.fixed.micro_batches is None else 1
        if ways > ALL_PLACEMENTS:
            return False
        most = ALL_PLACEMENTS // max(ways, 1) + 1
        return self.fixed.rows is not None or num_matrices(self.cells, shape.pipeline, shape.replicas, most) < most

    @property
    def _splits(self) -> bool:
        return of_ranks(self.shape.schedule, self.shape.pipeline).splits_backward

    def _matrices(self, *, all_: bool) -> list[Matrix]:
        shape = self.shape
        if self.fixed.rows is not None:
            return [tuple((kind, 1) for kind in self.fixed.rows)]
        if all_ or shape.pipeline * shape.replicas == 1:
            return list(matrices(self.cells, shape.pipeline, shape.replicas))
        return families(self.cells, shape.pipeline, shape.replicas, self.fastest_first)

    def all(self, below_s: float = float("inf")) -> Iterator[Placement]:
        """Every placement whose bound is below ``below_s``, each in one order of its replicas."""
        shares = list(self._shares()) if self.allowed.any() else []
        replicas = [[kind for kind, count in matrix for _ in range(count)] for matrix in self._matrices(all_=True)]
        each = (list(zip(kinds, share, strict=True)) for kinds in replicas for share in shares)
        ways = [pairs for pairs in each if not self._repeats(pairs)]
        if not ways:
            return
        pairs = sorted({pair for way in ways for pair in way})
        number = {pair: at for at, pair in enumerate(pairs)}
        of_ways = np.array([[number[pair] for pair in way] for way in ways])
        kinds, micro_batches = np.array([kind for kind, _ in pairs]), np.array([m for _, m in pairs])
        for pipe in self.pipes:
            num_stages = self.shape.pipeline * pipe.virtual
            most = self._tables_of(pipe).most_layers(np.unique(micro_batches)).max(axis=(0, 1))
            every = cuts(self.tables.num_layers, num_stages) if self.fixed.layers is None else [self.fixed.layers]
            least = self.fixed.fewest_layers(num_stages)
            held = (cut for cut in every if all(map(le, least, cut)) and all(map(le, cut, most)))
            while some := list(islice(held, 1 + ROWS // of_ways.size)):
                ends = self._ends(pipe, kinds[:, None], np.array(some), micro_batches[:, None])
                fits, bounds_s = ends.fits[of_ways].all(axis=1), ends.least_s[of_ways].max(axis=1)
                fits &= bounds_s * (1.0 + self.slowest_share) < below_s
                for at, way in np.argwhere(fits.T).tolist():
                    rows = [
                        Row(kind, m, self._recomputed(ends.recomputed[of, at].tolist()))
                        for (kind, m), of in zip(ways[way], of_ways[way].tolist(), strict=True)
                    ]
                    yield self._placement(rows, some[at], float(bounds_s[way, at]), pipe)

    def _tables_of(self, pipe: ScheduleChoice) -> LayoutTables:
        """The tables of a schedule, by stage."""
        return self.tables

    def _ends(self, pipe: ScheduleChoice, kinds: Ints, cut: Ints, micro_batches: Ints) -> Ends:
        """Bounds of replicas, [...], from kinds [..., p], cuts [..., S] and micro-batches [...]."""
        costs = self.tables.stages(kinds, cut, micro_batches)
        least_s = ends_s(costs.whole, costs.forward, micro_batches, splits=self._splits)
        least_s = least_s + self.tables.last_s[kinds[..., 0], cut[..., 0]]  # the last gradient ends at the first stage
        return Ends(least_s, np.logical_and.reduce(costs.fits, axis=-1), costs.recomputed)

    def _recomputed(self, at_least: list[int]) -> tuple[int, ...] | None:
        return tuple(at_least) if self.tables.has_choice else None

    def _placement(self, rows: list[Row], cut: tuple[int, ...], bound_s: float, pipe: ScheduleChoice) -> Placement:
        given = self.fixed.recomputed
        if given is not None:
            rows = [row._replace(recomputed=some) for row, some in zip(rows, given, strict=True)]
        return Placement(tuple(rows), cut, bound_s * (1.0 + self.slowest_share), pipe)

    def _repeats(self, pairs: list[tuple[Kind, int]]) -> bool:
        """Whether another share differs only in the order of replicas of one kind."""
        if self.fixed.micro_batches is not None or self.fixed.recomputed is not None:
            return False
        return any(a[0] == b[0] and a[1] < b[1] for a, b in pairwise(pairs))

    def _shares(self) -> Iterator[tuple[int, ...]]:
        if self.fixed.micro_batches is not None:
            yield self.fixed.micro_batches
            return
        least = int(self.allowed.argmax())
        extra = self.total - least * self.shape.replicas
        if extra < 0:
            return
        for share in cuts(extra + self.shape.replicas, self.shape.replicas):
            if all(self.allowed[least - 1 + more] for more in share):
                yield tuple(least - 1 + more for more in share)

    def _orders(self, placement: Placement) -> list[Parallelism]:
        if self.fixed.rows is not None or self.fixed.micro_batches is not None:
            return [self._layout(placement)]
        orders = islice(distinct_orders(placement.rows), ORDERS)
        return [self._layout(replace(placement, rows=rows)) for rows in orders]

    def of_families(self) -> Iterator[Placement]:
        """The members of the families, each with layers and micro-batches in balance."""
        for matrix in self._matrices(all_=False):
            kinds, counts = [kind for kind, _ in matrix], [count for _, count in matrix]
            found = balance(
                kinds, counts, self.tables, self.total, self.allowed,
                splits=self._splits, fixed=self.fixed.layers, fewest=self.fixed.fewest_layers(self.shape.pipeline),
            )  # fmt: skip
            if found is None:
                continue
            shared = [(kind, m) for kind, each in zip(kinds, found.micro_batches, strict=True) for m in each]
            if self.fixed.micro_batches is not None:
                shared = [(kind, m) for (kind, _), m in zip(shared, self.fixed.micro_batches, strict=True)]
            yield self._placement(self._rows(shared, found.layers), found.layers, found.at_least_s, self.pipes[0])

    def _rows(self, shared: list[tuple[Kind, int]], cut: tuple[int, ...]) -> list[Row]:
        if not self.tables.has_choice:
            return [Row(kind, m) for kind, m in shared]
        kinds, micro_batches = (np.array(of) for of in zip(*shared, strict=True))
        some = self.tables.stages(kinds, cut, micro_batches).recomputed.tolist()
        return [Row(kind, m, tuple(counts)) for (kind, m), counts in zip(shared, some, strict=True)]


def distinct_orders(rows: Sequence[Row]) -> Iterator[tuple[Row, ...]]:
    """Each distinct order of some replicas once, however many are equal; in the first order, equal ones stand together."""
    kinds = list(dict.fromkeys(rows))
    order = sorted(map(kinds.index, rows))
    while True:
        yield tuple(kinds[kind] for kind in order)
        rise = next((at for at in range(len(order) - 2, -1, -1) if order[at] < order[at + 1]), None)
        if rise is None:
            return
        larger = next(at for at in range(len(order) - 1, rise, -1) if order[at] > order[rise])
        order[rise], order[larger] = order[larger], order[rise]
        order[rise + 1 :] = reversed(order[rise + 1 :])
