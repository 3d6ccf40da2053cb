"""How long a collective takes over the links between its ranks.

GPUs communicate by NCCL, whose tuner is in nccl.py. CPU workers communicate by gloo: measured tables where ``ahp probe``
wrote some, and latency and bandwidth of a ring or a tree for what it did not measure.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection
from typing import Protocol

from ahp.cached_method import cached_method
from ahp.cluster.model import Link, NodeGroup
from ahp.forecast.constants import constants
from ahp.forecast.efficiency import is_cpu
from ahp.forecast.group import CollectiveKind, Group
from ahp.forecast.nccl import Nccl
from ahp.forecast.tables import interpolate

INTRA_NODE_EFFICIENCY = constants.value("gloo_intra_node_share")
"""Bus bandwidth of a ring over the bandwidth of a CPU worker's link."""

INTER_NODE_EFFICIENCY = constants.value("gloo_inter_node_share")
"""Bus bandwidth of a ring over the bandwidth of a node's network cards."""

BASE_S = constants.value("gloo_start_s")
"""Seconds to start any collective between CPU workers."""

TREE_BANDWIDTH = constants.value("gloo_tree_share")
"""A tree's algorithm bandwidth over the ring's bus bandwidth."""


class Times(Protocol):
    """Prices collectives."""

    def time_s(self, kind: CollectiveKind, num_bytes: float, group: Group, /) -> float: ...


class Network:
    """Times of collectives on one group of nodes: from its measured tables where there are some, else a model.

    ``others``: names of devices of other groups that take part.
    """

    def __init__(self, nodes: NodeGroup, others: Collection[str] = ()) -> None:
        self._tables = _tables(nodes)
        self._model_s = Gloo(nodes).time_s if is_cpu(nodes.device) else Nccl(nodes, others=others).time_s

    @cached_method
    def time_s(self, kind: CollectiveKind, num_bytes: float, group: Group) -> float:
        """Seconds of one collective. ``num_bytes`` is the whole tensor (the gathered one, for an all-gather; what one
        rank holds, for an all-to-all; the message, for a send); all groups of the same mesh axis run theirs at once."""
        if group.size < 2 or num_bytes <= 0:
            return 0.0
        if group.nodes == 1 and (measured := self._measured_s(kind, num_bytes, group)) is not None:
            return measured
        return self._model_s(kind, num_bytes, group)

    def _measured_s(self, kind: CollectiveKind, num_bytes: float, group: Group) -> float | None:
        """Seconds from the table of the nearest measured number of ranks, scaled to this number by the model's ratio."""
        tables = self._tables.get(kind)
        if not tables:
            return None
        workers = min(tables, key=lambda w: (abs(math.log(w / group.size)), w))
        seconds = interpolate(tables[workers], num_bytes)
        if workers != group.size and kind != "send_recv":
            same_node = Group(workers, workers, 1)
            seconds *= self._model_s(kind, num_bytes, group) / self._model_s(kind, num_bytes, same_node)
        return seconds


class Gloo:
    """Latency and bandwidth of a ring or a tree between CPU workers."""

    def __init__(self, nodes: NodeGroup) -> None:
        self.nodes = nodes

    def time_s(self, kind: CollectiveKind, num_bytes: float, group: Group) -> float:
        """Seconds of one collective, like ``Network.time_s``."""
        n, bandwidth = group.size, self._bus_bandwidth(group)
        ring = (n - 1) / n * num_bytes / bandwidth
        hop_s = self._hops_s(group)
        if kind == "send_recv":
            link = self.nodes.intra_node if group.nodes == 1 else self._inter
            return BASE_S + link.latency_s + num_bytes / bandwidth
        if kind != "all_reduce":
            return BASE_S + hop_s + ring
        return min(BASE_S + 2 * hop_s + 2 * ring, self._tree_s(num_bytes, group, bandwidth))

    def _tree_s(self, num_bytes: float, group: Group, bandwidth: float) -> float:
        """Seconds of an all-reduce up and down a tree: a chain within each node, a binary tree over the nodes."""
        hops_s = (group.local - 1) * self.nodes.intra_node.latency_s
        if group.nodes > 1:
            hops_s += math.log2(group.nodes) * self._inter.latency_s
        return BASE_S + 2 * hops_s + num_bytes / (TREE_BANDWIDTH * bandwidth)

    def _hops_s(self, group: Group) -> float:
        """Latency of going round the ring once."""
        if group.nodes == 1:
            return (group.size - 1) * self.nodes.intra_node.latency_s
        within = group.size - group.nodes
        return within * self.nodes.intra_node.latency_s + (group.nodes - 1) * self._inter.latency_s

    def _bus_bandwidth(self, group: Group) -> float:
        """Bytes/s of the ring's slowest link.

        Between nodes a group has the network cards that its local ranks reach: the node's bandwidth, shared with
        the groups of the node's other devices, which communicate at the same time (cost model, section 3.7).
        """
        within = INTRA_NODE_EFFICIENCY * self.nodes.intra_node.bandwidth_bytes_per_s
        if group.nodes == 1:
            return within
        share = group.local / self.nodes.devices_per_node
        between = INTER_NODE_EFFICIENCY * self._inter.bandwidth_bytes_per_s * share
        return min(within, between) if group.local > 1 else between

    @property
    def _inter(self) -> Link:
        assert self.nodes.inter_node is not None, "rules.illegal refuses several nodes without a network"
        return self.nodes.inter_node


def _tables(nodes: NodeGroup) -> dict[str, dict[int, list[tuple[float, float]]]]:
    """Measured (bytes, seconds), keyed by kind and number of ranks, sorted by size; repeated sizes are averaged."""
    found: dict[str, dict[int, dict[float, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for sample in nodes.measured.collectives if nodes.measured else ():
        found[sample.kind][sample.workers][float(sample.bytes)].append(sample.seconds)
    return {
        kind: {
            workers: [(size, sum(times) / len(times)) for size, times in sorted(sizes.items()) if size > 0]
            for workers, sizes in by_workers.items()
        }
        for kind, by_workers in found.items()
    }
