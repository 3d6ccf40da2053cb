"""Whether a layout can be placed on a cluster of several groups: the rules that a plain cluster does not have."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from ahp.cluster.cells import cell_widths, cells_of, first_devices, link_between, named_groups
from ahp.cluster.model import Cluster, Device, NodeGroup
from ahp.divisors import divisors
from ahp.errors import bad_input
from ahp.forecast.efficiency import is_cpu
from ahp.job import Job
from ahp.plan import DEGREE, Parallelism
from ahp.schedule.orders import ranks_of_stages
from ahp.words import number_of

MOST_LISTED = 8
"""The most cells whose widths an error lists."""


def illegal_placement(cluster: Cluster, job: Job, parallelism: Parallelism) -> str | None:
    """The first rule that the layout breaks on these groups, as ``key = value: rule (valid: ...)``."""
    names = [group.name for group in cluster.groups]
    if len(set(names)) < len(names):
        return f"cluster.groups = {names}: every group of a mixed cluster needs its own name"
    return (
        _unknown(names, parallelism)
        or devices(cluster, parallelism)
        or _on_one_group(parallelism)
        or widths_of_ranks(parallelism)
        or _room(cluster, parallelism)
        or _experts(parallelism)
        or used(cluster, job, parallelism)
    )


def _unknown(names: list[str], parallelism: Parallelism) -> str | None:
    for stage in parallelism.stages or ():
        for name in stage.groups(1):
            if name not in names:
                return str(bad_input("stages.group", name, "no group of the cluster has this name", names))
    return None


def devices(cluster: Cluster, parallelism: Parallelism) -> str | None:
    """Checks that there is a device for every cell at all, before cells are listed one by one."""
    replicas, ranks = parallelism.data_parallel_replicate_degree, parallelism.pipeline_parallel_degree
    if replicas * ranks <= cluster.num_devices:
        return None
    rule = f"with pipeline_parallel_degree {ranks} these are {number_of(replicas * ranks, 'cell')}, and the cluster has {number_of(cluster.num_devices, 'device')}"
    return str(bad_input("data_parallel_replicate_degree", replicas, rule))


def _on_one_group(parallelism: Parallelism) -> str | None:
    """Checks that all stages of a rank lie on one group."""
    replicas = parallelism.data_parallel_replicate_degree
    named = [_named(stage.groups(replicas)) for stage in parallelism.stages or ()]
    return _unlike_on_a_rank(parallelism, "stages.group", named, "which lies on")


def widths_of_ranks(parallelism: Parallelism) -> str | None:
    """Checks that all stages of a rank have one width."""
    for key in (DEGREE["dp_shard"], DEGREE["tp"]):
        given = [getattr(stage, key) or getattr(parallelism, key) for stage in parallelism.stages or ()]
        if reason := _unlike_on_a_rank(parallelism, f"stages.{key}", given, "whose degree is"):
            return reason
    return None


def _unlike_on_a_rank(parallelism: Parallelism, key: str, values: Sequence[Any], words: str) -> str | None:
    """Checks that all stages of a rank have one of these ``values``, which are in pipeline order."""
    several = values and parallelism.virtual_stages_per_rank > 1
    for number, rank in enumerate(ranks_of_stages(parallelism) if several else ()):
        if values[number] != values[rank]:
            rule = f"stage {number + 1} is computed by the same devices as stage {rank + 1}, {words} {values[rank]}"
            return str(bad_input(key, values[number], rule, [values[rank]]))
    return None


def _named(groups: tuple[str, ...]) -> str | list[str]:
    return groups[0] if len(set(groups)) == 1 else list(groups)


def _room(cluster: Cluster, parallelism: Parallelism) -> str | None:
    """Checks that every group has room for the cells that lie on it."""
    widths, columns = cell_widths(parallelism), named_groups(cluster, parallelism)
    if columns is None:
        there = ", ".join(f"{cells_of(group, widths[0])} on {group.name}" for group in cluster.groups)
        replicas, ranks = parallelism.data_parallel_replicate_degree, parallelism.pipeline_parallel_degree
        return (
            f"parallelism: its replicate {replicas} x pipeline {ranks} = {replicas * ranks} cells of {widths[0]} devices (shard x context x tensor) do not fit on the "
            f"groups: there is room for {there}, where a cell lies on one node or on whole nodes"
        )
    cells = [(name, width) for width, column in zip(widths, columns, strict=True) for name in column]
    for called in dict.fromkeys(name for name, _ in cells):
        group = next(group for group in cluster.groups if group.name == called)
        own = [width for name, width in cells if name == called]
        if first_devices(group, own) is not None:
            continue
        if len(set(own)) > 1:
            return (
                f"stages.group = {group.name!r}: cells of {_in_turn(own)} devices (shard x context x tensor, by the width of their "
                f"stages) do not follow each other on {_has(group)}, each on one node or on whole nodes"
            )
        return (
            f"stages.group = {group.name!r}: {len(own)} cells of {own[0]} devices (shard x context x tensor) are placed on it, "
            f"{_has(group)} (valid: at most {cells_of(group, own[0])})"
        )
    return None


def _in_turn(widths: list[int]) -> str:
    """``4, 4, 2``; the first ones of many."""
    return ", ".join(map(str, widths[:MOST_LISTED])) + (", ..." if len(widths) > MOST_LISTED else "")


def _has(group: NodeGroup) -> str:
    return f"{number_of(group.nodes, 'node')} of {number_of(group.devices_per_node, 'device')}"


def _experts(parallelism: Parallelism) -> str | None:
    within = parallelism.data_parallel_shard_degree * parallelism.context_parallel_degree
    expert = parallelism.expert_parallel_degree
    if within % expert:
        rule = (
            f"on a mixed cluster the experts of a layer lie in one cell: it must divide shard x context degree {within}"
        )
        return str(bad_input("expert_parallel_degree", expert, rule, divisors(within)))
    return None


def used(cluster: Cluster, job: Job, parallelism: Parallelism) -> str | None:
    """Checks that the groups that take part can compute in the job's precision, and reach each other."""
    columns = named_groups(cluster, parallelism) or []
    names = {name for column in columns for name in column}
    taken = [group for group in cluster.groups if group.name in names]
    for group in taken:
        if job.precision not in group.device.peak_flops_per_s:
            valid = sorted(set.intersection(*(set(group.device.peak_flops_per_s) for group in taken)))
            return no_units(job, group.device, valid)
        if group.nodes > 1 and group.inter_node is None:
            return (
                f"cluster.groups = {group.name!r}: a group of several nodes needs the bandwidth between them "
                "(inter_node_gbps, Gb/s of one node)"
            )
    return next((said for pair in combinations(taken, 2) if (said := apart(cluster, *pair)) is not None), None)


