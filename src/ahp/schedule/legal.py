"""Whether an order of actions can run: on its own, and with replicas that have other orders and sum their gradients."""

from __future__ import annotations

from collections.abc import Sequence

from ahp.schedule.actions import Action, Kind, Schedule


def why_not(schedule: Schedule) -> str | None:
    """Why the order cannot run, or None. Each stage must do each micro-batch once, and no rank may wait for what comes after it.

    Backwards are whole (B) or split (I, later W). Messages need no rule of their own: ``messages`` puts them where both ranks
    reach them.
    """
    return _wrong_count(schedule) or _stuck(schedule)


def why_not_together(schedules: Sequence[Schedule]) -> str | None:
    """Why replicas with these orders, each of which can run alone, would deadlock, or None.

    When a rank has a stage's last gradient, it waits until all replicas have theirs, because the gradients are summed.
    """
    first = schedules[0]
    for other in schedules[1:]:
        if other.stage_rank != first.stage_rank:
            ranks = f"{list(first.stage_rank)} and {list(other.stage_rank)}"
            return f"stages lie on ranks {ranks} (valid: the same on every replica)"
    if len(schedules) == 1 or len(first.ranks) == first.num_stages:
        return None  # nothing follows a stage's last gradient on its rank
    runs = [_Progress(schedule) for schedule in schedules]
    summed = [False] * first.num_stages
    moved = True
    while moved:
        moved = sum(run.advance(summed) for run in runs) > 0
        summed = [all(run.left[stage] == 0 for run in runs) for stage in range(first.num_stages)]
        moved |= any(run.waits_for_sums(summed) for run in runs)
    if not any(run.waiting for run in runs):
        return None
    return (
        "ranks end their stages in another order on one replica than on another, and would wait for each other's gradients (valid: the "
        "same order of last gradients on each rank)"
    )


def _wrong_count(schedule: Schedule) -> str | None:
    seen: set[tuple[str, int, int]] = set()
    for rank, order in enumerate(schedule.ranks):
        for action in order:
            letter, stage, i = action
            if action in seen:
                return f"rank {rank}: {stage}{letter}{i} comes twice"
            if schedule.stage_rank[stage] != rank:
                return f"rank {rank}: {stage}{letter}{i}, but stage {stage} is on rank {schedule.stage_rank[stage]}"
            seen.add(action)
    for stage in range(schedule.num_stages):
        for i in range(schedule.num_micro_batches):
            if ("F", stage, i) not in seen:
                return f"stage {stage}: {Action(Kind.FORWARD, stage, i)} is missing"
            found = [letter for letter in "BIW" if (letter, stage, i) in seen]
            if found not in (["B"], ["I", "W"]):
                return f"stage {stage}, micro-batch {i}: needs either B, or I and W"
    return None


def _stuck(schedule: Schedule) -> str | None:
    run = _Progress(schedule)
    while run.advance():
        pass
    waiting = run.waiting
    return f"it never ends: ranks wait for each other at {', '.join(waiting)}" if waiting else None


class _Progress:
    """An order that runs without times: each rank goes on as long as the inputs of its next action are done."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.m = schedule, schedule.num_micro_batches
        self.places = [0] * len(schedule.ranks)
        self.forwards, self.gradients = (bytearray(schedule.num_stages * self.m) for _ in range(2))
        """At index s x m + i: whether stage s has done micro-batch i."""
        self.left = [self.m] * schedule.num_stages
        """Weight gradients that each stage still has to make."""
        self.ended: list[int | None] = [None] * len(schedule.ranks)
        """Per rank, the stage whose last gradient it has just made, so that it waits for the other replicas; None: it does not wait."""

    def advance(self, summed: Sequence[bool] | None = None) -> int:
        """Let each rank in turn do all the actions it can; their number. ``summed``: whether each stage's gradients are summed;
        None = no rank waits for that."""
        before = sum(self.places)
        for rank, order in enumerate(self.schedule.ranks):
            place = self.places[rank]
            while place < len(order) and self._may(rank, order[place], summed):
                self._do(rank, *order[place])
                place += 1
            self.places[rank] = place
        return sum(self.places) - before

    def waits_for_sums(self, summed: Sequence[bool]) -> bool:
        """Let ranks go on whose gradients are now summed; whether there are any."""
        ready = [stage is not None and summed[stage] for stage in self.ended]
        self.ended = [None if go else stage for go, stage in zip(ready, self.ended, strict=True)]
        return any(ready)

    @property
    def waiting(self) -> list[str]:
        """The action at which each unfinished rank waits."""
        ranks = zip(self.schedule.ranks, self.places, strict=True)
        return [str(order[place]) for order, place in ranks if place < len(order)]

    def _may(self, rank: int, action: tuple[str, int, int], summed: Sequence[bool] | None) -> bool:
        letter, stage, i = action
        at = stage * self.m + i
        if summed is not None and self.ended[rank] is not None:
            return False
        if letter == "F":
            return stage == 0 or bool(self.forwards[at - self.m])
        if letter == "W":
            return bool(self.gradients[at])
        last = stage == self.schedule.num_stages - 1
        return bool(self.forwards[at]) and (last or bool(self.gradients[at + self.m]))

    def _do(self, rank: int, letter: str, stage: int, i: int) -> None:
        if letter == "F":
            self.forwards[stage * self.m + i] = 1
            return
        if letter != "W":
            self.gradients[stage * self.m + i] = 1
        if letter != "I":
            self.left[stage] -= 1
            if not self.left[stage]:
                self.ended[rank] = stage
