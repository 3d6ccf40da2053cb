"""The fewest layers that the stages of a placement recompute such that every cell fits, by the forecast's own memory.

Recomputing one layer less never makes a pass longer, and with one stage per rank what a cell keeps depends only on its own
number. So the fewest for every cell are the fastest choice of a placement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ahp.plan import Parallelism


def fewest(
    fits: Callable[[Sequence[int]], Sequence[bool]], at_least: Sequence[int], at_most: Sequence[int]
) -> tuple[int, ...]:
    """The least number for each cell of a replica, between its bounds, with which it fits, or the upper bound.

    ``fits``: whether each cell fits, from a number for each. All cells are looked at together: first at their lower bounds, which
    are close, then in steps that double, up to half the interval.
    """
    low, high, step = list(at_least), list(at_most), 0
    while any(a < b for a, b in zip(low, high, strict=True)):
        middle = [a + min(step, (b - a) // 2) for a, b in zip(low, high, strict=True)]
        for at, fit in enumerate(fits(middle)):
            if low[at] < high[at]:
                low[at], high[at] = (low[at], middle[at]) if fit else (middle[at] + 1, high[at])
        step = max(1, 2 * step)
    return tuple(high)


def said_plainly(layout: Parallelism) -> Parallelism:
    """The same layout, without numbers where all layers are recomputed or none is."""
    replicas, stages = layout.data_parallel_replicate_degree, layout.stages or ()
    counts = [stage.recomputed(replicas) for stage in stages]
    none = not any(map(any, counts))
    if not none and any(set(some) != {stage.layers} for stage, some in zip(stages, counts, strict=True)):
        return layout
    bare = tuple(stage.model_copy(update={"recomputed_layers": None}) for stage in stages)
    return layout.model_copy(update={"stages": bare} | ({"activation_checkpoint": "none"} if none else {}))