def apart(cluster: Cluster, one: NodeGroup, other: NodeGroup) -> str | None:
    """Why two groups cannot take part in one layout; None where they can."""
    if _library(one) != _library(other):
        return (
            f"cluster.groups = {[one.name, other.name]}: {one.device.name} communicates by {_library(one)} and "
            f"{other.device.name} by {_library(other)}, and no library spans both (valid: groups of one kind)"
        )
    if link_between(cluster, one.name, other.name) is None:
        return f"cluster.links: add {{between: [{one.name}, {other.name}], gbps: ...}}, which both take part"
    return None


def together(cluster: Cluster) -> list[list[NodeGroup]]:
    """The groups, split into sets that can take part in one layout: nothing joins groups of different sets. Each in the cluster's order."""
    found: list[list[NodeGroup]] = []
    for group in cluster.groups:
        near = [of for of in found if any(apart(cluster, group, other) is None for other in of)]
        found = [of for of in found if of not in near] + [[*(one for of in near for one in of), group]]
    return [[group for group in cluster.groups if group in of] for of in found]


def _library(group: NodeGroup) -> str:
    """The library that carries collectives between devices of this kind."""
    if is_cpu(group.device):
        return "gloo"
    return "RCCL" if group.device.name.startswith("MI") else "NCCL"


def no_units(job: Job, device: Device, valid: Sequence[str]) -> str:
    """The refusal of a device that does not compute in the job's precision: by the type of the weights, where that decides the precision.
    ``valid``: what could be asked for instead."""
    if job.dtype == "fp32":
        return str(bad_input("job.precision", job.precision, f"{device.name} has no units for it", valid))
    rule = f"{device.name} has no units for it, and weights are held in the type that they compute in"
    return str(bad_input("job.dtype", job.dtype, rule, [f"fp32, with job.precision {' or '.join(valid)}"]))
