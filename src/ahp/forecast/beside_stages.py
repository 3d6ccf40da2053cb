"""Collectives of weights that overlap with the computation of a rank's stages: gathers while the pipeline fills, and reductions.

torch's pipeline runtime starts to gather the weights of all stages of a rank as the step begins, in the order of the stages, and a stage
waits for all its weights before its first forward (torch 2.13, pipelining/schedules.py: ``_add_unshard_reshard``, ``_assert_unsharded``):
for a given order, and for patterns that can have several stages on a rank.

AHP's runtime begins to reduce a stage's gradients after its last backward, goes on with the rank's other stages, and waits for
all reductions after the rank's last action (``runtime/pipeline/torch_compat.py``: ``reduce_beside``). Reductions are then all that a
last backward pass has once per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from ahp.arrays import Floats, Ints
from ahp.forecast.communication import Times
from ahp.forecast.data_parallel import DataParallel
from ahp.forecast.overlap import CONTENTION
from ahp.forecast.sharing import StageUnits, UnitTimes
from ahp.forecast.stage import StageCost
from ahp.forecast.stage_table import StageTable
from ahp.forecast.states import Behaviour
from ahp.forecast.units import Units
from ahp.plan import Parallelism
from ahp.schedule.descriptor import PipelineSchedule
from ahp.schedule.orders import given_order, splits_backward
from ahp.schedule.registry import of_ranks
from ahp.schedule.simulate import StageTimes

MOST_STAGES = 3
"""How many stages' weights torch's runtime keeps on a rank (``max_active_stages``): with more stages it frees and gathers some again."""

GATHER, REDUCE = "weight_gather", "gradient_reduce"
"""The parts of a stage's cost that the two collectives are."""


@dataclass(frozen=True)
class BesideStages:
    """The collectives of one replica's weights that overlap with computation: seconds of each stage, one collective after the other."""

    stage_rank: tuple[int, ...]
    gathers_s: Sequence[float] = ()
    """Empty where no gathers overlap; ``reductions_s``: the same of reductions."""
    reductions_s: Sequence[float] = ()

    def stages(self, costs: Sequence[StageCost]) -> tuple[StageCost, ...]:
        """The stages without their waits for weights and for reductions, but with the seconds by which their gathers slow their rank down:
        0 for the stage that the rank begins with."""
        if not self.gathers_s and not self.reductions_s:
            return tuple(costs)
        without, begun, found = cache(self._without_waits), set[int](), []  # most stages are equal
        for stage, (cost, rank) in enumerate(zip(costs, self.stage_rank, strict=True)):
            found.append(without(cost, CONTENTION * self.gathers_s[stage] if self.gathers_s and rank in begun else 0.0))
            begun.add(rank)
        return tuple(found)

    def _without_waits(self, cost: StageCost, slowed_s: float) -> StageCost:
        if self.gathers_s:
            cost = replace(cost, first_forward=cost.first_forward | {GATHER: slowed_s})
        if not self.reductions_s:
            return cost
        last, apart = (once | {REDUCE: 0.0} for once in (cost.last_backward, cost.last_weight_gradient))
        return replace(cost, last_backward=last, last_weight_gradient=apart)

    def times(
        self, parallelism: Parallelism, stages: Sequence[StageCost], send: Sequence[float], back: Sequence[float]
    ) -> list[StageTimes]:
        """The times of each of these ``stages`` that the schedule needs: with the moment when its weights are there, as a rank gathers for one
        stage after the other, and with the reductions and how much these slow computation down. The host launches ahead while a rank waits for
        weights, so that the first forward saves its own wait for the host and can begin earlier by that much.

        ``send[s]``: seconds to send from stage ``s`` to the next; ``back[s]``: to send the gradient back from there.
        """
        there, last = dict.fromkeys(self.stage_rank, 0.0), 6 if splits_backward(parallelism) else 5
        found = []
        for stage, (cost, rank) in enumerate(zip(stages, self.stage_rank, strict=True)):
            if self.gathers_s:
                there[rank] += self.gathers_s[stage]
            found.append(
                StageTimes(
                    *cost.seconds[:4],
                    send_forward_s=send[stage] if stage < len(stages) - 1 else 0.0,
                    send_backward_s=back[stage - 1] if stage > 0 else 0.0,
                    first_forward_extra_s=cost.seconds[4],
                    last_backward_extra_s=cost.seconds[last],
                    gathered_s=max(0.0, there[rank] - cost.forward["host"]) if self.gathers_s else 0.0,
                    reduce_s=self.reductions_s[stage] if self.reductions_s else 0.0,
                    reduce_slows=CONTENTION if self.reductions_s else 0.0,
                )
            )
        return found


def gathers_beside(parallelism: Parallelism, data: DataParallel) -> bool:
    """Whether stages gather their weights once per step, overlapped with computation from the step's start on."""
    v = parallelism.virtual_stages_per_rank
    if data.traits.gather.forward != "per_step" or not share_ahead(data.traits, data.overlap):
        return False
    if given_order(parallelism) is not None:
        return v <= MOST_STAGES
    p = parallelism.pipeline_parallel_degree
    return p > 1 and gathers_ahead(of_ranks(parallelism.pipeline_parallel_schedule, p), v)


def gathers_ahead(schedule: PipelineSchedule, virtual: int) -> bool:
    """Whether torch's runtime gathers all weights of a rank's ``virtual`` stages as the step begins."""
    return schedule.gathers_ahead and virtual <= MOST_STAGES


def share_ahead(traits: Behaviour, overlap: float) -> Any:
    """[N, 1] Share of the weights gathered once per step whose gathers begin with the step where the schedule lets them: 1 or 0, a number or
    a column.

    ``overlap``: 1 where collectives can overlap with computation, else 0.
    """
    return traits.gather.beside_stages * (traits.gather.overlap == 1.0) * (overlap == 1.0)


def share_beside(virtual: int | Ints, traits: Behaviour, overlap: float) -> Any:
    """[N, 1] Share of the reductions after a stage's last backward pass that overlap with the rank's other stages: 1 or 0, a number or a column.

    ``virtual``: stages of a rank; ``overlap``: 1 where collectives can overlap with computation, else 0.
    """
    return traits.reduce.beside_stages * (virtual > 1) * (overlap == 1.0)


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


def reductions_s(parallelism: Parallelism, costs: Sequence[StageCost]) -> list[float]:
    """Seconds of each stage's reductions after its last backward pass, one collective after the other."""
    split = splits_backward(parallelism)
    return [(cost.last_weight_gradient if split else cost.last_backward)[REDUCE] for cost in costs]
