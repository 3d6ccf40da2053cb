"""Which ranks share the weights of a layout: sharded, replicated, and of experts held by fewer."""

from __future__ import annotations

from ahp.forecast.communication import Group, strided_group
from ahp.plan import Parallelism


def shard_ranks(parallelism: Parallelism) -> int:
    """Ranks over which ZeRO divides: those of the context axis hold the same weights and count as well."""
    if parallelism.zero_stage == 0:
        return 1
    return parallelism.data_parallel_shard_degree * parallelism.context_parallel_degree


def data_groups(parallelism: Parallelism, devices_per_node: int) -> tuple[Group, Group]:
    """The ranks over which weights are sharded, and those that replicate them; context ranks belong to either."""
    tensor, context = parallelism.tensor_parallel_degree, parallelism.context_parallel_degree
    inner = shard_ranks(parallelism)
    replicas = parallelism.data_parallel_degree * context // inner
    return strided_group(inner, tensor, devices_per_node), strided_group(replicas, tensor * inner, devices_per_node)


def expert_groups(parallelism: Parallelism, devices_per_node: int) -> tuple[Group, Group]:
    """``data_groups`` of the weights of experts: the ranks of an expert-parallel group hold different ones."""
    tensor, expert = parallelism.tensor_parallel_degree, parallelism.expert_parallel_degree
    ranks = parallelism.data_parallel_degree * parallelism.context_parallel_degree
    inner = max(1, shard_ranks(parallelism) // expert)
    replicas = max(1, ranks // (inner * expert))
    return (
        strided_group(inner, tensor * expert, devices_per_node),
        strided_group(replicas, tensor * expert * inner, devices_per_node),
    )


def replica_members(parallelism: Parallelism) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of the ranks of one cell (``ahp.cluster.cells``) that hold the same weights: how many, and how far apart; for dense
    weights and for those of experts."""
    tensor, expert, inner = (
        parallelism.tensor_parallel_degree,
        parallelism.expert_parallel_degree,
        shard_ranks(parallelism),
    )
    within = parallelism.data_parallel_shard_degree * parallelism.context_parallel_degree
    of_experts = max(1, inner // expert)
    return (within // inner, tensor * inner), (max(1, within // (of_experts * expert)), tensor * expert * of_experts)
