"""A schedule as a table of slots, with one column per rank, for a fast simulation row by row.

Every rank does at most one action in a row, and whatever an action waits for is in an earlier row, so that a row is one
vector operation. In the middle of the table rows repeat: with more micro-batches there are only more of these rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ahp.arrays import Ints
from ahp.schedule.patterns import make
from ahp.schedule.registry import get
from ahp.schedule.simulate import StageTimes, simulate
from ahp.schedule.slots import BACKWARD, FORWARD, KINDS, WEIGHT_GRADIENT, Period, Slots

Codes = NDArray[np.int32]


@dataclass(frozen=True)
class Table:
    """The rows of one schedule; S stages, R rows, p ranks.

    A flat place is row x p + rank, and row 0 is the state before the first row of ``code``.
    """

    code: Codes
    """[R, p] 0 = nothing, else 1 + kind x S + stage."""
    source: Ints
    """[R, p] Flat place of what the action waits for from another stage; the rank's own previous row if it waits for none."""
    send: Codes
    """[R, p] 0 = nothing is sent, 1 + stage: its output, 1 + S + stage: its gradient."""
    first: Ints
    """[S] Flat place of each stage's first forward, minus one row: an index into ``code``."""
    last: Ints
    """[S] The same for its last backward or weight gradient."""
    reads_last: Ints
    """[2, n] Stages whose last backward is whole and waited for, and the index into ``code`` of the action that waits."""
    micro_batches_per_period: int
    rows_per_period: int
    steady: tuple[int, int]
    """Rows ``steady[0] .. steady[1]`` (not included) repeat every period with later micro-batches and hold no first forward
    or last backward of a stage; more micro-batches mean more of these rows."""
    reach: int
    """The most rows back at which a steady row reads."""


@lru_cache(maxsize=64)
def table(name: str, p: int, v: int, m: int) -> Table:
    """The table of a legal schedule. Not for schedules with all forwards first: their rows do not repeat, and their times have a closed form."""
    schedule = get(name)
    period = schedule.period(p, v, m)
    few = m if period is None or period.enough is None else min(m, period.enough)
    slots = schedule.slots(p, v, few) or _as_simulated(name, p, v, few)
    made = _table(slots, p, p * v, few, period)
    return made if m == few else _table(_more(slots, made, m - few), p, p * v, m, period)


def _as_simulated(name: str, p: int, v: int, m: int) -> Slots:
    """The slots of any schedule: an action's row is its start time if every action takes one second."""
    timeline = simulate(make(name, p, v, m), [StageTimes(1.0, 1.0, 1.0, 1.0)] * (p * v))
    actions = [
        (int(start_s), rank, KINDS.index(letter), stage, micro_batch)
        for rank, (starts_s, order) in enumerate(zip(timeline.starts_s, timeline.schedule.ranks, strict=True))
        for start_s, (letter, stage, micro_batch) in zip(starts_s, order, strict=True)
    ]
    return Slots(*np.array(actions, dtype=np.int64).T)


def _more(slots: Slots, made: Table, more: int) -> Slots:
    """The slots of a table with ``more`` further micro-batches, one per period: the last steady rows repeated."""
    stop, length = made.steady[1], made.rows_per_period
    late = slots.row >= stop
    again = ~late & (slots.row >= stop - length)
    times = np.repeat(np.arange(1, more + 1), again.sum())

    def column(values: Ints, step: int) -> Ints:
        return np.concatenate([values[~late], np.tile(values[again], more) + step * times, values[late] + step * more])

    return Slots(
        row=column(slots.row, length),
        rank=column(slots.rank, 0),
        kind=column(slots.kind, 0),
        stage=column(slots.stage, 0),
        micro_batch=column(slots.micro_batch, 1),
    )


def _table(slots: Slots, p: int, stages: int, m: int, period: Period | None) -> Table:
    kind, stage, micro_batch = slots.kind, slots.stage, slots.micro_batch
    rows = int(slots.row.max()) + 1
    micro_batches_per_period, rows_per_period, _ = period or Period(m, rows)
    place = slots.row * p + slots.rank
    code = np.zeros(rows * p, dtype=np.int32)
    code[place] = 1 + kind * stages + stage
    counted = np.full(rows * p, -1)
    counted[place] = micro_batch
    # Flat places where each stage's output and gradient of each micro-batch are made, counting the row before the first.
    output, gradient = np.zeros((2, stages, m), dtype=np.int64)
    forward, weight = kind == FORWARD, kind == WEIGHT_GRADIENT
    back = ~(forward | weight)
    output[stage[forward], micro_batch[forward]] = place[forward] + p
    gradient[stage[back], micro_batch[back]] = place[back] + p
    source, send = np.arange(rows * p), np.zeros(rows * p, dtype=np.int32)
    waits = forward & (stage > 0)
    source[place[waits]] = output[stage[waits] - 1, micro_batch[waits]]
    send[place[waits]] = stage[waits]
    waits = back & (stage < stages - 1)
    source[place[waits]] = gradient[stage[waits] + 1, micro_batch[waits]]
    send[place[waits]] = 2 + stages + stage[waits]
    last = np.zeros(stages, dtype=np.int64)
    ends = (kind == BACKWARD) | weight
    np.maximum.at(last, stage[ends], place[ends])
    whole = np.flatnonzero((code[last] <= (BACKWARD + 1) * stages) & (np.arange(stages) > 0))
    read = gradient[whole - 1, counted[last[whole]]] - p
    code, counted, source = code.reshape(rows, p), counted.reshape(rows, p), source.reshape(rows, p)
    start, stop = _repeats(code, counted, source, micro_batches_per_period, rows_per_period)
    reach = 0
    if stop > start:
        reach = int((np.arange(start, stop)[:, None] + 1 - source[start:stop] // p).max())
    first = output[:, 0] - p
    start, stop = max(start - rows_per_period, int(first.max()) // p + 1), min(stop, int(last.min()) // p)
    return Table(
        code=code,
        source=source,
        send=send.reshape(rows, p),
        first=first,
        last=last,
        reads_last=np.stack([whole, read]),
        micro_batches_per_period=micro_batches_per_period,
        rows_per_period=rows_per_period,
        steady=(start, stop),
        reach=reach,
    )


def _repeats(code: Codes, micro_batch: Ints, source: Ints, period: int, rows: int) -> tuple[int, int]:
    """Start and stop of the longest run of rows that equal the rows ``rows`` earlier, with micro-batches ``period`` later."""
    if len(code) <= rows:
        return 0, 0
    same = (code[rows:] == code[:-rows]) & (source[rows:] - source[:-rows] == rows * code.shape[1])
    same &= (micro_batch[rows:] - micro_batch[:-rows] == period) | (code[rows:] == 0)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], same.all(axis=1), [0]]).astype(np.int8)))
    if len(edges) == 0:
        return 0, 0
    starts, stops = edges[::2], edges[1::2]
    longest = int(np.argmax(stops - starts))
    return int(starts[longest]) + rows, int(stops[longest]) + rows
