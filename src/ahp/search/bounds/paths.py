"""The ways through a schedule that may take longest, as counts of layers and passes; and its ranks that may hold the most.

They depend on the schedule, its ranks and micro-batches and the cut into stages alone, whatever a layer takes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ahp.arrays import Ints, Mask
from ahp.forecast.gathered import gathers_ahead
from ahp.forecast.overlap import CONTENTION
from ahp.schedule.bounds import in_flight
from ahp.schedule.descriptor import PipelineSchedule

Edges = tuple[int, ...]
"""The first layer of every stage, and the number of layers after the last."""


class Path(NamedTuple):
    """A way through a schedule of which each step waits for the one before: layers times passes of each kind, of layers as short as any.

    ``ahp.schedule.bounds`` has the ways that are taken.
    """

    forward: int = 0
    backward: int = 0
    """Whole backward passes, or both halves."""
    input_gradient: int = 0
    first_forward: int = 0
    """What comes once, with the first forward; and layers whose weights are waited for even where the engine gathers ahead."""
    first_waited: float = 0.0
    last_backward: int = 0
    """What comes once, with the last backward of each stage; and where others are computed beside it, of the stage that ends last."""
    last_stage: int = 0
    head: int = 0
    """Micro-batches that pass the head both ways."""


@lru_cache(maxsize=1 << 14)
def longest_paths(schedule: PipelineSchedule, p: int, v: int, m: int, edges: Edges) -> tuple[Path, ...]:
    """Of those that are alike in all but one thing the longest."""
    cut, own = np.array(edges), schedule.placement.rank_stages(p, v)
    sizes = np.diff(cut)
    before, layers, head = cut[:p], sizes[own].sum(axis=1), own[:, -1] == p * v - 1
    back = "input_gradient" if schedule.splits_backward else "backward"
    total, longest = edges[-1], int(sizes.max())
    # Gathered ahead: those of the first stage; those of a rank's later stages slow it down.
    ahead = gathers_ahead(schedule, v)
    waited = sizes[0] + CONTENTION * sizes[p:].sum() if ahead else total
    found = [Path(forward=total, first_forward=total, first_waited=waited)._replace(**{back: total})]
    for rank in _longest(layers, head, before):
        count, filling = int(layers[rank]), int(before[rank])
        first, stages = filling + count, sizes[own[rank]]
        own_waited = sizes[0] + CONTENTION * (count - stages[0]) if ahead else first
        all_work = Path(filling + m * count, m * count, 0, first, own_waited, head=m * int(head[rank]))
        last = int(stages.min() if schedule.splits_backward else stages[0])  # with whole backwards the lowest ends last
        found.append(all_work._replace(last_backward=count, last_stage=last))
        if not schedule.splits_backward:  # else weight gradients may fill the time in which gradients drain
            found.append(all_work._replace(backward=m * count + filling))
    if schedule.all_forwards_first:
        passes = total + (m - 1) * longest
        found.append(Path(passes, passes, 0, total, waited))
    forwards = schedule.forwards_before_gradient(p, v, m) if p > 1 else None
    if forwards is not None:
        found.append(_after_first_gradient(schedule, own, m, cut, forwards)._replace(first_waited=waited))
    return tuple(found)


def _after_first_gradient(schedule: PipelineSchedule, own: Ints, m: int, cut: Ints, forwards: Ints) -> Path:
    """Of the rank where it takes longest: the way of the first micro-batch to its highest stage and back there, then all that the rank
    has left. A forward is taken for half as long as a backward pass."""
    highest, sizes, total = own[:, -1], np.diff(cut)[own], int(cut[-1])
    back = total - cut[highest + 1]
    left_forward, left = ((m - forwards) * sizes).sum(axis=1), m * sizes.sum(axis=1)
    if not schedule.splits_backward:
        left = left + back + cut[own[:, 0]]
        back = np.zeros_like(back)
    rank = int((left_forward + 2 * left + back).argmax())
    head = min(m, m - int(forwards[rank, -1]) + 1) if highest[rank] == own.size - 1 else 0
    return Path(int(total + left_forward[rank]), int(left[rank]), int(back[rank]), total, head=head)


@lru_cache(maxsize=1 << 14)
def fullest_ranks(schedule: PipelineSchedule, p: int, v: int, m: int, edges: Edges) -> tuple[tuple[int, int, int], ...]:
    """Of the second rank (of a single stage the first), of the one that holds the most, and of the one with the most layers: its layers, layers
    times micro-batches in flight, and stages that its own receive from in both passes."""
    own, sizes = schedule.placement.rank_stages(p, v), np.diff(np.array(edges))
    layers = sizes[own].sum(axis=1)
    held = (in_flight(schedule.name, p, v, m) * sizes[own]).sum(axis=1)
    received = ((own > 0) * 1 + (own < p * v - 1)).sum(axis=1) * (p > 1)
    ranks = min(1, p - 1), int(held.argmax()), int(layers.argmax())
    return tuple((int(layers[rank]), int(held[rank]), int(received[rank])) for rank in ranks)


def _longest(layers: Ints, head: Mask, before: Ints) -> list[int]:
    """Ranks, but for those that another one has at least as much of everything as."""
    most: dict[tuple[int, bool], int] = {}
    for rank, key in enumerate(zip(layers.tolist(), head.tolist(), strict=True)):
        if key not in most or before[most[key]] < before[rank]:
            most[key] = rank
    return list(most.values())
