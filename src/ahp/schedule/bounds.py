"""Lower bounds of a schedule's makespan in closed form: certificates of a search.

Every bound is the length of a path through the schedule's own dependencies (what an action waits for, and the
order of its rank), so that none exceeds the simulation: each term below is time that passes one after another.
Here p = pipeline ranks, v = stages per rank, m = micro-batches; rank r's lowest stage is stage r in all schedules,
and stages take micro-batches in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from ahp.schedule.patterns import SPLIT_BACKWARD, stage_ranks
from ahp.schedule.simulate import StageTimes


def lower_bound_s(name: str, p: int, v: int, m: int, times: Sequence[StageTimes]) -> float:
    """Seconds that the schedule takes at least; O(p v + p^2). ``times[s]`` belongs to stage ``s``; the layout is legal.

    GPipe's is exact. 1F1B's and, where m is a multiple of p, Interleaved1F1B's are exact for equal stages without sends.
    """
    if name == "GPipe":
        return max(gpipe_ends_s(m, times))
    paths = _Paths(name, p, v, m, times)
    bound = max(paths.way_of_one_s(), *map(paths.rank_s, range(p)))
    if v == 1:
        bound = max(bound, paths.round_trips_s())
    return bound


def gpipe_ends_s(m: int, times: Sequence[StageTimes]) -> list[float]:
    """When each rank ends under GPipe, exactly: each phase is a flow shop of equal jobs, which its slowest stage paces."""
    forward_s = peak_s = first_s = 0.0
    for stage, t in enumerate(times):
        forward_s += t.forward_s + (times[stage - 1].send_forward_s if stage else 0.0)
        first_s += t.first_forward_extra_s
        peak_s = max(peak_s, first_s + (m - 1) * t.forward_s)
    ends: list[float] = []
    now_s, slowest_s = forward_s + peak_s, 0.0
    for t in reversed(times):
        now_s += t.backward_s
        slowest_s = max(slowest_s, t.backward_s)
        ends.append(now_s + (m - 1) * slowest_s + t.last_backward_extra_s)
        now_s += t.send_backward_s
    return ends[::-1]


class _Paths:
    """The times of one layout with the sums that the paths share."""

    def __init__(self, name: str, p: int, v: int, m: int, times: Sequence[StageTimes]) -> None:
        self.name, self.p, self.v, self.m, self.times = name, p, v, m, times
        self.own: list[list[int]] = [[] for _ in range(p)]
        for stage, rank in enumerate(stage_ranks(name, p, v)):
            self.own[rank].append(stage)
        self.split = [self._num_split(stage) for stage in range(p * v)]
        self.gradient_s = [self._least_gradient_s(stage) for stage in range(p * v)]
        each = (t.forward_s + t.first_forward_extra_s + t.send_forward_s for t in times)
        self.fill_s = list(accumulate(each, initial=0.0))
        """Seconds before a stage's first forward."""
        self.tail_s: list[float] = []
        """Seconds after a stage's last gradient: its own rest, or the way back to the first stage."""
        for stage, t in enumerate(times):
            rest_s = t.last_backward_extra_s
            if self.split[stage]:
                deferred = min(stage + 1, m) if v == 1 else 1
                rest_s += deferred * t.weight_gradient_s
            if stage:
                rest_s = max(rest_s, t.send_backward_s + self.gradient_s[stage - 1] + self.tail_s[-1])
            self.tail_s.append(rest_s)

    def _num_split(self, stage: int) -> int:
        """Micro-batches whose backward the stage splits; always the last ones, or the first ones and the last."""
        if self.name not in SPLIT_BACKWARD:
            return 0
        if self.name != "DualPipeV":
            return self.m
        p = self.p
        if stage < p:
            return p - (stage + 1) // 2
        rank = 2 * p - 1 - stage
        return p - rank - 1 + self._last_split_up(rank)

    def _last_split_up(self, rank: int) -> int:
        """DualPipeV: the last micro-batches that the stage on the way back splits."""
        return rank + 1 - (rank + 1) // 2 - (rank % 2 == 0)

    def _least_gradient_s(self, stage: int) -> float:
        t = self.times[stage]
        if self.split[stage] == 0:
            return t.backward_s
        return t.input_gradient_s if self.split[stage] == self.m else min(t.backward_s, t.input_gradient_s)

    def way_of_one_s(self) -> float:
        """One micro-batch through all stages and back."""
        return self.fill_s[-1] - self.times[-1].send_forward_s + self.gradient_s[-1] + self.tail_s[-1]

    def rank_s(self, rank: int) -> float:
        """What comes before the rank's first action, all its work, and what follows its last gradient."""
        work_s = extra_s = 0.0
        for stage in self.own[rank]:
            t, split = self.times[stage], self.split[stage]
            work_s += self.m * t.forward_s + t.first_forward_extra_s
            work_s += (self.m - split) * t.backward_s + split * (t.input_gradient_s + t.weight_gradient_s)
            extra_s += t.last_backward_extra_s
        before_s = self.fill_s[rank] + work_s
        deferred_s, others_s = self._after_last_gradient(rank, extra_s)
        return max(before_s + extra_s, before_s - deferred_s + others_s + self.tail_s[rank])

    def _after_last_gradient(self, rank: int, extra_s: float) -> tuple[float, float]:
        """At most what the rank computes after the last gradient of its lowest stage; extras that surely come before."""
        weight_s = [self.times[stage].weight_gradient_s for stage in self.own[rank]]
        others_s = extra_s - self.times[rank].last_backward_extra_s
        if self.name not in SPLIT_BACKWARD:
            return 0.0, others_s
        if self.name == "InterleavedZeroBubble":
            count = min(rank + 1, self.m * self.v)
            per_round = self.m // max(1, self.m // self.p)
            if self.v == 1 or count <= per_round:
                return count * weight_s[0], others_s
            return count * max(weight_s), 0.0
        if self.name == "DualPipeV":
            return (rank + 1) * max(weight_s), 0.0
        if self.m < 2 * self.p - 1:
            return self.m * sum(weight_s), 0.0
        return (rank + 1) * weight_s[0] + rank * weight_s[1], 0.0

    def round_trips_s(self) -> float:
        """One stage per rank: round trips from stage a to stage b and back, as sends and few micro-batches force them.

        Rank r starts forward i + p - r only after the gradient of micro-batch i. So F(a, k), ..., F(b, k), the
        gradient that rank b has next, and its way back to a hold up F(a, k + b - a + 1). A path begins with the
        forwards of a that fill the pipeline, makes as many trips as there are, and ends with the last micro-batch.
        """
        p, m, times = self.p, self.m, self.times
        a, b = np.triu_indices(p)
        forward, sent, back, weight, first, input_s = (
            np.array(column)
            for column in zip(
                *(
                    (t.forward_s, t.send_forward_s, t.send_backward_s, t.weight_gradient_s, t.first_forward_extra_s, g)
                    for t, g in zip(times, self.gradient_s, strict=True)
                ),
                strict=True,
            )
        )
        compute = np.concatenate([[0.0], np.cumsum(forward + input_s)])
        sends = np.concatenate([[0.0], np.cumsum(sent[:-1] + back[1:])])
        trip = compute[b + 1] - compute[a] + sends[b] - sends[a]
        last_trip = compute[p] - compute[a] + sends[p - 1] - sends[a]
        length = b - a + 1
        warm = p - 1 - b
        start = warm + (m - 1 - warm) % length
        trips = np.where(start < m, (m - 1 - start) // length, 0)
        start = np.minimum(start, m - 1)
        total = np.array(self.fill_s)[a] + start * forward[a] + np.where(start > 0, first[a], 0.0)
        total += trips * trip + last_trip + np.array(self.tail_s)[a]
        if self.name in SPLIT_BACKWARD:
            # Trip c returns with the gradient of micro-batch start + c * length - warm; from micro-batch a on, a
            # weight gradient comes between it and the next forward.
            none = np.clip(-((start - warm - a) // length), 0, trips)
            total += (trips - none) * weight[a]
        return float(total.max())
