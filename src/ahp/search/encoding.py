"""Layouts as points of a cube, so that solvers for functions of real numbers can walk over them.

Every coordinate, 0 to 1, chooses among the values that one key can still have after the choices before it: every point
gives a legal layout, and near points mostly share their first choices. Prices are kept, so a point whose layout was
seen before costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ahp.arrays import Floats
from ahp.errors import BadInput, NotExpressible
from ahp.plan import Forecast
from ahp.search.exact import Outcome, Place
from ahp.search.space import Space

COLUMNS = ("pipeline", "tensor", "context", "expert", "sequence_parallel", "mesh", "micro_batch")
"""The columns of a block in the order of choosing, those that affect time and memory most first. The mesh still leaves open where
ranks lie; the number of replicas follows from the others."""

NUM_GENES = len(COLUMNS) + 3
"""The columns, and how replicas share states, the schedule, and the recompute."""

TOO_LARGE = 10.0
"""Added to the log of the time of a layout that does not fit: its value is then above any that fits, and falls as it needs less."""

REFUSED = 100.0


class Cube:
    """The legal layouts of a space or of some of its blocks."""

    def __init__(self, space: Space, blocks: Sequence[int] | NDArray[np.intp] | None = None) -> None:
        kept = np.arange(len(space.blocks)) if blocks is None else np.asarray(blocks)
        table = np.stack([getattr(space.blocks, name)[kept] for name in COLUMNS], axis=1)
        order = np.lexsort(table.T[::-1])
        self._space, self._sorted, self._order = space, table[order], kept[order]
        changed = np.ones((len(table), len(COLUMNS)), dtype=bool)
        changed[1:] = np.logical_or.accumulate(self._sorted[1:] != self._sorted[:-1], axis=1)
        self._starts = [np.flatnonzero(changed[:, column]) for column in range(len(COLUMNS))]
        """For each column: where in the sorted blocks another value of it, or of a column before it, begins."""

    def place(self, point: Sequence[float] | Floats) -> Place:
        """The layout of a point: its block and its row there."""
        first, end = 0, len(self._sorted)
        for starts, at in zip(self._starts, point, strict=False):
            left, right = (int(found) for found in np.searchsorted(starts, np.array([first, end])))
            chosen = left + _choice(at, right - left)
            first, end = int(starts[chosen]), int(starts[chosen + 1]) if chosen + 1 < right else end
        block = int(self._order[first])
        shape = self._space.rows(block).shape
        row = tuple(_choice(at, count) for at, count in zip(point[len(COLUMNS) :], shape, strict=True))
        return block, int(np.ravel_multi_index(row, shape))


def _choice(at: float, count: int) -> int:
    return min(int(at * count), count - 1)


class BudgetSpent(Exception):
    """The allowed number of layouts has been priced."""


@dataclass
class Objective:
    """The function that solvers minimize: the log of the step time, raised far above that for layouts that do not fit."""

    cube: Cube
    price: Callable[[Place], Forecast]
    capacity_bytes: int
    budget: int
    """How many layouts can be priced."""
    outcome: Outcome = field(default_factory=Outcome)
    _seen: dict[Place, float] = field(default_factory=dict)

    def __call__(self, point: Floats) -> float:
        """The value at a point. Raises BudgetSpent instead of pricing one layout too many."""
        place = self.cube.place(point)
        if place not in self._seen:
            if len(self._seen) >= self.budget:
                raise BudgetSpent
            self._seen[place] = self._value(place)
        return self._seen[place]

    def _value(self, place: Place) -> float:
        try:
            forecast = self.price(place)
        except (BadInput, NotExpressible) as refusal:
            self.outcome.refused.append((place, str(refusal)))
            return REFUSED
        value = float(np.log(forecast.step_time_s))
        if forecast.fits:
            self.outcome.fitting.append((place, forecast))
            return value
        self.outcome.misfits.append((place, forecast))
        return value + TOO_LARGE + float(np.log(forecast.needed_bytes / self.capacity_bytes))


def anneal(objective: Objective, seed: int) -> None:
    """scipy's generalized simulated annealing (arXiv cond-mat/9501016): prices layouts until the budget is spent or ten times as many points
    were tried. The same seed gives the same walk."""
    from scipy.optimize import dual_annealing

    with suppress(BudgetSpent):
        dual_annealing(
            objective,
            [(0.0, 1.0)] * NUM_GENES,
            maxiter=objective.budget,
            maxfun=10 * objective.budget,
            no_local_search=True,  # it follows gradients, and here there are none
            rng=seed,
        )


POPULATION = 4
"""Points for each coordinate; scipy's 15 would spend a small budget on the first generation."""


def evolve(objective: Objective, seed: int) -> None:
    """scipy's differential evolution (Storn and Price, 1997): prices layouts until the budget is spent or the population has converged.
    The same seed gives the same course."""
    from scipy.optimize import differential_evolution

    with suppress(BudgetSpent):
        differential_evolution(
            objective,
            [(0.0, 1.0)] * NUM_GENES,
            maxiter=10 * objective.budget // (POPULATION * NUM_GENES) + 1,
            popsize=POPULATION,
            polish=False,  # it follows gradients, and here there are none
            rng=seed,
        )
