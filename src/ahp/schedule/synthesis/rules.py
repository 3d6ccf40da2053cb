"""Rules to begin with: from the way of one micro-batch, and from rhythms in which no rank has two things to do at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from math import ceil, floor, inf
from random import Random

from ahp.schedule.synthesis.bound import Paths
from ahp.schedule.synthesis.listing import MANY, Rule
from ahp.schedule.synthesis.problem import Problem


def along_the_way(problem: Problem, *, split: bool, lead: float, behind: float, patience: float) -> Rule:
    """A rule that puts actions in the order in which one micro-batch alone would reach them.

    ``lead``: periods by which forwards come earlier than that, which fills memory; ``behind``: periods by which weight gradients
    come later, which keeps them for the end, when a rank has nothing else to do.
    """
    paths = Paths(problem, split=split)
    period_s = paths.period_s
    gradient_s = [s + f + t for s, f, t in zip(paths.start_s, paths.forward_s, paths.turn_s, strict=True)]
    weight_s = [s + g + behind * period_s for s, g in zip(gradient_s, paths.gradient_s, strict=True)] if split else []
    return Rule(
        tuple(start - lead * period_s for start in paths.start_s),
        tuple(gradient_s),
        tuple(weight_s),
        period_s,
        (patience,) * problem.num_ranks,
        (MANY,) * problem.num_stages,
    )


@dataclass(frozen=True)
class Rhythm:
    """A repeating schedule: when each stage does the actions of one micro-batch, in overlapping periods."""

    base: Rule
    """Its order, with no more micro-batches between the forward and the gradient of each stage (``ahead``) than it has there."""
    fullness: float
    """The most that the fullest rank keeps, as a fraction of its memory."""

    def rule(self, spare: int, patience: float) -> Rule:
        """A rule for the rhythm's order that lets ``spare`` more micro-batches into each stage than the rhythm holds there."""
        ahead = tuple(count + spare for count in self.base.ahead)
        return replace(self.base, patience=(patience,) * len(self.base.patience), ahead=ahead)


def rhythms(problem: Problem, random: Random, *, split: bool) -> list[Rhythm]:
    """Rhythms of several lengths in turns with rhythms drawn at random, the most promising of each kind first: long periods cost time, and so
    does memory that is not there."""
    found: dict[object, Rhythm] = {}
    several = sorted(_usual(problem, split), key=_promise_s), drawn_rhythms(problem, random, split=split)
    for made in chain.from_iterable(zip_longest(*several)):
        if made is not None:
            found.setdefault((_order(problem, made), made.base.ahead), made)
    return list(found.values())


def drawn_rhythms(problem: Problem, random: Random, *, split: bool) -> list[Rhythm]:
    """Only the rhythms drawn at random, the most promising first."""
    return sorted(_drawn(problem, random, split), key=_promise_s)


def _usual(problem: Problem, split: bool) -> list[Rhythm]:
    """Rhythms in which actions come as early as they can."""
    found: list[Rhythm] = []
    shortest_s = Paths(problem, split=split).period_s
    for stretch in STRETCHES:
        if len(found) >= ENOUGH and stretch * shortest_s > min(map(_promise_s, found)):
            break  # longer ones promise less
        made = (in_rhythm(problem, split=split, stretch=stretch, snug=snug, even=even) for snug, even in SNUG)
        found += filter(None, made)
    return found


def _drawn(problem: Problem, random: Random, split: bool) -> Iterator[Rhythm]:
    """Rhythms in which some forwards and gradients come later than they could."""
    for _ in range(DRAWN):
        share = random.choice(DELAYED)
        delays = [random.uniform(0.0, LONGEST_DELAY) * (random.random() < share) for _ in range(2 * problem.num_stages)]
        (snug, even), stretch = random.choice(SNUG), random.choice(STRETCHES[:NEAR])
        made = in_rhythm(problem, split=split, stretch=stretch, snug=snug, even=even, delays=delays)
        if made is not None:
            yield made


def _promise_s(rhythm: Rhythm) -> float:
    """A score of a rhythm: the lower it is, the shorter its schedule may be."""
    return rhythm.base.period_s * max(1.0, rhythm.fullness) ** FULLNESS


ENOUGH = 6
"""Number of rhythms after which longer ones are made only if they can promise more."""

DRAWN, DELAYED, LONGEST_DELAY, NEAR = 60, (0.1, 0.2, 0.4), 1.5, 7
"""[Empirical] How many rhythms are drawn; possible shares of actions that come later; by how many times their own length at most; how
many of ``STRETCHES``, the shortest, they are drawn from."""

FULLNESS = 0.5
"""[Empirical] Exponent of a rhythm's demand for more memory than there is: a list schedule makes up for half of it."""


STRETCHES = (1.0, 1.01, 1.02, 1.03, 1.05, 1.08, 1.1, 1.13, 1.17, 1.2, 1.25, 1.3, 1.4, 1.5)
"""Periods that are tried, as multiples of the seconds that the fullest rank computes per micro-batch."""

SNUG = ((0.1, False), (1.0, False), (1.0, True), (1.5, True))
"""Fraction of its own length that an action may wait to leave no gap, and whether a rank's actions count as equally long."""


