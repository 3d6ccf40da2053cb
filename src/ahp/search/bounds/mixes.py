"""Ways through a pipeline whose stages may hold any number of layers, mixed so that the cut matters least.

The step takes at least as long as the longest way, and so at least as long as any weighted mean of the ways (a mix). Such a mean is a sum over the
stages: of what one layer there weighs, times its layers. A cut puts its layers where they weigh the least. Weights with which all stages weigh about the same
come from a game of the cut against the ways, whose value is the longest way of the best cut.

Dims: M = mixes, S = stages, p = pipeline ranks, T = what a layer takes: ``PARTS``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ahp.arrays import Floats, Ints
from ahp.schedule.registry import of_ranks
from ahp.search.choices import ScheduleChoice

PARTS = ("forward", "backward", "input_gradient", "first_forward", "last_backward", "update")
"""A forward pass, a whole backward pass or both halves, the half that hands gradients on; and what comes once a step: with a stage's first
forward pass, with its last backward pass, and for its optimizer."""

USUAL = np.array([1.0, 2.0, 1.0, 0.0, 0.0, 0.0])
"""[T] What a layer takes where weights are chosen; any weights give a bound."""

ROUNDS, STEP = 40, 4.0
"""Of the game, and the size of its steps. [Empirical] Of 2,900 drawn pipelines with up to 32 ranks the mix is 2 % below the best one in the median, and 10 %
below it or more in one of 20."""

MOST_VIRTUAL = 2
"""With more stages per rank no game is played, to save time. [Empirical] The other two mixes are 1 % below the best one in the median of 2,700 drawn pipelines,
and far below it where there are fewer micro-batches than ranks."""


@dataclass(frozen=True)
class Mixes:
    """Mixes of the ways through one pipeline; or through several, with a dim C before all others."""

    ranks: Floats
    """[M, p, T] What a layer of each rank weighs at least, in whichever of its stages."""
    base: Floats
    """[M, T] What the layers weigh that stages have in any cut."""
    embedding: Floats
    """[M] Micro-batches that pass the embedding both ways."""
    head: Floats
    """[M] The same of the head."""


@lru_cache(maxsize=1 << 10)
def mixes(pipes: tuple[ScheduleChoice, ...], p: int, m: int, ends_hold: bool, num_layers: int, head: float) -> Mixes:
    """Mixes of the ways through each pipeline: of all its ranks alike, of one micro-batch, and one with which all stages weigh about the same.

    Args:
        pipes: schedules and stages per rank.
        p: pipeline ranks.
        m: micro-batches.
        ends_hold: whether the first and the last stage have a layer at least, as all others do.
        num_layers: of the model.
        head: what the head takes, in layers.
    """
    found = [_ways(pipe, p, m) for pipe in pipes]
    base = [least_layers(pipe, p, ends_hold) for pipe in pipes]
    played = [at for at, pipe in enumerate(pipes) if p > 1 and pipe.virtual <= MOST_VIRTUAL]
    weights = dict(zip(played, _weights([_game(found[at], base[at], num_layers, head) for at in played]), strict=True))
    mixed = []
    for at, (pipe, ways) in enumerate(zip(pipes, found, strict=True)):
        number = np.arange(len(ways.head))
        of_all_ranks, of_one_micro_batch = (number < p) / p, number == number[-1]
        own = np.stack([of_all_ranks, of_one_micro_batch, weights.get(at, of_all_ranks)])
        stages = np.tensordot(own, ways.stages, 1)  # [M, S, T]
        ranks = stages[:, own_stages(pipe, p)].min(axis=2)
        mixed.append((ranks, base[at] @ stages, own @ ways.embedding, own @ ways.head))
    return Mixes(*map(np.stack, zip(*mixed, strict=True)))


def least_layers(pipe: ScheduleChoice, p: int, ends_hold: bool) -> Floats:
    """[S] Layers that each stage has in any cut."""
    base = np.ones(p * pipe.virtual)
    if len(base) > 1 and not ends_hold:
        base[[0, -1]] = 0.0
    return base


def own_stages(pipe: ScheduleChoice, p: int) -> Ints:
    """[p, v] The stages of each rank."""
    return of_ranks(pipe.schedule, p).placement.rank_stages(p, pipe.virtual)


class _Ways(NamedTuple):
    """The ways through one pipeline, of which any stage may have any number of layers."""

    stages: Floats
    """[ways, S, T] What each has of a stage's layers."""
    embedding: Floats
    """[ways] Micro-batches that pass the embedding both ways."""
    head: Floats
    """[ways] The same of the head."""


def _game(ways: _Ways, base: Floats, num_layers: int, head: float) -> Floats:
    """[ways, S] What each takes for one layer more in a stage, with its part of what all cuts have."""
    passes = ways.stages @ USUAL
    fixed = passes @ base + head * USUAL[:2].sum() * ways.head
    return np.asarray(passes + fixed[:, None] / max(num_layers - base.sum(), 1.0))


