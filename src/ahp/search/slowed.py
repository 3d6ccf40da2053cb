"""What a plan would gain from knowing about a slow device, or a node with slow links: a search on a mixed cluster with the slow part as its
own group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ahp.cluster.cells import place
from ahp.cluster.domains import joined
from ahp.cluster.model import Cluster, GroupLink, Measurements, NodeGroup
from ahp.cluster.scaled import scaled, scaled_link
from ahp.errors import BadInput, NotExpressible
from ahp.plan import Parallelism, Plan
from ahp.search.fastest import fastest
from ahp.search.problem import Problem
from ahp.words import percent, seconds

SLOW = "slow"
"""Name of the slow group; slow-2 if an earlier one has that name."""
SLOWED = "taken as slower than its like"
"""The source given for the slow group's figures."""


@dataclass(frozen=True)
class Slowed:
    """Today's layout and the best one, both on a cluster with the slow device in it."""

    cluster: Cluster
    today: Parallelism
    today_s: float
    best: Parallelism
    best_s: float
    network: bool = False
    """Whether the links are slow, rather than the device."""

    def plain(self) -> dict[str, Any]:
        """As data for JSON."""
        best = self.best.model_dump(mode="json")
        return {"step_time_s": self.today_s, "best_step_time_s": self.best_s, "best": best, "words": self.words()}

    def words(self) -> str:
        """One line for people."""
        slow = "the slow links of its node" if self.network else "this device as a group of its own"
        what = f"with {slow}, ahp plan forecasts {seconds(self.today_s)} a step for the current layout"
        if self.best_s >= self.today_s or self.best == self.today:
            return f"{what}, and finds none that is faster"
        gain = percent(self.today_s / self.best_s - 1)
        return f"{what}, and {seconds(self.best_s)} for {self.best.short()}: {gain} more tokens/s"


def gain(asked: Problem, plan: Plan, rank: int, ratio: float, *, network: bool = False) -> Slowed:
    """Search again with a rank's device ``ratio`` times as slow as assumed or, for ``network``, with its node's links that slow.
    ``asked`` has the plan's cluster."""
    cluster = with_slow(asked.cluster, plan.parallelism, rank, ratio, network=network)
    slow = replace(asked, cluster=cluster)
    today_s = _today_s(slow, plan, ratio, network)
    found = fastest(slow, like=plan.parallelism)
    if found is None or found.best is None:
        return Slowed(cluster, plan.parallelism, today_s, plan.parallelism, today_s, network)
    best, forecast = found.best
    return Slowed(cluster, plan.parallelism, today_s, best, forecast.step_time_s, network)


def _today_s(slow: Problem, plan: Plan, ratio: float, network: bool) -> float:
    """Step time of the plan's layout on the slow cluster. If the layout cannot be placed on its groups, all of it is slow: all ranks wait."""
    try:
        return slow.priced(plan.parallelism).forecast.step_time_s
    except (BadInput, NotExpressible):
        assert plan.cluster is not None, "it was made for one"
        cluster = Cluster.resolve(plan.cluster)
        slower = _with_slow_links if network else scaled
        groups = tuple(slower(group, ratio, SLOWED) for group in cluster.groups)
        links = tuple(_slow_link(link, ratio) for link in cluster.links) if network else cluster.links
        as_slow = replace(slow, cluster=cluster.model_copy(update={"groups": groups, "links": links}))
        return as_slow.priced(plan.parallelism).forecast.step_time_s


def with_slow(cluster: Cluster, layout: Parallelism, rank: int, ratio: float, *, network: bool = False) -> Cluster:
    """The cluster with a rank's device, or for ``network`` its node's links, ``ratio`` times as slow. If its group has several nodes, the whole
    node is slowed, since its devices work together; else the device alone. Calibrations are dropped: they hold for a single group only."""
    workers = place(cluster, layout).workers if cluster.is_mixed else range(layout.world_size)
    worker, groups = list(workers)[rank], list(cluster.groups)
    at = 0
    while worker >= groups[at].num_devices:
        worker -= groups[at].num_devices
        at += 1
    group = groups[at].model_copy(update={"calibration": None})
    by_node = group.nodes > 1 or network
    number, of = (worker // group.devices_per_node, group.nodes) if by_node else (worker, group.devices_per_node)
    name, links = group.name, list(cluster.links)
    slow = group
    if of > 1:
        name = _free_name(cluster)
        slow = _part(group, 1).model_copy(update={"name": name})
        links += _links(cluster, group, name)
    if network:
        links = [_slow_link(link, ratio) if name in link.between else link for link in links]
    else:
        slow = scaled(slow, ratio, SLOWED)
    parts = [slow]
    if of > 1:
        others = _part(group, of - 1)
        # Ranks fill the groups in order: this puts the slow part as close to its old place as two groups allow.
        parts = [others, slow] if 2 * number >= of - 1 else [slow, others]
    groups[at : at + 1] = parts
    alone = [one.model_copy(update={"calibration": None}) for one in groups]
    return cluster.model_copy(update={"groups": tuple(alone), "links": tuple(links)})


def _with_slow_links(group: NodeGroup, ratio: float, source: str) -> NodeGroup:
    link = group.inter_node
    return group if link is None else group.model_copy(update={"inter_node": scaled_link(link, ratio, source)})


def _slow_link(link: GroupLink, ratio: float) -> GroupLink:
    return link.model_copy(update={"link": scaled_link(link.link, ratio, SLOWED)})


def _free_name(cluster: Cluster) -> str:
    taken = {group.name for group in cluster.groups}
    return next(name for name in (SLOW, *(f"{SLOW}-{n}" for n in range(2, len(taken) + 3))) if name not in taken)


def _links(cluster: Cluster, group: NodeGroup, slow: str) -> list[GroupLink]:
    """Links from the slow part to the rest of its group, and to the other groups like those of its group."""
    own = group.inter_node if joined(group).nodes > 1 else group.intra_node
    assert own is not None, "several nodes have a link between them"
    others = [one for one in cluster.links if group.name in one.between]
    ends = [(next(name for name in one.between if name != group.name), one.link) for one in others]
    return [GroupLink(between=(slow, name), link=link) for name, link in [(group.name, own), *ends]]


def _part(group: NodeGroup, count: int) -> NodeGroup:
    """``count`` nodes of a group, or devices if it has one node. Measurements stay those with all devices at work."""
    if group.nodes > 1:
        return group.model_copy(update={"nodes": count, "inter_node": group.inter_node if count > 1 else None})
    return group.model_copy(update={"devices_per_node": count, "measured": _with_all(group)})


def _with_all(group: NodeGroup) -> Measurements | None:
    """Only the samples with about as many workers as the node has devices: the other devices still share its memory."""
    if group.measured is None:
        return None
    found = {}
    for key in ("matmul", "memory", "attention", "element_wise"):
        samples = getattr(group.measured, key)
        most = min((one.workers for one in samples), key=lambda n: abs(n - group.devices_per_node), default=0)
        found[key] = tuple(one for one in samples if one.workers == most)
    return group.measured.model_copy(update=found)
