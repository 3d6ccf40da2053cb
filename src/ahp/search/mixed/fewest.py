"""The fewest layers that the stages of a placement recompute such that every cell fits, by the forecast's own memory.

A layer recomputed less never makes a pass longer, and with one stage on each rank what a cell keeps depends on its own
number alone: so the fewest of every cell are the fastest choice of a placement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ahp.plan import Parallelism


def fewest(
    fits: Callable[[Sequence[int]], Sequence[bool]], at_least: Sequence[int], at_most: Sequence[int]
) -> tuple[int, ...]:
    """Of each cell of a replica the least number between its bounds with which it fits, or the upper one.

    ``fits``: of each cell whether it does, from a number for each. All cells are looked at at once, their lower bounds first, which
    are close; then in steps that double, and halves.
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
    """The same layout, where all layers are recomputed or none is without numbers."""
    replicas, stages = layout.data_parallel_replicate_degree, layout.stages or ()
    counts = [stage.recomputed(replicas) for stage in stages]
    none = not any(map(any, counts))
    if not none and any(set(some) != {stage.layers} for stage, some in zip(stages, counts, strict=True)):
        return layout
    bare = tuple(stage.model_copy(update={"recomputed_layers": None}) for stage in stages)
    return layout.model_copy(update={"stages": bare} | ({"activation_checkpoint": "none"} if none else {}))
