"""Placements of a shape with several stages per rank, under each schedule that has them.

Where they are few, every cut into stages under every schedule is looked at, in the order of a bound. Otherwise layers and micro-batches
are balanced as with one stage per rank, and each rank's layers go to its stages as evenly as possible.

A rank is busy for all its stages, m times. It cannot begin before the first micro-batch has come through the ranks before it,
and it ends with a backward pass that goes on through these ranks, unless weight gradients come last:

    sum of F of the first stages of the ranks before + m t + (sum of their backward passes, where those are not split)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from operator import le

import numpy as np

from ahp.arrays import Floats, Ints, Mask
from ahp.errors import BadInput, NotExpressible
from ahp.schedule.patterns import stage_ranks
from ahp.schedule.registry import get
from ahp.search.choices import ScheduleChoice
from ahp.search.fewest import fewest, lowest_first
from ahp.search.mixed.solve import Ends, Placement, Price, Row, Solved, Task
from ahp.search.mixed.tables import LayoutTables, RankCosts

LOOKED_AT = (
    ScheduleChoice("Interleaved1F1B", 2),
    ScheduleChoice("Interleaved1F1B", 4),
    ScheduleChoice("InterleavedZeroBubble", 2),
    ScheduleChoice("ZBVZeroBubble", 2),
)
"""The schedules that are tried where placements and schedules are many: those with the least memory and those with the least bubble."""

CHOICES = 64
"""The most choices of recomputed layers that are all looked at: for the stages of one rank, and then for all ranks together."""


@dataclass(frozen=True)
class SeveralTask(Task):
    """One such shape; its ``tables`` are by rank, for all stages that a rank has."""

    one: Task
    """The same shape with one stage per rank, whose layers and micro-batches are balanced."""
    of_pipe: Callable[[ScheduleChoice], LayoutTables]
    """The tables of a schedule, by stage."""
    legal: Callable[[ScheduleChoice, Ints], Mask]
    """Whether a replica can have each number of micro-batches under a schedule."""

    def _tables_of(self, pipe: ScheduleChoice) -> LayoutTables:
        return self.of_pipe(pipe)

    def _ends(self, pipe: ScheduleChoice, kinds: Ints, cut: Ints, micro_batches: Ints) -> Ends:
        costs, legal = self._costs(pipe, kinds, cut, micro_batches), self.legal(pipe, micro_batches)
        return Ends(self._least_s(pipe, costs, micro_batches), costs.fits.all(axis=-1) & legal, costs.recomputed)

    def _costs(self, pipe: ScheduleChoice, kinds: Ints, cut: Ints | Sequence[int], micro_batches: Ints) -> RankCosts:
        """Costs, from the group of each rank."""
        return self.of_pipe(pipe).of_ranks(kinds, cut, micro_batches)

    def _ranks(self, pipe: ScheduleChoice) -> Ints:
        return np.array(stage_ranks(pipe.schedule, self.shape.pipeline, pipe.virtual))

    def _least_s(self, pipe: ScheduleChoice, costs: RankCosts, micro_batches: Ints) -> Floats:
        """[...] Seconds of a replica, at least."""
        first = (costs.forward if get(pipe.schedule).splits_backward else costs.light)[..., : self.shape.pipeline]
        before = np.cumsum(first, axis=-1) - first
        return (before + micro_batches[..., None] * costs.busy).max(axis=-1)

    # -- recompute --------------------------------------------------------------------------------------------------

    def _lightest(self, price: Price, placement: Placement) -> tuple[list[Placement], bool]:
        if not self._is_open:
            return [placement], True
        found = self._smallest(placement)
        return ([self._with_fewest(price, placement)], False) if found is None else (found, True)

    def _smallest(self, placement: Placement) -> list[Placement] | None:
        """The placement with each minimal choice of recomputed layers, as fewer never take longer; None where there are too many to look at.

        What a cell keeps depends only on the numbers of its own stages.
        """
        ranks = self._ranks(placement.pipe)
        every = (product(*(range(n + 1) for n in own)) for own in _of_ranks(placement.layers, ranks))
        ways = [list(islice(of_rank, CHOICES + 1)) for of_rank in every]
        if max(map(len, ways)) > CHOICES:
            return None
        try:
            fits = self.cells_fit(placement.of(self.shape, self.names))
        except (BadInput, NotExpressible):
            return [placement]  # pricing it gives the reason
        rows: dict[Row, list[Row]] = {}
        for replica, row in enumerate(placement.rows):
            if row not in rows:
                smallest = self._smallest_of_ranks(partial(fits, replica), ways, ranks)
                if not all(smallest):
                    return []
                some = islice(product(*smallest), CHOICES + 1)
                rows[row] = [row._replace(recomputed=_by_stage(of_ranks, ranks)) for of_ranks in some]
        found = list(islice(product(*(rows[row] for row in placement.rows)), CHOICES + 1))
        return None if len(found) > CHOICES else [replace(placement, rows=rows) for rows in found]

    def _smallest_of_ranks(
        self, fits: Callable[[Sequence[int]], Sequence[bool]], ways: list[list[tuple[int, ...]]], ranks: Ints
    ) -> list[list[tuple[int, ...]]]:
        found: list[list[tuple[int, ...]]] = [[] for _ in ways]
        for number in range(max(map(len, ways))):
            some = [of_rank[min(number, len(of_rank) - 1)] for of_rank in ways]
            left = [
                number < len(of_rank) and not any(all(map(le, less, one)) for less in smallest)
                for of_rank, one, smallest in zip(ways, some, found, strict=True)
            ]
            if not any(left):
                continue
            for rank, fit in enumerate(fits(_by_stage(some, ranks))):
                if fit and left[rank]:
                    found[rank].append(some[rank])  # smaller ones come first
        return found

    def _fewest(
        self, placement: Placement, at_least: tuple[int, ...], fits: Callable[[Sequence[int]], Sequence[bool]]
    ) -> tuple[int, ...]:
        """The fewest of each rank, put into its first stages, where the most micro-batches wait."""
        ranks = self._ranks(placement.pipe)
        least, most = (list(map(sum, _of_ranks(numbers, ranks))) for numbers in (at_least, placement.layers))

        def by_stage(numbers: Sequence[int]) -> tuple[int, ...]:
            return lowest_first(numbers, placement.layers, ranks.tolist())

        return by_stage(fewest(lambda numbers: fits(by_stage(numbers)), least, most))

    # -- where placements are many ----------------------------------------------------------------------------------

    def promising(self) -> list[Placement]:
        """The most promising placement with one stage per rank that any schedule can take, under each schedule that is tried."""
        found: list[Placement] = []
        for placement in self.one.promising():
            if found := list(self._spread(placement)):
                break
        return sorted(found, key=lambda placement: placement.at_least_s)

    def of_families(self) -> Iterator[Placement]:
        """The members of the families, under each schedule that is tried."""
        for placement in self.one.of_families():
            yield from self._spread(placement)

    def first_that_fits(self, price: Price, found: list[Placement]) -> Solved:
        """Price every placement that can still win: the one with the lowest bound need not be the fastest that fits."""
        solved = Solved()
        for placement in found:
            if solved.best is None or placement.at_least_s < solved.best[1].step_time_s:
                self._price(price, self._layout(self._with_fewest(price, placement)), solved)
        return solved

    def _spread(self, placement: Placement) -> Iterator[Placement]:
        """The placement under each schedule, with the layers of each rank spread over its stages."""
        few, m = len(self.pipes) <= len(LOOKED_AT), np.array([row.micro_batches for row in placement.rows])
        for pipe in self.pipes:
            goes_round = min(placement.layers) >= pipe.virtual or self.fixed.layers is not None
            if goes_round and (few or pipe in LOOKED_AT) and self.legal(pipe, m).all():
                yield from self._under(pipe, placement)

    def _under(self, pipe: ScheduleChoice, placement: Placement) -> Iterator[Placement]:
        """The placement under one schedule, where its memory may suffice."""
        ranks, v = self._ranks(pipe), pipe.virtual
        parts = [[n // v + (part < n % v) for part in range(v)] for n in placement.layers]
        cut = self.fixed.layers or _by_stage(parts, ranks)
        kinds, m = (np.array(of) for of in zip(*(row[:2] for row in placement.rows), strict=True))
        costs = self._costs(pipe, kinds, cut, m)
        rows = [
            row._replace(recomputed=self._recomputed(some))
            for row, some in zip(placement.rows, costs.recomputed.tolist(), strict=True)
        ]
        if costs.fits.all() and all(map(le, self.fixed.fewest_layers(len(cut)), cut)):
            yield self._placement(rows, cut, float(self._least_s(pipe, costs, m).max()), pipe)


def _of_ranks(values: Sequence[int], ranks: Ints) -> list[list[int]]:
    """The values of each rank in the order of its stages, from those in pipeline order."""
    return [np.array(values)[ranks == rank].tolist() for rank in range(int(ranks.max()) + 1)]


def _by_stage(of_ranks: Sequence[Sequence[int]], ranks: Ints) -> tuple[int, ...]:
    """Values in pipeline order, from the values of each rank in the order of its stages."""
    left = [iter(of_rank) for of_rank in of_ranks]
    return tuple(next(left[rank]) for rank in ranks.tolist())
