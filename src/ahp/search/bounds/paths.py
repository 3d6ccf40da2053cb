"""The paths through a schedule that can be the longest, as counts of layers and passes; and its ranks that can hold the most.

They depend only on the schedule, its ranks and micro-batches, and the cut into stages, not on the time of a layer. Layers are counted by kind;
a model has K kinds: in DeepSeek-V3, the three layers without experts have a thirtieth of the others' weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ahp.arrays import Floats, Ints, Mask
from ahp.forecast.beside_stages import gathers_ahead
from ahp.forecast.overlap import CONTENTION
from ahp.forecast.stage_memory import receives_from
from ahp.schedule.bounds import in_flight
from ahp.schedule.descriptor import PipelineSchedule

Layers = tuple[tuple[int, ...], ...]
"""The number of layers of each kind in every stage."""


class Path(NamedTuple):
    """A path through a schedule, on which each step waits for the one before: layers of each kind times passes, [K] each.

    ``ahp.schedule.bounds`` has the paths that are used.
    """

    forward: Floats | Ints
    backward: Floats | Ints
    """Whole backward passes, or both halves."""
    input_gradient: Floats | Ints
    first_forward: Floats | Ints
    """Extra work once, with the first forward; and the layers whose weights are waited for even if the engine gathers ahead."""
    first_waited: Floats | Ints
    last_backward: Floats | Ints
    """Extra work once, with the last backward of each stage; and, if other stages hide it, of the stage that ends last."""
    last_stage: Floats | Ints
    head: Floats | Ints
    """Micro-batches that pass the head both ways; the head has no kind, so it counts as the first."""

    @classmethod
    def of(cls, num_kinds: int, head: int = 0, **parts: Floats | Ints) -> Path:
        """A path with zeros for the parts left out."""
        none = np.zeros(num_kinds)
        heads = np.where(np.arange(num_kinds) == 0, head, 0)
        return cls(**{**dict.fromkeys(cls._fields, none), "head": heads, **parts})


FORWARD, BACKWARD, INPUT_GRADIENT, FIRST_FORWARD, FIRST_WAITED, HEAD = map(
    Path._fields.index, ("forward", "backward", "input_gradient", "first_forward", "first_waited", "head")
)


@lru_cache(maxsize=1 << 14)
def longest_paths(schedule: PipelineSchedule, p: int, v: int, m: int, stages: Layers) -> Floats:
    """[L, parts of a ``Path``, K] The paths that can be longest; of paths that differ in only one thing, the longest."""
    once, each, waited = _of_any_number(schedule, p, v, stages)
    found = once + m * each
    forwards = schedule.forwards_before_gradient(p, v, m) if p > 1 else None
    if forwards is None:
        return found
    path = _after_first_gradient(schedule, p, v, m, stages, forwards)
    path[FIRST_WAITED] = waited
    return np.concatenate([found, path[None]])


@lru_cache(maxsize=1 << 12)
def _of_any_number(schedule: PipelineSchedule, p: int, v: int, stages: Layers) -> tuple[Floats, Floats, Floats]:
    """The paths that grow with the number of micro-batches: [L, parts of a ``Path``, K] what they have once, and with each micro-batch; and
    [K] the layers on the first micro-batch's path whose weights are waited for."""
    each, own = np.array(stages), schedule.placement.rank_stages(p, v)
    sizes, of_ranks, kinds = each.sum(axis=1), each[own].sum(axis=1), each.shape[1]
    before, head = np.cumsum(each[:p], axis=0) - each[:p], own[:, -1] == p * v - 1
    back = "input_gradient" if schedule.splits_backward else "backward"
    total, longest = each.sum(axis=0), each[int(sizes.argmax())]
    # If gathered ahead, only the first stage's weights are waited for; those of a rank's later stages slow it down.
    ahead = gathers_ahead(schedule, v)
    waited = each[0] + CONTENTION * each[p:].sum(axis=0) if ahead else total
    first = {"first_forward": total, "first_waited": waited}
    found = [(Path.of(kinds, forward=total, **first, **{back: total}), Path.of(kinds))]
    for rank in _longest(of_ranks, head, before):
        count, filling = of_ranks[rank], before[rank]
        own_waited = each[0] + CONTENTION * (count - each[own[rank, 0]]) if ahead else filling + count
        # With whole backwards the lowest stage ends last.
        last = own[rank, int(sizes[own[rank]].argmin())] if schedule.splits_backward else own[rank, 0]
        once = Path.of(kinds, forward=filling, first_forward=filling + count, first_waited=own_waited)
        all_work = Path.of(kinds, int(head[rank]), forward=count, backward=count)
        found.append((once._replace(last_backward=count, last_stage=each[last]), all_work))
        if not schedule.splits_backward:  # else weight gradients can fill the time in which gradients drain
            found.append((once._replace(backward=filling), all_work))
    if schedule.all_forwards_first:
        others = total - longest
        found.append(
            (
                Path.of(kinds, forward=others, backward=others, **first),
                Path.of(kinds, forward=longest, backward=longest),
            )
        )
    paths = np.array(found, dtype=float)
    return paths[:, 0], paths[:, 1], np.asarray(waited, dtype=float)


