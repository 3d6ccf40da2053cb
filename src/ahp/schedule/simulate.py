"""When each action of a schedule starts and ends: an event simulation, and its lower bound in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from ahp.schedule.actions import Action, Kind, Schedule


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds that one stage computes on one micro-batch, and seconds that what it sends is on its way."""

    forward_s: float
    backward_s: float
    """The whole backward."""
    input_gradient_s: float = 0.0
    weight_gradient_s: float = 0.0
    send_forward_s: float = 0.0
    """From the end of its forward until the next stage can start; 0 where both are on one rank."""
    send_backward_s: float = 0.0
    """From the end of its backward until the previous stage can start."""
    first_forward_extra_s: float = 0.0
    """Added to the forward of micro-batch 0, such as weights gathered once per step."""
    last_backward_extra_s: float = 0.0
    """Keeps the rank busy after the backward of the last micro-batch, such as the reduction of gradients; what
    the backward sends does not wait for it."""

    def of(self, kind: Kind) -> float:
        if kind is Kind.FORWARD:
            return self.forward_s
        if kind is Kind.BACKWARD:
            return self.backward_s
        return self.input_gradient_s if kind is Kind.INPUT_GRADIENT else self.weight_gradient_s


@dataclass(frozen=True, slots=True)
class Span:
    """One action with its start and end, in seconds from the start of the step."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """What each rank does when."""

    ranks: tuple[tuple[Span, ...], ...]
    makespan_s: float
    busy_s: tuple[float, ...]
    """Seconds each rank computes."""

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Seconds each rank waits, before its first and after its last action included."""
        return tuple(self.makespan_s - busy for busy in self.busy_s)

    def end_s(self, rank: int) -> float:
        """When the rank has done its last action."""
        return self.ranks[rank][-1].end_s


def simulate(schedule: Schedule, times: Sequence[StageTimes]) -> Timeline:
    """Run the schedule: an action starts when its rank is free and what it needs has arrived.

    ``times[s]`` belongs to stage ``s``. O(actions). Raises ValueError when the order can never run (a rank
    waits for something that comes only after what waits for it).
    """
    stages, m = schedule.num_stages, schedule.num_micro_batches
    forward_end: list[list[float | None]] = [[None] * m for _ in range(stages)]
    gradient_end: list[list[float | None]] = [[None] * m for _ in range(stages)]
    spans: list[list[Span]] = [[] for _ in schedule.ranks]
    free = [0.0] * len(schedule.ranks)
    left = sum(map(len, schedule.ranks))
    while left:
        before = left
        for rank, order in enumerate(schedule.ranks):
            done, now = spans[rank], free[rank]
            for action in islice(order, len(done), None):
                arrived = _arrival(action, stages, forward_end, gradient_end, times)
                if arrived is None:
                    break
                start = now if now > arrived else arrived
                stage_times, micro_batch = times[action.stage], action.micro_batch
                now = start + stage_times.of(action.kind)
                if action.kind is Kind.FORWARD:
                    if micro_batch == 0:
                        now += stage_times.first_forward_extra_s
                    forward_end[action.stage][micro_batch] = now
                else:
                    if action.kind is not Kind.WEIGHT_GRADIENT:
                        gradient_end[action.stage][micro_batch] = now
                    if micro_batch == m - 1 and action.kind is not Kind.INPUT_GRADIENT:
                        now += stage_times.last_backward_extra_s
                done.append(Span(action, start, now))
                left -= 1
            free[rank] = now
        if left == before:
            stuck = [str(o[len(s)]) for o, s in zip(schedule.ranks, spans, strict=True) if len(s) < len(o)]
            raise ValueError(f"schedule {schedule.name} never ends: waiting at {', '.join(stuck)}")
    busy = tuple(sum(span.end_s - span.start_s for span in rank) for rank in spans)
    return Timeline(tuple(map(tuple, spans)), max(free), busy)


def _arrival(
    action: Action,
    stages: int,
    forward_end: list[list[float | None]],
    gradient_end: list[list[float | None]],
    times: Sequence[StageTimes],
) -> float | None:
    """When everything the action reads is on its rank; None while it is not known."""
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind is Kind.FORWARD:
        if stage == 0:
            return 0.0
        end = forward_end[stage - 1][micro_batch]
        return None if end is None else end + times[stage - 1].send_forward_s
    own = (gradient_end if action.kind is Kind.WEIGHT_GRADIENT else forward_end)[stage][micro_batch]
    if own is None or action.kind is Kind.WEIGHT_GRADIENT or stage == stages - 1:
        return own
    end = gradient_end[stage + 1][micro_batch]
    return None if end is None else max(own, end + times[stage + 1].send_backward_s)


def lower_bound_s(schedule: Schedule, times: Sequence[StageTimes]) -> float:
    """A makespan that no order of the same actions on the same ranks can beat.

    The largest over ranks of (what must come before its first action + its work + what must follow its last),
    and of the way of a single micro-batch through all stages and back.
    """
    m = schedule.num_micro_batches
    split = any(action.kind is Kind.INPUT_GRADIENT for order in schedule.ranks for action in order)

    def backward(t: StageTimes) -> float:
        return t.input_gradient_s if split else t.backward_s

    bound = sum(t.forward_s + t.first_forward_extra_s + backward(t) for t in times)
    bound += sum(t.send_forward_s for t in times[:-1]) + sum(t.send_backward_s for t in times[1:])
    for rank in range(len(schedule.ranks)):
        own = [stage for stage, holder in enumerate(schedule.stage_rank) if holder == rank]
        work = sum(m * (times[s].forward_s + backward(times[s])) + times[s].first_forward_extra_s for s in own)
        work += m * sum(times[s].weight_gradient_s for s in own) if split else 0.0
        above = times[: own[0]]
        fill = sum(t.forward_s + t.first_forward_extra_s + t.send_forward_s for t in above)
        # With a split backward the last action may be a weight gradient that nobody waits for.
        drain = 0.0 if split else sum(times[s + 1].send_backward_s + times[s].backward_s for s in range(own[0]))
        bound = max(bound, fill + work + max(drain, sum(times[s].last_backward_extra_s for s in own)))
    return bound


def peak_in_flight(schedule: Schedule, weights: Sequence[float]) -> tuple[float, ...]:
    """Per rank, the largest sum over its stages of weight x micro-batches between forward and backward.

    ``weights[s]`` is what one micro-batch of stage ``s`` keeps (bytes); weights of 1 count micro-batches.
    """
    peaks = []
    for order in schedule.ranks:
        held = peak = 0.0
        for action in order:
            if action.kind is Kind.FORWARD:
                held += weights[action.stage]
                peak = max(peak, held)
            elif action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT):
                held -= weights[action.stage]
        peaks.append(peak)
    return tuple(peaks)
