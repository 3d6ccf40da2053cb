"""The two balances of a mixed layout: layers among its stages, and micro-batches among its replicas.

Both look at one number for each kind of replica: the time before which its schedule cannot be done, linear in the
micro-batches m. With t the seconds of a stage on one micro-batch, F those of its forward pass and W the sum of t over the
replica's stages, stage s (of p, from 0) ends no sooner than

    W + (m - 1) t_s - (min(p - s, m) - 1) F_s

One micro-batch goes through all stages and back; then the stage has m - 1 backward passes to do, and all forward passes but
those that it may have done until the first gradient came. Without a pipeline that is m t, exactly. Where the backward pass is
split, weight gradients may fill the way back: of the other stages only their forward passes count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

ROUNDS = 4
"""Layers and micro-batches are balanced in turn so many times at most; a second round already changes little."""


class StageTables(Protocol):
    """Seconds and room of a stage for every run of layers, [L + 1, L + 1]: the first layer, and the one after the last."""

    def forward_s(self, group: int, stage: int) -> Floats:
        """Forward pass of one micro-batch; infinite where a run has no layer."""
        ...

    def whole_s(self, group: int, stage: int) -> Floats:
        """Both passes."""
        ...

    def fits(self, group: int, stage: int, micro_batches: int) -> NDArray[np.bool_]:
        """Whether the group's device holds it."""
        ...


@dataclass(frozen=True)
class Balanced:
    """A cut of the layers, and the micro-batches of each replica."""

    layers: tuple[int, ...]
    micro_batches: tuple[tuple[int, ...], ...]
    """Of the replicas of each kind, the most first."""
    at_least_s: float
    """The step cannot be shorter, by the formula above."""


def ends_s(whole: Floats, forward: Floats, micro_batches: Ints, *, splits: bool) -> Floats:
    """[M] Seconds that a replica takes at least with each number of micro-batches, from [S] seconds of its stages.

    ``splits``: whether the schedule computes weight gradients apart from input gradients.
    """
    m = np.asarray(micro_batches)[:, None]
    waits = np.minimum(len(whole) - np.arange(len(whole)), m) - 1
    way = forward if splits else whole
    return way.sum() + (m * whole - way - waits * forward).max(axis=1)


def round_down(
    shared: list[list[int]], allowed: Bools, times_s: Sequence[Floats], least: int
) -> list[list[int]] | None:
    """Shares whose every number is allowed: rounded down, and what is left given to whoever is then done first.

    ``allowed``: [M + 1]; ``times_s`` as for ``share``. None where what is left cannot be given away.
    """
    if all(allowed[m] for each in shared for m in each):
        return shared
    numbers = np.flatnonzero(allowed)
    below = [[int(numbers[np.searchsorted(numbers, m, side="right") - 1]) for m in each] for each in shared]
    left = sum(map(sum, shared)) - sum(map(sum, below))
    while left:
        more = []
        for kind, each in enumerate(below):
            for replica, m in enumerate(each):
                at = int(np.searchsorted(numbers, m, side="right"))
                if at < len(numbers) and numbers[at] - m <= left:
                    more.append((float(times_s[kind][numbers[at] - least]), kind, replica, int(numbers[at])))
        if not more:
            return None
        _, kind, replica, number = min(more)
        left -= number - below[kind][replica]
        below[kind][replica] = number
    return [sorted(each, reverse=True) for each in below]


def share(counts: Sequence[int], total: int, least: int, times_s: Sequence[Floats]) -> list[list[int]] | None:
    """Micro-batches of each replica, the most first, such that the slowest is as fast as can be.

    Args:
        counts: replicas of each kind.
        total: micro-batches.
        least: so many for each replica.
        times_s: by kind, seconds with ``least``, ``least`` + 1, ... micro-batches, rising.

    Returns:
        By kind, the micro-batches of its replicas; None where there are fewer than ``least`` for each.

    One micro-batch at a time goes to the replica that is then done first. No other distribution has a faster slowest
    replica: it gives some replica one more than it has here, which takes at least as long as the last one here did.
    """
    left = total - least * sum(counts)
    if left < 0:
        return None
    queue = np.concatenate([np.repeat(times[1:], count) for times, count in zip(times_s, counts, strict=True)])
    owner = np.repeat(np.arange(len(counts)), [(len(t) - 1) * count for t, count in zip(times_s, counts, strict=True)])
    taken = np.bincount(owner[np.argsort(queue, kind="stable")[:left]], minlength=len(counts))
    if taken.sum() < left:
        return None
    each = [divmod(int(more), count) for more, count in zip(taken, counts, strict=True)]
    return [
        [least + whole + (replica < rest) for replica in range(count)]
        for (whole, rest), count in zip(each, counts, strict=True)
    ]


