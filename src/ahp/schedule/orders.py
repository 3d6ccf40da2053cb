"""Orders of actions that were written by hand or found by a search: as text, and as part of a layout."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from ahp.errors import BadInput
from ahp.plan import Parallelism
from ahp.schedule.actions import Action, Kind, Schedule
from ahp.schedule.legal import why_not, why_not_together
from ahp.schedule.patterns import stage_ranks
from ahp.schedule.registry import PLAIN, SCHEDULES, of_ranks

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_KINDS = {kind.value: kind for kind in Kind}


def order_text(schedule: Schedule) -> tuple[str, ...]:
    """One line per rank, as torch's schedules are written: ``0F0,0F1,0B0,0B1``, with stage, letter and micro-batch of each action."""
    return tuple(",".join(f"{stage}{letter}{i}" for letter, stage, i in rank) for rank in schedule.ranks)


def read_order(name: str, lines: Sequence[str]) -> Schedule:
    """The schedule from lines of ``order_text``. Raises BadInput if a line is malformed or the order cannot run (``why_not``)."""
    ranks, stage_rank = [], {}
    for rank, line in enumerate(lines):
        actions = []
        for word in line.replace(" ", "").split(","):
            found = _ACTION.fullmatch(word)
            if found is None:
                raise BadInput(
                    f"rank {rank}: {word!r} is no action (valid: 0F0, 0B0, 0I0, 0W0: stage, kind, micro-batch)"
                )
            action = Action(_KINDS[found[2]], int(found[1]), int(found[3]))
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


SYNTHESIZED = "Synthesized"
"""The value of ``pipeline_parallel_schedule`` in a layout that gives its own order."""


def whole(schedule: Schedule) -> Schedule:
    """The order with whole backwards in place of the input gradients."""
    first, second = Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT
    ranks = (
        [Action(Kind.BACKWARD, *a[1:]) if a.kind is first else a for a in rank if a.kind is not second]
        for rank in schedule.ranks
    )
    return replace(schedule, ranks=tuple(map(tuple, ranks)))


def apart(schedule: Schedule) -> Schedule:
    """The order with split backwards: a whole one becomes two parts, one right after the other."""

    def parts(action: Action) -> tuple[Action, ...]:
        if action.kind is not Kind.BACKWARD:
            return (action,)
        return Action(Kind.INPUT_GRADIENT, *action[1:]), Action(Kind.WEIGHT_GRADIENT, *action[1:])

    ranks = ([part for action in rank for part in parts(action)] for rank in schedule.ranks)
    return replace(schedule, ranks=tuple(map(tuple, ranks)))


def any_order() -> Parallelism:
    """A layout with its own order, to ask an engine whether it can run one."""
    order = ("0F0,0B0", "1F0,1B0")
    return Parallelism(
        pipeline_parallel_degree=2, pipeline_parallel_schedule=SYNTHESIZED, pipeline_parallel_order=order
    )


@lru_cache(maxsize=256)
def _given(lines: tuple[str, ...]) -> Schedule:
    try:
        return read_order(SYNTHESIZED, lines)
    except BadInput as error:
        raise BadInput(f"pipeline_parallel_order: {error}") from None


def order_lines(parallelism: Parallelism, replica: int = 0) -> tuple[str, ...] | None:
    """The lines of one replica in the layout's own order; None if its schedule is a pattern or it has no pipeline."""
    lines, p = parallelism.pipeline_parallel_order, parallelism.pipeline_parallel_degree
    if lines is None or p == 1:
        return None
    return lines if len(lines) == p else lines[replica * p : (replica + 1) * p]


def given_order(parallelism: Parallelism, replica: int = 0) -> Schedule | None:
    """The layout's own order for a replica; None if ``order_lines`` gives none. Raises BadInput if the order cannot run."""
    lines = order_lines(parallelism, replica)
    if lines is None:
        return None
    schedule = _given(lines)
    if schedule.num_stages != parallelism.num_stages:
        raise BadInput(
            f"pipeline_parallel_order: {schedule.num_stages} stages, pipeline_parallel_degree x virtual_stages_per_rank are "
            f"{parallelism.num_stages}"
        )
    return schedule


def illegal_order(parallelism: Parallelism, micro_batches: Sequence[int]) -> str | None:
    """Why the layout's own order cannot run ``micro_batches`` of each replica; None if it can, or the layout has none."""
    found: dict[tuple[str, ...], Schedule] = {}
    try:
        for replica, count in enumerate(micro_batches):
            lines, schedule = order_lines(parallelism, replica), given_order(parallelism, replica)
            if lines is None or schedule is None:
                return None
            if schedule.num_micro_batches != count:
                return (
                    f"pipeline_parallel_order: made for {schedule.num_micro_batches} micro-batches, there are {count} "
                    f"(valid: an order of {count})"
                )
            found[lines] = schedule
    except BadInput as error:
        return str(error)
    reasons = (_losses_out_of_order(schedule) for schedule in found.values())
    if reason := next(filter(None, reasons), None):
        return reason
    reason = why_not_together(list(found.values()))
    return None if reason is None else f"pipeline_parallel_order: {reason}"


def _losses_out_of_order(schedule: Schedule) -> str | None:
    last = schedule.num_stages - 1
    order = schedule.ranks[schedule.stage_rank[last]]
    forwards = [action.micro_batch for action in order if action.kind is Kind.FORWARD and action.stage == last]
    if forwards == sorted(forwards):
        return None
    return (
        f"pipeline_parallel_order: the last stage, {last}, takes micro-batches {forwards}; torch's pipeline runtime finds their losses "
        "by their place (valid: in order there)"
    )


def ranks_of_stages(parallelism: Parallelism) -> tuple[int, ...]:
    """The pipeline rank that holds each stage."""
    p = parallelism
    if p.pipeline_parallel_degree == 1:
        return (0,)
    if (schedule := given_order(p)) is not None:
        return schedule.stage_rank
    return stage_ranks(p.pipeline_parallel_schedule, p.pipeline_parallel_degree, p.virtual_stages_per_rank)


def under_pattern(parallelism: Parallelism) -> Parallelism:
    """The layout with the fixed pattern most like its own order: first by where its stages lie, then by whether it splits backwards. A
    layout without an order is returned as it is."""
    if parallelism.pipeline_parallel_order is None:
        return parallelism
    p, v = parallelism.pipeline_parallel_degree, parallelism.virtual_stages_per_rank
    split = splits_backward(parallelism)
    able = [s for s in SCHEDULES.values() if not (s.all_forwards_first or s.illegal(p, v, p * v))]
    stage_rank = ranks_of_stages(parallelism)
    able.sort(key=lambda s: (s.placement.stage_ranks(p, v) != stage_rank, s.splits_backward != split))
    name = able[0].name if able else PLAIN
    return parallelism.model_copy(update={"pipeline_parallel_schedule": name, "pipeline_parallel_order": None})


def splits_backward(parallelism: Parallelism) -> bool:
    """Whether at least some weight gradients are computed apart from input gradients."""
    if parallelism.pipeline_parallel_degree == 1:
        return False
    if (lines := parallelism.pipeline_parallel_order) is not None:
        return any("I" in line for line in lines)
    return of_ranks(parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_degree).splits_backward
