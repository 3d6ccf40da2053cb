"""How a space is searched: exactly, or by a solver with a budget of forecasts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ahp.errors import bad_input
from ahp.plan import Forecast
from ahp.search.bounds.space_bounds import Bounds
from ahp.search.encoding import Cube, Objective, anneal, evolve
from ahp.search.exact import Limits, Outcome, Place, best_first
from ahp.search.problem import Problem

MethodName = Literal["exact", "anneal", "evolve"]
SOLVERS = {"anneal": anneal, "evolve": evolve}


@dataclass(frozen=True)
class Method:
    """How to search. Only annealing and evolution use ``seed`` and ``budget``."""

    name: MethodName = "exact"
    seed: int = 0
    budget: int = 500
    """How many layouts can be priced."""

    def __post_init__(self) -> None:
        if self.name not in get_args(MethodName):
            raise bad_input("method", self.name, "no such method", get_args(MethodName))
        if self.budget < 1:
            raise bad_input("budget", self.budget, "at least one layout must be priced")
        if self.seed < 0:
            raise bad_input("seed", self.seed, "must be 0 or more")


def find(
    used: Problem,
    bounds: Bounds,
    method: Method,
    keep: int,
    ceiling_s: float = float("inf"),
    only: NDArray[np.bool_] | None = None,
    slack: float = 0.0,
) -> Outcome:
    """Price rows of the bounds' space by the method. An exact outcome may be proven; for the other methods the lower bounds limit
    how far from the best they can be. ``ceiling_s``: the exact search leaves out rows that take as long; ``only``: the
    blocks to search, the others count as too large; ``slack``: as in ``Limits``."""
    space, most_bytes = bounds.space, bounds.most_that_fits_bytes()
    blocks_s = bounds.first_s() if only is None else np.where(only, bounds.first_s(), np.inf)

    def price(place: Place) -> Forecast:
        return used.price(space.layout(*place))

    if method.name == "exact":
        return best_first(
            blocks_s,
            space.blocks.rows,
            bounds.levels(blocks_s),
            lambda block: bounds.rows(block, most_bytes).times_s,
            price,
            Limits(keep=keep, ceiling_s=ceiling_s, slack=slack),
        )
    roomy = np.flatnonzero(np.isfinite(blocks_s))
    if not len(roomy):
        return Outcome(too_large=space.num_legal, bounds_s=blocks_s)
    objective = Objective(Cube(space, roomy), price, used.capacity_bytes, method.budget)
    SOLVERS[method.name](objective, method.seed)
    found = objective.outcome
    found.bounds_s, found.too_large = blocks_s, int(space.blocks.rows[np.isinf(blocks_s)].sum())
    return found.settled(space.num_legal, float(blocks_s.min()))
