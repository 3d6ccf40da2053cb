"""Groups measured hosts that are alike, and makes a group of nodes from each."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ahp.cluster.domains import domain_of
from ahp.cluster.model import NodeGroup
from ahp.errors import BadInput

SAME_SPEED = 1.15
"""Hosts are alike if their products, and their streams, differ by no more. [Empirical] Ten quick probes of one core of an AMD EPYC, with other programs running, differed by
up to 1.10 in products and 1.11 in streams (docs/decisions/several-hosts.md); and shares of a batch are whole micro-batches, which seldom match a ratio more closely."""
SAME_MEMORY = 1.1
"""The same for free memory, which differs a little from host to host; the plans of a group can use the least."""


@dataclass(frozen=True)
class Probed:
    """One host: its own name, and its own measurements as a group of one node."""

    name: str
    nodes: NodeGroup


@dataclass(frozen=True)
class _Speed:
    kind: tuple[str, int]
    products: float
    """FLOP/s of one device, the geometric mean over the shapes that all hosts of the kind have measured."""
    stream: float
    """Bytes/s of one device."""
    memory_bytes: int

    def is_like(self, other: _Speed) -> bool:
        return (
            self.kind == other.kind
            and _apart(self.products, other.products) <= SAME_SPEED
            and _apart(self.stream, other.stream) <= SAME_SPEED
            and _apart(self.memory_bytes, other.memory_bytes) <= SAME_MEMORY
        )


def grouped(hosts: Sequence[Probed]) -> list[list[int]]:
    """The numbers of the hosts in each group, the fastest group first; the groups do not depend on the order of the hosts.

    Within a group every host is like every other one: a chain of small differences never joins two that are far apart.
    """
    speeds = _speeds([host.nodes for host in hosts])
    order = sorted(
        range(len(hosts)),
        key=lambda at: (-speeds[at].products, speeds[at].kind, -speeds[at].stream, speeds[at].memory_bytes, hosts[at].name),
    )  # fmt: skip
    groups: list[list[int]] = []
    for at in order:
        fitting = (group for group in groups if all(speeds[at].is_like(speeds[other]) for other in group))
        group = next(fitting, None)
        if group is None:
            groups.append([at])
        else:
            group.append(at)
    return groups


def as_nodes(hosts: Sequence[Probed], groups: Sequence[Sequence[int]]) -> list[NodeGroup]:
    """A group of nodes for each group of hosts: the measurements of the host in the middle, the least memory of any.

    Named after the device, with a number if several groups have the same device, the fastest first. Raises BadInput for GPUs and CPU cores
    in one cluster, which have no communication library in common.
    """
    devices = [hosts[members[0]].nodes.device.name for members in groups]
    if len({name.startswith("cpu") for name in devices}) > 1:
        kinds = ", ".join(f"{hosts[m[0]].name}: {device}" for m, device in zip(groups, devices, strict=True))
        raise BadInput(
            f"the hosts do not compute on the same kind of devices ({kinds}); make the GPUs visible on all hosts, or on none"
        )
    several, seen = Counter(devices), Counter[str]()
    found = []
    for members, device in zip(groups, devices, strict=True):
        seen[device] += 1
        name = device.lower() + (f"-{seen[device]}" if several[device] > 1 else "")
        found.append(_nodes([hosts[at] for at in members], name if len(groups) > 1 else "nodes"))
    return found


def _nodes(alike: Sequence[Probed], name: str) -> NodeGroup:
    """``alike`` is in the order of speed, as ``grouped`` leaves it."""
    middle = alike[(len(alike) - 1) // 2].nodes
    least = min(host.nodes.device.memory_bytes for host in alike)
    source = (
        middle.device.source
        if len(alike) == 1
        else f"{middle.device.source}; the one in the middle of {len(alike)} hosts that are alike"
    )
    device = middle.device.model_copy(update={"memory_bytes": least, "source": source})
    names = tuple(sorted({host.name for host in alike}))
    update = {"name": name, "nodes": len(alike), "device": device, "hosts": names}
    return middle.model_copy(update={**update, **domain_of(device.name, len(alike), middle.devices_per_node)})


def _speeds(hosts: Sequence[NodeGroup]) -> list[_Speed]:
    """The speed of each host, over the products that all hosts of its kind have measured: a slow host leaves the large ones out."""
    rates = [_rates(nodes) for nodes in hosts]
    kinds = [(nodes.device.name, nodes.devices_per_node) for nodes in hosts]
    found = []
    for nodes, own, kind in zip(hosts, rates, kinds, strict=True):
        of_all = set.intersection(*(set(other) for other, same in zip(rates, kinds, strict=True) if same == kind))
        logs = [math.log(own[shape]) for shape in sorted(of_all)]
        products = math.exp(statistics.fmean(logs)) if logs else max(nodes.device.peak_flops_per_s.values())
        found.append(_Speed(kind, products, _stream(nodes), nodes.device.memory_bytes))
    return found


def _rates(nodes: NodeGroup) -> dict[tuple[str, str, int, int, int], float]:
    """FLOP/s of each product while all devices compute."""
    samples = nodes.measured.matmul if nodes.measured is not None else ()
    return {
        (s.phase, s.dtype, s.m, s.n, s.k): 2.0 * s.m * s.n * s.k / s.seconds
        for s in samples
        if s.workers == nodes.devices_per_node
    }


def _stream(nodes: NodeGroup) -> float:
    samples = nodes.measured.memory if nodes.measured is not None else ()
    return max(samples, key=lambda s: s.workers).bytes_per_s if samples else nodes.device.memory_bandwidth_bytes_per_s


def _apart(one: float, other: float) -> float:
    return max(one, other) / min(one, other)