def _weights(games: Sequence[Floats]) -> list[Floats]:
    """Of each game weights of its rows, so that the least of the weighed columns is about as large as it can be: by optimistic
    multiplicative weights of both players (arXiv 1311.1869), of all games at once."""
    if not games:
        return []
    shape = len(games), max(len(game) for game in games), max(game.shape[1] for game in games)
    scaled, has_row, has_column = np.zeros(shape), np.full(shape[:2], -np.inf), np.full(shape[::2], -np.inf)
    for at, game in enumerate(games):
        count, columns = game.shape
        scaled[at, :count, :columns] = (game - game.min()) * (STEP / max(np.ptp(game), 1e-12))
        has_row[at, :count] = has_column[at, :columns] = 0.0
    rows, columns, gain, loss, weights = has_row, has_column, 0.0, 0.0, np.zeros(shape[:2])
    for _ in range(ROUNDS):
        row, column = _softmax(rows + gain), _softmax(columns - loss)
        gain, loss = (scaled @ column[..., None])[..., 0], (row[:, None] @ scaled)[:, 0]
        rows, columns, weights = rows + gain, columns - loss, weights + row
    return [own[: len(game)] / ROUNDS for own, game in zip(weights, games, strict=True)]


def _softmax(scores: Floats) -> Floats:
    """Of scores below 300, of which no power is infinite; overwrites them."""
    np.exp(scores, out=scores)
    scores /= np.add.reduce(scores, axis=-1, keepdims=True)
    return scores


@lru_cache(maxsize=1 << 12)
def _ways(pipe: ScheduleChoice, p: int, m: int) -> _Ways:
    """``ahp.schedule.bounds`` says why each is one, and ``bounds.paths`` counts them for stages that are known. The first p have all the work of a
    rank, the last is that of one micro-batch.
    """
    once, each, of_one = _of_any_number(pipe, p)
    found = [_Ways(*(first + m * more for first, more in zip(once, each, strict=True))), of_one]
    forwards = of_ranks(pipe.schedule, p).forwards_before_gradient(p, pipe.virtual, m) if p > 1 else None
    if forwards is not None:
        found.insert(1, _after_first_gradient(pipe, p, m, forwards))
    return _Ways(*(np.concatenate(part) for part in zip(*found, strict=True)))


@lru_cache(maxsize=1 << 10)
def _of_any_number(pipe: ScheduleChoice, p: int) -> tuple[_Ways, _Ways, _Ways]:
    """Of the ways that grow with the number of micro-batches what each has once, and with every micro-batch; and that of one micro-batch."""
    schedule, own, stages = of_ranks(pipe.schedule, p), own_stages(pipe, p), np.arange(p * pipe.virtual)
    mine = (own[:, :, None] == stages).any(axis=1).astype(float)  # [p, S]
    before, none, end = (stages < own[:, :1]).astype(float), np.zeros((p, len(stages))), np.zeros(p)
    first = [(before, none, none, mine, mine, mine, end, end)]
    more = [(mine, mine, none, none, none, none, mine[:, 0], mine[:, -1])]
    if not schedule.splits_backward:  # else weight gradients may fill the time in which gradients drain
        first.append((before, before, none, mine, none, mine, end, end))
        more.append(more[0])
    if schedule.all_forwards_first:
        slowest = np.eye(len(stages))
        others, without = 1.0 - slowest, np.zeros_like(slowest)
        first.append((others, others, without, without, without, without, others[:, 0], others[:, -1]))
        more.append((slowest, slowest, without, without, without, without, slowest[:, 0], slowest[:, -1]))
    once, nothing, whole = np.ones((1, len(stages))), np.zeros((1, len(stages))), _whole(pipe, p)
    back = (nothing, once) if schedule.splits_backward else (once, nothing)
    of_one = (once, *back, nothing, nothing, once / p, np.full(1, whole), np.full(1, whole))
    return _joined(first), _joined(more), _joined([of_one])


def _after_first_gradient(pipe: ScheduleChoice, p: int, m: int, forwards: Ints) -> _Ways:
    """The way of the first micro-batch to a rank's highest stage and back there, then all that the rank has left."""
    schedule, own, stages = of_ranks(pipe.schedule, p), own_stages(pipe, p), np.arange(p * pipe.virtual)
    before, none, left = (stages < own[:, :1]).astype(float), *np.zeros((2, p, len(stages)))
    mine = (own[:, :, None] == stages).any(axis=1).astype(float)
    np.put_along_axis(left, own, (m - forwards).astype(float), axis=1)
    behind, work, whole = (stages > own[:, -1:]).astype(float), m * mine, _whole(pipe, p)
    back = (work, behind) if schedule.splits_backward else (work + behind + before, none)
    heads = np.where(own[:, -1] == stages[-1], np.minimum(m, m - forwards[:, -1] + 1), whole)
    return _joined([(1.0 + left, *back, none, none, mine, np.full(p, whole), heads)])


def _whole(pipe: ScheduleChoice, p: int) -> float:
    """Micro-batches whose way takes the ends both ways, their weight gradients too."""
    return 0.0 if of_ranks(pipe.schedule, p).splits_backward else 1.0


def _joined(some: Sequence[tuple[Floats, ...]]) -> _Ways:
    """Each: what its ways have of the stages' layers, [ways, S] for each of ``PARTS``; embeddings and heads, [ways]."""
    *parts, embeddings, heads = (np.concatenate(part) for part in zip(*some, strict=True))
    return _Ways(np.stack(parts, axis=-1), embeddings, heads)