def _after_first_gradient(schedule: PipelineSchedule, p: int, v: int, m: int, stages: Layers, forwards: Ints) -> Floats:
    """[parts of a ``Path``, K] The path of the first micro-batch through all stages and back to a rank's highest stage, then all that the rank
    has left; for the rank where this is longest. To choose it, a forward counts as half a backward pass."""
    way, sizes, of_ranks, drained, back = _of_first_gradient(schedule, p, v, stages)
    left_forward, left = ((m - forwards)[:, None] @ sizes)[:, 0], m * of_ranks + drained
    rank = int((left_forward + 2 * left + back).sum(axis=1).argmax())
    found = np.zeros((len(Path._fields), sizes.shape[2]))
    found[FORWARD], found[BACKWARD], found[INPUT_GRADIENT] = way + left_forward[rank], left[rank], back[rank]
    found[FIRST_FORWARD] = way
    if schedule.placement.rank_stages(p, v)[rank, -1] == p * v - 1:
        found[HEAD, 0] = min(m, m - int(forwards[rank, -1]) + 1)
    return found


@lru_cache(maxsize=1 << 12)
def _of_first_gradient(
    schedule: PipelineSchedule, p: int, v: int, stages: Layers
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """The parts of that path that hold for any number of micro-batches: [K] the layers that one passes; [p, v, K] the layers of each rank's
    stages, and [p, K] their sum; [p, K] each, the layers that gradients pass on other ranks, in whole backward passes and in first halves."""
    each, own = np.array(stages), schedule.placement.rank_stages(p, v)
    highest, sizes, total = own[:, -1], each[own], each.sum(axis=0)
    start = np.cumsum(each, axis=0) - each
    back, none = total - start[highest] - each[highest], np.zeros((p, each.shape[1]), dtype=np.int64)
    drained, back = (none, back) if schedule.splits_backward else (back + start[own[:, 0]], none)
    return total, sizes, sizes.sum(axis=1), drained, back


@dataclass(frozen=True)
class FullestRanks:
    """The ranks of some pipelines whose memory is bounded."""

    most_layers: Ints
    """[C, K] Layers of each kind on the rank that has the most layers."""
    layers: Ints
    """[C, G, K] Layers of the second rank (the first if it is alone), and of the rank that holds the most."""
    held: Ints
    """[C, G, K] Layers times micro-batches in flight there."""
    received: Ints
    """[C, G] Number of stages that a rank's own stages receive from, in both passes."""


@lru_cache(maxsize=1 << 14)
def fullest_ranks(schedule: PipelineSchedule, p: int, v: int, m: int, stages: Layers) -> tuple[Ints, Ints, Ints, Ints]:
    """One pipeline's part of each figure of ``FullestRanks``."""
    own, each = schedule.placement.rank_stages(p, v), np.array(stages)
    layers = each[own].sum(axis=1)
    held = (in_flight(schedule.name, p, v, m)[..., None] * each[own]).sum(axis=1)
    ranks = [min(1, p - 1), int(held.sum(axis=1).argmax())]
    return layers[int(layers.sum(axis=1).argmax())], layers[ranks], held[ranks], receives_from(own[ranks], p)


def _longest(of_ranks: Ints, head: Mask, before: Ints) -> list[int]:
    """One rank for each number of layers per kind, with and without the head: the one with the most layers before it."""
    most: dict[tuple[tuple[int, ...], bool], int] = {}
    for rank, key in enumerate(zip(map(tuple, of_ranks.tolist()), head.tolist(), strict=True)):
        if key not in most or before[most[key]].sum() < before[rank].sum():
            most[key] = rank
    return list(most.values())
