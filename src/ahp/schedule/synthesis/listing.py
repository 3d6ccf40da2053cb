"""A list schedule: a free rank starts the action that its rule puts first, among those that have their input and fit in memory."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from ahp.schedule.simulate import links
from ahp.schedule.slots import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT
from ahp.schedule.synthesis.codes import Orders
from ahp.schedule.synthesis.problem import ROUNDING, Problem

MANY = 1 << 40
"""More micro-batches than there are."""


@dataclass(frozen=True)
class Rule:
    """Which action goes first: the one with the least ``offset + period_s x micro-batch``, in seconds of an imagined steady state."""

    forward_s: tuple[float, ...]
    gradient_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    """Offset of each stage's actions; ``weight_s`` is empty where the backward is whole."""
    period_s: float
    patience: tuple[float, ...]
    """Per rank: it waits for a preferred input on its way if that takes less than this fraction of the action it could do now."""
    ahead: tuple[int, ...]
    """Per stage: the most micro-batches that have had its forward and not its gradient; at least 1."""


@dataclass(frozen=True)
class Listed:
    """The orders that a rule makes, with their times."""

    orders: Orders
    starts_s: list[list[float]]
    """When each action starts."""
    end_s: float
    """When all is done, including gradients that are reduced next to the computation."""


def list_schedule(problem: Problem, rule: Rule, m: int) -> Listed:
    """The order of each rank for ``m`` micro-batches. O(actions x stages per rank), a few microseconds for each.

    Memory never blocks the schedule. A forward of any micro-batch except the oldest with forwards left on the rank must leave
    room for one micro-batch of all the rank's stages. So the oldest micro-batch of all can always go on: older ones are done
    and keep nothing; on ranks where it has forwards left, younger ones leave room for all that it will keep; and its gradients
    need no memory. ``ahead`` does not block it either: at a stage where it has had no forward, no younger one has.
    """
    return _Run(problem, rule, m).run()


