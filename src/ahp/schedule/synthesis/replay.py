"""When the actions of given orders run, what they keep, and what runs beside them: ``schedule.simulate`` over codes."""

from __future__ import annotations

from dataclasses import dataclass

from ahp.schedule.synthesis.codes import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Orders
from ahp.schedule.synthesis.problem import ROUNDING, Problem


@dataclass(frozen=True)
class Replay:
    """The times of one step."""

    ends_s: list[list[float]]
    """When each action ends, by rank."""
    reduced_s: list[float]
    """When the gradients of each stage are reduced."""
    end_s: float
    """When all is done."""


def replay(problem: Problem, orders: Orders) -> Replay:
    """Run the orders: an action starts when its rank is free and what it needs has arrived. O(actions).

    Raises ValueError where the orders can never end.
    """
    stages, last, times = problem.num_stages, problem.num_stages - 1, problem.times
    m, gathered_s = problem.num_micro_batches, [t.gathered_s for t in times]
    seconds = [t.forward_s for t in times] + [t.backward_s for t in times]
    seconds += [t.input_gradient_s for t in times] + [t.weight_gradient_s for t in times]
    arrived_f: list[list[float]] = [[] for _ in range(stages)]
    arrived_g: list[list[float]] = [[] for _ in range(stages)]
    arrived_f[0] = [gathered_s[0]] * m
    num_f, num_g, left = [0] * stages, [0] * stages, [m] * stages
    apart = [0] * stages  # input gradients whose weight gradient has not run
    ends: list[list[float]] = [[] for _ in orders]
    reduced_s = [0.0] * stages
    reducing_until_s = [0.0] * len(orders)
    waiting = True
    while waiting:
        waiting = moved = False
        for rank, order in enumerate(orders):
            mine = ends[rank]
            now = mine[-1] if mine else 0.0
            before = len(mine)
            for code in order[before:] if before else order:
                kind, s = divmod(code, stages)
                if kind == FORWARD:
                    k = num_f[s]
                    if k >= len(arrived_f[s]):
                        break
                    at = arrived_f[s][k]
                    begin = at if at > now else now
                    now = begin + seconds[code]
                    if k == 0:
                        now += times[s].first_forward_extra_s
                    if begin < reducing_until_s[rank]:
                        now += times[s].slowed_s(begin, now, reducing_until_s[rank])
                    num_f[s] = k + 1
                    if s == last:
                        arrived_g[s].append(now)
                    else:
                        at = now + times[s].send_forward_s
                        arrived_f[s + 1].append(max(at, gathered_s[s + 1]) if k == 0 else at)
                else:
                    if kind != WEIGHT_GRADIENT:
                        k = num_g[s]
                        if k >= len(arrived_g[s]) or k >= num_f[s]:
                            break
                        at = arrived_g[s][k]
                        begin = at if at > now else now
                        now = begin + seconds[code]
                        if begin < reducing_until_s[rank]:
                            now += times[s].slowed_s(begin, now, reducing_until_s[rank])
                        num_g[s] = k + 1
                        if s:
                            arrived_g[s - 1].append(now + times[s].send_backward_s)
                        if kind == INPUT_GRADIENT:
                            apart[s] += 1
                    else:
                        if not apart[s]:
                            break
                        apart[s] -= 1
                        begin, now = now, now + seconds[code]
                        if begin < reducing_until_s[rank]:
                            now += times[s].slowed_s(begin, now, reducing_until_s[rank])
                    if kind != INPUT_GRADIENT:
                        left[s] -= 1
                        if not left[s]:
                            now += times[s].last_backward_extra_s
                            at = max(now, reducing_until_s[rank]) + times[s].reduce_s
                            reduced_s[s] = reducing_until_s[rank] = at
                mine.append(now)
            moved |= len(mine) > before
            waiting |= len(mine) < len(order)
        if waiting and not moved:
            raise ValueError("the orders never end: every rank waits for another")
    return Replay(ends, reduced_s, max(*reducing_until_s, *(mine[-1] for mine in ends)))


def peak_bytes(problem: Problem, orders: Orders) -> list[float]:
    """Per rank, the most that it keeps at once."""
    stages, kept, freed = problem.num_stages, problem.kept_bytes, problem.freed_bytes
    change = {FORWARD: kept, BACKWARD: [-k for k in kept], INPUT_GRADIENT: [-f for f in freed]}
    change[WEIGHT_GRADIENT] = [f - k for k, f in zip(kept, freed, strict=True)]
    by_code = [change[kind][s] for kind in range(4) for s in range(stages)]
    peaks = []
    for order in orders:
        held = peak = 0.0
        for code in order:
            held += by_code[code]
            if held > peak:
                peak = held
        peaks.append(peak)
    return peaks


def fits(problem: Problem, orders: Orders) -> bool:
    """Whether no rank keeps more than it has memory for, but for rounding."""
    return all(
        peak <= memory * (1 + ROUNDING)
        for peak, memory in zip(peak_bytes(problem, orders), problem.memory_bytes, strict=True)
    )
