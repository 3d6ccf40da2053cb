"""Lower bounds on the time of any order of actions: work of the fullest rank or link, longest path, memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import floor, inf

from ahp.schedule.synthesis.problem import ROUNDING, Problem


@dataclass(frozen=True)
class LowerBound:
    """A bound in seconds, and its reason."""

    seconds: float
    reason: str


def lower_bound(problem: Problem) -> LowerBound:
    """The largest of the bounds below. Each is the length of things that follow one another in every order that fits."""
    return max((LowerBound(*found) for found in _bounds(Paths(problem))), key=lambda bound: bound.seconds)


class Paths:
    """The way of one micro-batch that meets no other: when it can start on each stage, and what follows."""

    def __init__(self, problem: Problem, *, split: bool | None = None) -> None:
        """``split``: whether backwards can be split, by default as the problem allows; if so, the shorter of whole and split counts."""
        self.problem = problem
        times, self.m = problem.times, problem.num_micro_batches
        split = problem.split if split is None else split
        self.forward_s = [t.forward_s for t in times]
        self.gradient_s = [min(t.input_gradient_s, t.backward_s) if split else t.backward_s for t in times]
        """Seconds of each stage's backward until the gradient for the stage before is there."""
        self.whole_s = [
            min(t.input_gradient_s + t.weight_gradient_s, t.backward_s) if split else t.backward_s for t in times
        ]
        self.period_s = max(sum(self.forward_s[s] + self.whole_s[s] for s in own) for own in problem.stages_of)
        """Seconds that the fullest rank computes per micro-batch."""
        self.last_s = [t.last_backward_extra_s + t.reduce_s for t in times]
        """Seconds after a stage's last backward, on its own rank and on the network."""
        self.start_s = [times[0].gathered_s]
        """The earliest start of each stage's first forward."""
        for s, t in enumerate(times[:-1]):
            there = self.start_s[-1] + t.forward_s + t.first_forward_extra_s + t.send_forward_s
            self.start_s.append(max(there, times[s + 1].gathered_s))
        rest = [self.whole_s[0] + self.last_s[0]]
        """The least seconds from the start of a stage's last gradient to the end of the step."""
        for s in range(1, len(times)):
            own = self.whole_s[s] + self.last_s[s]
            rest.append(max(own, self.gradient_s[s] + times[s].send_backward_s + rest[-1]))
        self.rest_s = rest
        turn = [0.0] * len(times)
        """The least seconds from the end of a stage's forward to the start of the same micro-batch's gradient."""
        for s in range(len(times) - 2, -1, -1):
            turn[s] = (
                times[s].send_forward_s
                + self.forward_s[s + 1]
                + turn[s + 1]
                + self.gradient_s[s + 1]
                + times[s + 1].send_backward_s
            )
        self.turn_s = turn

    def after_s(self, s: int) -> float:
        """The least seconds after all that a rank computes, if it ends with this stage."""
        extra_s = self.problem.times[s].last_backward_extra_s
        if self.problem.split:
            return self.last_s[s] - extra_s
        return self.rest_s[s] - self.whole_s[s] - extra_s


def _bounds(paths: Paths) -> Iterator[tuple[float, str]]:
    problem, m = paths.problem, paths.m
    for stage in range(problem.num_stages):
        first = problem.times[stage].first_forward_extra_s
        through = paths.start_s[stage] + first + paths.forward_s[stage] * m
        yield through + paths.turn_s[stage] + paths.rest_s[stage], f"path of the last micro-batch from stage {stage} on"
        back = paths.start_s[stage] + first + paths.forward_s[stage] + paths.turn_s[stage]
        yield back + paths.gradient_s[stage] * (m - 1) + paths.rest_s[stage], f"gradients of stage {stage}"
    for rank, own in enumerate(problem.stages_of):
        yield from _bounds_of_rank(paths, rank, own)
    yield from _bounds_of_links(paths)


def _bounds_of_links(paths: Paths) -> Iterator[tuple[float, str]]:
    """For each pair of ranks: the time before the first message from one to the other, the time of all messages, and the time after the last."""
    ranks, times = paths.problem.stage_rank, paths.problem.times
    messages: dict[tuple[int, int], list[tuple[float, float, float]]] = {}
    for s, t in enumerate(times):
        made_s = paths.start_s[s] + t.first_forward_extra_s + paths.forward_s[s]
        if s + 1 < len(times) and ranks[s] != ranks[s + 1]:
            after_s = paths.forward_s[s + 1] + paths.turn_s[s + 1] + paths.rest_s[s + 1]
            messages.setdefault((ranks[s], ranks[s + 1]), []).append((made_s, t.send_forward_s, after_s))
        if s and ranks[s] != ranks[s - 1]:
            made_s += paths.turn_s[s] + paths.gradient_s[s]
            messages.setdefault((ranks[s], ranks[s - 1]), []).append((made_s, t.send_backward_s, paths.rest_s[s - 1]))
    for (here, there), of_link in messages.items():
        before_s, sends_s, after_s = zip(*of_link, strict=True)
        yield min(before_s) + paths.m * sum(sends_s) + min(after_s), f"messages from rank {here} to rank {there}"