def in_rhythm(
    problem: Problem, *, split: bool, stretch: float, snug: float, even: bool, delays: Sequence[float] = ()
) -> Rhythm | None:
    """The rhythm with a given period in which every action comes as soon as its rank is free.

    Modulo scheduling (Rau, MICRO 1994), like the building blocks of arXiv 2405.15362: the forward and the gradient of every stage,
    one after the other, then the weight gradients where there is room. This keeps as little as possible. An action may wait for
    ``snug`` times its own length if it then leaves no gap to the next. None if a rank has no gap long enough; ``even`` treats actions
    as equally long, which leaves no gap too short, and its order is as good if they nearly are. ``delays``: for each forward, then
    each gradient, how much later than possible it comes, in multiples of its length; empty: no delay.
    """
    if even:
        problem = _evened(problem, split)
    period_s = Paths(problem, split=split).period_s * stretch * (1 + 1e-9)
    ranks = [_Ring(period_s) for _ in problem.stages_of]
    times, rank_of, stages = problem.times, problem.stage_rank, range(problem.num_stages)
    takes_s = [t.input_gradient_s if split else t.backward_s for t in times]
    forward, gradient, weight = [0.0] * len(stages), [0.0] * len(stages), [0.0] * len(stages)
    now, later = 0.0, delays or [0.0] * (2 * len(stages))
    for starts, seconds, sends, order, late in (
        (forward, [t.forward_s for t in times], [t.send_forward_s for t in times[:-1]] + [0.0], stages, later),
        (gradient, takes_s, [t.send_backward_s for t in times], stages[::-1], later[len(stages) :]),
    ):
        for s in order:
            at = ranks[rank_of[s]].take(now + late[s] * seconds[s], seconds[s], snug * seconds[s])
            if at is None:
                return None
            starts[s], now = at, at + seconds[s] + sends[s]
    for s in stages[::-1] if split else ():
        at = ranks[rank_of[s]].take(gradient[s] + takes_s[s], times[s].weight_gradient_s, 0.0)
        if at is None:
            return None
        weight[s] = at
    ends = [start + seconds for start, seconds in zip(gradient, takes_s, strict=True)]
    held = tuple(max(1, ceil((end - start) / period_s - 1e-9)) for start, end in zip(forward, ends, strict=True))
    done = [at + t.weight_gradient_s for at, t in zip(weight, times, strict=True)] if split else ends
    fullness = _fullness(problem, forward, ends, done, period_s)
    weights = tuple(weight) if split else ()
    at_once = (0.0,) * problem.num_ranks
    return Rhythm(Rule(tuple(forward), tuple(gradient), weights, period_s, at_once, held), fullness)


def _order(problem: Problem, rhythm: Rhythm) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Each rank's actions in their order within a period, each with how many periods its micro-batch is behind the first action's."""
    ranks, base = [], rhythm.base
    for own in problem.stages_of:
        starts = [each[s] for s in own for each in (base.forward_s, base.gradient_s, base.weight_s) if each]
        turns = [divmod((start - starts[0]) / base.period_s + 1e-9, 1.0) for start in starts]
        ranks.append(tuple((n, int(turns[n][0])) for n in sorted(range(len(turns)), key=lambda n: turns[n][1])))
    return tuple(ranks)


def _evened(problem: Problem, split: bool) -> Problem:
    """The problem in which every action of a rank takes as long as the rank's average."""
    times = list(problem.times)
    for own in problem.stages_of:
        work_s = sum(
            t.forward_s + (t.input_gradient_s + t.weight_gradient_s if split else t.backward_s)
            for t in (times[s] for s in own)
        )
        each_s = work_s / (len(own) * (3 if split else 2))
        for s in own:
            whole_s = 2 * each_s if split else each_s
            times[s] = times[s]._replace(
                forward_s=each_s, backward_s=whole_s, input_gradient_s=each_s, weight_gradient_s=each_s
            )
    return replace(problem, times=tuple(times))


def _fullness(
    problem: Problem, forward: list[float], gradient: list[float], done: list[float], period_s: float
) -> float:
    """The most that the fullest rank keeps, as a fraction of its memory, from when bytes begin and cease to be kept in each period."""
    most = 0.0
    for own, memory in zip(problem.stages_of, problem.memory_bytes, strict=True):
        changes = []
        for s in own:
            freed = problem.freed_bytes[s] if done is not gradient else 0.0
            changes += [(forward[s], problem.kept_bytes[s]), (gradient[s], -freed)]
            changes.append((done[s], freed - problem.kept_bytes[s]))
        for start in [forward[s] for s in own] if memory < inf else ():
            held = sum(more * floor((start % period_s - at) / period_s + 1e-9) for at, more in changes)
            most = max(most, held / memory)
    return most


class _Ring:
    """The times at which one rank is busy in each period."""

    def __init__(self, period_s: float) -> None:
        self.period_s = period_s
        self.taken: list[tuple[float, float]] = []

    def take(self, earliest_s: float, seconds: float, slack_s: float) -> float | None:
        """Take and return the first free time from ``earliest_s`` on; None if there is none. A time that touches a taken one is preferred
        if it is at most ``slack_s`` after ``earliest_s``."""
        period = self.period_s
        after = sorted([earliest_s + (end - earliest_s) % period for _, end in self.taken])
        found = next((at for at in [earliest_s, *after] if self._free(at, seconds)), None)
        if found is None:
            return None
        if slack_s and self.taken:
            before = [earliest_s + (start - seconds - earliest_s) % period for start, _ in self.taken]
            touching = (at for at in sorted(after + before) if at - earliest_s <= slack_s)
            found = next((at for at in touching if self._free(at, seconds)), found)
        start = found % period
        self.taken.append((start, start + seconds))
        return found

    def _free(self, at: float, seconds: float) -> bool:
        """Whether the taken time before ``at`` has ended, and the one after begins later; around the ring both can be the same."""
        period = self.period_s
        start, rounding = at % period, 1e-9 * period
        least_s = seconds - rounding
        if least_s > period:
            return False
        for a, b in self.taken:  # a loop, for speed
            if (start - a) % period < b - a - rounding or (a - start) % period < least_s:
                return False
        return True
