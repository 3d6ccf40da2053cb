"""How long a schedule takes, without building its actions one by one: exact, in a few milliseconds at any size.

The same recurrence as ``simulate``, over the rows of a ``Table`` with all ranks at once. With many micro-batches the rows
settle into a rhythm: once the state of all ranks equals an earlier state plus a constant, this repeats until the first stage
runs out of micro-batches, and the periods between are added instead of run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ahp.arrays import Floats
from ahp.schedule.actions import Kind, Schedule
from ahp.schedule.bounds import gpipe_ends_s
from ahp.schedule.patterns import make, refuse_illegal, stage_ranks
from ahp.schedule.registry import get
from ahp.schedule.simulate import StageTimes, Timeline, links, peak_in_flight, simulate
from ahp.schedule.slots import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT
from ahp.schedule.table import Table, table

SECONDS = ("forward_s", "backward_s", "input_gradient_s", "weight_gradient_s")
"""The field of ``StageTimes`` for each kind of action, in the order of a table's kinds."""

SAME_RHYTHM = 1e-13
"""Largest difference between two states that count as the same, relative to the time passed: a few hundred times the
rounding error of doubles. Added periods are then off by at most this times the micro-batches that were run, at most 16
per rank: for a thousand ranks 2e-9 of the time added, in practice 1e-12."""

SETTLED_ROUNDS = (4, 8, 16)
"""Micro-batches per rank of the tables that are searched for a rhythm, in turn, before the whole table is run. [Empirical]
1,500 layouts of 2 to 8 ranks: 65 % settle within 4 and 97 % within 16 if all stages except the ends are equal, 89 and 98 % if
stages are random."""


