"""How long a collective takes on GPUs: NCCL's own tuner, on the links that the group has.

NCCL estimates a time for every algorithm and protocol as latency + bytes / bandwidth and takes the least
(src/graph/tuning.cc). This file does the same, with additions that measured rows require: what the links really carry, the
start of a kernel, the time in which a pipeline fills, the latency of a hop over a real network beyond the tuner's, and the
links of nodes without a switch. Constants and sources: nccl.yaml. Inside this file all times are microseconds, all rates
bytes per microsecond.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from ahp.cluster.meshes import mesh_of
from ahp.cluster.model import NodeGroup
from ahp.forecast.group import CollectiveKind, Group
from ahp.shipped import shipped

Algorithm = Literal["ring", "tree", "pat", "nvls", "nvls_tree", "peers"]
Protocol = Literal["LL", "LL128", "Simple"]

PROTOCOLS: tuple[Protocol, ...] = ("LL", "LL128", "Simple")
LL, LL128, SIMPLE = range(3)

BYTES_PER_US_PER_GB = 1.0e3
"""GB/s (10^9 bytes/s) as bytes per microsecond."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to run a collective."""

    algorithm: Algorithm
    protocol: Protocol
    seconds: float


@cache
def constants() -> Mapping[str, Any]:
    """nccl.yaml, read once."""
    return shipped("ahp.forecast", "nccl.yaml")


