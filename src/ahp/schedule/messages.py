"""What ranks send each other under a schedule, and when: an order of sends and receives that cannot deadlock."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ahp.schedule.actions import Action, Kind, Schedule
from ahp.schedule.simulate import StageTimes, simulate


class Message(NamedTuple):
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
"""The times that put messages in order: a backward takes twice as long as a forward, in two equal parts; no action takes 0."""


def with_messages(schedule: Schedule, *, receives_first: bool = False) -> tuple[tuple[Step, ...], ...]:
    """Each rank's actions with its sends and receives; two stages on one rank send each other nothing.

    Both ends of a message are added at the moment when its action ends in a simulation. So there is one order of all messages,
    and each rank keeps to it: even if a send waits for its receive and each rank does one thing at a time, the first unfinished
    message is next on both its ranks, or comes after actions that wait for no message. A rank receives while it computes the
    action that it started before.
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


def waiting(schedule: Schedule) -> tuple[int, ...]:
    """The most messages that each rank has asked for at once and that no action has read yet, with messages in the order above."""
    timeline = simulate(schedule, [USUAL] * schedule.num_stages)
    received: list[list[float]] = [[] for _ in schedule.ranks]
    read: list[list[float]] = [[] for _ in schedule.ranks]
    rank_of = (*schedule.stage_rank, None)  # there is no stage after the last, nor, at -1, before the first
    for rank, actions in enumerate(schedule.ranks):
        times = zip(timeline.starts_s[rank], timeline.ends_s[rank], strict=True)
        for (kind, stage, _), (start_s, end_s) in zip(actions, times, strict=True):
            if kind is Kind.WEIGHT_GRADIENT:
                continue
            source, target = rank_of[stage - 1], rank_of[stage + 1]
            source, target = (source, target) if kind is Kind.FORWARD else (target, source)
            if target is not None and target != rank:
                received[target].append(end_s)
            if source is not None and source != rank:
                read[rank].append(start_s)
    # An action reads after all messages that come when it starts.
    before = (np.searchsorted(np.sort(own), np.sort(ends)) for own, ends in zip(read, received, strict=True))
    return tuple(int((np.arange(1, len(own) + 1) - own).max(initial=0)) for own in before)


def _is_receive(step: Step) -> bool:
    return isinstance(step, Message) and step.kind.startswith("RECV")


def _message(schedule: Schedule, action: Action) -> tuple[Message, Message] | None:
    """The send and the receive of the message from an action to another rank; None if it sends none."""
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
