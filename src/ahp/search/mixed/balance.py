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
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

Kind = tuple[int, ...]
"""The number of the group of each stage."""

PRECISION = 1e-6
"""Of the bisection, relative."""

TINY_S = 1e-12
"""Seconds that a layer takes at least, so that a stage without layers of its own can be divided by."""

ROUNDS = 4
"""Layers and micro-batches are balanced in turn so many times at most; a second round already changes little."""


class StageTables(Protocol):
    """What a stage costs on each group."""

    @property
    def lines(self) -> Floats:
        """[4, G, S] Seconds of one micro-batch: forward beside the layers and of a layer, both passes beside and of a layer.
        Where layers differ, of the mean one."""
        ...

    def most_layers(self, micro_batches: int) -> Ints:
        """[G, S] Layers that a device of the group can hold in a stage, at most."""
        ...

    def stage_s(self, kind: Kind, layers: tuple[int, ...]) -> tuple[Floats, Floats]:
        """[S] Seconds of a replica's stages with these layers for one micro-batch: both passes, and the forward one."""
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
    times = np.concatenate([of_kind[1:] for of_kind in times_s])
    owner = np.repeat(np.arange(len(counts)), [len(of_kind) - 1 for of_kind in times_s])
    order = np.argsort(times, kind="stable")
    takes = np.asarray(counts)[owner[order]]  # every replica of the kind
    done = np.minimum(np.cumsum(takes), left)
    if not len(done) or done[-1] < left:
        return [[least] * count for count in counts] if left == 0 else None
    taken = np.bincount(owner[order], weights=np.diff(done, prepend=0), minlength=len(counts))
    each = [divmod(int(more), count) for more, count in zip(taken, counts, strict=True)]
    return [
        [least + whole + (replica < rest) for replica in range(count)]
        for (whole, rest), count in zip(each, counts, strict=True)
    ]


def balance(
    kinds: Sequence[Kind],
    counts: Sequence[int],
    tables: StageTables,
    num_layers: int,
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
        layers = fixed or _cut(kinds, tables, num_layers, [each[0] for each in micro_batches], ways_s, splits=splits)
        if layers is None:
            break
        stages = [tables.stage_s(kind, layers) for kind in kinds]
        ways_s = np.array([(forward if splits else whole).sum() for whole, forward in stages])
        times_s = [ends_s(*of_kind, numbers, splits=splits) for of_kind in stages]
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


def _by_speed(kinds: Sequence[Kind], tables: StageTables, numbers: Ints) -> list[Floats]:
    """Seconds of each kind by micro-batches, as if the layers of a replica were spread over its cells by their speed."""
    layer_s = tables.lines[3].max(axis=1) + tables.lines[2].min(axis=1)
    return [numbers / float((1.0 / layer_s[list(kind)]).sum()) for kind in kinds]


def _cut(
    kinds: Sequence[Kind], tables: StageTables, num_layers: int, most: Sequence[int], ways_s: Floats, *, splits: bool
) -> tuple[int, ...] | None:
    """The cut with the earliest end by the formula, the ways through the replicas as they were in the last round.

    A stage of n layers ends at a line in n for each kind of replica: in T seconds it has room for so many, and the least T
    whose stages have room for all layers is found by bisection.
    """
    num_stages = len(kinds[0])
    at, stages = np.array(kinds), np.arange(num_stages)
    forward_beside, forward, beside, layer = tables.lines[:, at, stages]
    m = np.array(most)[:, None]
    early = np.minimum(num_stages - stages, m) - 1 + splits
    times = m if splits else np.maximum(m - 1, 0.5)
    start = np.array(ways_s)[:, None] + times * beside - early * forward_beside
    each = np.maximum(times * layer - early * forward, TINY_S)
    room = np.min([tables.most_layers(of)[kind, stages] for kind, of in zip(at, most, strict=True)], axis=0)
    if room.min() < 1 or room.sum() < num_layers:
        return None

    def fit(seconds: float) -> Ints:
        return np.minimum(np.floor((seconds - start) / each).min(axis=0), room).astype(np.int64)

    low = float((start + each).max())
    high = float((start + each * num_layers).max())
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        if fit(middle).sum() >= num_layers:
            high = middle
        else:
            low = middle
    layers = np.maximum(fit(high), 1)
    while (over := int(layers.sum()) - num_layers) > 0:
        ends = np.where(layers > 1, (start + each * layers).max(axis=0), -np.inf)
        layers[np.argsort(-ends, kind="stable")[: min(over, int((layers > 1).sum()))]] -= 1
    return tuple(layers.tolist())
