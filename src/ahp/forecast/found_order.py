"""A schedule made for a layout's own stages: for their seconds, the bytes they keep, and the memory that each rank has left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

from ahp.arrays import Floats
from ahp.cached_method import cached_method
from ahp.engines.registry import get
from ahp.errors import AhpError, BadInput
from ahp.forecast.mixed import MixedPricer
from ahp.forecast.priced import Priced, Replica
from ahp.forecast.pricer import Pricer
from ahp.plan import Parallelism
from ahp.schedule.actions import Schedule
from ahp.schedule.orders import SYNTHESIZED, any_order, apart, order_text, ranks_of_stages, splits_backward, whole
from ahp.schedule.simulate import StageTimes
from ahp.schedule.synthesis.bound import LowerBound, lower_bound
from ahp.schedule.synthesis.find import Synthesized, synthesize
from ahp.schedule.synthesis.problem import ROUNDING, Problem
from ahp.schedule.synthesis.search import actions_tried
from ahp.words import WORTH_TELLING, percent

LESS_MEMORY = (1.0, 0.95, 0.9)
"""Shares of the ranks' free memory that are tried until the layout fits: what a rank keeps besides activations can grow with them."""


@dataclass(frozen=True)
class FoundOrder:
    """A layout with a schedule that was found for it, priced, next to the layout that it was found for."""

    priced: Priced
    before: Priced
    found: Synthesized
    bound: LowerBound
    """The time that no schedule of the layout beats, with backwards whole or in two parts."""

    @property
    def gain(self) -> float:
        """The share of the step that the schedule saves over the layout's earlier pattern."""
        return 1.0 - self.priced.forecast.step_time_s / self.before.forecast.step_time_s

    @property
    def gap(self) -> float:
        """The largest share of the schedule's time that another order of the same stages could save."""
        return max(0.0, 1.0 - self.bound.seconds / self.found.makespan_s)

    def words(self) -> str:
        """One line for people: the gain, and how near the schedule is to the best possible."""
        before = self.before.parallelism.pipeline_parallel_schedule
        faster = f"more than {percent(self.gap)} faster" if self.gap >= WORTH_TELLING else "faster"
        return (
            f"a schedule made for these stages takes {percent(self.gain)} less of a step than {before}; no order of these stages is {faster} "
            f"(bound: {self.bound.reason})"
        )


