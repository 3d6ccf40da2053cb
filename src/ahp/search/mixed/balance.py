"""The two balances of a mixed layout: layers among its stages, and micro-batches among its replicas.

Both use one number for each kind of replica: the earliest time at which its schedule can be done, linear in the
micro-batches m. With t the seconds of a stage for one micro-batch, F those of its forward pass and W the sum of t over the
replica's stages, stage s (of p, from 0) ends no sooner than

    W + (m - 1) t_s - (min(p - s, m) - 1) F_s

One micro-batch goes through all stages and back; then the stage still has m - 1 backward passes to do, and all forward passes
except those that it can do before the first gradient comes. Without a pipeline the time is exactly m t. With a split backward
pass, weight gradients can fill the way back, so that only forward passes of the other stages count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from ahp.arrays import Floats, Ints, Mask
from ahp.search.mixed.matrices import Kind
from ahp.search.mixed.tables import LayoutTables, StageCosts

ROUNDS = 4
"""The most rounds in which layers and micro-batches are balanced in turn; a second round already changes little."""


@dataclass(frozen=True)
class Balanced:
    """A cut of the layers, and the micro-batches of each replica."""

    layers: tuple[int, ...]
    micro_batches: tuple[tuple[int, ...], ...]
    """Micro-batches of the replicas of each kind, the most first."""
    at_least_s: float
    """The step cannot be shorter, by the formula above."""


def ends_s(whole: Floats, forward: Floats, micro_batches: Ints, *, splits: bool) -> Floats:
    """[...] Seconds that replicas take at least with ``micro_batches`` [...], from the seconds of their stages [..., S].

    ``splits``: whether the schedule computes weight gradients separately from input gradients.
    """
    m = np.asarray(micro_batches)[..., None]
    stages = forward.shape[-1]
    waits = np.minimum(stages - np.arange(stages), m) - 1
    way = forward if splits else whole
    return way.sum(axis=-1) + (m * whole - way - waits * forward).max(axis=-1)


def round_down(shared: list[list[int]], allowed: Mask, times_s: Sequence[Floats], least: int) -> list[list[int]] | None:
    """Shares with allowed numbers only: rounded down, and the rest given to the replica that is then done first.

    ``allowed``: [M + 1]; ``times_s`` as for ``share``. None where the rest cannot be given away.
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
    """Micro-batches of each replica, the most first, such that the slowest replica is as fast as possible.

    Args:
        counts: replicas of each kind.
        total: micro-batches.
        least: the fewest for each replica.
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
    tables: LayoutTables,
    total: int,
    allowed: Mask,
    *,
    splits: bool,
    fewest: Sequence[int],
    fixed: tuple[int, ...] | None = None,
) -> Balanced | None:
    """Balance layers and micro-batches in turn, until neither improves. None where no cut fits the devices, there are too few micro-batches,
    or no number of micro-batches is allowed.

    How many layers a stage recomputes follows from its layers and micro-batches. ``allowed``: [M + 1] whether a replica can have
    m micro-batches; ``fewest``: the fewest layers of each stage; ``fixed``: the layers of each stage where they are given.
    """
    if not allowed.any():
        return None
    least = int(allowed.argmax())
    numbers = np.arange(least, total - least * (sum(counts) - 1) + 1)
    at = np.array(kinds)
    micro_batches = share(counts, total, least, _by_speed(kinds, tables, numbers))
    best: tuple[bool, Balanced] | None = None
    ways_s = np.zeros(len(kinds))
    # A round mostly begins with what the previous one ended with.
    costs_of = cache(lambda layers, most: tables.stages(at, layers, np.array(most)))
    for _ in range(ROUNDS):
        if micro_batches is None:
            break
        most = _most(micro_batches)
        layers = fixed or _cut(at, tables, most, ways_s, np.array(fewest), splits=splits)
        if layers is None:
            break
        costs = costs_of(layers, most)
        ways_s = (costs.forward if splits else costs.whole).sum(axis=1)
        times_s = [ends_s(*of_kind, numbers, splits=splits) for of_kind in zip(costs.whole, costs.forward, strict=True)]
        shared = share(counts, total, least, times_s)
        assert shared is not None, "the first share had enough"
        shared = round_down(shared, allowed, times_s, least)
        if shared is None:
            break
        found = _bounded(costs_of(layers, _most(shared)), layers, shared, splits=splits)
        if best is not None and (best[0], -best[1].at_least_s) >= (found[0], -found[1].at_least_s):
            break
        best = found
        micro_batches = shared
    return None if best is None else best[1]


def _most(micro_batches: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The micro-batches of the replica with the most, for each kind."""
    return tuple(each[0] for each in micro_batches)


def _bounded(
    costs: StageCosts, layers: tuple[int, ...], shared: list[list[int]], *, splits: bool
) -> tuple[bool, Balanced]:
    """Whether the stages fit, and the balance with the time that it takes at least."""
    ends = ends_s(costs.whole, costs.forward, np.array(_most(shared)), splits=splits)
    return bool(costs.fits.all()), Balanced(layers, tuple(map(tuple, shared)), float(ends.max()))


def _by_speed(kinds: Sequence[Kind], tables: LayoutTables, numbers: Ints) -> list[Floats]:
    """Seconds of each kind by micro-batches, as if the layers of a replica were shared among its cells by speed."""
    return [numbers / float((1.0 / tables.layer_s[list(kind)]).sum()) for kind in kinds]


def _cut(
    kinds: Ints, tables: LayoutTables, most: Sequence[int], ways_s: Floats, fewest: Ints, *, splits: bool
) -> tuple[int, ...] | None:
    """The cut with the earliest end by the formula, with the ways through the replicas from the last round.

    ``kinds``: [K, S]. A stage ends later the more layers it has, so in T seconds each stage has room for some number of layers. The least T
    in which all L layers have room is the L-th earliest end of all stages and numbers of layers.
    """
    stages, num_layers = np.arange(kinds.shape[1]), tables.num_layers
    ends = np.full((len(stages), num_layers), -np.inf)
    for kind, m, way_s in zip(kinds, most, ways_s, strict=True):
        costs = tables.by_layers(m)
        early = (np.minimum(len(stages) - stages, m) - 1 + splits)[:, None]
        times = m if splits else max(m - 1, 0.5)
        np.maximum(ends, way_s + times * costs.whole[kind, stages] - early * costs.forward[kind, stages], out=ends)
    ends = np.maximum.accumulate(ends, axis=1)
    last_s = max(
        float(np.partition(ends.ravel(), num_layers - 1)[num_layers - 1]), float(ends[stages, fewest - 1].max())
    )
    if last_s == np.inf:
        return None
    layers = (ends <= last_s).sum(axis=1)
    while (over := int(layers.sum()) - num_layers) > 0:
        at_end = np.where(layers > fewest, ends[stages, layers - 1], -np.inf)
        layers[np.argsort(-at_end, kind="stable")[: min(over, int((layers > fewest).sum()))]] -= 1
    return tuple(layers.tolist())
