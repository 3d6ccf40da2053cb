"""Floors under every placement of a shape: no matrix of cells, no cut of the layers, no sharing of micro-batches goes below.

Let x be a share of the model's work (of the layers and the head), z_g the seconds that a cell of group g takes at least for the
whole of it and one micro-batch. A replica whose longest stage takes t takes W + (m - 1 - (p - 1) f) t at least (``mixed.balance``),
W being its way through all stages and f the largest share of the forward pass. That is least where its k fastest cells have
stages as long as each other and the rest nothing: (k + m - 1 - (p - 1) f) / S_k with S_k the sum of 1 / z_g over these k. So in
T seconds it does m <= T S_k - k + 1 + (p - 1) f micro-batches, and R replicas together

    M <= sum over the cells used of (T / z_g - 1)  +  R (1 + (p - 1) f)

Cells are used fastest first, R p at most. Solved for T that is the floor: work over the speed of everything there is, and the
time in which the pipelines fill.

A stage has a layer at least, so that a replica with a cell of group g does no more than T / (l z_g) micro-batches, l being the
least share of a layer. Of a replica that keeps to the k fastest groups p cells lie on these, so that there are C_k / p such
replicas at most, C_k being their cells. With n of them the rest are R - n, and the micro-batches of all are no more than T
(S of n p cells + (R - n) / (l z_{k+1})): concave in n, and greatest where a group is about used up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ahp.search.mixed.costs import Work
from ahp.search.mixed.space import SEVERAL, all_forwards_first, splits_backward
from ahp.search.mixed.tables import LayoutTables

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
    least_forward_share: float
    """The smallest."""
    layer_share: float
    """l: of the whole work that of a layer, at least."""

    def way_s(self, cells: Sequence[int], *, splits: bool) -> float:
        """Seconds in which one micro-batch passes all stages, at least: forward alone where the schedule splits backward passes."""
        fastest = min(
            (whole for whole, count in zip(self.whole_s.tolist(), cells, strict=True) if count), default=np.inf
        )
        return fastest * (self.least_forward_share if splits else 1.0)


def speeds(works: Sequence[Work]) -> Speeds:
    """Of the groups' cells with a pipeline: a share of the work is each layer's and the head's mean share over the groups."""
    units = [_units(work, 1) for work in works]
    share = np.mean([each / each.sum() for each in units], axis=0)
    some = share > 0
    whole = np.array([float((each[some] / share[some]).min()) for each in units])
    forward = [_units(work, 0)[some] / each[some] for work, each in zip(works, units, strict=True)]
    highest, least = float(max(f.max() for f in forward)), float(min(f.min() for f in forward))
    return Speeds(whole, highest, least, float(share[:-1].min(initial=1.0)))


def _units(work: Work, passes: int) -> Floats:
    head = work.beside[2][passes] - work.beside[1][passes]
    return np.append(work.layers[passes], max(head, 0.0))


def floors_s(found: Speeds, cells: Sequence[int], total: int, pipeline: Ints, replicas: Ints, schedule: str) -> Floats:
    """[N] Seconds that ``total`` micro-batches take at least in so many replicas of so many stages.

    GPipe begins no backward pass before all forward passes are done, so that none of them hides in the way: f = 0. Where the
    backward pass is split, or a rank has several stages, no more is counted than the work.
    """
    order = np.argsort(found.whole_s, kind="stable")
    left = (replicas * pipeline).astype(float)
    early = 0.0 if all_forwards_first(schedule) else found.forward_share
    fills = not (schedule == SEVERAL or splits_backward(schedule))
    need = total - fills * replicas * (1.0 + (pipeline - 1) * early)
    speed = np.zeros(len(need))
    best = np.full(len(need), np.inf)
    for group in order:
        used = np.minimum(cells[group], left)
        left = left - used
        need, speed = need + fills * used, speed + used / found.whole_s[group]
        best = np.minimum(best, np.where(speed > 0, np.maximum(need, 0.0) / np.maximum(speed, 1e-300), np.inf))
    return np.where(left > 0, np.inf, np.maximum(best, found.way_s(cells, splits=not fills)))


def paced_s(found: Speeds, having: Sequence[int], total: int, pipeline: Ints, replicas: Ints) -> Floats:
    """[N] Seconds that ``total`` micro-batches take at least in so many replicas of so many stages, each of which has a layer.

    ``having``: cells of each group.
    """
    cells = np.asarray(having)
    order = np.array([group for group in np.argsort(found.whole_s, kind="stable") if cells[group]], dtype=np.int64)
    used = np.concatenate([[0], np.cumsum(cells[order])])
    speed = np.concatenate([[0.0], np.cumsum(cells[order] / found.whole_s[order])])
    least = np.full(len(pipeline), np.inf)
    for k, group in enumerate(order):
        paced = 1.0 / (found.layer_share * found.whole_s[group])
        most = used[k] // pipeline  # replicas that keep to the groups before
        ways = [0 * most, most, *(np.minimum(used[j] // pipeline + more, most) for j in range(1, k) for more in (0, 1))]
        kept = np.array(ways if k else ways[:1])
        per_s = (np.interp(kept * pipeline, used, speed) + (replicas - kept) * paced).max(axis=0)
        least = np.minimum(least, np.where(most < replicas, per_s, np.inf))
    return total / least


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


def columns_hold(
    tables: LayoutTables, cells: Sequence[int], shape: tuple[int, int], micro_batches: tuple[int, int]
) -> bool:
    """Whether the cells that there are of each group can hold the model in one shape of (stages, replicas).

    ``micro_batches``: the fewest that a replica may have, and how many one of them has at least. Of the columns only so many lie
    wholly on the groups with the most room as these have cells; any other has a cell on one of the rest, which holds no more than
    the best of these with the fewest micro-batches. Every column has a cell of the replica with the most.
    """
    stages, replicas = shape
    groups = [group for group, count in enumerate(cells) if count]
    light, layers = (tables.most_layers(m)[groups] for m in micro_batches)
    most = layers.max(axis=0)
    by_room = sorted(range(len(groups)), key=lambda at: layers[at].sum())
    for weak in range(1, len(groups) + 1):
        limit = np.minimum(light[by_room[:weak]].max(axis=0), most)
        strong = list(by_room[weak:])
        whole_columns = sum(cells[groups[at]] for at in strong) // replicas
        gain = np.sort(np.maximum(layers[strong].max(axis=0) - limit, 0))[::-1] if strong else np.zeros(0, int)
        if weak < len(groups) and whole_columns >= stages:
            continue
        if limit.clip(min=0).sum() + gain[:whole_columns].sum() < tables.num_layers:
            return False
    return True
