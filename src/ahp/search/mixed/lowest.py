"""The lowest floor of the shapes that may still win: no layout of these takes less time.

Limits rise in steps. At each, most shapes turn out to take longer by cheap floors (``mixed.floors``), and only the others get closer ones. The
search for the lowest ends at the first limit above a shape that may win. A floor needs to be known no better than that it is above the
lowest one so far.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ahp.search.mixed.by_replicas import AT_LIMIT
from ahp.search.mixed.floors import ShapeFloors, ShapeKind
from ahp.search.mixed.queue import Queue
from ahp.search.mixed.shapes import Shapes
from ahp.search.mixed.space import Shape

FIRST = 0.88
"""[Empirical] The first limit as a share of the best time: most lowest floors of large clusters are a little below."""

STEP = 1.03
"""By which factor limits rise."""

TOGETHER = 1024
"""How many shapes get the closest floors at once."""


def lowest_floor_s(
    floors: ShapeFloors, kind: ShapeKind, best_s: float, below_s: float, may_win: Callable[[Shape], bool]
) -> float:
    """The lowest floor in seconds of the shapes of a kind that may win, as close as it can be known; infinite where none is below ``below_s``.

    ``best_s``: the best time found; the first limit depends on it.
    """
    if kind == "alone":
        popped = Queue(floors, kind, below_s).popped(below_s)
        return next((floor_s for floor_s, shape in popped if may_win(shape)), float("inf"))
    rest, longer, limit_s = floors.by_work(kind, below_s), Shapes.all([]), min(FIRST * best_s, below_s)
    while True:
        some, rest = rest.split(limit_s)
        some = floors.by_memory(kind, some)
        some = floors.by_replicas(Shapes.all([longer, some.where(some.floor_s < np.inf)]), limit_s)
        shorter = some.floor_s < limit_s * AT_LIMIT
        lowest_s, longer = _closely(floors, kind, some.where(shorter).sorted(), limit_s, may_win)
        if lowest_s < limit_s:
            return lowest_s
        if limit_s >= below_s:
            return float("inf")
        longer, limit_s = Shapes.all([some.where(~shorter), longer]), min(STEP * limit_s, below_s)


def _closely(
    floors: ShapeFloors, kind: ShapeKind, some: Shapes, limit_s: float, may_win: Callable[[Shape], bool]
) -> tuple[float, Shapes]:
    """The lowest floor below a limit of some shapes that may win, or the limit; and the shapes that take longer than it."""
    longer = [Shapes.all([])]
    while len(some.rows):
        of, some = some.where(slice(TOGETHER)), some.where(slice(TOGETHER, None))
        of = floors.by_replicas(of, limit_s, closely=True).sorted()
        shorter = of.floor_s < limit_s * AT_LIMIT
        longer.append(of.where(~shorter))
        for at in np.flatnonzero(shorter).tolist():
            if any(map(may_win, floors.shapes(kind, of, at))):
                limit_s = float(of.floor_s[at])
                some = some.where(some.floor_s < limit_s * AT_LIMIT)
                break
    return limit_s, Shapes.all(longer)
