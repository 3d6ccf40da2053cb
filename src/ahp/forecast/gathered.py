"""Weight gathers that overlap with computation, while the pipeline fills.

torch's pipeline runtime starts to gather the weights of all stages of a rank as the step begins, in the order of the stages, and a stage
waits for all its weights before its first forward (torch 2.13, pipelining/schedules.py: ``_add_unshard_reshard``, ``_assert_unsharded``):
for a given order, and for patterns that can have several stages on a rank. ``reduced`` does the same for gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ahp.arrays import Floats, Ints
from ahp.forecast.communication import Times
from ahp.forecast.data_parallel import DataParallel
from ahp.forecast.overlap import CONTENTION
from ahp.forecast.sharing import StageUnits, UnitTimes
from ahp.forecast.stage import StageCost
from ahp.forecast.stage_table import StageTable
from ahp.forecast.states import TraitColumns
from ahp.forecast.units import Units
from ahp.plan import Parallelism
from ahp.schedule.descriptor import PipelineSchedule
from ahp.schedule.orders import given_order
from ahp.schedule.registry import of_ranks
from ahp.schedule.simulate import StageTimes

MOST_STAGES = 3
"""How many stages' weights torch's runtime keeps on a rank (``max_active_stages``): with more stages it frees and gathers some again."""


@dataclass(frozen=True)
class Gathers:
    """The gathers of one replica that overlap with computation; empty where none do."""

    each_s: tuple[float, ...] = ()
    """Seconds of each stage's gathers, one collective after the other."""
    stage_rank: tuple[int, ...] = ()

    def stages(self, costs: Sequence[StageCost]) -> tuple[StageCost, ...]:
        """The stages without their waits for weights, but with the seconds by which their gathers slow their rank down: 0 for the stage
        that the rank begins with."""
        if not self.each_s:
            return tuple(costs)
        found, begun, made = [], set[int](), dict[tuple[int, float], StageCost]()  # most stages are one object
        for cost, seconds, rank in zip(costs, self.each_s, self.stage_rank, strict=True):
            slowed_s = CONTENTION * seconds if rank in begun else 0.0
            begun.add(rank)
            if (key := (id(cost), slowed_s)) not in made:
                made[key] = replace(cost, first_forward={**cost.first_forward, "weight_gather": slowed_s})
            found.append(made[key])
        return tuple(found)

    def times(self, times: list[StageTimes], costs: Sequence[StageCost]) -> list[StageTimes]:
        """The times with the moment when each stage's weights are there: a rank gathers for one stage after the other. The host launches
        ahead during the wait, so that the first forward saves its own wait for the host and can begin earlier by that much."""
        if not self.each_s:
            return times
        there, found = dict.fromkeys(self.stage_rank, 0.0), []
        for one, cost, seconds, rank in zip(times, costs, self.each_s, self.stage_rank, strict=True):
            there[rank] += seconds
            found.append(one._replace(gathered_s=max(0.0, there[rank] - cost.forward["host"])))
        return found


def gathers_beside(parallelism: Parallelism, data: DataParallel) -> bool:
    """Whether stages gather their weights once per step, overlapped with computation from the step's start on."""
    gather, v = data.traits.gather, parallelism.virtual_stages_per_rank
    if gather.forward != "per_step" or data.overlap * gather.overlap != 1.0 or not gather.beside_stages:
        return False
    if given_order(parallelism) is not None:
        return v <= MOST_STAGES
    p = parallelism.pipeline_parallel_degree
    return p > 1 and gathers_ahead(of_ranks(parallelism.pipeline_parallel_schedule, p), v)


def gathers_ahead(schedule: PipelineSchedule, virtual: int) -> bool:
    """Whether torch's runtime gathers all weights of a rank's ``virtual`` stages as the step begins."""
    return schedule.gathers_ahead and virtual <= MOST_STAGES


def share_ahead(traits: TraitColumns, overlap: float) -> Floats:
    """[N, 1] Share of the weights gathered once per step whose gathers begin with the step where the schedule lets them: 1 or 0.

    ``overlap``: 1 where collectives can overlap with computation, else 0.
    """
    return traits.gather.beside_stages * (traits.gather.overlap == 1.0) * (overlap == 1.0)


def gathered_columns_s(each_s: Floats, own: Ints, host_s: Floats) -> tuple[Floats, Floats]:
    """[N, S] each, for many layouts: when the weights of each stage are there, and the seconds by which its gathers slow its rank down.

    ``each_s``, ``host_s``: [N, S] seconds of each stage's gathers, and of its forward's wait for the host; ``own``: [p, v] each rank's stages.
    """
    there, slowed = np.zeros(each_s.shape), np.zeros(each_s.shape)
    of_ranks_s = each_s[:, own]
    there[:, own] = np.cumsum(of_ranks_s, axis=-1)
    slowed[:, own[:, 1:]] = CONTENTION * of_ranks_s[..., 1:]
    return (there - host_s).clip(0.0), slowed


def gathers_s(units: Units, table: StageTable, data: DataParallel, network: Times) -> list[float]:
    """Seconds to gather each stage's weights, one collective after the other."""
    found = UnitTimes.of(
        StageUnits.of(units, data.traits, table), lambda unit, stage: data.gather_s(unit, network, stage)
    )
    return found.of_stages(table)[0].tolist()
