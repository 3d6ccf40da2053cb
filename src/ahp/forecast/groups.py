"""Which ranks share the weights of a layout: sharded, replicated, and those of experts, which fewer ranks hold."""

from __future__ import annotations

from ahp.forecast.group import Group
from ahp.forecast.mesh import Run, first_of, group_of, runs
from ahp.plan import Axis, Parallelism

OF_A_REPLICA: tuple[Axis, ...] = ("dp_shard", "cp")
"""Axes whose ranks share the weights of a replica."""


def data_ranks(parallelism: Parallelism, *, tensor_too: bool = False) -> tuple[Run, ...]:
    """The ranks that hold the same weights, apart from sharding: those of a replica first, then the replicas. ``tensor_too``: and the
    tensor-parallel ranks among them."""
    within: tuple[Axis, ...] = (*OF_A_REPLICA, "tp") if tensor_too else OF_A_REPLICA
    return joined(runs(parallelism, within), runs(parallelism, ("dp_replicate",)))


def joined(within: tuple[Run, ...], between: tuple[Run, ...]) -> tuple[Run, ...]:
    """``data_ranks`` where the ranks of a replica and the replicas are known."""
    if within and between and within[-1].size * within[-1].stride == between[0].stride:
        return (*within[:-1], Run(within[-1].size * between[0].size, within[-1].stride))
    return within + between


def data_groups(parallelism: Parallelism, devices_per_node: int) -> tuple[Group, Group]:
    """The ranks over which weights are sharded, and those that replicate them; context ranks can belong to either."""
    shards, replicas = first_of(data_ranks(parallelism), parallelism.weight_shards)
    world = parallelism.world_size
    return group_of(shards, devices_per_node, world), group_of(replicas, devices_per_node, world)


def expert_ranks(parallelism: Parallelism, folded: bool) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """The ranks that share the experts, and those that hold the same experts. Neighbors on the data and context axes share experts, and on
    the tensor axis too where experts are ``folded`` (``ExpertTraits``)."""
    return first_of(data_ranks(parallelism, tensor_too=folded), parallelism.expert_parallel_degree)


def num_expert_ranks(parallelism: Parallelism, folded: bool) -> int:
    """How many ranks of a stage can share experts."""
    tensor = parallelism.tensor_parallel_degree if folded else 1
    return parallelism.data_parallel_degree * parallelism.context_parallel_degree * tensor


def expert_shards(parallelism: Parallelism, folded: bool) -> int:
    """How many of the ranks that hold the same experts ZeRO divides the states of experts over."""
    if parallelism.weight_shards == 1:
        return 1
    tensor = parallelism.tensor_parallel_degree if folded else 1
    return max(1, parallelism.weight_shards * tensor // parallelism.expert_parallel_degree)


def expert_groups(parallelism: Parallelism, devices_per_node: int, folded: bool = False) -> tuple[Group, Group]:
    """``data_groups`` of the weights of experts: the ranks of an expert-parallel group hold different experts."""
    if parallelism.expert_parallel_degree == 1 and not folded:
        return data_groups(parallelism, devices_per_node)
    _, alike = expert_ranks(parallelism, folded)
    shards, replicas = first_of(alike, expert_shards(parallelism, folded))
    world = parallelism.world_size
    return group_of(shards, devices_per_node, world), group_of(replicas, devices_per_node, world)


def replica_members(parallelism: Parallelism, folded: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """(how many, how far apart) of the ranks of one cell (``ahp.cluster.cells``) that hold the same weights: for dense
    weights, and for those of experts."""
    tensor, inner = parallelism.tensor_parallel_degree, parallelism.weight_shards
    within = parallelism.data_parallel_shard_degree * parallelism.context_parallel_degree
    dividing = 1 if folded else tensor
    apart = parallelism.expert_parallel_degree * dividing * expert_shards(parallelism, folded)
    return (within // inner, tensor * inner), (max(1, within * tensor // apart), apart)
