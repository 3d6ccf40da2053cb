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


def axes_of(parallelism: Parallelism, devices_per_node: int) -> Axes:
    """The groups of a layout."""
    tensor = parallelism.tensor_parallel_degree
    return Axes(
        tensor=axis_group(parallelism, "tp", devices_per_node),
        sequence_parallel=parallelism.enable_sequence_parallel and tensor > 1,
        context=axis_group(parallelism, "cp", devices_per_node),
        expert=group_of(expert_ranks(parallelism)[0], devices_per_node, parallelism.world_size),
    )
