"""The links of a cluster from what pairs of its hosts have measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from ahp.cluster.model import Cluster, GroupLink, Link, NodeGroup

STRONGLY = 1.5
"""Pairs of one kind that differ by more are named: hosts whose own speeds differ by so much would not be one group either."""
MOST_NAMED = 3


@dataclass(frozen=True)
class Direction:
    """What one host's devices send to another's, measured alone on both."""

    sender: int
    receiver: int
    bandwidth_bytes_per_s: float
    """Of the whole host."""
    latency_s: float


def direction(sender: int, receiver: int, streams: int, seconds: dict[int, float]) -> Direction:
    """``seconds``: of a message of so many bytes, sent by each of ``streams`` devices at once and answered by a small one, for two sizes or more.

    The smallest is two small messages. What the largest takes beyond it is its bytes: a shaped network lets the first ones through at once, so
    that a message which is not large says too much.
    """
    small, large = min(seconds), max(seconds)
    beyond_s = max(seconds[large] - seconds[small], 1.0e-9)
    return Direction(sender, receiver, streams * (large - small) / beyond_s, seconds[small] / 2)


@dataclass(frozen=True)
class Joined:
    """A cluster with its links, and what is to be said of them."""

    cluster: Cluster
    warnings: tuple[str, ...]


def joined(
    groups: Sequence[NodeGroup],
    members: Sequence[Sequence[int]],
    names: Sequence[str],
    measured: Sequence[Direction],
    source: str,
) -> Joined:
    """``members``: the numbers of each group's hosts; ``names``: of each host. Each pair of groups, and each group of several hosts, has a pair that was measured."""
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
    """The median over the pairs, of each the slower direction: a collective waits for both."""
    pairs: dict[frozenset[int], list[Direction]] = {}
    for one in measured:
        pairs.setdefault(frozenset((one.sender, one.receiver)), []).append(one)
    slower = [min(one.bandwidth_bytes_per_s for one in both) for both in pairs.values()]
    told = f"{source}: median of {len(pairs)} {'pair' if len(pairs) == 1 else 'pairs'} of hosts, of each the slower direction"
    if len(pairs) > 1:
        told += f"; {_gbps(min(slower))} to {_gbps(max(slower))} Gb/s"
    return Link(
        bandwidth_bytes_per_s=statistics.median(slower),
        latency_s=statistics.median(one.latency_s for one in measured),
        source=told,
    )


def _differing(measured: Sequence[Direction], names: Sequence[str], where: str) -> list[str]:
    """What a plan that takes all of them for alike would get wrong."""
    fastest = max(one.bandwidth_bytes_per_s for one in measured)
    slowest = sorted(measured, key=lambda one: one.bandwidth_bytes_per_s)
    slow = [one for one in slowest if one.bandwidth_bytes_per_s * STRONGLY < fastest]
    if not slow:
        return []
    told = [
        f"{names[one.sender]} to {names[one.receiver]} {_gbps(one.bandwidth_bytes_per_s)}" for one in slow[:MOST_NAMED]
    ]
    more = f" and {len(slow) - MOST_NAMED} more" if len(slow) > MOST_NAMED else ""
    return [
        f"links {where} differ: the fastest has {_gbps(fastest)} Gb/s, {', '.join(told)}{more}. A plan takes them for alike; leave those hosts out, or mend the network"
    ]


def _gbps(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e9:.3g}"
