"""When each action of a schedule starts and ends (an event simulation), and how much is kept in flight.

``ahp.schedule.makespan`` computes only the length of the step, many times faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from ahp.schedule.actions import Action, Kind, PlainAction, Schedule


class StageTimes(NamedTuple):
    """Seconds that one stage computes on one micro-batch, and seconds that its messages take."""

    forward_s: float
    backward_s: float
    """The whole backward: an action B."""
    input_gradient_s: float = 0.0
    """An action I, in schedules that split the backward."""
    weight_gradient_s: float = 0.0
    """An action W."""
    send_forward_s: float = 0.0
    """To send its output to the next stage; 0 if both are on one rank. Messages from one rank to another go one at a time."""
    send_backward_s: float = 0.0
    """To send the gradient from its backward, or its input gradient, to the previous stage."""
    first_forward_extra_s: float = 0.0
    """Added to the forward of micro-batch 0, such as weights gathered once per step."""
    last_backward_extra_s: float = 0.0
    """Keeps the rank busy after the stage's last backward or weight gradient, such as the reduction of gradients;
    the gradient that this backward sends does not wait for it."""
    gathered_s: float = 0.0
    """When its weights have arrived, if they are gathered next to the computation from the start of the step: the forward of micro-batch
    0 starts no earlier."""
    reduce_s: float = 0.0
    """Seconds to reduce its gradients next to the computation, once its last backward or weight gradient and ``last_backward_extra_s``
    are done. A rank reduces the gradients of one stage after the other."""
    reduce_slows: float = 0.0
    """Seconds lost per second that it computes while gradients of its rank are reduced; less than 1."""

    def slowed_s(self, start_s: float, end_s: float, until_s: float) -> float:
        """Seconds that an action of this stage loses, from ``start_s`` to ``end_s``, to gradients that are reduced until ``until_s``."""
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
    """Seconds in which each rank waits only for weights (``StageTimes.gathered_s``)."""
    reducing_s: tuple[float, ...]
    """Seconds in which each rank still reduces gradients (``StageTimes.reduce_s``) after its last action."""
    slowed_s: tuple[float, ...]
    """Seconds of ``busy_s`` that each rank loses because gradients are reduced at the same time."""

    @cached_property
    def ranks(self) -> tuple[tuple[Span, ...], ...]:
        """Per rank, its actions with start and end."""
        columns = zip(self.schedule.ranks, self.starts_s, self.ends_s, strict=True)
        return tuple(tuple(map(Span, actions, starts, ends)) for actions, starts, ends in columns)

    def end_s(self, rank: int) -> float:
        """When the rank has done its last action, and its gradients are reduced."""
        return self.ends_s[rank][-1] + self.reducing_s[rank]


def links(stage_rank: Sequence[int]) -> tuple[list[int], list[int]]:
    """For each stage, the number of the rank-to-rank link that takes its output, and of the one that takes its gradient; 0 if none does."""
    numbers: dict[tuple[int, int], int] = {}
    pairs = list(pairwise(stage_rank))
    outputs = [numbers.setdefault((here, there), len(numbers)) for here, there in pairs]
    gradients = [numbers.setdefault((here, there), len(numbers)) for there, here in pairs]
    return [*outputs, 0], [0, *gradients]


def simulate(schedule: Schedule, times: Sequence[StageTimes]) -> Timeline:
    """Run the schedule: an action starts when its rank is free and its inputs have arrived.

    ``times[s]`` belongs to stage ``s``. O(actions). Raises ValueError when the order can never run (an action waits for
    something that comes only after it).
    """
    run = Run(schedule.ranks, schedule.stage_rank, schedule.num_micro_batches, times)
    busy = tuple(sum(end) - sum(start) for start, end in zip(run.starts_s, run.ends_s, strict=True))
    reducing = tuple(max(0.0, reduced - end[-1]) for reduced, end in zip(run.reduced_s, run.ends_s, strict=True))
    columns = tuple(map(tuple, run.starts_s)), tuple(map(tuple, run.ends_s))
    return Timeline(schedule, *columns, run.end_s, busy, tuple(run.gathering_s), reducing, tuple(run.slowed_s))


class Run:
    """One simulation of given orders: when each action starts and ends, and what gathers and reductions add."""

    def __init__(
        self, orders: Sequence[Sequence[PlainAction]], stage_rank: Sequence[int], m: int, times: Sequence[StageTimes]
    ) -> None:
        """``orders``: the actions of each rank; ``m``: micro-batches. Raises like ``simulate``."""
        stages = len(times)
        self.times, self._last_stage = times, stages - 1
        self._links = links(stage_rank)
        self._free_s = [0.0] * (1 + max(map(max, self._links)))
        """When each link is free again."""
        self._gradients_left = [m] * stages
        self.starts_s: list[list[float]] = [[] for _ in orders]
        self.ends_s: list[list[float]] = [[] for _ in orders]
        self.gathering_s = [0.0] * len(orders)
        self.reduced_s = [0.0] * len(orders)
        """When all gradients that each rank has finished so far are reduced."""
        self.slowed_s = [0.0] * len(orders)
        self._seconds: dict[str, list[float]] = {
            Kind.FORWARD: [t.forward_s for t in times],
            Kind.BACKWARD: [t.backward_s for t in times],
            Kind.INPUT_GRADIENT: [t.input_gradient_s for t in times],
            Kind.WEIGHT_GRADIENT: [t.weight_gradient_s for t in times],
        }
        none: list[list[list[float | None]]] = [[[None] * m for _ in range(stages)] for _ in range(3)]
        self._outputs, self._gradients, self._deferred = none
        """When each stage's input, gradient and own input gradient are on its rank, per micro-batch; None while that is not known. The last
        stage has its gradient when its forward ends."""
        self._outputs[0] = [0.0] * m
        self._ready: dict[str, list[list[float | None]]] = {
            Kind.FORWARD: self._outputs,
            Kind.BACKWARD: self._gradients,
            Kind.INPUT_GRADIENT: self._gradients,
            Kind.WEIGHT_GRADIENT: self._deferred,
        }
        left = sum(map(len, orders))
        while left:
            done = sum(self._advance(rank, order) for rank, order in enumerate(orders))
            if done == 0:
                ended = zip(orders, self.ends_s, strict=True)
                stuck = [order[len(ends)] for order, ends in ended if len(ends) < len(order)]
                at = ", ".join(f"{stage}{letter}{micro_batch}" for letter, stage, micro_batch in stuck)
                raise ValueError(f"the schedule never ends: waiting at {at}")
            left -= done

    @property
    def end_s(self) -> float:
        """When all actions and reductions are done."""
        return max(max(ends[-1], reduced) for ends, reduced in zip(self.ends_s, self.reduced_s, strict=True))

    def _advance(self, rank: int, order: Sequence[PlainAction]) -> int:
        """Run the rank's next actions until one waits for another rank; returns how many were run."""
        starts, ends = self.starts_s[rank], self.ends_s[rank]
        before = len(ends)
        now = ends[-1] if ends else 0.0
        times, ready, seconds = self.times, self._ready, self._seconds
        for at in range(before, len(order)):  # not islice, which steps through all earlier actions
            letter, stage, micro_batch = order[at]
            arrived = ready[letter][stage][micro_batch]
            if arrived is None:
                break
            start = now if now > arrived else arrived
            first = letter == "F" and micro_batch == 0
            if first and (gathered_s := times[stage].gathered_s) > start:
                self.gathering_s[rank] += gathered_s - start
                start = gathered_s
            now = start + seconds[letter][stage]
            if first:
                now += times[stage].first_forward_extra_s
            if start < (until := self.reduced_s[rank]):
                slowed_s = times[stage].slowed_s(start, now, until)
                self.slowed_s[rank] += slowed_s
                now += slowed_s
            if letter == "F":
                if stage < self._last_stage:
                    sent_s = self._sent(self._links[0][stage], now, times[stage].send_forward_s)
                    self._outputs[stage + 1][micro_batch] = sent_s
                else:
                    self._gradients[stage][micro_batch] = now
            else:
                if letter != "W":
                    self._deferred[stage][micro_batch] = now
                    if stage:
                        sent_s = self._sent(self._links[1][stage], now, times[stage].send_backward_s)
                        self._gradients[stage - 1][micro_batch] = sent_s
                if letter != "I":
                    self._gradients_left[stage] -= 1
                    if not self._gradients_left[stage]:
                        now += times[stage].last_backward_extra_s
                        self.reduced_s[rank] = max(now, self.reduced_s[rank]) + times[stage].reduce_s
            starts.append(start)
            ends.append(now)
        return len(ends) - before

    def _sent(self, link: int, at_s: float, seconds: float) -> float:
        """When a message that is ready to be sent at ``at_s`` has arrived."""
        free_s = self._free_s[link]
        arrived_s = (at_s if at_s > free_s else free_s) + seconds
        self._free_s[link] = arrived_s
        return arrived_s


def peak_in_flight(
    orders: Iterable[Sequence[PlainAction]], weights: Sequence[float], freed: Sequence[float] = ()
) -> tuple[float, ...]:
    """The most that each rank keeps at once for the micro-batches of all its stages.

    Args:
        orders: the actions of each rank (``Schedule.ranks``).
        weights: what one micro-batch of each stage keeps from its forward to its backward, or to its weight gradient
            (bytes); weights of 1 count micro-batches.
        freed: the part of ``weights`` that only the input gradient needs and that is freed after it, if the backward is split;
            empty: nothing.
    """
    freed = freed or [0.0] * len(weights)
    peaks = []
    for order in orders:
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