class Nccl:
    """Times of collectives on one group of nodes; ``data`` replaces nccl.yaml.

    ``others``: further devices that take part, from other groups of a mixed cluster. NCCL then tunes for the oldest
    generation (src/graph/tuning.cc, minCompCap).
    """

    def __init__(
        self, nodes: NodeGroup, data: Mapping[str, Any] | None = None, *, others: Collection[str] = ()
    ) -> None:
        data = data or constants()
        self._tuner, self._all_to_all, derived = data["tuner"], data["all_to_all"], data["derived"]
        self._network = data["network"]
        self._devices_per_node = nodes.devices_per_node
        name = nodes.device.name
        kinds = {_generation(data, device) for device in (name, *others)}
        self.generation: str = min(kinds, key=list(data["generations"]).index)
        self._of = data["generations"][self.generation]
        self._start_us = derived["start_us"][self.generation]
        self._fill, self._peer_share = derived, derived["peer_share"]
        self._link = nodes.intra_node.bandwidth_bytes_per_s / 1e6
        self._on_pcie = self._link < data["pcie"]["below_gb_per_s"] * BYTES_PER_US_PER_GB
        self._ring_share = data["pcie"]["ring_share"] if self._on_pcie else derived["ring_share"][self.generation]
        self._mesh = mesh_of(name, nodes.devices_per_node, nodes.nvlink_switch)
        self._fills_at_once = self._mesh is not None and name.startswith(tuple(derived["fills_at_once"]))
        self._within = self._tuner["hop_us"]["pcie" if self._on_pcie else "nvlink"]
        self._between = self._tuner["hop_us"]["network"]
        self._read_network(nodes)

    def _read_network(self, nodes: NodeGroup) -> None:
        """Read what the node's cards carry (bytes/us), and the latency of a hop beyond the tuner's constants."""
        given, link = self._network, nodes.inter_node
        self._cards, self._hop_extra_us = 0.0, 0.0
        if link is None:
            return
        nominal = link.bandwidth_bytes_per_s / 1e6
        on_tcp = nominal < given["tcp_below_gb_per_s"] * BYTES_PER_US_PER_GB
        self._cards = nominal * given["tcp_share" if on_tcp else "rdma_share"]
        least_us = given["tcp_hop_us"] if on_tcp else 0.0
        self._hop_extra_us = max(least_us, link.latency_s * 1e6 - given["tuner_hop_us"])

    def time_s(self, kind: CollectiveKind, num_bytes: float, group: Group) -> float:
        """Seconds of the fastest way; ``num_bytes`` as in ``Network.time_s``."""
        return min(choice.seconds for choice in self.choices(kind, num_bytes, group))

    def choices(self, kind: CollectiveKind, num_bytes: float, group: Group) -> Iterator[Choice]:
        """Every way that NCCL has for this collective on this group."""
        if kind in ("all_to_all", "send_recv"):
            yield self._peers(kind, num_bytes, group)
            return
        yield from self._rings(kind, num_bytes, group)
        if kind == "all_reduce":
            yield from self._trees(num_bytes, group)
            yield from self._in_switch(num_bytes, group)
        elif group.nodes == group.size:
            yield self._pat(num_bytes, group)

    def _choice(self, algorithm: Algorithm, protocol: int, latency_us: float, wire_us: float, group: Group) -> Choice:
        """``wire_us``: the time of the bytes once a pipeline of chunks is full."""
        seconds = 1e-6 * (self._start_us + latency_us + wire_us + self._filling_us(algorithm, wire_us, group))
        return Choice(algorithm, PROTOCOLS[protocol], seconds)

    def _filling_us(self, algorithm: Algorithm, wire_us: float, group: Group) -> float:
        """Time in which a pipeline fills: a share of the wire time of a short message, at most ``share * limit`` of a long one.

        A tree over nodes fills level by level. Within a node NCCL's factor for trees contains this time already, and V100 without
        a switch were measured to need none.
        """
        fill = self._fill
        if group.nodes == 1:
            none = algorithm == "tree" or self._fills_at_once
            share, limit_us = 0.0 if none else fill["fill_share"], fill["fill_us"]
        elif algorithm in ("tree", "nvls_tree"):
            share, limit_us = fill["tree_fill_share"] * math.log2(group.nodes), fill["tree_fill_us"]
        else:
            share, limit_us = fill["network_fill_share"], fill["network_fill_us"]
        return share * wire_us / (1.0 + wire_us / limit_us)

    def _rings(self, kind: CollectiveKind, num_bytes: float, group: Group) -> Iterator[Choice]:
        laps = 2 if kind == "all_reduce" else 1
        steps, between = laps * (group.size - 1), laps * (group.nodes - 1)
        bus = self._bus(group)
        tuner, several = self._tuner, group.nodes > 1
        for protocol in self._protocols(group):
            hop_us = self._within["ring"][protocol]
            rate = bus
            if protocol == LL:
                rate = min(self._most_ll(group), tuner["ll_share_ring"] * bus)
            elif protocol == LL128:
                rate = min(tuner["ll128_share_ring"] * bus, self._per_channel(self._of["ring_ll128"]))
            if several:
                post_us = tuner["network_post_us"] * (tuner["network_post_simple"] if protocol == SIMPLE else 1.0)
                hop_us = max(hop_us, post_us)
            latency_us = tuner["base_us"]["ring"][protocol] + (steps - between) * hop_us
            latency_us += between * self._network_hop_us("ring", protocol, group)
            if several and protocol == SIMPLE and laps == 2:
                latency_us *= tuner["plateau"][self.generation != "volta"]
            wire_us = steps * num_bytes / group.size / rate
            yield self._choice("ring", protocol, latency_us, wire_us, group)

    def _trees(self, num_bytes: float, group: Group) -> Iterator[Choice]:
        """All-reduce up and down two trees, each with half of the bytes: a chain within each node, a binary tree over the nodes.

        Of two nodes each is the root of one tree, so its cards send half as many bytes as those of more nodes.
        """
        tuner = self._tuner
        bus = self._bus(group, of_cards=2.0 if group.nodes == 2 else 1.0)
        bus = min(tuner["tree_share"] * bus, self._per_channel(self._of["tree"][min(group.nodes, 3) - 1]))
        for protocol in self._protocols(group):
            rate = bus
            if protocol == LL:
                rate = min(tuner["ll_share_tree"] * bus, self._most_ll(group))
            elif protocol == LL128:
                rate = min(tuner["ll128_share_tree"] * bus, self._per_channel(self._of["tree_ll128"]))
            hops_us = (group.size // group.nodes - 1) * self._within["tree"][protocol]
            hops_us += _log2(group.nodes) * self._network_hop_us("tree", protocol, group)
            rate *= 0.5 * self._correction(protocol, num_bytes)
            latency_us = tuner["base_us"]["tree"][protocol] + 2 * hops_us
            yield self._choice("tree", protocol, latency_us, num_bytes / rate, group)

    def _in_switch(self, num_bytes: float, group: Group) -> Iterator[Choice]:
        """NVLS: the switch adds up what it reads from all devices of a node, and sends the sum to all devices.

        Each device sends its whole buffer once, and its part of the sum: 1 + 1/n of the bytes on its link.
        """
        of = self._of
        joined = not self._on_pcie and self._mesh is None
        if of["nvls_share"] is None or not joined or group.local < self._tuner["nvls_devices"]:
            return
        rate = of["nvls_share"] * of["link_share"] * self._link
        wire_us = num_bytes * (1.0 + 1.0 / group.local) / rate
        latency_us = self._within["nvls"]
        if group.nodes == 1:
            yield self._choice("nvls", SIMPLE, latency_us, wire_us, group)
            return
        # The nodes' sums go along a tree over the nodes: every card sends its part up and down; with two nodes, across.
        cards = (1 if group.nodes == 2 else 2) * num_bytes / self._share(group)
        most = of["nvls_tree"][min(group.nodes, 3) - 1] * group.local * BYTES_PER_US_PER_GB
        wire_us = max(wire_us, cards, 2.0 * (group.size - 1) / group.size * num_bytes / most)
        if self.generation == "blackwell":
            wire_us /= self._correction(SIMPLE, num_bytes)
        hop_us = self._between["nvls_tree"] + 2 * self._hop_extra_us
        yield self._choice("nvls_tree", SIMPLE, latency_us + 2 * _log2(group.nodes) * hop_us, wire_us, group)

    def _pat(self, num_bytes: float, group: Group) -> Choice:
        """All-gather or reduce-scatter along parallel trees; NCCL has it for one rank on each node."""
        tuner = self._tuner
        hop_us = self._network_hop_us("tree", SIMPLE, group)
        latency_us = tuner["base_us"]["pat"][SIMPLE] + group.size * tuner["pat_rank_us"]
        latency_us += _log2(group.nodes) * hop_us * tuner["pat_hop_share"]
        return self._choice("pat", SIMPLE, latency_us, num_bytes / (tuner["pat_share"] * self._bus(group)), group)

    def _peers(self, kind: CollectiveKind, num_bytes: float, group: Group) -> Choice:
        """Sends and receives between pairs, all at once: within the node and over the cards at the same time."""
        given, n = self._all_to_all, group.size
        latency_us = self._tuner["base_us"]["ring"][SIMPLE] + (n - 1) * given["peer_us"]
        if group.nodes == 1:
            latency_us += self._within["ring"][SIMPLE]
            moved = num_bytes if kind == "send_recv" else num_bytes * (n - 1) / n
            return self._choice("peers", SIMPLE, latency_us, moved / self._between_peers(group), group)
        latency_us += self._network_hop_us("ring", SIMPLE, group)
        per_rank = self._share(group) / group.local
        if kind == "send_recv":
            return self._choice("peers", SIMPLE, latency_us, num_bytes / per_rank, group)
        out_us = num_bytes * (n - group.local) / n / (given["network_share"] / self._network["rdma_share"] * per_rank)
        in_us = num_bytes * (group.local - 1) / n / self._between_peers(group) if group.local > 1 else 0.0
        return self._choice("peers", SIMPLE, latency_us, max(in_us, out_us), group)

    def _bus(self, group: Group, of_cards: float = 1.0) -> float:
        """Bytes/us of the slowest link of the group's rings; ``of_cards``: bytes in a ring for each byte that a card sends."""
        within = self._ring_share * self._links(group.local) if group.local > 1 else math.inf
        return min(within, of_cards * self._share(group)) if group.nodes > 1 else within

    def _between_peers(self, group: Group) -> float:
        share = self._ring_share if self._on_pcie else self._peer_share
        return share * self._links(group.local)

    def _links(self, num_devices: int) -> float:
        """Nominal bytes/us of one device to the others of a group of ``num_devices`` on its node."""
        return self._link if self._mesh is None else self._link * self._mesh.share(num_devices)

    def _share(self, group: Group) -> float:
        """Bytes/us over the cards that the group's ranks of a node reach; the node's other groups have the other cards."""
        return self._cards * group.local / self._devices_per_node

    def _protocols(self, group: Group) -> tuple[int, ...]:
        """LL128 needs stores of 128 bytes that arrive whole, as on NVLink. Between nodes NCCL can take it too, but the times
        measured there are those of Simple (nccl.yaml)."""
        if group.nodes > 1 or self._on_pcie:
            return LL, SIMPLE
        return LL, LL128, SIMPLE

    def _network_hop_us(self, algorithm: str, protocol: int, group: Group) -> float:
        if group.nodes == 1:
            return 0.0
        alone = group.nodes == group.size  # with one rank on a node nothing hides the network: the tree's figure
        hop_us = self._between["tree" if alone else algorithm][protocol]
        return hop_us + (2 if protocol == SIMPLE else 1) * self._hop_extra_us  # Simple also flushes

    def _most_ll(self, group: Group) -> float:
        if group.nodes == 1:
            return self._of["ll_gb_per_s"] * BYTES_PER_US_PER_GB
        return self._tuner["ll_network_gb_per_s"][group.nodes > 2] * BYTES_PER_US_PER_GB

    def _per_channel(self, most_gb_per_s: float) -> float:
        """Bytes/us of all rings of a node, where each ring carries at most ``most_gb_per_s``."""
        return self._of["channels"] * most_gb_per_s * BYTES_PER_US_PER_GB

    def _correction(self, protocol: int, num_bytes: float) -> float:
        """NCCL's factor for trees of middle sizes. NCCL's has steps; this one is linear between them, so that more bytes take longer."""
        table = self._tuner["tree_correction"][protocol]
        at = math.log2(max(num_bytes, 64.0) / 64.0)
        low = int(at)
        if low >= len(table) - 1:
            return table[-1]
        return table[low] + (at - low) * (table[low + 1] - table[low])


def _generation(data: Mapping[str, Any], device: str) -> str:
    return next(
        row["generation"] for row in data["devices"] if any(device.startswith(start) for start in row["starts"])
    )


def _log2(count: int) -> int:
    """The whole part of the logarithm, as NCCL takes it."""
    return count.bit_length() - 1