@dataclass(frozen=True)
class Makespan:
    """When each rank of a schedule is done, and the whole timeline on demand."""

    name: str
    p: int
    v: int
    m: int
    times: tuple[StageTimes, ...]
    makespan_s: float
    busy_s: tuple[float, ...]
    """Seconds each rank computes."""
    ends_s: tuple[float, ...]
    """When each rank has done its last action, and its gradients are reduced."""
    gathering_s: tuple[float, ...]
    """Seconds of ``idle_s`` in which each rank waits for weights gathered next to the computation."""
    reducing_s: tuple[float, ...]
    """Seconds of ``idle_s`` in which each rank still reduces gradients after its last action."""
    slowed_s: tuple[float, ...]
    """Seconds of ``busy_s`` that each rank loses because gradients are reduced at the same time."""
    order: Schedule | None = None
    """The order itself, if it is not one that ``name`` makes."""

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Seconds each rank waits, including before its first and after its last action."""
        return tuple(self.makespan_s - busy for busy in self.busy_s)

    @property
    def splits_backward(self) -> bool:
        """Whether at least some weight gradients are computed apart from input gradients."""
        if self.order is not None:
            return any(action.kind is Kind.INPUT_GRADIENT for rank in self.order.ranks for action in rank)
        return get(self.name).splits_backward

    @property
    def schedule(self) -> Schedule:
        """The order of each rank."""
        return self.order or make(self.name, self.p, self.v, self.m)

    @cached_property
    def timeline(self) -> Timeline:
        """Every action with its start and end; O(p v m), tens of milliseconds for tens of thousands of actions."""
        return simulate(self.schedule, self.times)

    def peak_kept(self, weights: Sequence[float]) -> tuple[float, ...]:
        """The most that each rank keeps at once, if one micro-batch of stage ``s`` keeps ``weights[s]``."""
        if self.order is not None:
            return peak_in_flight(self.order.ranks, weights)
        return peak_kept(self.name, self.p, self.v, self.m, weights)


def makespan(name: str, p: int, v: int, m: int, times: Sequence[StageTimes]) -> Makespan:
    """The totals of ``simulate(make(name, p, v, m), times)`` for the whole step, up to rounding.

    Args:
        name: a schedule of ``ahp.schedule.registry.SCHEDULES``.
        p: pipeline ranks.
        v: stages per rank.
        m: micro-batches.
        times: seconds of each stage, in pipeline order.

    Raises:
        BadInput: there is no such schedule (``patterns.illegal``).
    """
    refuse_illegal(name, p, v, m)
    first = get(name).all_forwards_first
    if any(t.gathered_s for t in times) if first else _may_queue(name, p, v, times):
        return replace(makespan_of_order(make(name, p, v, m), times), order=None)
    ran = _all_forwards_first(m, times) if first else _run(name, p, v, m, times)
    ends = tuple(map(max, ran.ends_s, ran.reduced_s))
    busy, gathering, slowed = map(tuple, (ran.busy_s, ran.gathering_s, ran.slowed_s))
    reducing = tuple(end - own for end, own in zip(ends, ran.ends_s, strict=True))
    return Makespan(name, p, v, m, tuple(times), max(ends), busy, ends, gathering, reducing, slowed)


def _may_queue(name: str, p: int, v: int, times: Sequence[StageTimes]) -> bool:
    """Whether a message can be ready before its link is free: if sending one takes longer than an action that sends another."""
    gradients_s = [min(t.backward_s, t.input_gradient_s) if get(name).splits_backward else t.backward_s for t in times]
    sends_s = max(max(t.send_forward_s, t.send_backward_s) for t in times)
    if sends_s <= min(min(gradients_s), min(t.forward_s for t in times)):
        return False
    outputs, gradients = links(stage_ranks(name, p, v))
    sent = list(zip(outputs, (t.send_forward_s for t in times), (t.forward_s for t in times), strict=True))[:-1]
    sent += list(zip(gradients, (t.send_backward_s for t in times), gradients_s, strict=True))[1:]
    longest, shortest = dict[int, float](), dict[int, float]()
    for link, sent_s, action_s in sent:
        longest[link] = max(longest.get(link, 0.0), sent_s)
        shortest[link] = min(shortest.get(link, np.inf), action_s)
    return any(longest[link] > shortest[link] for link in longest)


def makespan_of_order(order: Schedule, times: Sequence[StageTimes]) -> Makespan:
    """The ``Makespan`` of a given order that has the same number of stages on each rank. O(actions)."""
    timeline, p = simulate(order, times), len(order.ranks)
    ends_s = tuple(timeline.end_s(rank) for rank in range(p))
    name, v, m = order.name, order.num_stages // p, order.num_micro_batches
    columns = timeline.busy_s, ends_s, timeline.gathering_s, timeline.reducing_s, timeline.slowed_s
    return Makespan(name, p, v, m, tuple(times), timeline.makespan_s, *columns, order)


def peak_kept(
    name: str,
    p: int,
    v: int,
    m: int,
    weights: Sequence[float],
    freed_after_input_gradient: Sequence[float] | None = None,
) -> tuple[float, ...]:
    """The result of ``peak_in_flight(make(name, p, v, m).ranks, ...)`` without making the schedule: the most that each rank keeps."""
    refuse_illegal(name, p, v, m)
    if get(name).all_forwards_first:
        return tuple(m * weight for weight in weights)
    rows = table(name, p, v, _fewer(name, p, v, m, SETTLED_ROUNDS[0]))
    kept, stages = np.array(weights, dtype=float), p * v
    freed = (
        np.zeros(stages) if freed_after_input_gradient is None else np.array(freed_after_input_gradient, dtype=float)
    )
    change = np.zeros(1 + 4 * stages)
    changes = (FORWARD, kept), (BACKWARD, -kept), (INPUT_GRADIENT, -freed), (WEIGHT_GRADIENT, freed - kept)
    for kind, of_stage in changes:
        change[1 + kind * stages : 1 + (kind + 1) * stages] = of_stage
    return tuple(np.cumsum(change[rows.code], axis=0).max(axis=0).tolist())


class _Ran(NamedTuple):
    """Results per rank, in seconds."""

    busy_s: list[float]
    ends_s: list[float]
    """When the rank has done its last action."""
    reduced_s: list[float]
    """When the gradients that it reduces next to its actions are reduced; 0 if there are none."""
    slowed_s: list[float]
    gathering_s: list[float]


def _all_forwards_first(m: int, times: Sequence[StageTimes]) -> _Ran:
    """The closed form for stages that gather no weights next to the computation."""
    busy = [m * (t.forward_s + t.backward_s) + t.first_forward_extra_s + t.last_backward_extra_s for t in times]
    ends, none = gpipe_ends_s(m, times), [0.0] * len(times)
    return _Ran(
        busy, ends, [(end + t.reduce_s) * (t.reduce_s > 0) for end, t in zip(ends, times, strict=True)], none, none
    )


def _fewer(name: str, p: int, v: int, m: int, rounds: int) -> int:
    """``rounds`` micro-batches per rank, at most m, such that the table of m is their table plus whole periods."""
    return m if get(name).period(p, v, m) is None else min(m, rounds * p)


def _run(name: str, p: int, v: int, m: int, times: Sequence[StageTimes]) -> _Ran:
    shorter = None
    for rounds in SETTLED_ROUNDS:
        fewer = _fewer(name, p, v, m, rounds)
        if fewer * 3 < m * 2:
            run = _Run(table(name, p, v, fewer), times, shorter)
            if run.settles((m - fewer) // run.table.micro_batches_per_period):
                return run.result()
            shorter = run
    run = _Run(table(name, p, v, m), times, shorter)
    run.finish()
    return run.result()


class _Run:
    """One pass over a table. It computes the idle time of each rank before each row: a row's end is that plus the rank's work
    until then, so that a row costs a gather, an addition and a maximum. The time lost to reductions counts as idle here."""

    def __init__(self, rows: Table, times: Sequence[StageTimes], shorter: _Run | None) -> None:
        """``shorter``: a run of the table of fewer micro-batches until its first stage ran out; those rows are the same."""
        self.table = rows
        seconds = np.array([0.0, *(getattr(t, kind) for kind in SECONDS for t in times)])
        sends = np.array([0.0, *(t.send_forward_s for t in times), *(t.send_backward_s for t in times)])
        last = np.array([t.last_backward_extra_s for t in times])
        work = seconds[rows.code]
        work.reshape(-1)[rows.first] += [t.first_forward_extra_s for t in times]
        work.reshape(-1)[rows.last] += last
        self.work_s = np.zeros((len(work) + 1, work.shape[1]))
        """[R + 1, p] Seconds that each rank has computed before each row."""
        np.cumsum(work, axis=0, out=self.work_s[1:])
        whole, reading = rows.reads_last
        lag = sends[rows.send]
        lag.reshape(-1)[reading] -= last[whole]
        lag += self.work_s.reshape(-1)[rows.source]
        lag -= self.work_s[:-1]
        self.lag_s = lag
        self.idle_s = np.zeros_like(self.work_s)
        """[R + 1, p] Seconds that each rank has waited before the end of each row."""
        self.added_s = np.zeros(work.shape[1])
        """Seconds that each rank computes in added periods."""
        self.done = 0
        """Rows that have been run."""
        self.times = times
        self.reduced_s, self.slowed_s, self.gathering_s = np.zeros((3, work.shape[1]))
        """Per rank: when its gradients are reduced, the seconds that this slows it down, and the seconds it waited for weights."""
        if shorter is not None:
            self.done = shorter.done
            self.idle_s[: self.done + 1] = shorter.idle_s[: self.done + 1]
            self.gathering_s = shorter.gathering_s
        elif any(t.gathered_s for t in times):
            self._begin()

    def _begin(self) -> None:
        """Run the rows until every stage that waits for its weights has begun."""
        gathered_s = np.array([t.gathered_s for t in self.times])
        each_s = np.array([t.forward_s + t.first_forward_extra_s + t.send_forward_s for t in self.times])
        late = gathered_s > np.cumsum(each_s) - each_s  # the others have their weights before their first micro-batch
        first_row, rank = np.divmod(self.table.first, self.idle_s.shape[1])
        for row in sorted(set(first_row[late].tolist())):
            self.advance(row + 1)
            begin = np.flatnonzero(first_row == row)
            start_s = (self.idle_s[row + 1] + self.work_s[row])[rank[begin]]
            waited_s = (gathered_s[begin] - start_s).clip(0.0)
            self.idle_s[row + 1, rank[begin]] += waited_s
            self.gathering_s[rank[begin]] += waited_s

    def advance(self, stop: int) -> None:
        """Run the rows until ``stop`` (not included)."""
        for _ in self._rows(stop):
            pass

    def _rows(self, stop: int) -> Iterator[Floats]:
        """Like ``advance``, row by row: yields the time that each rank has waited before the row's end, which the caller may increase."""
        start, self.done = self.done, stop
        flat, buffer = self.idle_s.reshape(-1), np.empty(self.idle_s.shape[1])
        take, add, maximum = flat.take, np.add, np.maximum
        rows = zip(
            self.table.source[start:stop], self.lag_s[start:stop], self.idle_s[start:stop],
            self.idle_s[start + 1 : stop + 1], strict=True,
        )  # fmt: skip
        for source, lag, before, after in rows:
            take(source, out=buffer, mode="clip")
            add(buffer, lag, out=buffer)
            maximum(buffer, before, out=after)
            yield after

    def finish(self) -> None:
        """Run the remaining rows. Once a stage is done, its gradients are reduced while the rank goes on with the others."""
        rows, p = self.table.code.shape
        reduce_s = np.array([t.reduce_s for t in self.times])
        if not reduce_s.any():
            self.advance(rows)
            return
        last_row, rank = np.divmod(self.table.last, p)
        ended: dict[int, list[int]] = {}
        for stage, row in enumerate(last_row.tolist()):
            ended.setdefault(row, []).append(stage)
        first = min(ended)
        self.advance(first)
        slows = np.array([t.reduce_slows for t in self.times])
        slows = slows[(self.table.code[first:] - 1) % len(slows)]  # an empty slot has some stage's, but takes no time
        actions_s = np.diff(self.work_s, axis=0)
        actions_s[last_row, rank] -= [t.last_backward_extra_s for t in self.times]
        beside_s, work_s = np.empty(p), self.work_s[first:]
        each = zip(range(first, rows), self._rows(rows), work_s[:-1], work_s[1:], actions_s[first:], slows, strict=True)
        for row, idle_s, before_s, after_s, action_s, slowed in each:
            np.add(idle_s, before_s, out=beside_s)
            np.subtract(self.reduced_s, beside_s, out=beside_s)
            if np.maximum.reduce(beside_s) > 0.0:
                np.minimum(beside_s, action_s, out=beside_s)
                np.maximum(beside_s, 0.0, out=beside_s)
                np.multiply(beside_s, slowed, out=beside_s)
                self.slowed_s += beside_s
                idle_s += beside_s
            if (stages := ended.get(row)) is not None:
                ranks = rank[stages]
                ends_s = idle_s[ranks] + after_s[ranks]
                self.reduced_s[ranks] = np.maximum(ends_s, self.reduced_s[ranks]) + reduce_s[stages]

    def settles(self, periods: int) -> bool:
        """Run all rows with ``periods`` more periods in between, if the steady rows settle into a rhythm; whether they do."""
        start, stop = self.table.steady
        length, reach = self.table.rows_per_period, self.table.reach
        self.advance(stop)
        found = self._rhythm(start, stop)
        if found is None:
            return False
        cycle, cycle_s = found
        more, rest = divmod(periods, cycle)
        # Whole cycles are added. If periods are left over, one more cycle is added and the drain starts from earlier rows.
        back = (cycle - rest) * length if rest else 0
        window = np.arange(stop + 1 - reach, stop + 1)
        ends_s = self.idle_s[window - back] + self.work_s[window - back] + (more + (rest > 0)) * cycle_s
        self.idle_s[window] = ends_s - self.work_s[window]
        self.added_s = periods * (self.work_s[stop] - self.work_s[stop - length])
        self.finish()
        return True

    def _rhythm(self, start: int, stop: int) -> tuple[int, float] | None:
        """Periods and seconds after which the state of all ranks before row ``stop`` repeats; None if it does not."""
        length, reach = self.table.rows_per_period, self.table.reach
        earliest = max(start, reach - 1)
        earlier = np.arange(stop - length, earliest - 1, -length)
        if len(earlier) == 0:
            return None
        ends_s = self.idle_s[: stop + 1] + self.work_s[: stop + 1]
        tolerance_s = SAME_RHYTHM * float(ends_s[stop].max())
        passed = ends_s[stop] - ends_s[earlier]
        for cycle in np.flatnonzero(np.ptp(passed, axis=1) <= tolerance_s) + 1:
            window = np.arange(stop + 1 - reach, stop + 1)
            moved = ends_s[window] - ends_s[window - cycle * length]
            if np.ptp(moved) <= tolerance_s:
                return int(cycle), float(moved[-1].max())
        return None

    def result(self) -> _Ran:
        """The results, once all rows have been run."""
        busy_s, ends_s = self.work_s[-1] + self.added_s + self.slowed_s, self.idle_s[-1] + self.work_s[-1]
        gradients = self.reduced_s.tolist(), self.slowed_s.tolist()
        return _Ran(busy_s.tolist(), ends_s.tolist(), *gradients, self.gathering_s.tolist())