@dataclass(frozen=True)
class ToOrder:
    """A layout with a pipeline, and the facts that an order of its actions depends on."""

    pricer: Pricer | MixedPricer
    before: Priced

    @classmethod
    def of(cls, pricer: Pricer | MixedPricer, parallelism: Parallelism) -> ToOrder | None:
        """None where there is nothing to order, or the engine cannot run a given order. Raises what ``price`` raises."""
        before = pricer.price(parallelism)
        if before.parallelism.pipeline_parallel_degree == 1:
            return None
        return None if get(pricer.choice.name).refuses(pricer.job, any_order(), pricer.choice) else cls(pricer, before)

    @cached_property
    def as_order(self) -> Priced:
        """The layout with its pattern's order given action by action."""
        return self.pricer.price(self._with_orders([one.span.schedule for one in self._pipelines(self.before)]))

    @cached_method
    def _way(self, split: bool) -> Priced | None:
        """The same with backwards in two parts (True) or whole (False), in which stages can take different times; None if the engine cannot run
        that."""
        change = apart if split else whole
        schedules = [change(one.span.schedule) for one in self._pipelines(self.before)]
        try:
            return self.pricer.price(self._with_orders(schedules))
        except AhpError:  # compiled blocks in fp8 have only whole backwards
            return None

    @cached_property
    def _activation_bytes(self) -> Floats:
        """[R, p] Bytes that each rank of each replica has for activations of its own layers."""
        return self.pricer.activation_bytes(self.before)

    def _rooms(self, priced: Priced, *, most: bool = False) -> list[tuple[float, ...]]:
        """Bytes that each rank of each pipeline has for activations, if its stages keep as much as in ``priced``.

        Replicas under one order count with the least: a replica that recomputes more keeps less of the same micro-batches. ``most``: no
        order that keeps more fits; otherwise every order that keeps no more fits.
        """
        rooms = self._activation_bytes
        if self._own_orders or not priced.replicas:
            return [tuple(map(float, own)) for own in rooms]
        kept, ranks = priced.memory.kept, np.array(ranks_of_stages(priced.parallelism))
        held = np.array([kept / np.maximum(replica.memory.kept, 1) for replica in priced.replicas])
        of_ranks = [held[:, ranks == rank] for rank in range(rooms.shape[1])]
        shares = np.array([part.max(axis=1) if most else part.min(axis=1) for part in of_ranks]).T
        return [tuple((rooms * shares).min(axis=0).tolist())]

    @cached_property
    def bound(self) -> LowerBound:
        """The time that no schedule of its stages beats in that memory, with backwards whole or in two parts."""
        ways = [way for split in (True, False) if (way := self._way(split)) is not None]
        try:
            found = [[lower_bound(one) for one in self._problems(way, most=True)] for way in ways]
        except BadInput:  # not one micro-batch fits
            found = [[lower_bound(one) for one in self._problems(way, limited=False)] for way in ways]
        of_pipelines = (min(several, key=lambda one: one.seconds) for several in zip(*found, strict=True))
        return max(of_pipelines, key=lambda one: one.seconds)

    @property
    def tried(self) -> int:
        """Actions that ``found`` tries with an effort of 1, for one kind of backward."""
        return sum(actions_tried(one.span.p, one.span.m) for one in self._pipelines(self.before))

    @property
    def floor_s(self) -> float:
        """Seconds of a step that no order gets below in the memory that is left."""
        return min(self.before.forecast.step_time_s, *self._floors_s.values())

    @cached_property
    def _floors_s(self) -> dict[bool, float]:
        """The same with backwards in two parts and whole: weights are never waited for, and gradients only where a rank has nothing else
        to do."""
        before, least_s = self.before, {True: 0.0, False: 0.0}
        for one, rooms in zip(self._pipelines(before), self._rooms(before, most=True), strict=True):
            times = tuple(map(_beside, one.span.times))
            stages, kept = (times, ranks_of_stages(before.parallelism), one.span.m), one.memory.kept.tolist()
            limits = {"kept_bytes": kept, "memory_bytes": rooms} if before.forecast.fits else {}
            for split in least_s:
                least_s[split] = max(least_s[split], lower_bound(Problem(*stages, split=split, **limits)).seconds)
        return {split: self._step_s(seconds) for split, seconds in least_s.items()}

    def _step_s(self, makespan_s: float) -> float:
        """Seconds of a step whose pipeline takes ``makespan_s``."""
        return self.before.forecast.step_time_s - (self.before.span.makespan_s - makespan_s) * self.pricer.stretch

    def found(self, *, effort: float = 1.0, limit_s: float = inf) -> FoundOrder | None:
        """The best schedule found; None where no schedule is faster and fits, or where the first one found for a kind of backward does not
        bring a step below ``limit_s``: one that keeps less takes longer."""
        best: FoundOrder | None = None
        for split, floor_s in self._floors_s.items():
            if floor_s >= limit_s or (way := self._way(split)) is None:
                continue
            least_s = max(lower_bound(one).seconds for one in self._problems(way, limited=False))
            if self._step_s(least_s) >= limit_s or (best is not None and least_s >= best.found.makespan_s):
                continue
            one = self._fitting(way, effort, limit_s)
            if one is not None and (best is None or one.gain > best.gain):
                best = one
        return best if best is not None and best.gain > ROUNDING else None

    def _fitting(self, way: Priced, effort: float, limit_s: float) -> FoundOrder | None:
        for part in LESS_MEMORY:
            try:
                problems = self._problems(way, part)
            except BadInput:  # not one micro-batch fits
                return None
            orders = {one: synthesize(one, effort=effort) for one in dict.fromkeys(problems)}
            slowest = max(orders.values(), key=lambda one: one.makespan_s)
            if self._step_s(slowest.makespan_s) >= limit_s:
                return None
            try:
                priced = self.pricer.price(self._with_orders([orders[one].schedule for one in problems]))
            except BadInput:  # replicas would wait for each other
                return None
            if priced.forecast.fits or not self.before.forecast.fits:
                return FoundOrder(priced, self.before, slowest, self.bound)
        return None

    @property
    def _own_orders(self) -> bool:
        """Whether replicas need an order each, because their numbers of micro-batches differ."""
        return len({replica.span.m for replica in self.before.replicas}) > 1

    def _pipelines(self, priced: Priced) -> list[Priced | Replica]:
        """The pipelines to order: every replica, or only the slowest where all have equally many micro-batches."""
        return list(priced.replicas) if self._own_orders else [priced]

    def _problems(self, way: Priced, part: float = 1.0, *, limited: bool = True, most: bool = False) -> list[Problem]:
        """The problem that an order of each pipeline solves, with backwards as in ``way``. ``limited``: within ``part`` of the bytes that its ranks have for
        activations; ``most``: see ``_rooms``.

        Raises BadInput where not one micro-batch fits.
        """
        return [
            Problem(
                one.span.times,
                ranks_of_stages(way.parallelism),
                one.span.m,
                tuple(map(float, one.memory.kept.tolist())),
                memory_bytes=tuple(part * room for room in rooms) if limited else (),
                split=splits_backward(way.parallelism),
            )
            for one, rooms in zip(self._pipelines(way), self._rooms(way, most=most), strict=True)
        ]

    def _with_orders(self, schedules: Sequence[Schedule]) -> Parallelism:
        lines = tuple(line for schedule in schedules for line in order_text(schedule))
        keys = {"pipeline_parallel_schedule": SYNTHESIZED, "pipeline_parallel_order": lines}
        return self.before.parallelism.model_copy(update=keys)


def _beside(stage: StageTimes) -> StageTimes:
    """The stage as if its rank could go on while weights are gathered and gradients reduced."""
    reduce_s = stage.last_backward_extra_s + stage.reduce_s
    return stage._replace(first_forward_extra_s=0.0, last_backward_extra_s=0.0, reduce_s=reduce_s)
