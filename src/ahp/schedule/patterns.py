"""The fixed pipeline schedules, in the order torch runs them.

Order of actions as in ``torch.distributed.pipelining.schedules`` of torch 2.13 (``ScheduleGPipe``,
``Schedule1F1B``, ``ScheduleInterleaved1F1B``, ``ScheduleInterleavedZeroBubble``, ``ScheduleZBVZeroBubble``,
``ScheduleDualPipeV``); the tests hold each order against torch's own. Megatron-LM's interleaved schedule
(``get_schedule_table``, ``get_pp_rank_microbatches``) is the same order where m is a multiple of p; versions up to
2024 run all forwards first where m = p.
Here p = pipeline ranks, v = stages per rank, m = micro-batches.
"""

from __future__ import annotations

from functools import lru_cache

from ahp.errors import BadInput, bad_input
from ahp.schedule.actions import Action, Kind, Schedule
from ahp.schedule.v_shape import dual_pipe_v, zbv

WHOLE_BACKWARD: tuple[str, ...] = ("GPipe", "1F1B", "Interleaved1F1B")
"""Schedules that compute input and weight gradient as one."""

SPLIT_BACKWARD: tuple[str, ...] = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules that compute weight gradients apart, later than input gradients; DualPipeV does so for some only."""

SCHEDULES: tuple[str, ...] = WHOLE_BACKWARD + SPLIT_BACKWARD
"""Names that ``make`` generates."""

V_SHAPED: tuple[str, ...] = ("ZBVZeroBubble", "DualPipeV")
"""Schedules whose rank r holds stages r and 2p-1-r."""


def illegal(name: str, p: int, v: int, m: int) -> str | None:
    """Why there is no such schedule with p ranks, v stages per rank, m micro-batches; None if there is.

    The rules are torch's, with three exceptions. Several stages on a single rank are no pipeline and refused. 1F1B, and
    InterleavedZeroBubble with v = 1, the published ZB-H1 (arXiv 2401.10241, section 3), are ordered for any m:
    ``illegal_in_torch`` says what torch asks there.
    """
    if name not in SCHEDULES:
        return str(bad_input("pipeline_parallel_schedule", name, "there is no such schedule", SCHEDULES))
    if name in V_SHAPED:
        return _illegal_v_shaped(name, p, v, m)
    if name == "Interleaved1F1B" or (name == "InterleavedZeroBubble" and v > 1):
        return _illegal_interleaved(name, p, v, m)
    if v != 1:
        return (
            f"virtual_stages_per_rank = {v}: {name} runs one stage per rank "
            "(valid: 1, or pipeline_parallel_schedule Interleaved1F1B)"
        )
    return None


def illegal_in_torch(name: str, p: int, v: int, m: int) -> str | None:
    """Why torch 2.13 cannot run this schedule, or None.

    Beyond ``illegal`` it asks 1F1B for a micro-batch of each rank, and InterleavedZeroBubble at v = 1 for whole rounds.
    """
    if name == "1F1B" and v == 1 and m < p:
        return (
            f"pipeline_parallel_degree = {p}: torch's 1F1B needs at least as many micro-batches, there are {m} "
            f"(valid: up to {m}, or pipeline_parallel_schedule GPipe)"
        )
    if name == "InterleavedZeroBubble" and v == 1:
        return _uneven_rounds(name, p, m)
    return illegal(name, p, v, m)


def _illegal_interleaved(name: str, p: int, v: int, m: int) -> str | None:
    if p == 1:
        return f"pipeline_parallel_schedule = {name!r}: needs pipeline_parallel_degree of 2 or more"
    if v < 2:
        return f"virtual_stages_per_rank = {v}: {name} needs 2 or more stages per rank (valid: 2, 3, ...)"
    return _uneven_rounds(name, p, m)


def _uneven_rounds(name: str, p: int, m: int) -> str | None:
    rounds = max(1, m // p)
    if m % rounds == 0:
        return None
    near = sorted(k for k in range(1, 2 * m + 1) if k % max(1, k // p) == 0)
    valid = [k for k in near if k < m][-2:] + [k for k in near if k > m][:2]
    return (
        f"pipeline_parallel_schedule = {name!r}: {m} micro-batches do not divide into "
        f"{rounds} rounds of {p} ranks (valid micro-batches: {', '.join(map(str, valid))})"
    )


def _illegal_v_shaped(name: str, p: int, v: int, m: int) -> str | None:
    if p == 1:
        return f"pipeline_parallel_schedule = {name!r}: needs pipeline_parallel_degree of 2 or more"
    if v != 2:
        return f"virtual_stages_per_rank = {v}: {name} runs two stages per rank (valid: 2)"
    if name == "DualPipeV" and m < 2 * p:
        valid = f"up to {m // 2}" if m >= 4 else "none"
        return (
            f"pipeline_parallel_degree = {p}: DualPipeV needs two micro-batches for each rank, there are {m} "
            f"(valid: {valid}, or pipeline_parallel_schedule ZBVZeroBubble)"
        )
    return None


def stage_ranks(name: str, p: int, v: int) -> tuple[int, ...]:
    """The pipeline rank that holds each of the p x v stages: looped, or down and up again for the V schedules."""
    if name in V_SHAPED:
        return tuple(range(p)) + tuple(range(p - 1, -1, -1))
    return tuple(stage % p for stage in range(p * v))


def refuse_illegal(name: str, p: int, v: int, m: int) -> None:
    """Raise BadInput with the reason where ``illegal`` gives one."""
    if reason := illegal(name, p, v, m):
        raise BadInput(reason)


@lru_cache(maxsize=256)
def make(name: str, p: int, v: int, m: int) -> Schedule:
    """The schedule; raises BadInput with the reason where ``illegal`` gives one."""
    refuse_illegal(name, p, v, m)
    return Schedule(
        name=name,
        num_stages=p * v,
        num_micro_batches=m,
        ranks=tuple(tuple(_rank_actions(name, rank, p, v, m)) for rank in range(p)),
        stage_rank=stage_ranks(name, p, v),
    )


def _rank_actions(name: str, rank: int, p: int, v: int, m: int) -> list[Action]:
    if name == "GPipe":
        return _gpipe(rank, m)
    if name == "1F1B":
        return _one_forward_one_backward(rank, p, m)
    if name == "ZBVZeroBubble":
        return zbv(rank, p, m)
    if name == "DualPipeV":
        return dual_pipe_v(rank, p, m)
    return _interleaved(rank, p, v, m, split=name == "InterleavedZeroBubble")


def _gpipe(rank: int, m: int) -> list[Action]:
    forward = [Action(Kind.FORWARD, rank, i) for i in range(m)]
    return forward + [Action(Kind.BACKWARD, rank, i) for i in range(m)]


def _one_forward_one_backward(rank: int, p: int, m: int) -> list[Action]:
    warmup = min(m, p - 1 - rank)
    actions = [Action(Kind.FORWARD, rank, i) for i in range(warmup)]
    for i in range(m - warmup):
        actions += [Action(Kind.FORWARD, rank, warmup + i), Action(Kind.BACKWARD, rank, i)]
    return actions + [Action(Kind.BACKWARD, rank, i) for i in range(m - warmup, m)]


def _interleaved(rank: int, p: int, v: int, m: int, *, split: bool) -> list[Action]:
    """Depth first in rounds of about p micro-batches (arXiv 2104.04473; torch relaxes m mod p = 0 to rounds).

    Split: weight gradients follow ``rank`` input gradients behind, so that every rank keeps p micro-batches in
    flight at one stage each (arXiv 2401.10241, ZB-H1).
    """
    per_round = m // max(1, m // p) if v > 1 else 1
    total = m * v
    warmup = min((v - 1) * per_round + (1 if split else 2) * (p - 1 - rank), total)

    def nth(kind: Kind, n: int) -> Action:
        chunk, within = divmod(n, per_round)
        round_index, local = divmod(chunk, v)
        if kind is not Kind.FORWARD:
            local = v - 1 - local
        return Action(kind, local * p + rank, round_index * per_round + within)

    gradient = Kind.INPUT_GRADIENT if split else Kind.BACKWARD
    actions = [nth(Kind.FORWARD, n) for n in range(warmup)]
    for n in range(total):
        if warmup + n < total:
            actions.append(nth(Kind.FORWARD, warmup + n))
        actions.append(nth(gradient, n))
        if split and n >= rank:
            actions.append(nth(Kind.WEIGHT_GRADIENT, n - rank))
    if split:
        actions += [nth(Kind.WEIGHT_GRADIENT, n) for n in range(max(total - rank, 0), total)]
    return actions
