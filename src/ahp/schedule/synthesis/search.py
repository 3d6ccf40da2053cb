"""Tries rules on few micro-batches, changes the best rules at random, and carries out the best of all with every micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, count
from math import ceil, inf
from random import Random

from ahp.schedule.synthesis.bound import Paths
from ahp.schedule.synthesis.codes import Orders
from ahp.schedule.synthesis.listing import MANY, Listed, Rule, list_schedule
from ahp.schedule.synthesis.merge import merged
from ahp.schedule.synthesis.problem import Problem
from ahp.schedule.synthesis.repeat import Part, fewer, repeated, steady_part
from ahp.schedule.synthesis.replay import fits, replay
from ahp.schedule.synthesis.rules import along_the_way, drawn_rhythms, rhythms

ROUNDS_TRIED = 1.5
"""Micro-batches per rank (and a few more) of the short schedules on which rules are compared."""

GOOD_GAP = 1e-3
"""The search stops once the end is within this fraction of the lower bound."""

EFFORT = 36
"""Actions tried per micro-batch and rank. With v stages per rank an action counts v times, because it takes v times as long.
One to two microseconds each: 20 to 40 ms for 8 ranks and 64 micro-batches, 0.2 to 0.4 s for 16 and 256."""

LEAST_EFFORT = 18_000
"""The least number of actions tried, for few ranks and micro-batches."""

FEW_ACTIONS = 150
"""With at most this many actions, half of the tries are swaps of neighbors: with more actions rules gain more."""

FINALISTS = 2
"""How many of the best rules get a schedule of all micro-batches."""

NEVER = 1000.0
"""More periods than any weight gradient waits: with this delay, weight gradients come when nothing else can run."""

ON_THE_WAY = (
    (1, 1, 0.0),
    (0, NEVER, 0.0),
    (0, 1, 0.0),
    (0, 1, 0.5),
    (2, 1, 0.5),
    (0, NEVER, 0.5),
    (2, 1, 0.0),
    (0, 2, 0.0),
    (2, 2, 0.0),
    (2, 1, 1.0),
    (2, 0.5, 0.5),
)
"""Lead, behind and patience of ``along_the_way``. [Empirical] Here and below: the rules among 500 that together are best for
370 problems of 4 to 12 ranks; with ample memory five rules come within 0.1 % of all. The first two are the best of all for 29 of 41
pipelines of the catalogue's models with three or more stages per rank, where effort is spent after few rules."""

FEWEST_RULES = 5
"""This many rules are tried, whatever they cost: with eight stages per rank effort would be spent after one."""

IN_RHYTHM = ((0, 0.5), (1, 0.5), (0, 1.0))
"""Spare and patience of the rules of a rhythm, which suit problems with little memory."""

TURNS = 4
"""One rule in this many is of the kind that has found the longer schedule so far."""

FURTHER_DRAWS, BEST_DRAWN = 6, 2
"""How often rhythms are drawn again at most, and how many of each draw are tried. [Empirical] 4 of 80 problems need it, and one draw or two."""

FIRST_RHYTHMS = 5
"""Rhythms that are tried with each entry of ``IN_RHYTHM`` before the next rhythms are."""


def actions_tried(p: int, m: int) -> int:
    """Actions that are tried with an effort of 1."""
    return max(LEAST_EFFORT, EFFORT * p * m)


@dataclass(frozen=True)
class _Tried:
    """A rule, its schedule of few micro-batches, and an estimate of its time with all."""

    rule: Rule
    listed: Listed
    part: Part | None
    score_s: float


