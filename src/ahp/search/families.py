"""Families of layouts: the best of each is shown, however far behind it is, and its twins are counted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from ahp.arrays import Mask
from ahp.plan import Parallelism
from ahp.search.bounds.space_bounds import Bounds
from ahp.search.exact import Outcome
from ahp.search.lighten import lighten
from ahp.search.method import Method, find
from ahp.search.pairs import Improved, Pair, by_time
from ahp.search.problem import Problem
from ahp.search.recut import recut
from ahp.search.space import Blocks

ASKED_FOR: tuple[Callable[[Blocks], Mask], ...] = (
    lambda b: (b.tensor == 1) & (b.pipeline == 1) & (b.context == 1) & (b.expert == 1),
    lambda b: b.pipeline == 1,
    lambda b: b.tensor == 1,
)
"""Families whose best layout is always searched for, because users ask about them first and they decide a tie: only data parallelism, no
pipeline, no tensor parallelism."""


def family(layout: Parallelism) -> tuple[str, ...]:
    """What a layout divides besides the batch: layouts of one family divide the same things by different degrees."""
    degrees = {
        "tensor": max(tensor for _, tensor in layout.widths),
        "pipeline": layout.pipeline_parallel_degree,
        "context": layout.context_parallel_degree,
        "experts": layout.expert_parallel_degree,
    }
    return tuple(name for name, degree in degrees.items() if degree > 1)


def best_of_each(pairs: Iterable[Pair], always: Collection[Parallelism] = ()) -> list[Pair]:
    """The first layout of every family, and those of ``always``, in the order given."""
    found, seen = [], set()
    for pair in pairs:
        own = family(pair[0])
        if own not in seen or pair[0] in always:
            found.append(pair)
        seen.add(own)
    return found


def with_families(used: Problem, bounds: Bounds, priced: Outcome, rows: Improved) -> Improved:
    """The rows, and the best of each family in ``ASKED_FOR`` that has no row among the priced ones, with the best cut into stages that was found
    and with as few layers recomputed as memory allows. What is forecast for these is not counted."""
    space = bounds.space
    pairs, places, words = list(rows.ranked), dict(rows.places), dict(rows.words)
    known = {block for (block, _), _ in priced.fitting}
    for of in ASKED_FOR:
        mask = of(space.blocks)
        if mask[list(known)].any() or not mask.any():
            continue
        found = find(used, bounds, Method(), 1, only=mask)
        if not found.fitting:
            continue
        place, forecast = found.fitting[0]
        known.add(place[0])
        layout = space.layout(*place)
        places[layout] = place
        lighter = lighten(used, recut(used, Improved([(layout, forecast)])))
        pairs += lighter.ranked
        words |= lighter.words
    return replace(rows, ranked=by_time(pairs), places=places, words=words)
