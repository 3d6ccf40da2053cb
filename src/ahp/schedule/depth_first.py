"""What 1F1B and the interleaved schedules share: each rank repeats forward, backward (, weight gradient), depth first.

Several stages per rank go in rounds of about p micro-batches (arXiv 2104.04473, section 2.2; torch relaxes m mod p = 0 to
rounds of equal length). Megatron-LM's interleaved schedule (``get_schedule_table``, ``get_pp_rank_microbatches``) is the
same order if m is a multiple of p; versions up to 2024 run all forwards first if m = p.
"""

from __future__ import annotations

import numpy as np

from ahp.arrays import Ints, Mask
from ahp.schedule.actions import Action, Kind
from ahp.schedule.descriptor import PipelineSchedule
from ahp.schedule.slots import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Period, Slots


class DepthFirst(PipelineSchedule):
    """The table of these schedules in closed form, and the order of those with several stages per rank."""

    def rank_actions(self, rank: int, p: int, v: int, m: int) -> list[Action]:
        """Backward n follows forward n + warm-up.

        If the backward is split, weight gradients run ``rank`` input gradients behind, so that with one stage per rank every
        rank keeps p micro-batches in flight (arXiv 2401.10241, ZB-H1).
        """
        split, per_round, total = self.splits_backward, round_length(p, v, m), m * v
        warmup = min((v - 1) * per_round + (1 if split else 2) * (p - 1 - rank), total)

        def nth(kind: Kind, n: int) -> Action:
            chunk, within = divmod(n, per_round)
            round_index, local = divmod(chunk, v)
            if kind is not Kind.FORWARD:
                local = v - 1 - local
            return Action(kind, local * p + rank, round_index * per_round + within)

        gradient = Kind.INPUT_GRADIENT if split else Kind.BACKWARD
        actions = [nth(Kind.FORWARD, n) for n in range(warmup)]
        for n in range(total):
            if warmup + n < total:
                actions.append(nth(Kind.FORWARD, warmup + n))
            actions.append(nth(gradient, n))
            if split and n >= rank:
                actions.append(nth(Kind.WEIGHT_GRADIENT, n - rank))
        if split:
            actions += [nth(Kind.WEIGHT_GRADIENT, n) for n in range(max(total - rank, 0), total)]
        return actions

    def forwards_before_gradient(self, p: int, v: int, m: int) -> Ints:
        """The warm-up and one more forward."""
        behind = 1 if self.splits_backward or v == 1 else 2
        return held_after((v - 1) * round_length(p, v, m) + behind * (p - 1 - np.arange(p)) + 1, p, v, m)

    def in_flight(self, p: int, v: int, m: int) -> Ints:
        """Those held when the first gradient starts."""
        return self.forwards_before_gradient(p, v, m)

    def slots(self, p: int, v: int, m: int) -> Slots | None:
        """The closed form, if there is a whole round or one stage per rank; else None."""
        return _slots(p, v, m, split=self.splits_backward) if v == 1 or m >= p else None

    def period(self, p: int, v: int, m: int) -> Period | None:
        """One round, if more micro-batches are more rounds of the same length; else None."""
        length = round_length(p, v, m)
        return None if v > 1 and m % p else Period(length, length * v * _cycle(self.splits_backward))


def round_length(p: int, v: int, m: int) -> int:
    """Micro-batches that go through a stage before the rank turns to its next one."""
    return m // max(1, m // p) if v > 1 else 1


def whole_rounds(p: int, m: Ints) -> Mask:
    """Whether micro-batches divide into rounds of equal length."""
    return (m > 0) & (m % np.maximum(m // p, 1) == 0)


def uneven_rounds(name: str, p: int, m: int) -> str:
    """The reason why ``m`` micro-batches are refused, if they do not."""
    near = (np.flatnonzero(whole_rounds(p, np.arange(1, 2 * m + 1))) + 1).tolist()
    valid = [k for k in near if k < m][-2:] + [k for k in near if k > m][:2]
    return (
        f"pipeline_parallel_schedule = {name!r}: {m} micro-batches do not divide into "
        f"{max(1, m // p)} rounds of {p} ranks (valid micro-batches: {', '.join(map(str, valid))})"
    )


def held_after(done: Ints, p: int, v: int, m: int) -> Ints:
    """[p, v] Micro-batches that each rank holds per stage after ``done`` [p] forwards in depth-first order."""
    if p == 1:
        return np.ones((1, v), dtype=np.int64)
    per_round = round_length(p, v, m)
    whole, rest = np.divmod(np.minimum(done, m * v), per_round * v)
    begun = np.minimum(np.maximum(rest[:, None] - np.arange(v) * per_round, 0), per_round)
    return whole[:, None] * per_round + begun


def _cycle(split: bool) -> int:
    """Number of actions that a rank repeats."""
    return 3 if split else 2


def _slots(p: int, v: int, m: int, *, split: bool) -> Slots:
    """A forward stands one row (1F1B, zero bubble) or two rows after that of the previous rank; backwards do so in the other
    direction, because the warm-ups of neighbors differ by one or two cycles."""
    total, cycle = m * v, _cycle(split)
    per_round = round_length(p, v, m)
    behind = 1 if split or v == 1 else 2
    rank, n = (axis.ravel() for axis in np.meshgrid(np.arange(p), np.arange(total), indexing="ij"))
    warm = (v - 1) * per_round + behind * (p - 1 - rank)
    chunk, within = np.divmod(n, per_round)
    round_index, local = np.divmod(chunk, v)
    micro_batch = round_index * per_round + within
    down, up = local * p + rank, (v - 1 - local) * p + rank
    start = behind * rank
    columns = [(cycle * n + start, FORWARD, down)]
    columns.append((cycle * (n + warm) + start + 1, INPUT_GRADIENT if split else BACKWARD, up))
    if split:
        columns.append((cycle * (n + rank + warm) + start + 2, WEIGHT_GRADIENT, up))
    row = np.concatenate([rows for rows, _, _ in columns])
    # Take out rows in which no rank does anything, such as in the warm-up.
    used = np.zeros(row.max() + 1, dtype=np.int64)
    used[row] = 1
    return Slots(
        row=(np.cumsum(used) - 1)[row],
        rank=np.tile(rank, len(columns)),
        kind=np.repeat([kind for _, kind, _ in columns], len(n)),
        stage=np.concatenate([stage for _, _, stage in columns]),
        micro_batch=np.tile(micro_batch, len(columns)),
    )
