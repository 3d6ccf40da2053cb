"""Families of layouts: the best of each is shown, however far behind it is, and its twins are counted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from ahp.arrays import Mask
from ahp.plan import Parallelism
from ahp.search.bounds.space_bounds import Bounds
from ahp.search.exact import Outcome, Place
from ahp.search.lighten import lighten
from ahp.search.method import Method, find
from ahp.search.pairs import Pair
from ahp.search.problem import Problem
from ahp.search.recut import recut
from ahp.search.space import Blocks, Space

ASKED_FOR: tuple[tuple[str, Callable[[Blocks], Mask]], ...] = (
    ("no other axis than data parallelism", lambda b: (b.tensor == 1) & (b.pipeline == 1) & (b.context == 1) & (b.expert == 1)),
    ("no pipeline", lambda b: b.pipeline == 1),
    ("no tensor parallelism", lambda b: b.tensor == 1),
)  # fmt: skip
"""Families whose best layout is always searched for: what users ask about first, and what decides a tie."""


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


@dataclass
class Found:
    """The best layouts of the families in ``ASKED_FOR``."""

    pairs: list[Pair] = field(default_factory=list)
    places: dict[Parallelism, Place] = field(default_factory=dict)
    """The row that each layout comes from."""
    words: dict[Parallelism, tuple[str, ...]] = field(default_factory=dict)
    """What each layout's cut into stages and its recomputed layers gain."""


def asked_for(used: Problem, bounds: Bounds, space: Space, priced: Outcome) -> Found:
    """The best of each family in ``ASKED_FOR`` that has no row among the priced ones, with the best cut into stages that was found
    and with as few layers recomputed as memory allows."""
    told, known = Found(), {block for (block, _), _ in priced.fitting}
    for _, of in ASKED_FOR:
        mask = of(space.blocks)
        if mask[list(known)].any() or not mask.any():
            continue
        found = find(used, bounds, space, Method(), 1, only=mask)
        if not found.fitting:
            continue
        place, forecast = found.fitting[0]
        known.add(place[0])
        better = recut(used, [(space.layout(*place), forecast)])
        lighter = lighten(used, better.ranked)
        layout = lighter.ranked[0][0]
        told.pairs.append(lighter.ranked[0])
        told.places[layout] = place
        told.words[layout] = tuple(filter(None, (better.words(layout), lighter.words(layout))))
    return told
