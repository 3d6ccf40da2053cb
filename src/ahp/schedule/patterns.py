"""The order of a named schedule, for given numbers of ranks, stages and micro-batches.

Actions are ordered as in ``torch.distributed.pipelining.schedules`` of torch 2.13; the tests compare each order with torch's own.
Here p = pipeline ranks, v = stages per rank, m = micro-batches.
"""

from __future__ import annotations

from functools import lru_cache

from ahp.errors import BadInput
from ahp.schedule.actions import Schedule
from ahp.schedule.registry import get


def illegal(name: str, p: int, v: int, m: int, *, in_torch: bool = False) -> str | None:
    """Why there is no such schedule with p ranks, v stages per rank, m micro-batches; None if there is. ``in_torch``: why torch 2.13 cannot run it.

    The rules are torch's, with three exceptions. Several stages on a single rank are refused, because they are no pipeline. 1F1B
    and InterleavedZeroBubble with v = 1 are allowed for any m outside torch.
    """
    try:
        return get(name).illegal(p, v, m, in_torch=in_torch)
    except BadInput as unknown:
        return str(unknown)


def stage_ranks(name: str, p: int, v: int) -> tuple[int, ...]:
    """The pipeline rank that holds each of the p x v stages."""
    return get(name).placement.stage_ranks(p, v)


def refuse_illegal(name: str, p: int, v: int, m: int) -> None:
    """Raise BadInput with the reason if ``illegal`` gives one."""
    if reason := illegal(name, p, v, m):
        raise BadInput(reason)


@lru_cache(maxsize=256)
def make(name: str, p: int, v: int, m: int) -> Schedule:
    """The schedule; raises BadInput with the reason if ``illegal`` gives one."""
    refuse_illegal(name, p, v, m)
    schedule = get(name)
    return Schedule(
        name=name,
        num_stages=p * v,
        num_micro_batches=m,
        ranks=tuple(tuple(schedule.rank_actions(rank, p, v, m)) for rank in range(p)),
        stage_rank=schedule.placement.stage_ranks(p, v),
    )
