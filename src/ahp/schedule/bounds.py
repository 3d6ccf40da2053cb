"""Closed-form lower bounds on a schedule's makespan and on what its ranks keep: certificates of a search.

Every bound on time is the length of a path through the schedule's own dependencies (what an action waits for, and the
order of its rank), so that none exceeds the simulation: the terms of a sum below are times that follow one another.
Here p = pipeline ranks, v = stages per rank, m = micro-batches, N = layouts that share these, S = p v stages;
rank r's lowest stage is stage r in all schedules, and stages take micro-batches in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np

from ahp.arrays import Floats, Ints
from ahp.schedule.registry import get
from ahp.schedule.simulate import StageTimes


@dataclass(frozen=True)
class TimeColumns:
    """``StageTimes`` of many layouts: each field [N, S] in seconds, or anything that broadcasts to it."""

    forward_s: Floats
    backward_s: Floats
    input_gradient_s: Floats
    weight_gradient_s: Floats
    send_forward_s: Floats
    send_backward_s: Floats
    first_forward_extra_s: Floats
    last_backward_extra_s: Floats
    reduce_s: Floats
    gathered_s: Floats

    @classmethod
    def of(cls, *layouts: Sequence[StageTimes]) -> TimeColumns:
        """The columns for the stages of each layout; all layouts have the same number of stages."""
        names = (field.name for field in fields(cls))
        return cls(**{name: np.array([[getattr(t, name) for t in times] for times in layouts]) for name in names})


def lower_bounds_s(name: str, p: int, v: int, m: int, times: TimeColumns, *, turns: float = 1.0) -> Floats:
    """[N] The least seconds that the schedule takes, for many legal layouts at once; O(N p v), with one stage per rank O(N p^2).

    GPipe's is exact. 1F1B's and, if m is a multiple of p, Interleaved1F1B's are exact for equal stages without sends.
    ``turns``: workers that share a core, if ``times`` are those of all workers at once (``forecast.turns``): while some wait the
    others are faster, at most by this factor, but all work together gets no faster than with all at once.
    """
    if turns > 1.0 and p > 1:
        return np.maximum(lower_bounds_s(name, p, v, m, times) / turns, _Paths(name, p, v, m, times).mean_work_s())
    schedule = get(name)
    if schedule.all_forwards_first:
        return _gpipe_s(m, times)
    paths = _Paths(name, p, v, m, times)
    bound = np.maximum(paths.way_of_one_s(), paths.ranks_s().max(axis=-1))
    if (forwards := schedule.forwards_before_gradient(p, v, m)) is not None:
        bound = np.maximum(bound, paths.after_first_gradient_s(forwards).max(axis=-1))
    if p > 1 and (np.any(times.send_forward_s > times.forward_s) or np.any(times.send_backward_s > times.backward_s)):
        bound = np.maximum(bound, paths.links_s().max(axis=-1))  # else ranks take longer than their messages
    return np.maximum(bound, paths.round_trips_s()) if schedule.one_forward_one_backward and v == 1 and p > 1 else bound


def gpipe_ends_s(m: int, times: Sequence[StageTimes]) -> list[float]:
    """When each rank has done its last action under GPipe, exactly: each phase is a flow shop of equal jobs, paced by its slowest
    stage or link."""
    forward_s = peak_s = first_s = 0.0
    for stage, t in enumerate(times):
        sent_s = times[stage - 1].send_forward_s if stage else 0.0
        peak_s = max(peak_s, first_s + (m - 1) * sent_s)
        forward_s += t.forward_s + sent_s
        first_s += t.first_forward_extra_s
        peak_s = max(peak_s, first_s + (m - 1) * t.forward_s)
    ends: list[float] = []
    now_s, slowest_s = forward_s + peak_s, 0.0
    for t in reversed(times):
        now_s += t.backward_s
        slowest_s = max(slowest_s, t.backward_s)
        ends.append(now_s + (m - 1) * slowest_s + t.last_backward_extra_s)
        now_s += t.send_backward_s
        slowest_s = max(slowest_s, t.send_backward_s)
    return ends[::-1]


def _gpipe_s(m: int, times: TimeColumns) -> Floats:
    """[N] The latest of ``gpipe_ends_s``, with ``reduce_s`` added to each."""
    forward, back, back_sent = times.forward_s, times.backward_s[..., ::-1], times.send_backward_s[..., ::-1]
    first = np.cumsum(times.first_forward_extra_s, axis=-1)
    sent = times.send_forward_s.copy()
    sent[..., -1] = 0.0  # there is no next stage
    start_s = (forward + sent).sum(axis=-1) + (first + (m - 1) * np.maximum(forward, sent)).max(axis=-1)
    slowest = np.maximum.accumulate(back, axis=-1)
    slowest[..., 1:] = np.maximum(slowest[..., 1:], np.maximum.accumulate(back_sent, axis=-1)[..., :-1])
    ends = np.cumsum(back + back_sent, axis=-1) - back_sent + (m - 1) * slowest
    ends = ends + (times.last_backward_extra_s + times.reduce_s)[..., ::-1]
    return start_s + ends.max(axis=-1)


@lru_cache(maxsize=1 << 12)
def in_flight(name: str, p: int, v: int, m: int) -> Ints:
    """[p, v] Micro-batches of each rank's stages, lowest stage first, held at a moment at or near the rank's fullest: the fullest for GPipe
    and 1F1B, and for the others if all stages keep the same amount."""
    return get(name).in_flight(p, v, m)


class _Paths:
    """The times of some layouts, and the sums that several paths use."""

    def __init__(self, name: str, p: int, v: int, m: int, times: TimeColumns) -> None:
        self.p, self.v, self.m, self.times = p, v, m, times
        self.schedule = get(name)
        self.own = self.schedule.placement.rank_stages(p, v)
        self.split: Ints = np.array([self.schedule.num_split(stage, p, m) for stage in range(p * v)])
        self.gradient_s = self._least_gradient_s()
        each = times.forward_s + times.first_forward_extra_s + times.send_forward_s
        fill_s = np.cumsum(each, axis=-1) - each
        self.fill_s = fill_s + np.maximum.accumulate((times.gathered_s - fill_s).clip(0.0), axis=-1)
        """[N, S] Seconds before a stage's first forward."""
        rest_s = times.last_backward_extra_s + times.reduce_s
        if self.split.any():
            deferred = self.schedule.fewest_deferred(p, v, m)
            rest_s = rest_s + np.where(self.split > 0, deferred * times.weight_gradient_s, 0.0)
        back = np.zeros(self.gradient_s.shape)
        back[..., 1:] = times.send_backward_s[..., 1:] + self.gradient_s[..., :-1]
        self.back_s = way = np.cumsum(back, axis=-1)
        """[N, S] Seconds from the end of a stage's gradient to the end of the first stage's."""
        self.tail_s = way + np.maximum.accumulate(rest_s - way, axis=-1)
        """[N, S] Seconds after a stage's last gradient: its own remaining work, or the way back to an earlier stage and that stage's."""

    def _least_gradient_s(self) -> Floats:
        whole_s, input_s = self.times.backward_s, self.times.input_gradient_s
        some = np.where(self.split == self.m, input_s, np.minimum(whole_s, input_s))
        return np.where(self.split == 0, whole_s, some)

    def _first_gradient_s(self) -> Floats:
        """[N] Seconds until the last stage has the first micro-batch's gradient."""
        t = self.times
        return (self.fill_s + t.forward_s + t.first_forward_extra_s + self.gradient_s)[..., -1]

    def way_of_one_s(self) -> Floats:
        """[N] Seconds of one micro-batch through all stages and back."""
        return self._first_gradient_s() + self.tail_s[..., -1]

    def _work_s(self) -> Floats:
        """[N, S] Seconds of each stage's actions, without what follows its last gradient."""
        t = self.times
        return self.m * t.forward_s + t.first_forward_extra_s + self._backward_s()

    def _backward_s(self) -> Floats:
        """[N, S] The part of ``_work_s`` in backward passes, whole or split, of all micro-batches."""
        t, split = self.times, self.split
        return (self.m - split) * t.backward_s + split * (t.input_gradient_s + t.weight_gradient_s)

    def mean_work_s(self) -> Floats:
        """[N] Seconds that a rank computes on average."""
        return (self._work_s() + self.times.last_backward_extra_s).sum(axis=-1) / self.p

    def ranks_s(self) -> Floats:
        """[N, p] Seconds before each rank's first action, of all its work, and after its last gradient."""
        work = self._work_s()
        work_s = work[..., self.own].sum(axis=-1)
        times = self.times
        last = np.broadcast_to(times.last_backward_extra_s, work.shape)
        extra_s = last[..., self.own].sum(axis=-1)
        before_s = self.fill_s[..., : self.p] + work_s
        reduce_s = self._of_ranks(times.reduce_s)
        last_s = reduce_s.min(axis=-1) if self.schedule.splits_backward else reduce_s[..., 0]
        deferred_s, others_s = self._after_last_gradient(extra_s - last[..., : self.p])
        return np.maximum(before_s + extra_s + last_s, before_s - deferred_s + others_s + self.tail_s[..., : self.p])

    def after_first_gradient_s(self, forwards: Ints) -> Floats:
        """[N, p] Seconds before each rank's first gradient, which is the first micro-batch's of its highest stage; then of all the work left
        until its last gradient, which is its lowest stage's; and after that.

        ``forwards``: [p, v] forwards of each rank's stages before that first gradient.
        """
        t, highest, back_s = self.times, self.own[:, -1], self.back_s
        first_s = (self._first_gradient_s() + back_s[..., -1])[..., None] - back_s[..., highest]
        left = self._backward_s() + 0.0 * t.forward_s
        left_s = (left[..., self.own] + (self.m - forwards) * self._of_ranks(t.forward_s)).sum(axis=-1)
        deferred_s, _ = self._after_last_gradient(np.zeros(self.p))
        until_s = first_s + left_s - self.gradient_s[..., highest]
        return until_s + np.maximum(self.tail_s[..., : self.p] - deferred_s, 0.0)

    def links_s(self) -> Floats:
        """[N, links] For each link from one rank to another: seconds before its first message, of all its messages one after the other, and
        the least after the last."""
        t = self.times
        each = t.forward_s, t.send_forward_s, t.send_backward_s
        forward_s, sent_s, sent_back_s = (np.broadcast_to(of, self.gradient_s.shape) for of in each)
        made_s = self.fill_s + t.first_forward_extra_s + forward_s
        way_s = np.cumsum((forward_s + sent_s)[..., ::-1], axis=-1)[..., ::-1]
        ends_s = self.gradient_s + self.tail_s
        first_gradient_s = self._first_gradient_s()[..., None] + self.back_s[..., [-1]] - self.back_s
        before = np.concatenate([made_s[..., :-1], first_gradient_s[..., 1:]], axis=-1)
        sends = np.concatenate([sent_s[..., :-1], sent_back_s[..., 1:]], axis=-1)
        after = np.concatenate([way_s[..., 1:] - sent_s[..., [-1]] + ends_s[..., [-1]], ends_s[..., :-1]], axis=-1)
        order, starts = _links(self.schedule.name, self.p, self.v)
        least = (np.minimum.reduceat(of[..., order], starts, axis=-1) for of in (before, after))
        return sum(least) + self.m * np.add.reduceat(sends[..., order], starts, axis=-1)

    def _of_ranks(self, stages: Floats) -> Floats:
        """[N, p, v] The values of each rank's stages."""
        return np.broadcast_to(stages, (*stages.shape[:-1], self.p * self.v))[..., self.own]

    def _after_last_gradient(self, others_s: Floats) -> tuple[Floats | float, Floats | float]:
        """The most that each rank computes after the last gradient of its lowest stage, and those extras that surely come before it."""
        if not self.schedule.splits_backward:
            return 0.0, others_s
        weight_s = self._of_ranks(self.times.weight_gradient_s)
        deferred_s, lowest_alone = self.schedule.last_weights_s(weight_s, self.p, self.v, self.m)
        return deferred_s, np.where(lowest_alone, others_s, 0.0)

    def round_trips_s(self) -> Floats:
        """[N] One stage per rank: round trips from stage a to stage b and back, forced by sends and by few micro-batches in flight.

        Rank r starts forward i + p - r only after the gradient of micro-batch i. So F(a, k + b - a + 1) waits for
        F(a, k), ..., F(b, k), the next gradient of rank b, and its way back to a. A path begins with the forwards
        of a that fill the pipeline, makes as many trips as there are, and ends with the last micro-batch.
        """
        p, m, t = self.p, self.m, self.times
        a, b = np.triu_indices(p)
        compute = _with_zero(np.cumsum(t.forward_s + self.gradient_s, axis=-1))
        sends = _with_zero(np.cumsum(t.send_forward_s[..., :-1] + t.send_backward_s[..., 1:], axis=-1))
        trip = compute[..., b + 1] - compute[..., a] + sends[..., b] - sends[..., a]
        last_trip = compute[..., [p]] - compute[..., a] + sends[..., [p - 1]] - sends[..., a]
        length = b - a + 1
        warm = p - 1 - b
        start = warm + (m - 1 - warm) % length
        trips = np.where(start < m, (m - 1 - start) // length, 0)
        start = np.minimum(start, m - 1)
        total = self.fill_s[..., a] + start * t.forward_s[..., a]
        total = total + np.where(start > 0, t.first_forward_extra_s[..., a], 0.0)
        total = total + trips * trip + last_trip + self.tail_s[..., a]
        if self.schedule.splits_backward:
            # Trip c returns with the gradient of micro-batch start + c * length - warm; from micro-batch a on, a
            # weight gradient comes between that gradient and the next forward.
            none = np.clip(-((start - warm - a) // length), 0, trips)
            total = total + (trips - none) * t.weight_gradient_s[..., a]
        return total.max(axis=-1)


@lru_cache(maxsize=1 << 12)
def _links(name: str, p: int, v: int) -> tuple[Ints, Ints]:
    """The messages of one micro-batch between ranks, sorted by link, and where each link begins in them. Messages are numbered: first the outputs
    of all stages except the last, then the gradients of all except the first."""
    ranks = np.array(get(name).placement.stage_ranks(p, v))
    pairs = np.concatenate([ranks[:-1] * p + ranks[1:], ranks[1:] * p + ranks[:-1]])
    between = np.flatnonzero(pairs // p != pairs % p)
    order = between[np.argsort(pairs[between], kind="stable")]
    return order, np.flatnonzero(np.diff(pairs[order], prepend=-1))


def _with_zero(sums: Floats) -> Floats:
    return np.concatenate([np.zeros((*sums.shape[:-1], 1)), sums], axis=-1)
