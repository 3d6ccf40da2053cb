"""Paths through a pipeline whose stages can hold any number of layers, mixed so that the cut matters least.

The step takes at least as long as the longest path, and so at least as long as any weighted mean of the paths (a mix). A mix is a sum over the
stages: the weight of one layer there, times the stage's layers. The best cut puts layers where they weigh least. Weights with which all stages
weigh about the same come from a game of the cut against the paths, whose value is the longest path of the best cut.

Dims: M = mixes, S = stages, p = pipeline ranks, T = the parts of a layer's time: ``PARTS``.
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
"""A forward pass; a whole backward pass, or both halves; the half that passes gradients on; and once per step the extra time of a stage's
first forward pass, of its last backward pass, and of its optimizer."""

USUAL = np.array([1.0, 2.0, 1.0, 0.0, 0.0, 0.0])
"""[T] The times of a layer assumed for choosing weights; any weights give a valid bound."""

ROUNDS, STEP = 40, 4.0
"""Rounds of the game, and the size of its steps. [Empirical] In 2,900 random pipelines with up to 32 ranks the mix is 2 % below the best one
in the median, and at least 10 % below it in one of 20."""

MOST_VIRTUAL = 2
"""With more stages per rank no game is played, to save time. [Empirical] The other two mixes are 1 % below the best one in the median of 2,700
random pipelines, and far below it if there are fewer micro-batches than ranks."""


@dataclass(frozen=True)
class Mixes:
    """Mixes of the paths through one pipeline; or through several, with a dim C before all others."""

    ranks: Floats
    """[M, p, T] The least weight of a layer on each rank, over its stages."""
    base: Floats
    """[M, T] The weight of the layers that stages have in any cut."""
    embedding: Floats
    """[M] Micro-batches that pass the embedding both ways."""
    head: Floats
    """[M] Micro-batches that pass the head both ways."""


@lru_cache(maxsize=1 << 10)
def mixes(pipes: tuple[ScheduleChoice, ...], p: int, m: int, ends_hold: bool, num_layers: int, head: float) -> Mixes:
    """Mixes of the paths through each pipeline: all ranks equally, one micro-batch alone, and one in which all stages weigh about the same.

    Args:
        pipes: schedules and stages per rank.
        p: pipeline ranks.
        m: micro-batches.
        ends_hold: whether the first and the last stage have at least one layer, like all others.
        num_layers: layers of the model.
        head: time of the head, in layers.
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
    """The paths (ways) through one pipeline, whose stages can have any number of layers."""

    stages: Floats
    """[ways, S, T] How often each path has each part of the time of a stage's layers."""
    embedding: Floats
    """[ways] Micro-batches that pass the embedding both ways."""
    head: Floats
    """[ways] Micro-batches that pass the head both ways."""


def _game(ways: _Ways, base: Floats, num_layers: int, head: float) -> Floats:
    """[ways, S] Time of each path for one more layer in a stage, with a proportional part of the time that all cuts have."""
    passes = ways.stages @ USUAL
    fixed = passes @ base + head * USUAL[:2].sum() * ways.head
    return np.asarray(passes + fixed[:, None] / max(num_layers - base.sum(), 1.0))


def _weights(games: Sequence[Floats]) -> list[Floats]:
    """Weights for the rows of each game that make the least weighted column about as large as possible: by optimistic multiplicative
    weights of both players (arXiv 1311.1869), for all games at once."""
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
    """Softmax that overwrites its scores; they are below 300, so no power is infinite."""
    np.exp(scores, out=scores)
    scores /= np.add.reduce(scores, axis=-1, keepdims=True)
    return scores


@lru_cache(maxsize=1 << 12)
def _ways(pipe: ScheduleChoice, p: int, m: int) -> _Ways:
    """The paths through one pipeline: ``ahp.schedule.bounds`` explains each, and ``bounds.paths`` counts them for known stages. The first p have
    all the work of a rank, the last is that of one micro-batch.
    """
    once, each, of_one = _of_any_number(pipe, p)
    found = [_Ways(*(first + m * more for first, more in zip(once, each, strict=True))), of_one]
    forwards = of_ranks(pipe.schedule, p).forwards_before_gradient(p, pipe.virtual, m) if p > 1 else None
    if forwards is not None:
        found.insert(1, _after_first_gradient(pipe, p, m, forwards))
    return _Ways(*(np.concatenate(part) for part in zip(*found, strict=True)))


@lru_cache(maxsize=1 << 10)
def _of_any_number(pipe: ScheduleChoice, p: int) -> tuple[_Ways, _Ways, _Ways]:
    """The paths that grow with the number of micro-batches: what each has once, and with every micro-batch; and the path of one micro-batch."""
    schedule, own, stages = of_ranks(pipe.schedule, p), own_stages(pipe, p), np.arange(p * pipe.virtual)
    mine = (own[:, :, None] == stages).any(axis=1).astype(float)  # [p, S]
    before, none, end = (stages < own[:, :1]).astype(float), np.zeros((p, len(stages))), np.zeros(p)
    first = [(before, none, none, mine, mine, mine, end, end)]
    more = [(mine, mine, none, none, none, none, mine[:, 0], mine[:, -1])]
    if not schedule.splits_backward:  # else weight gradients can fill the time in which gradients drain
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
    """The path of the first micro-batch through all stages and back to each rank's highest one, then all that the rank has left."""
    schedule, own, stages = of_ranks(pipe.schedule, p), own_stages(pipe, p), np.arange(p * pipe.virtual)
    before, none, left = (stages < own[:, :1]).astype(float), *np.zeros((2, p, len(stages)))
    mine = (own[:, :, None] == stages).any(axis=1).astype(float)
    np.put_along_axis(left, own, (m - forwards).astype(float), axis=1)
    behind, work, whole = (stages > own[:, -1:]).astype(float), m * mine, _whole(pipe, p)
    back = (work, behind) if schedule.splits_backward else (work + behind + before, none)
    heads = np.where(own[:, -1] == stages[-1], np.minimum(m, m - forwards[:, -1] + 1), whole)
    return _joined([(1.0 + left, *back, none, none, mine, np.full(p, whole), heads)])


def _whole(pipe: ScheduleChoice, p: int) -> float:
    """Micro-batches whose path passes embedding and head both ways, including their weight gradients."""
    return 0.0 if of_ranks(pipe.schedule, p).splits_backward else 1.0


def _joined(some: Sequence[tuple[Floats, ...]]) -> _Ways:
    """Join paths. Each tuple has [ways, S] for each of ``PARTS``, then embeddings and heads, [ways]."""
    *parts, embeddings, heads = (np.concatenate(part) for part in zip(*some, strict=True))
    return _Ways(np.stack(parts, axis=-1), embeddings, heads)
