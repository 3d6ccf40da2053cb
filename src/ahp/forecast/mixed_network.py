"""The cost of collectives whose ranks lie on several groups of a mixed cluster.

A ring is as slow as its slowest part. Each group that takes part is priced as if all nodes were like its own: its links
within a node, its share of the network cards, and the slowest of the networks that its nodes send over; the slowest group
counts. NCCL tunes for the oldest device of all (``nccl.Nccl``, ``others``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ahp.cached_method import cached_method
from ahp.cluster.cells import Cell, Placement, link_between
from ahp.cluster.domains import joined
from ahp.cluster.model import Cluster, Link, NodeGroup
from ahp.forecast.communication import Network, Times
from ahp.forecast.group import CollectiveKind, Group


@dataclass(frozen=True, slots=True)
class Side:
    """The part that one group of nodes has in a collective over several groups."""

    group: str
    local: int
    """Ranks on each of its nodes; the most where they differ."""
    bandwidth_bytes_per_s: float
    latency_s: float
    """The worst bandwidth (per node) and latency of the networks that its nodes send over: to each other, or to the ring's next group."""


@dataclass(frozen=True, slots=True)
class Spread(Group):
    """The ranks of a collective over several groups of nodes."""

    sides: tuple[Side, ...]


class MixedNetwork:
    """Where ranks lie on a mixed cluster, and how long their collectives take."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._groups: dict[str, NodeGroup] = {group.name: group for group in cluster.groups}

    def times(self, own: Network) -> Times:
        """Prices the collectives of ranks on one group: those within it with its ``own`` network."""
        return _Times(own, self)

    @cached_method
    def spread_s(self, kind: CollectiveKind, num_bytes: tuple[float, ...], spread: Spread) -> float:
        """Seconds of a collective over several groups, like ``Network.time_s``; ``num_bytes``: of each side."""
        names = tuple(sorted({self._groups[side.group].device.name for side in spread.sides}))
        return max(
            self._side_network(side, names).time_s(kind, own, Group(spread.size, side.local, spread.nodes))
            for side, own in zip(spread.sides, num_bytes, strict=True)
        )

    def handed_s(self, own: Network, one: Cell, other: Cell, num_bytes: float) -> float:
        """Seconds to send ``num_bytes`` from one cell to another of different width: every rank of either cell has its share of the bytes."""
        shares, group = (num_bytes / one.width, num_bytes / other.width), self.pair(one, other)
        if not isinstance(group, Spread):
            return own.time_s("send_recv", max(shares), group)
        return self.spread_s("send_recv", shares, group)

    @cached_method
    def _side_network(self, side: Side, names: tuple[str, ...]) -> Network:
        nodes = self._groups[side.group]
        link = Link(bandwidth_bytes_per_s=side.bandwidth_bytes_per_s, latency_s=side.latency_s)
        others = tuple(name for name in names if name != nodes.device.name)
        return Network(joined(nodes.model_copy(update={"inter_node": link})), others=others)

    def replicas(self, column: Iterable[Cell], per_cell: int, stride: int) -> Group:
        """The ranks that hold the same weights: ``per_cell`` of each cell of a column, ``stride`` apart."""
        return self._group(Counter((cell.group, node) for cell in column for node in cell.nodes(per_cell, stride)))

    def together(self, cells: Iterable[Cell]) -> Group:
        """All ranks of some cells."""
        return self._group(Counter((cell.group, node) for cell in cells for node in cell.nodes(cell.width, 1)))

    def pair(self, one: Cell, other: Cell) -> Group:
        """Two ranks at the same place of two cells: the pair that is furthest apart."""
        if one.group != other.group:
            return self._two_groups(one.group, other.group)
        return Group(2, 2, 1) if one.shares_node(other) else Group(2, 1, 2)

    @cached_method
    def _two_groups(self, one: str, other: str) -> Group:
        return self._group(Counter(((one, 0), (other, 0))))

    def world(self, placement: Placement) -> Group:
        """All ranks of a layout."""
        ranks: Counter[tuple[str, int]] = Counter()
        for row in placement.cells:
            for cell in row:
                on_node = min(cell.width, cell.devices_per_node)
                for offset in range(0, cell.width, on_node):
                    ranks[cell.group, cell.node_of(offset)] += on_node
        order = list(placement.used)
        return self._group(dict(sorted(ranks.items(), key=lambda item: (order.index(item[0][0]), item[0][1]))))

    def _group(self, ranks: Mapping[tuple[str, int], int]) -> Group:
        """The group of ``ranks`` (how many on each node of a group of nodes), in the order of their ring."""
        most: dict[str, int] = {}
        for (name, _), count in ranks.items():
            most[name] = max(count, most.get(name, 0))
        size, local, nodes = sum(ranks.values()), max(most.values()), len(ranks)
        if len(most) == 1:
            return Group(size, local, nodes)
        ring = [name for name, _ in ranks]
        sides = tuple(Side(name, count, *self._slowest(name, ring)) for name, count in most.items())
        return Spread(size, local, nodes, sides)

    def _slowest(self, name: str, ring: list[str]) -> tuple[float, float]:
        """The worst bandwidth and the worst latency of the links between a group's nodes and their neighbors in the ring."""
        hops = {frozenset(hop) for hop in zip(ring, [*ring[1:], ring[0]], strict=True) if name in hop}
        links = [link_between(self._cluster, name, *(hop - {name} or {name})) for hop in hops]
        found = [link for link in links if link is not None]
        assert len(found) == len(links), "rules.illegal refuses groups that nothing connects"
        return min(link.bandwidth_bytes_per_s for link in found), max(link.latency_s for link in found)


@dataclass(frozen=True)
class _Times:
    own: Network
    mixed: MixedNetwork

    def time_s(self, kind: CollectiveKind, num_bytes: float, group: Group, /) -> float:
        if isinstance(group, Spread):
            return self.mixed.spread_s(kind, (num_bytes,) * len(group.sides), group) if num_bytes > 0 else 0.0
        return self.own.time_s(kind, num_bytes, group)
