"""Gradients that are reduced beside the computation, where a plan brings its own order of actions.

AHP's runtime begins to reduce those of a stage when its last one is there, goes on with the rank's other stages, and waits for all of
them when the rank has done its last action (``runtime/pipeline/torch_compat.py``: ``reduce_beside``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ahp.engines.traits import Traits
from ahp.forecast.data_parallel import DataParallel
from ahp.forecast.overlap import CONTENTION
from ahp.forecast.stage import StageCost
from ahp.plan import Parallelism
from ahp.schedule.orders import given_order, ranks_of_stages, splits_backward
from ahp.schedule.simulate import StageTimes

PART = "gradient_reduce"


@dataclass(frozen=True)
class Reductions:
    """What is reduced beside the computation of one replica; empty where nothing is."""

    each_s: tuple[float, ...] = ()
    """Of each stage, one collective after the other."""
    stage_rank: tuple[int, ...] = ()

    @classmethod
    def of(cls, parallelism: Parallelism, costs: Sequence[StageCost]) -> Reductions:
        """Of a layout whose gradients are reduced beside the computation."""
        last = [cost.last_weight_gradient if splits_backward(parallelism) else cost.last_backward for cost in costs]
        return cls(tuple(once[PART] for once in last), ranks_of_stages(parallelism))

    def stages(self, costs: Sequence[StageCost]) -> tuple[StageCost, ...]:
        """The stages without what they waited for reductions, but for what these slow their rank down: not those of its lowest stage,
        whose input gradients are the last of all."""
        if not self.each_s:
            return tuple(costs)
        found, begun = [], set[int]()
        for cost, seconds, rank in zip(costs, self.each_s, self.stage_rank, strict=True):
            slowed = {PART: CONTENTION * seconds if rank in begun else 0.0}
            begun.add(rank)
            last, weights = cost.last_backward | slowed, cost.last_weight_gradient | slowed
            found.append(replace(cost, last_backward=last, last_weight_gradient=weights))
        return tuple(found)

    def times(self, times: Sequence[StageTimes]) -> list[StageTimes]:
        """The times with what is reduced beside the computation."""
        if not self.each_s:
            return list(times)
        return [replace(one, reduce_s=seconds) for one, seconds in zip(times, self.each_s, strict=True)]


def reduces_beside(parallelism: Parallelism, traits: Traits, data: DataParallel) -> bool:
    """Whether a rank computes its other stages while gradients of one are reduced. Replicas that keep theirs in buckets of their own sum
    weight gradients that were computed apart when all are done."""
    several = parallelism.virtual_stages_per_rank > 1 and given_order(parallelism) is not None
    return several and data.overlap == 1.0 and not traits.reduce.gradients_in_buckets
