"""Floors under every placement of a shape: no matrix of cells, no cut of the layers, no sharing of micro-batches goes below.

Let x be a share of the model's work (of the layers and the head), z_g the seconds that a cell of group g takes at least for the
whole of it and one micro-batch. A replica whose longest stage takes t takes W + (m - 1 - (p - 1) f) t at least (``mixed.balance``),
W being its way through all stages and f the largest share of the forward pass. That is least where its k fastest cells have
stages as long as each other and the rest nothing: (k + m - 1 - (p - 1) f) / S_k with S_k the sum of 1 / z_g over these k. So in
T seconds it does m <= T S_k - k + 1 + (p - 1) f micro-batches, and R replicas together

    M <= sum over the cells used of (T / z_g - 1)  +  R (1 + (p - 1) f)

Cells are used fastest first, R p at most. Solved for T that is the floor: work over the speed of everything there is, and the
time in which the pipelines fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ahp.schedule.patterns import SPLIT_BACKWARD
from ahp.search.mixed.costs import GroupCells, LayoutTables, Work

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


ROUNDING = 1e-12
"""What a whole number of micro-batches may lack of itself."""


@dataclass(frozen=True)
class Speeds:
    """How fast the cells of each group are, whatever share of the model they compute."""

    whole_s: Floats
    """[G] z_g: seconds of one micro-batch's whole work, at least."""
    forward_share: float
    """f: the largest share that forward passes have of a layer's seconds, or of the head's."""


def speeds(works: Sequence[Work]) -> Speeds:
    """Of the groups' cells with a pipeline: a share of the work is each layer's and the head's mean share over the groups."""
    units = [_units(work, 1) for work in works]
    share = np.mean([each / each.sum() for each in units], axis=0)
    some = share > 0
    whole = np.array([float((each[some] / share[some]).min()) for each in units])
    forward = [_units(work, 0)[some] / each[some] for work, each in zip(works, units, strict=True)]
    return Speeds(whole, float(max(f.max() for f in forward)))


def _units(work: Work, passes: int) -> Floats:
    head = work.beside[2][passes] - work.beside[1][passes]
    return np.append(work.layers[passes], max(head, 0.0))


def floors_s(found: Speeds, cells: Sequence[int], total: int, pipeline: Ints, replicas: Ints, schedule: str) -> Floats:
    """[N] Seconds that ``total`` micro-batches take at least in so many replicas of so many stages.

    GPipe begins no backward pass before all forward passes are done, so that none of them hides in the way: f = 0. Where the
    backward pass is split no more is counted than the work.
    """
    order = np.argsort(found.whole_s, kind="stable")
    left = (replicas * pipeline).astype(float)
    early = 0.0 if schedule == "GPipe" else found.forward_share
    fills = schedule not in SPLIT_BACKWARD
    need = total - fills * replicas * (1.0 + (pipeline - 1) * early)
    speed = np.zeros(len(need))
    best = np.full(len(need), np.inf)
    for group in order:
        used = np.minimum(cells[group], left)
        left = left - used
        need, speed = need + fills * used, speed + used / found.whole_s[group]
        best = np.minimum(best, np.where(speed > 0, np.maximum(need, 0.0) / np.maximum(speed, 1e-300), np.inf))
    return np.where(left > 0, np.inf, best)


def floors_alone_s(whole_s: Floats, cells: Sequence[int], total: int, replicas: Ints) -> Floats:
    """[N] The same without a pipeline, where each replica has a whole number of micro-batches, and one at least."""
    order = np.argsort(whole_s, kind="stable")
    ends = np.cumsum(np.asarray(cells)[order])
    found = np.full(len(replicas), np.inf)
    for index, count in enumerate(replicas.tolist()):
        if count <= min(ends[-1], total):
            used = np.diff(np.minimum(ends, count), prepend=0)
            found[index] = _whole_micro_batches_s(whole_s[order][used > 0], used[used > 0], total)
    return found


def _whole_micro_batches_s(whole_s: Floats, used: Ints, total: int) -> float:
    seconds = max(total / float((used / whole_s).sum()), float(whole_s.max()))
    while True:
        done = np.floor(seconds / whole_s * (1 + ROUNDING))
        if int((used * done).sum()) >= total:
            return seconds
        seconds = float(((done + 1) * whole_s).min())


def can_hold(
    cells: Sequence[GroupCells], rooms: Sequence[float], schedule: str, most: Ints, pipeline: Ints
) -> NDArray[np.bool_]:
    """[N] Whether the stages can hold all layers, if each lies on the group that has the most room for it.

    ``most``: [N] micro-batches of some replica, at least. What a stage holds depends on its distance from the last one.
    """
    num_layers, numbers = len(cells[0].units.layers), np.unique(most)
    m, depth = numbers[:, None], np.arange(1, int(pipeline.max()) + 1)[None, :]
    held = np.broadcast_to(m, (len(numbers), depth.shape[1])) if schedule == "GPipe" else np.minimum(depth, m)

    def layers(place: int, held: Ints) -> Ints:
        """The most of any group, [M, depth]."""
        found = [of.most_layers(place, held, m, room) for of, room in zip(cells, rooms, strict=True)]
        return np.max(found, axis=0)

    alone = layers(3, np.ones_like(m))[:, 0] >= num_layers
    if pipeline.max() == 1:
        return alone[np.searchsorted(numbers, most)]
    if not alone.any() and layers(2, np.ones((1, 1), dtype=np.int64)).max() < 1:
        return np.zeros(len(most), dtype=bool)
    first, between, last = layers(0, held), layers(1, held), layers(2, held[:, :1])
    sums = np.cumsum(np.where(depth > 1, between, 0), axis=1)  # of the stages that are not the last, up to a depth
    whole = first[:, 1:] + sums[:, :-1] + last
    nowhere = (first[:, 1:] < 1) | (last < 1) | ((depth[:, :-1] > 1) & (between[:, :-1] < 1))
    enough = np.concatenate([alone[:, None], (whole >= num_layers) & ~nowhere], axis=1)
    return enough[np.searchsorted(numbers, most), pipeline - 1]


def columns_hold(tables: LayoutTables, cells: Sequence[int], shape: tuple[int, int], most: int) -> bool:
    """The same for one shape of (stages, replicas), with the cells of each group counted.

    Of the columns only so many lie wholly on the groups with the most room as these have cells; any other has a cell on
    one of the rest, which holds no more than the best of these.
    """
    stages, replicas = shape
    groups = [group for group, count in enumerate(cells) if count]
    layers = tables.most_layers(most)[groups]
    by_room = sorted(range(len(groups)), key=lambda at: layers[at].sum())
    for weak in range(1, len(groups) + 1):
        limit = layers[by_room[:weak]].max(axis=0)
        strong = list(by_room[weak:])
        whole_columns = sum(cells[groups[at]] for at in strong) // replicas
        gain = np.sort(np.maximum(layers[strong].max(axis=0) - limit, 0))[::-1] if strong else np.zeros(0, int)
        if weak < len(groups) and whole_columns >= stages:
            continue
        if limit.clip(min=0).sum() + gain[:whole_columns].sum() < tables.num_layers:
            return False
    return True