class Search:
    """One search; the same seed gives the same result."""

    def __init__(self, problem: Problem, bound_s: float, seed: int, effort: float) -> None:
        self.problem, self.bound_s = problem, bound_s
        self.m = fewer(problem, ceil(ROUNDS_TRIED * problem.num_ranks) + 4)
        self.period_s = Paths(problem).period_s
        self.random = Random(seed)
        self.left = effort * actions_tried(problem.num_ranks, problem.num_micro_batches)
        """Actions that may still be tried, each counted once per stage of its rank."""
        few = 3 * problem.num_stages * problem.num_micro_batches <= FEW_ACTIONS
        self.for_swaps = self.left / 2 if few else 0.0
        """The part of ``left`` that is reserved for swaps."""
        self.last_s = inf
        """Estimated seconds of the rule that was tried last."""
        self.tried: list[_Tried] = []
        self.unsettled: list[_Tried] = []
        """Rules without a steady part in so few micro-batches, such as those that run ahead until memory is full."""

    def best(self) -> tuple[Orders, float]:
        """The best orders found, and when they end."""
        for number, rule in enumerate(chain(self._first_rules(), self._changed_rules()), 1):
            self._try(rule)
            spent = self.left <= self.for_swaps and number >= FEWEST_RULES
            if spent or self.good(self.tried[0].score_s):
                break
        finalists = self.tried[:FINALISTS]
        finalists += [tried for tried in self.unsettled[:FINALISTS] if tried not in finalists]
        found = min((self._carried_out(tried) for tried in finalists), key=lambda made: made[1])
        if self.for_swaps and not self.good(found[1]):
            tries = int(self.for_swaps / sum(map(len, found[0])))
            found = swapped(self.problem, *found, self.random, tries, self.bound_s * (1 + GOOD_GAP))
        return self._merged(found) if self.tried[0].rule.weight_s else found

    def better(self, found: tuple[Orders, float], enough_s: float) -> tuple[Orders, float]:
        """The best of ``found`` and of what further random rhythms give, until it ends by ``enough_s``."""
        for _ in range(FURTHER_DRAWS):
            if found[1] <= enough_s:
                break
            for rhythm in drawn_rhythms(self.problem, self.random, split=self.problem.split)[:BEST_DRAWN]:
                tried = self._try(rhythm.rule(*IN_RHYTHM[0]))
                if tried.score_s < found[1]:
                    found = min(found, self._merged(self._carried_out(tried)), key=lambda made: made[1])
        return found

    def _merged(self, found: tuple[Orders, float]) -> tuple[Orders, float]:
        """``found`` with whole backwards in place of two parts that cost more, where no action waits for the first part."""
        if any(t.input_gradient_s + t.weight_gradient_s > t.backward_s for t in self.problem.times):
            return merged(self.problem, *found)
        return found

    def good(self, end_s: float) -> bool:
        """Whether ``end_s`` is so near the bound that trying more would gain too little."""
        return end_s <= self.bound_s * (1 + GOOD_GAP)

    def _try(self, rule: Rule) -> _Tried:
        problem, m, all_m = self.problem, self.m, self.problem.num_micro_batches
        listed = list_schedule(problem, rule, m)
        self.left -= sum(len(order) * len(own) for order, own in zip(listed.orders, problem.stages_of, strict=True))
        part, score_s = None, listed.end_s
        if m < all_m:
            part = steady_part(problem, listed, m, self.period_s)
            of_one_s = part.seconds / part.micro_batches if part else max(listed.end_s / m, self.period_s)
            score_s += (all_m - m) * of_one_s
        tried, self.last_s = _Tried(rule, listed, part, score_s), score_s
        self.tried = _best(self.tried, tried)
        if m < all_m and part is None:
            self.unsettled = _best(self.unsettled, tried)
        return tried

    def _first_rules(self) -> Iterator[Rule]:
        """Rules of each kind in turns; of every ``TURNS`` the kind that has found the shorter schedule gets all except one."""
        problem = self.problem
        ways = [True] if problem.split else []
        if not problem.split or any(
            t.backward_s < (t.input_gradient_s + t.weight_gradient_s) * (1 - GOOD_GAP) for t in problem.times
        ):
            ways.append(False)
        kinds = [self._rules_on_the_way(ways)]
        if any(memory < inf for memory in problem.memory_bytes):
            kinds.append(self._rules_in_rhythm(ways))
        shortest_s = [inf] * len(kinds)
        for turn in count():
            if not kinds:
                return
            better = shortest_s.index(min(shortest_s))
            kind = (better + 1) % len(kinds) if turn % TURNS == 1 else better
            if (rule := next(kinds[kind], None)) is None:
                del kinds[kind], shortest_s[kind]
                continue
            yield rule
            shortest_s[kind] = min(shortest_s[kind], self.last_s)

    def _rules_on_the_way(self, ways: list[bool]) -> Iterator[Rule]:
        for lead, behind, patience in ON_THE_WAY:
            for split in ways:
                if split or behind == 1:
                    yield along_the_way(self.problem, split=split, lead=lead, behind=behind, patience=patience)

    def _rules_in_rhythm(self, ways: list[bool]) -> Iterator[Rule]:
        found = [rhythms(self.problem, self.random, split=split) for split in ways]
        most = max(map(len, found))
        for first in range(0, most, FIRST_RHYTHMS):
            for spare, patience in IN_RHYTHM:
                for number in range(first, first + FIRST_RHYTHMS):
                    yield from (some[number].rule(spare, patience) for some in found if number < len(some))

    def _changed_rules(self) -> Iterator[Rule]:
        while True:
            yield self._changed(self.tried[self.random.randrange(min(len(self.tried), FINALISTS))].rule)

    def _changed(self, rule: Rule) -> Rule:
        """The rule with one thing changed: how long a rank waits, how far a stage runs ahead, or when some actions come."""
        random, problem = self.random, self.problem
        what = random.randrange(4)
        if what == 0:
            patience = list(rule.patience)
            patience[random.randrange(problem.num_ranks)] = random.choice((0.0, 0.25, 0.5, 1.0))
            return replace(rule, patience=tuple(patience))
        stage = random.randrange(problem.num_stages)
        if what == 1:
            ahead = list(rule.ahead)
            usual = ceil((rule.gradient_s[stage] - rule.forward_s[stage]) / rule.period_s) + 1
            now = usual if ahead[stage] == MANY else ahead[stage]
            ahead[stage] = random.choice((MANY, max(1, now - 1), max(1, now + 1)))
            return replace(rule, ahead=tuple(ahead))
        names = ["forward_s", "gradient_s", *(["weight_s"] if rule.weight_s else [])]
        name = random.choice(names)
        chosen = {stage} if what == 2 else set(problem.stages_of[problem.stage_rank[stage]])
        by_s = random.gauss(0.0, 0.5) * rule.period_s
        moved = tuple(at + by_s * (s in chosen) for s, at in enumerate(getattr(rule, name)))
        return replace(rule, **{name: moved})

    def _carried_out(self, tried: _Tried) -> tuple[Orders, float]:
        """The rule's orders of all micro-batches, by repeating its steady part or by a list schedule of all; and when they end."""
        problem, m = self.problem, self.problem.num_micro_batches
        if self.m == m:
            orders = tried.listed.orders  # the rule may wait where its order need not
        elif tried.part:
            orders = repeated(tried.listed.orders, tried.part, m - self.m)
        else:
            orders = list_schedule(problem, tried.rule, m).orders
        return orders, replay(problem, orders).end_s


def _best(tried: list[_Tried], one: _Tried) -> list[_Tried]:
    return sorted([*tried, one], key=lambda some: some.score_s)[: 2 * FINALISTS]


def swapped(
    problem: Problem, orders: Orders, end_s: float, random: Random, tries: int, enough_s: float
) -> tuple[Orders, float]:
    """Orders that no rule makes: neighbors swapped at random, as long as the step gets no longer; and when they end. Stops at ``enough_s``.

    Swaps that do not change when the orders end are kept too: the next swap may need them.
    """
    orders = [list(order) for order in orders]
    for _ in range(tries):
        if end_s <= enough_s:
            break
        order = orders[random.randrange(len(orders))]
        first = random.randrange(len(order) - 1)
        second = min(len(order) - 1, first + random.choice((1, 1, 2, 3)))
        moved = order.pop(second)
        order.insert(first, moved)
        try:
            found_s = replay(problem, orders).end_s if fits(problem, orders) else float("inf")
        except ValueError:  # it cannot run
            found_s = float("inf")
        if found_s <= end_s:
            end_s = found_s
        else:
            order.insert(second, order.pop(first))
    return orders, end_s
