"""Orders of actions that somebody wrote or found: as text, and whether they can run."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ahp.errors import BadInput
from ahp.schedule.actions import Action, Kind, Schedule

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


def order_text(schedule: Schedule) -> tuple[str, ...]:
    """One line for each rank, as torch's schedules are written: ``0F0,0F1,0B0,0B1``, each stage, letter and micro-batch."""
    return tuple(",".join(map(str, rank)) for rank in schedule.ranks)


def read_order(name: str, lines: Sequence[str]) -> Schedule:
    """The schedule that ``order_text`` wrote. Raises BadInput where it can not run (``why_not``)."""
    ranks, stage_rank = [], {}
    for rank, line in enumerate(lines):
        actions = []
        for word in line.replace(" ", "").split(","):
            found = _ACTION.fullmatch(word)
            if found is None:
                raise BadInput(
                    f"rank {rank}: {word!r} is no action (valid: 0F0, 0B0, 0I0, 0W0: stage, kind, micro-batch)"
                )
            action = Action(Kind(found[2]), int(found[1]), int(found[3]))
            if stage_rank.setdefault(action.stage, rank) != rank:
                raise BadInput(f"{action}: stage {action.stage} is on rank {stage_rank[action.stage]}, not on {rank}")
            actions.append(action)
        ranks.append(tuple(actions))
    stages = max(stage_rank, default=-1) + 1
    if missing := set(range(stages)) - set(stage_rank) or ({0} if not stages else set()):
        raise BadInput(f"stage {min(missing)} has no action on any rank")
    num_micro_batches = 1 + max(action.micro_batch for rank in ranks for action in rank)
    schedule = Schedule(name, stages, num_micro_batches, tuple(ranks), tuple(stage_rank[s] for s in range(stages)))
    if reason := why_not(schedule):
        raise BadInput(reason)
    return schedule


def why_not(schedule: Schedule) -> str | None:
    """Why the order cannot run, or None: each stage does each micro-batch once, and no rank waits for what comes after it.

    Backwards are whole (B) or apart (I, later W). Messages need no rule of their own: ``messages`` puts them where both ranks
    come to them.
    """
    return _wrong_count(schedule) or _stuck(schedule)


def _wrong_count(schedule: Schedule) -> str | None:
    seen: set[Action] = set()
    for rank, order in enumerate(schedule.ranks):
        for action in order:
            if action in seen:
                return f"rank {rank}: {action} comes twice"
            if schedule.stage_rank[action.stage] != rank:
                return f"rank {rank}: {action}, but stage {action.stage} is on rank {schedule.stage_rank[action.stage]}"
            seen.add(action)
    for stage in range(schedule.num_stages):
        for i in range(schedule.num_micro_batches):
            forward, whole, first, second = (Action(kind, stage, i) in seen for kind in Kind)
            if not forward:
                return f"stage {stage}: {Action(Kind.FORWARD, stage, i)} is missing"
            if (whole, first, second) not in ((True, False, False), (False, True, True)):
                return f"stage {stage}, micro-batch {i}: needs either B, or I and W"
    return None


def _stuck(schedule: Schedule) -> str | None:
    """Run it without times: each rank goes on while what its next action needs has been done."""
    done: set[tuple[str, int, int]] = set()
    places = [0] * len(schedule.ranks)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(schedule.plain):
            place = places[rank]
            while place < len(order) and all(need in done for need in _needs(schedule, order[place])):
                letter, stage, i = order[place]
                done.add(("G" if letter in "BI" else letter, stage, i))
                place += 1
            moved |= place > places[rank]
            places[rank] = place
    waiting = [str(o[at]) for o, at in zip(schedule.ranks, places, strict=True) if at < len(o)]
    return f"it never ends: ranks wait for each other at {', '.join(waiting)}" if waiting else None


def _needs(schedule: Schedule, action: tuple[str, int, int]) -> list[tuple[str, int, int]]:
    letter, stage, i = action
    if letter == "F":
        return [("F", stage - 1, i)] if stage else []
    if letter == "W":
        return [("G", stage, i)]
    return [("F", stage, i)] + ([("G", stage + 1, i)] if stage < schedule.num_stages - 1 else [])
