"""When each action of a schedule starts and ends: an event simulation, and what is kept in flight.

Where only the step's length is wanted ``ahp.schedule.makespan`` has it many times faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import NamedTuple

from ahp.schedule.actions import Action, Kind, Schedule


class StageTimes(NamedTuple):
    """Seconds that one stage computes on one micro-batch, and seconds that what it sends is on its way."""

    forward_s: float
    backward_s: float
    """The whole backward; what an action B takes."""
    input_gradient_s: float = 0.0
    """What an action I takes, in schedules that split the backward."""
    weight_gradient_s: float = 0.0
    """What an action W takes."""
    send_forward_s: float = 0.0
    """From the end of its forward until the next stage can start; 0 where both are on one rank."""
    send_backward_s: float = 0.0
    """From the end of its backward, or of its input gradient, until the previous stage can start."""
    first_forward_extra_s: float = 0.0
    """Added to the forward of micro-batch 0, such as weights gathered once per step."""
    last_backward_extra_s: float = 0.0
    """Keeps the rank busy after the stage's last backward or weight gradient, such as the reduction of gradients;
    what the backward sends does not wait for it."""
    gathered_s: float = 0.0
    """When its weights are there, which are gathered beside the computation from the start of the step on: the forward of micro-batch 0
    starts no earlier."""
    reduce_s: float = 0.0
    """Seconds in which its gradients are reduced beside the computation once it is done with its last backward or weight gradient, and what
    ``last_backward_extra_s`` adds to that. A rank reduces those of one stage after the other."""
    reduce_slows: float = 0.0
    """Seconds that it computes longer for each second in which gradients of its rank are reduced meanwhile; less than 1."""

    @property
    def passes_s(self) -> float:
        return self.forward_s + self.backward_s

    def slowed_s(self, start_s: float, end_s: float, until_s: float) -> float:
        """Seconds that an action of this stage takes longer where gradients are reduced until after its start."""
        return self.reduce_slows * (min(end_s, until_s) - start_s)

    def scaled(self, factor: float) -> StageTimes:
        """All seconds times ``factor``."""
        seconds = {name: factor * value for name, value in self._asdict().items() if name.endswith("_s")}
        return self._replace(**seconds)


@dataclass(frozen=True, slots=True)
class Span:
    """One action with its start and end, in seconds from the start of the step."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """What each rank does when."""

    schedule: Schedule
    starts_s: tuple[tuple[float, ...], ...]
    """Start of each rank's actions, in the order of the schedule."""
    ends_s: tuple[tuple[float, ...], ...]
    makespan_s: float
    busy_s: tuple[float, ...]
    """Seconds each rank computes."""
    gathering_s: tuple[float, ...]
    """Seconds each rank waits for weights alone (``StageTimes.gathered_s``), of those that it is idle."""
    reducing_s: tuple[float, ...]
    """Seconds each rank still reduces gradients (``StageTimes.reduce_s``) after its last action, of those that it is idle."""
    slowed_s: tuple[float, ...]
    """Seconds that each rank computes longer because gradients are reduced meanwhile, of those that it computes."""

    @cached_property
    def ranks(self) -> tuple[tuple[Span, ...], ...]:
        """Per rank, its actions with start and end."""
        columns = zip(self.schedule.ranks, self.starts_s, self.ends_s, strict=True)
        return tuple(tuple(map(Span, actions, starts, ends)) for actions, starts, ends in columns)

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Seconds each rank waits, before its first and after its last action included."""
        return tuple(self.makespan_s - busy for busy in self.busy_s)

    def end_s(self, rank: int) -> float:
        """When the rank has done its last action, and its gradients are reduced."""
        return self.ends_s[rank][-1] + self.reducing_s[rank]


def simulate(schedule: Schedule, times: Sequence[StageTimes]) -> Timeline:
    """Run the schedule: an action starts when its rank is free and what it needs has arrived.

    ``times[s]`` belongs to stage ``s``. O(actions). Raises ValueError when the order can never run (a rank
    waits for something that comes only after what waits for it).
    """
    run = _Run(schedule, times)
    starts: list[list[float]] = [[] for _ in schedule.ranks]
    ends: list[list[float]] = [[] for _ in schedule.ranks]
    left = sum(map(len, schedule.ranks))
    while left:
        done = sum(run.advance(rank, starts[rank], ends[rank]) for rank in range(len(schedule.ranks)))
        if done == 0:
            stuck = [str(o[len(e)]) for o, e in zip(schedule.ranks, ends, strict=True) if len(e) < len(o)]
            raise ValueError(f"schedule {schedule.name} never ends: waiting at {', '.join(stuck)}")
        left -= done
    busy = tuple(sum(end) - sum(start) for start, end in zip(starts, ends, strict=True))
    reducing = tuple(max(0.0, reduced - end[-1]) for reduced, end in zip(run.reduced_s, ends, strict=True))
    makespan_s = max(end[-1] + more for end, more in zip(ends, reducing, strict=True))
    columns = tuple(map(tuple, starts)), tuple(map(tuple, ends))
    return Timeline(schedule, *columns, makespan_s, busy, tuple(run.gathering_s), reducing, tuple(run.slowed_s))


class _Run:
    """The state of one simulation: when each stage's results of each micro-batch reach the next rank."""

    def __init__(self, schedule: Schedule, times: Sequence[StageTimes]) -> None:
        stages, m = schedule.num_stages, schedule.num_micro_batches
        self.order, self.last_stage = schedule.plain, stages - 1
        self.gradients_left = [m] * stages
        self.gathering_s = [0.0] * len(schedule.ranks)
        self.reduced_s = [0.0] * len(schedule.ranks)
        """When the gradients that each rank is done with are reduced."""
        self.slowed_s = [0.0] * len(schedule.ranks)
        self.times = times
        self.seconds: dict[str, list[float]] = {
            Kind.FORWARD: [t.forward_s for t in times],
            Kind.BACKWARD: [t.backward_s for t in times],
            Kind.INPUT_GRADIENT: [t.input_gradient_s for t in times],
            Kind.WEIGHT_GRADIENT: [t.weight_gradient_s for t in times],
        }
        self.forward_end: list[list[float | None]] = [[None] * m for _ in range(stages)]
        self.gradient_end: list[list[float | None]] = [[None] * m for _ in range(stages)]

    def advance(self, rank: int, starts: list[float], ends: list[float]) -> int:
        """Run the rank's next actions until one waits for another rank; append their times, return their number."""
        before = len(ends)
        now = ends[-1] if ends else 0.0
        for letter, stage, micro_batch in islice(self.order[rank], before, None):
            arrived = self._arrival(letter, stage, micro_batch)
            if arrived is None:
                break
            start = now if now > arrived else arrived
            if letter == "F" and micro_batch == 0 and (gathered_s := self.times[stage].gathered_s) > start:
                self.gathering_s[rank] += gathered_s - start
                start = gathered_s
            now = start + self.seconds[letter][stage]
            if letter == "F" and micro_batch == 0:
                now += self.times[stage].first_forward_extra_s
            if start < (until := self.reduced_s[rank]):
                slowed_s = self.times[stage].slowed_s(start, now, until)
                self.slowed_s[rank] += slowed_s
                now += slowed_s
            if letter == "F":
                self.forward_end[stage][micro_batch] = now
            else:
                if letter != "W":
                    self.gradient_end[stage][micro_batch] = now
                if letter != "I":
                    self.gradients_left[stage] -= 1
                    if not self.gradients_left[stage]:
                        now += self.times[stage].last_backward_extra_s
                        self.reduced_s[rank] = max(now, self.reduced_s[rank]) + self.times[stage].reduce_s
            starts.append(start)
            ends.append(now)
        return len(ends) - before

    def _arrival(self, letter: str, stage: int, micro_batch: int) -> float | None:
        """When everything the action reads is on its rank; None while it is not known."""
        if letter == "F":
            if stage == 0:
                return 0.0
            end = self.forward_end[stage - 1][micro_batch]
            return None if end is None else end + self.times[stage - 1].send_forward_s
        own = (self.gradient_end if letter == "W" else self.forward_end)[stage][micro_batch]
        if own is None or letter == "W" or stage == self.last_stage:
            return own
        end = self.gradient_end[stage + 1][micro_batch]
        if end is None:
            return None
        end += self.times[stage + 1].send_backward_s
        return end if end > own else own


def peak_in_flight(
    schedule: Schedule, weights: Sequence[float], freed_after_input_gradient: Sequence[float] | None = None
) -> tuple[float, ...]:
    """Per rank, the largest sum over its stages of what its micro-batches keep.

    Args:
        schedule: the order of each rank.
        weights: what one micro-batch of each stage keeps from its forward to its backward, or to its weight gradient
            (bytes); weights of 1 count micro-batches.
        freed_after_input_gradient: the part of it that only the input gradient needs and that goes with it, where the
            backward is split; none if not given.
    """
    freed = freed_after_input_gradient or [0.0] * len(weights)
    peaks = []
    for order in schedule.plain:
        held = peak = 0.0
        for letter, stage, _ in order:
            if letter == "F":
                held += weights[stage]
                if held > peak:
                    peak = held
            elif letter == "B":
                held -= weights[stage]
            elif letter == "I":
                held -= freed[stage]
            else:
                held -= weights[stage] - freed[stage]
        peaks.append(peak)
    return tuple(peaks)