class _Run:
    """The state: what has been started, what has arrived, and when each rank looks for work again."""

    def __init__(self, problem: Problem, rule: Rule, m: int) -> None:
        stages, times, split = problem.num_stages, problem.times, bool(rule.weight_s)
        self.problem, self.rule, self.m, self.split, self.stages = problem, rule, m, split, stages
        self.own, self.rank_of, self.kept = problem.stages_of, problem.stage_rank, problem.kept_bytes
        self.seconds = [t.forward_s for t in times]
        self.seconds += [t.input_gradient_s if split else t.backward_s for t in times]
        self.seconds += [t.weight_gradient_s for t in times]
        kept = problem.kept_bytes
        freed = problem.freed_bytes if split else kept
        self.frees = [-k for k in kept] + list(freed) + [k - f for k, f in zip(kept, freed, strict=True)]
        kinds = (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT) if split else (FORWARD, BACKWARD)
        self.codes = [kind * stages + s for kind in kinds for s in range(stages)]
        """Code of each internal number, which is stages x (0 forward, 1 gradient, 2 weight gradient) + stage."""
        self.done = [0] * (3 * stages)
        """How many actions of each internal number have been started."""
        self.room = [memory * (1 + ROUNDING) for memory in problem.memory_bytes]
        self.gathered_s = [t.gathered_s for t in times]
        self.outputs: list[list[float]] = [[] for _ in range(stages)]
        """When the input of each stage's forwards has arrived."""
        self.outputs[0] = [self.gathered_s[0]] * m
        self.gradients: list[list[float]] = [[] for _ in range(stages)]
        self.orders: Orders = [[] for _ in problem.stages_of]
        self.starts: list[list[float]] = [[] for _ in problem.stages_of]
        self.wake_s, self.free_s = [inf] * problem.num_ranks, [0.0] * problem.num_ranks
        self.heap: list[tuple[float, int]] = []
        self.first_last = (2 if split else 1) * stages
        """The first internal number whose last action completes a stage."""
        self.alone = [len(own) == 1 or room == inf for own, room in zip(self.own, self.room, strict=True)]
        """Whether a rank needs no check for room: memory is unlimited, or with its one stage each forward is the oldest micro-batch's."""
        self.young_room = [room - least for room, least in zip(self.room, problem.least_bytes, strict=True)]
        self.sends_s = [t.send_forward_s for t in times] + [t.send_backward_s for t in times]
        outputs, gradients = links(problem.stage_rank)
        self.links, self.sent_s = outputs + gradients, [0.0] * (1 + max(outputs + gradients))
        """The link that takes the result of each forward and gradient; and when each link is free again."""
        self.end_s, self.reducing_until_s = 0.0, [0.0] * problem.num_ranks

    def run(self) -> Listed:
        """Run until nothing is left."""
        self._wake(self.rank_of[0], self.gathered_s[0])
        heap, wake_s, choose, start = self.heap, self.wake_s, self._choose, self._start
        while heap:
            now, rank = heappop(heap)
            if wake_s[rank] == now:
                chosen, until_s = choose(rank, now)
                if chosen >= 0:
                    start(rank, chosen, now)
                else:
                    self._wake(rank, until_s)
        return Listed(self.orders, self.starts, max(self.end_s, *self.reducing_until_s))

    def _wake(self, rank: int, at: float) -> None:
        self.wake_s[rank] = at
        if at < inf:
            heappush(self.heap, (at, rank))

    def _choose(self, rank: int, now: float) -> tuple[int, float]:
        """The internal number that the rank starts, and ``now``; or -1, and when the rank looks again."""
        rule, done, kept, stages, split = self.rule, self.done, self.kept, self.stages, self.split
        period_s, have = rule.period_s, self.room[rank]
        first = soon = soonest = inf
        chosen = -1
        for s in self.own[rank]:
            k, arrived = done[stages + s], self.gradients[s]
            if k < len(arrived):
                key, at = rule.gradient_s[s] + k * period_s, arrived[k]
                if at <= now:
                    if key < first:
                        first, chosen = key, stages + s
                elif key < soon:
                    soon, soonest = key, at
            if split and (late := done[2 * stages + s]) < k:
                key = rule.weight_s[s] + late * period_s
                if key < first:
                    first, chosen = key, 2 * stages + s
            number, arrived = done[s], self.outputs[s]
            if number < len(arrived) and kept[s] <= have and number - k < rule.ahead[s]:
                key, at = rule.forward_s[s] + number * period_s, arrived[number]
                if (key < first if at <= now else key < soon) and (self.alone[rank] or self._leaves_room(rank, s)):
                    if at <= now:
                        first, chosen = key, s
                    else:
                        soon, soonest = key, at
        if chosen < 0 or (soon < first and soonest - now < rule.patience[rank] * self.seconds[chosen]):
            return -1, soonest
        return chosen, now

    def _leaves_room(self, rank: int, stage: int) -> bool:
        """Whether the oldest micro-batch with forwards to do on the rank would still fit, with all that it will keep."""
        own, done, kept = self.own[rank], self.done, self.kept
        oldest = done[own[-1]]  # no stage is ahead of an earlier one
        if done[stage] == oldest:
            return True
        young = kept[stage]
        for s in own:
            if done[s] > oldest + 1:
                young += kept[s] * (done[s] - oldest - 1)
        return young <= self.young_room[rank]

    def _start(self, rank: int, chosen: int, now: float) -> None:
        stages, done = self.stages, self.done
        k = done[chosen]
        done[chosen] = k + 1
        self.orders[rank].append(self.codes[chosen])
        self.starts[rank].append(now)
        self.room[rank] += self.frees[chosen]
        end = now + self.seconds[chosen]
        if chosen < stages and k == 0:
            end += self.problem.times[chosen].first_forward_extra_s
        if now < self.reducing_until_s[rank]:
            end += self.problem.times[chosen % stages].slowed_s(now, end, self.reducing_until_s[rank])
        to = rank
        at = end
        if chosen == stages - 1:
            self.gradients[chosen].append(end)
        elif chosen < 2 * stages and chosen != stages:
            link, sent_s = self.links[chosen], self.sent_s
            at = sent_s[link] = (end if end > sent_s[link] else sent_s[link]) + self.sends_s[chosen]
            if chosen < stages:
                if k == 0:
                    at = max(at, self.gathered_s[chosen + 1])
                self.outputs[chosen + 1].append(at)
                to = self.rank_of[chosen + 1]
            else:
                self.gradients[chosen - stages - 1].append(at)
                to = self.rank_of[chosen - stages - 1]
        if k == self.m - 1 and chosen >= self.first_last:
            times = self.problem.times[chosen % stages]
            end += times.last_backward_extra_s
            self.reducing_until_s[rank] = max(end, self.reducing_until_s[rank]) + times.reduce_s
        self.wake_s[rank] = self.free_s[rank] = end
        heappush(self.heap, (end, rank))
        if end > self.end_s:
            self.end_s = end
        if to != rank and at < self.wake_s[to] and self.free_s[to] <= now:  # it is free, and would look later
            self._wake(to, at)
