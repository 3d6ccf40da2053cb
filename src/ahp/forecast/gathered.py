"""Weights that are gathered beside the computation, where a plan brings its own order of actions.

torch's pipeline runtime then asks for the weights of a rank's stages as the step begins, the stage that comes first first, and a
stage waits for all of its own before its first forward (torch 2.13, pipelining/schedules.py: ``_add_unshard_reshard``,
``_assert_unsharded``). Gradients: ``reduced``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ahp.engines.traits import Traits
from ahp.forecast.communication import Times
from ahp.forecast.data_parallel import DataParallel
from ahp.forecast.overlap import CONTENTION
from ahp.forecast.sharing import SharedWeights, StageUnits
from ahp.forecast.stage import StageCost
from ahp.forecast.stage_table import StageTable
from ahp.forecast.units import Units
from ahp.plan import Parallelism
from ahp.schedule.orders import given_order
from ahp.schedule.simulate import StageTimes

MOST_STAGES = 3
"""Stages of a rank whose weights torch's runtime keeps at once (``max_active_stages``): of more it frees some and gathers them again."""


@dataclass(frozen=True)
class Gathers:
    """What is gathered beside the computation of one replica; empty where nothing is."""

    each_s: tuple[float, ...] = ()
    """Of each stage, one collective after the other."""
    stage_rank: tuple[int, ...] = ()

    def stages(self, costs: Sequence[StageCost]) -> tuple[StageCost, ...]:
        """The stages without what they waited for weights, but for what gathers slow their rank down: not that of the stage which it
        begins with."""
        if not self.each_s:
            return tuple(costs)
        found, begun = [], set[int]()
        for cost, seconds, rank in zip(costs, self.each_s, self.stage_rank, strict=True):
            slowed_s = CONTENTION * seconds if rank in begun else 0.0
            begun.add(rank)
            found.append(replace(cost, first_forward={**cost.first_forward, "weight_gather": slowed_s}))
        return tuple(found)

    def times(self, times: list[StageTimes], costs: Sequence[StageCost]) -> list[StageTimes]:
        """The times with when the weights of each stage are there: a rank gathers those of its stages one after the other. Where its
        device waits for the host in a forward, the host goes on meanwhile, so that it may begin earlier by so much."""
        if not self.each_s:
            return times
        there, found = dict.fromkeys(self.stage_rank, 0.0), []
        for one, cost, seconds, rank in zip(times, costs, self.each_s, self.stage_rank, strict=True):
            there[rank] += seconds
            found.append(replace(one, gathered_s=max(0.0, there[rank] - cost.forward["host"])))
        return found


def gathers_beside(parallelism: Parallelism, traits: Traits, data: DataParallel) -> bool:
    """Whether stages gather their weights once a step, beside the computation from its start on."""
    gather = traits.gather
    hides = data.overlap * gather.overlap == 1.0 and gather.forward == "per_step" and not gather.at_start
    return hides and given_order(parallelism) is not None and parallelism.virtual_stages_per_rank <= MOST_STAGES


def gathers_s(units: Units, table: StageTable, data: DataParallel, network: Times) -> list[float]:
    """Seconds in which each stage's weights are gathered, one collective after the other."""
    found = SharedWeights.of(StageUnits.of(units, data.traits, table), data, network).gathers
    return (found.before[0] + (table.counts * found.kinds[0]).sum(axis=-1) + found.after[0]).tolist()
