"""What the ranks of pipelines hold in any cut: every stage has at least one layer, except for ends that can be empty.

Dims: C = pipelines, p = pipeline ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ahp.arrays import Floats, Ints
from ahp.forecast.stage_memory import receives_from
from ahp.schedule.bounds import in_flight
from ahp.schedule.registry import of_ranks
from ahp.search.bounds.mixes import least_layers, own_stages
from ahp.search.choices import ScheduleChoice


@dataclass(frozen=True)
class CutRanks:
    """The ranks of some pipelines in any cut, [C, p] each."""

    hold: Floats
    """The least number of layers of a rank."""
    held: Floats
    """These layers times micro-batches in flight."""
    fewest: Ints
    """Micro-batches in flight of the stage that has the fewest."""
    embeddings: Ints
    """Micro-batches in flight of the first stage, 0 elsewhere."""
    heads: Ints
    """Micro-batches in flight of the last stage, 0 elsewhere."""
    others: Ints
    """Micro-batches in flight of all stages except the last."""
    received: Ints
    """Number of stages that a rank's own stages receive from."""
    ends: Ints
    """Index of a rank's weights in ``LayerColumns.ends_weights``."""


@lru_cache(maxsize=1 << 10)
def cut_ranks(pipes: tuple[ScheduleChoice, ...], p: int, m: int, ends_hold: bool) -> CutRanks:
    """``ends_hold``: whether the first and the last stage have at least one layer, like all others."""
    found = []
    for pipe in pipes:
        own = own_stages(pipe, p)
        first, last = own == 0, own == own.size - 1
        counts = in_flight(of_ranks(pipe.schedule, p).name, p, pipe.virtual, m)
        hold = least_layers(pipe, p, ends_hold)[own]
        ends = np.array([[3, 1], [0, 2]])[first.any(axis=1) * 1, last.any(axis=1) * 1]
        by_rank = hold, hold * counts, None, counts * first, counts * last, counts * ~last
        sums = [counts.min(axis=1) if part is None else part.sum(axis=1) for part in by_rank]
        found.append((*sums, receives_from(own, p), ends))
    return CutRanks(*map(np.array, zip(*found, strict=True)))