def shortest_longest(stages: Sequence[Floats]) -> tuple[float, tuple[int, ...]] | None:
    """The cut whose longest stage is shortest, from [L + 1, L + 1] seconds of each stage for every run of layers.

    Infinite entries are runs that may not be; None where no cut is left.
    """
    edges = len(stages[0])
    longest = np.full(edges, np.inf)
    longest[0] = 0.0
    chosen: list[Ints] = []
    for table in stages:
        reached = np.maximum(longest[:, None], table)
        chosen.append(reached.argmin(axis=0))
        longest = reached.min(axis=0)
    if not np.isfinite(longest[-1]):
        return None
    at = [edges - 1]
    for starts in reversed(chosen):
        at.append(int(starts[at[-1]]))
    at.reverse()
    return float(longest[-1]), tuple(end - start for start, end in pairwise(at))


def balance(
    kinds: Sequence[tuple[int, ...]],
    counts: Sequence[int],
    tables: StageTables,
    total: int,
    allowed: Bools,
    *,
    splits: bool,
    fixed: tuple[int, ...] | None = None,
) -> Balanced | None:
    """Layers and micro-batches in turn, until neither gets better. None where no cut fits the devices, or too few are left.

    ``allowed``: [M + 1] micro-batches that a replica may have; ``fixed``: the layers of each stage where they are given.
    """
    least = int(allowed.argmax())
    numbers = np.arange(least, total - least * (sum(counts) - 1) + 1)
    micro_batches = share(counts, total, least, _by_speed(kinds, tables, numbers))
    best: Balanced | None = None
    ways_s = np.zeros(len(kinds))
    for _ in range(ROUNDS):
        if micro_batches is None:
            break
        layers = fixed or _cut(kinds, tables, [each[0] for each in micro_batches], ways_s, splits=splits)
        if layers is None:
            break
        whole, forward = _of_cut(kinds, tables, layers)
        ways_s = (forward if splits else whole).sum(axis=1)
        times_s = [ends_s(whole[kind], forward[kind], numbers, splits=splits) for kind in range(len(kinds))]
        shared = share(counts, total, least, times_s)
        assert shared is not None, "the first share had enough"
        shared = round_down(shared, allowed, times_s, least)
        if shared is None:
            break
        bound_s = max(float(times_s[kind][each[0] - least]) for kind, each in enumerate(shared))
        if best is not None and bound_s >= best.at_least_s:
            break
        best = Balanced(layers, tuple(map(tuple, shared)), bound_s)
        micro_batches = shared
    return best


def _by_speed(kinds: Sequence[tuple[int, ...]], tables: StageTables, numbers: Ints) -> list[Floats]:
    """Seconds of each kind by micro-batches, as if the layers of a replica were spread over its cells by their speed."""
    groups = sorted({group for kind in kinds for group in kind})
    last = len(kinds[0]) - 1
    everything = {group: float(tables.whole_s(group, last)[0, -1]) for group in groups}
    return [numbers / sum(1.0 / everything[group] for group in kind) for kind in kinds]


def _cut(
    kinds: Sequence[tuple[int, ...]], tables: StageTables, most: Sequence[int], ways_s: Floats, *, splits: bool
) -> tuple[int, ...] | None:
    """The cut with the earliest end by the formula, the ways through the replicas as they were in the last round."""
    stages, num_stages = [], len(kinds[0])
    for stage in range(num_stages):
        table: Floats | None = None
        for kind, m, way_s in dict.fromkeys(zip((k[stage] for k in kinds), most, ways_s.tolist(), strict=True)):
            early = min(num_stages - stage, m) - 1 + splits
            times = m if splits else max(m - 1, 0.5)
            end_s = way_s + times * tables.whole_s(kind, stage) - early * tables.forward_s(kind, stage)
            end_s = np.where(tables.fits(kind, stage, m), end_s, np.inf)
            table = end_s if table is None else np.maximum(table, end_s)
        assert table is not None, "a stage is on some group"
        stages.append(table)
    found = shortest_longest(stages)
    return None if found is None else found[1]


def _of_cut(kinds: Sequence[tuple[int, ...]], tables: StageTables, layers: tuple[int, ...]) -> tuple[Floats, Floats]:
    """[K, S] Seconds of the stages of each kind, both passes and forward."""
    edges = np.cumsum([0, *layers]).tolist()
    runs = list(enumerate(pairwise(edges)))
    whole = [[tables.whole_s(kind[s], s)[run] for s, run in runs] for kind in kinds]
    forward = [[tables.forward_s(kind[s], s)[run] for s, run in runs] for kind in kinds]
    return np.array(whole), np.array(forward)
