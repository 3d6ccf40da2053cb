"""The groups that divide a micro-batch within one stage: tensor, context and expert parallelism."""

from __future__ import annotations

from typing import NamedTuple

from ahp.forecast.group import Group
from ahp.forecast.groups import expert_ranks
from ahp.forecast.mesh import axis_group, group_of
from ahp.plan import Parallelism

ALONE = Group(1, 1, 1)


class Axes(NamedTuple):
    """The groups that divide a micro-batch within one stage."""

    tensor: Group = ALONE
    sequence_parallel: bool = False
    context: Group = ALONE
    expert: Group = ALONE
    beside_opposite: bool = True
    """Whether sends to experts on other nodes can overlap with the opposite pass of another micro-batch, if the engine supports it."""


def axes_of(parallelism: Parallelism, devices_per_node: int, folded_experts: bool = False) -> Axes:
    """The groups of a layout; ``folded_experts``: see ``ExpertTraits``."""
    tensor = parallelism.tensor_parallel_degree
    return Axes(
        tensor=axis_group(parallelism, "tp", devices_per_node),
        sequence_parallel=parallelism.enable_sequence_parallel and tensor > 1,
        context=axis_group(parallelism, "cp", devices_per_node),
        expert=group_of(expert_ranks(parallelism, folded_experts)[0], devices_per_node, parallelism.world_size),
    )


def has_opposite_pass(parallelism: Parallelism) -> bool:
    """Whether a pass can overlap with the opposite pass of another micro-batch: the rank's order has one if the rank holds several
    stages or the whole pipeline, and that pass is complete unless recompute is full.

    These are Megatron-Core's own rules for ``overlap_moe_expert_parallel_comm`` (as Megatron-Bridge 067f987d, training/comm_overlap.py,
    has them).
    """
    several = parallelism.pipeline_parallel_degree == 1 or parallelism.virtual_stages_per_rank > 1
    return several and parallelism.activation_checkpoint != "full"
