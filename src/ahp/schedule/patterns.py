"""The fixed pipeline schedules: GPipe, 1F1B and Interleaved1F1B, in the order torch runs them.

Order of actions as in ``torch.distributed.pipelining.schedules`` of torch 2.13 (``ScheduleGPipe``,
``Schedule1F1B``, ``ScheduleInterleaved1F1B``); the tests hold each order against torch's own.
Here p = pipeline ranks, v = stages per rank, m = micro-batches; stage s is on rank s mod p.
"""

from __future__ import annotations

from functools import lru_cache

from ahp.errors import bad_input
from ahp.schedule.actions import Action, Kind, Schedule

GENERATED: tuple[str, ...] = ("GPipe", "1F1B", "Interleaved1F1B")
"""Names that ``make`` generates."""

NOT_YET = "is not generated yet: it splits the backward into input and weight gradients"


def illegal(name: str, p: int, v: int, m: int) -> str | None:
    """Why torch cannot run this schedule with p ranks, v stages per rank, m micro-batches; None if it can."""
    if name not in GENERATED:
        return f"pipeline_parallel_schedule = {name!r}: {NOT_YET} (valid: {', '.join(GENERATED)})"
    if name == "Interleaved1F1B":
        return _illegal_interleaved(p, v, m)
    if v != 1:
        return (
            f"virtual_stages_per_rank = {v}: {name} runs one stage per rank "
            "(valid: 1, or pipeline_parallel_schedule Interleaved1F1B)"
        )
    if name == "1F1B" and m < p:
        return (
            f"pipeline_parallel_degree = {p}: 1F1B needs at least as many micro-batches, there are {m} "
            f"(valid: up to {m}, or pipeline_parallel_schedule GPipe)"
        )
    return None


def _illegal_interleaved(p: int, v: int, m: int) -> str | None:
    if p == 1:
        return "pipeline_parallel_schedule = 'Interleaved1F1B': needs pipeline_parallel_degree of 2 or more"
    if v < 2:
        return f"virtual_stages_per_rank = {v}: Interleaved1F1B needs 2 or more stages per rank (valid: 2, 3, ...)"
    rounds = max(1, m // p)
    if m % rounds:
        near = sorted(k for k in range(1, 2 * m + 1) if k % max(1, k // p) == 0)
        valid = [k for k in near if k < m][-2:] + [k for k in near if k > m][:2]
        return (
            f"pipeline_parallel_schedule = 'Interleaved1F1B': {m} micro-batches do not divide into "
            f"{rounds} rounds of {p} ranks (valid micro-batches: {', '.join(map(str, valid))})"
        )
    return None


@lru_cache(maxsize=4096)
def make(name: str, p: int, v: int, m: int) -> Schedule:
    """The schedule; raises BadInput with the reason where ``illegal`` gives one."""
    if reason := illegal(name, p, v, m):
        raise bad_input("pipeline_parallel_schedule", name, reason, GENERATED if name not in GENERATED else None)
    rank_actions = {"GPipe": _gpipe, "1F1B": _one_forward_one_backward, "Interleaved1F1B": _interleaved}[name]
    return Schedule(
        name=name,
        num_stages=p * v,
        num_micro_batches=m,
        ranks=tuple(tuple(rank_actions(rank, p, v, m)) for rank in range(p)),
        stage_rank=tuple(stage % p for stage in range(p * v)),
    )


def _gpipe(rank: int, p: int, v: int, m: int) -> list[Action]:
    forward = [Action(Kind.FORWARD, rank, i) for i in range(m)]
    return forward + [Action(Kind.BACKWARD, rank, i) for i in range(m)]


def _one_forward_one_backward(rank: int, p: int, v: int, m: int) -> list[Action]:
    warmup = min(m, p - 1 - rank)
    actions = [Action(Kind.FORWARD, rank, i) for i in range(warmup)]
    for i in range(m - warmup):
        actions += [Action(Kind.FORWARD, rank, warmup + i), Action(Kind.BACKWARD, rank, i)]
    return actions + [Action(Kind.BACKWARD, rank, i) for i in range(m - warmup, m)]


def _interleaved(rank: int, p: int, v: int, m: int) -> list[Action]:
    """Depth first in rounds of about p micro-batches (arXiv 2104.04473; torch relaxes m mod p = 0 to rounds)."""
    per_round = m // max(1, m // p)
    total = m * v
    warmup = min((v - 1) * per_round + 2 * (p - 1 - rank), total)

    def nth(kind: Kind, n: int) -> Action:
        chunk, within = divmod(n, per_round)
        round_index, local = divmod(chunk, v)
        if kind is Kind.BACKWARD:
            local = v - 1 - local
        return Action(kind, local * p + rank, round_index * per_round + within)

    actions = [nth(Kind.FORWARD, n) for n in range(warmup)]
    for n in range(total - warmup):
        actions += [nth(Kind.FORWARD, warmup + n), nth(Kind.BACKWARD, n)]
    return actions + [nth(Kind.BACKWARD, n) for n in range(total - warmup, total)]
