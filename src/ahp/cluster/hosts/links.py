"""The links of a cluster, from measurements between pairs of its hosts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from ahp.cluster.model import Cluster, GroupLink, Link, NodeGroup

STRONGLY = 1.5
"""Pairs of one kind that differ by more than this factor are named: hosts whose own speeds differ as much would not be one group either."""
MOST_NAMED = 3


@dataclass(frozen=True)
class Direction:
    """The link from one host's devices to another's, measured while both do nothing else."""

    sender: int
    receiver: int
    bandwidth_bytes_per_s: float
    """Bandwidth of the whole host."""
    latency_s: float


def direction(sender: int, receiver: int, streams: int, seconds: dict[int, float]) -> Direction:
    """``seconds``: for two or more sizes in bytes, the time of a message that each of ``streams`` devices sends at once, with a small answer.

    The smallest is two small messages. What the largest takes beyond it is due to its bytes: a network with traffic shaping lets the first
    bytes through at once, so that a message which is not large would show too high a rate.
    """
    small, large = min(seconds), max(seconds)
    beyond_s = max(seconds[large] - seconds[small], 1.0e-9)
    return Direction(sender, receiver, streams * (large - small) / beyond_s, seconds[small] / 2)


@dataclass(frozen=True)
class Joined:
    """A cluster with its links, and warnings about them."""

    cluster: Cluster
    warnings: tuple[str, ...]


def joined(
    groups: Sequence[NodeGroup],
    members: Sequence[Sequence[int]],
    names: Sequence[str],
    measured: Sequence[Direction],
    source: str,
) -> Joined:
    """``members``: the numbers of each group's hosts; ``names``: the hosts' names. Each pair of groups, and each group of several hosts, has a measured pair."""
    group_of = {host: at for at, hosts in enumerate(members) for host in hosts}
    found: dict[frozenset[int], list[Direction]] = {}
    for one in measured:
        found.setdefault(frozenset((group_of[one.sender], group_of[one.receiver])), []).append(one)
    warnings: list[str] = []
    nodes = []
    for at, group in enumerate(groups):
        inner = found.get(frozenset((at,)))
        if inner is not None:
            group = group.model_copy(update={"inter_node": _link(inner, source)})
            warnings += _differing(inner, names, f"within {group.name}")
        nodes.append(group)
    links = []
    for one, other in combinations(range(len(groups)), 2):
        between = found[frozenset((one, other))]
        pair = (groups[one].name, groups[other].name)
        links.append(GroupLink(between=pair, link=_link(between, source)))
        warnings += _differing(between, names, f"between {pair[0]} and {pair[1]}")
    return Joined(Cluster(groups=tuple(nodes), links=tuple(links), source=source), tuple(warnings))


def _link(measured: Sequence[Direction], source: str) -> Link:
    """The median over pairs of the slower direction of each: a collective waits for both."""
    pairs: dict[frozenset[int], list[Direction]] = {}
    for one in measured:
        pairs.setdefault(frozenset((one.sender, one.receiver)), []).append(one)
    slower = [min(one.bandwidth_bytes_per_s for one in both) for both in pairs.values()]
    description = f"{source}: median of {len(pairs)} {'pair' if len(pairs) == 1 else 'pairs'} of hosts, each in its slower direction"
    if len(pairs) > 1:
        description += f"; {_gbps(min(slower))} to {_gbps(max(slower))} Gb/s"
    return Link(
        bandwidth_bytes_per_s=statistics.median(slower),
        latency_s=statistics.median(one.latency_s for one in measured),
        source=description,
    )


def _differing(measured: Sequence[Direction], names: Sequence[str], where: str) -> list[str]:
    """Warnings about links that differ too much, because a plan takes them all as equal."""
    fastest = max(one.bandwidth_bytes_per_s for one in measured)
    slowest = sorted(measured, key=lambda one: one.bandwidth_bytes_per_s)
    slow = [one for one in slowest if one.bandwidth_bytes_per_s * STRONGLY < fastest]
    if not slow:
        return []
    named = [
        f"{names[one.sender]} to {names[one.receiver]} {_gbps(one.bandwidth_bytes_per_s)}" for one in slow[:MOST_NAMED]
    ]
    more = f" and {len(slow) - MOST_NAMED} more" if len(slow) > MOST_NAMED else ""
    return [
        f"links {where} differ: the fastest has {_gbps(fastest)} Gb/s, {', '.join(named)}{more}. A plan treats all links as equal; leave those hosts out, or repair the network"
    ]


def _gbps(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e9:.3g}"
