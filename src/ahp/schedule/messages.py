"""What ranks send each other under a schedule, and when they turn to it: an order in which nobody can wait in a circle."""

from __future__ import annotations

from dataclasses import dataclass

from ahp.schedule.actions import Action, Kind, Schedule
from ahp.schedule.simulate import StageTimes, simulate


@dataclass(frozen=True, slots=True)
class Message:
    """One end of a message, as torch writes it: ``0SEND_F3`` leaves stage 0, ``1RECV_F3`` reaches stage 1."""

    kind: str
    """SEND_F, RECV_F: an output; SEND_B, RECV_B: a gradient."""
    stage: int
    """The stage that sends, or the one that receives."""
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Step = Action | Message

USUAL = StageTimes(1.0, 2.0, 1.0, 1.0)
"""A backward takes twice as long as a forward, in two equal parts: what orders the messages. None takes no time."""


def with_messages(schedule: Schedule, *, receives_first: bool = False) -> tuple[tuple[Step, ...], ...]:
    """Each rank's actions and its ends of messages; two stages on one rank send each other nothing.

    Both ends of a message are written down at once, when its action ends in a simulation. So all messages stand in one order
    that each rank keeps: even if a send waits for its receive and each rank does one after the other, the first message that
    is not yet over is the next on both ranks, or comes after actions that wait for none. Ranks receive while they compute
    what was started before.
    """
    timeline = simulate(schedule, [USUAL] * schedule.num_stages)
    events: list[tuple[float, int, int, int]] = []  # time, 0 for an end, rank, place
    for rank, (starts, ends) in enumerate(zip(timeline.starts_s, timeline.ends_s, strict=True)):
        for place, (start, end) in enumerate(zip(starts, ends, strict=True)):
            events += [(start, 1, rank, place), (end, 0, rank, place)]
    steps: list[list[Step]] = [[] for _ in schedule.ranks]
    for _, begins, rank, place in sorted(events):
        action = schedule.ranks[rank][place]
        if begins:
            steps[rank].append(action)
        elif (ends := _message(schedule, action)) is not None:
            send, receive = ends
            steps[rank].append(send)
            steps[schedule.stage_rank[receive.stage]].append(receive)
    if receives_first:
        steps = [sorted(own, key=lambda step: not _is_receive(step)) for own in steps]
    return tuple(map(tuple, steps))


def _is_receive(step: Step) -> bool:
    return isinstance(step, Message) and step.kind.startswith("RECV")


def _message(schedule: Schedule, action: Action) -> tuple[Message, Message] | None:
    """Both ends of what an action sends to another rank."""
    forward = action.kind is Kind.FORWARD
    to = action.stage + (1 if forward else -1)
    if action.kind is Kind.WEIGHT_GRADIENT or not 0 <= to < schedule.num_stages:
        return None
    if schedule.stage_rank[to] == schedule.stage_rank[action.stage]:
        return None
    letter = "F" if forward else "B"
    return (
        Message(f"SEND_{letter}", action.stage, action.micro_batch),
        Message(f"RECV_{letter}", to, action.micro_batch),
    )