def _bounds_of_rank(paths: Paths, rank: int, own: tuple[int, ...]) -> Iterator[tuple[float, str]]:
    problem, m, memory, times = paths.problem, paths.m, paths.problem.memory_bytes[rank], paths.problem.times
    first_s = sum(times[s].first_forward_extra_s for s in own)
    work_s = first_s + sum(m * (paths.forward_s[s] + paths.whole_s[s]) + times[s].last_backward_extra_s for s in own)
    begin_s = min(paths.start_s[s] for s in own)
    after_s = min(paths.after_s(s) for s in own)
    # Until its first gradient is there, a rank has only forwards to do, as many as memory holds.
    turn_s = min(paths.start_s[s] + times[s].first_forward_extra_s + paths.forward_s[s] + paths.turn_s[s] for s in own)
    forwards_s = first_s + _most_s(m, memory, [(paths.forward_s[s], problem.kept_bytes[s]) for s in own])
    idle_s = max(0.0, turn_s - begin_s - forwards_s)
    busy_s = begin_s + idle_s + work_s + after_s
    few = ", whose memory holds few forwards" if idle_s else ""
    yield busy_s, f"work of rank {rank}{few}"
    if len(own) > 1 and any(times[s].reduce_s for s in own):
        # Once the first of its stages is done, the rank's gradients are all reduced, one stage after the other.
        done_s = begin_s + idle_s + work_s - max(_left_s(paths, s, own, memory) for s in own)
        yield done_s + sum(times[s].reduce_s for s in own), f"work of rank {rank}{few}, and its reductions"
    if memory == inf or not any(problem.kept_bytes[s] for s in own):
        return
    if len(own) == 1:
        yield from _bounds_of_memory(paths, rank, own[0], busy_s)
    # Memory times seconds: what each micro-batch keeps from a stage's forward to its gradient, and for how long.
    held = sum(problem.kept_bytes[s] * (paths.forward_s[s] + paths.turn_s[s] + paths.gradient_s[s]) for s in own)
    low = min(own)
    yield begin_s + m * held / memory + paths.rest_s[low] - paths.gradient_s[low], f"memory of rank {rank}"


def _bounds_of_memory(paths: Paths, rank: int, s: int, busy_s: float) -> Iterator[tuple[float, str]]:
    """Bounds for a rank with one stage, if memory holds fewer micro-batches than there are.

    ``busy_s``: the bound from its work and its wait for the first gradient.
    """
    problem, m, memory, kept = paths.problem, paths.m, paths.problem.memory_bytes[rank], paths.problem.kept_bytes[s]
    most = floor(memory / kept * (1 + ROUNDING))
    if m <= most:
        return
    # A forward waits for the gradient ``most`` micro-batches before it: round trips, one after the other.
    trip_s = paths.forward_s[s] + paths.turn_s[s] + paths.gradient_s[s]
    trips, start = divmod(m - 1, most)
    start_s = paths.start_s[s] + start * paths.forward_s[s]
    if start:
        start_s += problem.times[s].first_forward_extra_s
    yield start_s + trips * trip_s + paths.forward_s[s] + paths.turn_s[s] + paths.rest_s[s], f"memory of rank {rank}"
    # Between the last forward and its gradient the rank has only the backwards of the micro-batches that it holds.
    waiting, rest = m if problem.split else 0, kept - problem.freed_bytes[s]
    if problem.split and rest > 0.0:
        waiting = floor(memory / rest * (1 + ROUNDING))
    backwards_s = (most - 1) * paths.gradient_s[s]
    if problem.split:
        backwards_s += min(m, waiting + most) * problem.times[s].weight_gradient_s
    idle_s = max(0.0, paths.turn_s[s] - backwards_s)
    yield busy_s + idle_s, f"memory of rank {rank}, at the beginning and the end"


def _left_s(paths: Paths, done: int, own: tuple[int, ...], memory: float) -> float:
    """The most seconds of work that a rank can have left when stage ``done`` ends before its others: as much as memory holds data for.

    By then all forwards are done, and the input gradients of later stages.
    """
    problem, times, kinds = paths.problem, paths.problem.times, list[tuple[float, float]]()
    others = [s for s in own if s != done]
    for s in others:
        if s < done:
            kinds.append((paths.whole_s[s], problem.kept_bytes[s]))
        if problem.split:
            weights_s = max(0.0, paths.whole_s[s] - times[s].input_gradient_s)
            kinds.append((weights_s, problem.kept_bytes[s] - problem.freed_bytes[s]))
    most_s = paths.m * sum(paths.whole_s[s] for s in others)
    return min(most_s, _most_s(paths.m, memory, kinds)) + sum(times[s].last_backward_extra_s for s in others)


def _most_s(m: int, memory: float, kinds: list[tuple[float, float]]) -> float:
    """The most seconds of actions whose kept bytes fit in memory at once: taken by seconds per byte, the last one in part."""
    total = 0.0
    for seconds, kept in sorted(kinds, key=lambda kind: kind[0] / kind[1] if kind[1] else inf, reverse=True):
        count = m if kept == 0.0 else min(m, memory / kept)
        total += count * seconds
        memory -= count * kept
    return total
