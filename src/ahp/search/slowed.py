"""What a plan would gain that knew of a slow device: the device as a group of its own in a mixed cluster, and the search on that."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ahp.cluster.cells import place
from ahp.cluster.model import Cluster, GroupLink, Link, Measurements, NodeGroup
from ahp.cluster.scaled import scaled
from ahp.errors import BadInput, NotExpressible
from ahp.plan import Parallelism, Plan
from ahp.search.problem import Problem
from ahp.search.ranking import search
from ahp.words import percent, seconds

SLOW = "slow"
"""Name of the group."""
SLOWED = "taken as slower than its like"
"""Where its figures come from."""


@dataclass(frozen=True)
class Slowed:
    """The layout of today and the best one, both on a cluster with the slow device in it."""

    cluster: Cluster
    today: Parallelism
    today_s: float
    best: Parallelism
    best_s: float

    def plain(self) -> dict[str, Any]:
        """As data for JSON."""
        best = self.best.model_dump(mode="json")
        return {"step_time_s": self.today_s, "best_step_time_s": self.best_s, "best": best, "words": self.words()}

    def words(self) -> str:
        """One line for people."""
        what = f"with this device as a group of its own, ahp plan forecasts {seconds(self.today_s)} a step for the layout of now"
        if self.best_s >= self.today_s or self.best == self.today:
            return f"{what}, and finds none that is faster"
        gain = percent(self.today_s / self.best_s - 1)
        return f"{what}, and {seconds(self.best_s)} for {self.best.short()}: {gain} more tokens/s"


def gain(asked: Problem, plan: Plan, rank: int, ratio: float) -> Slowed:
    """Search again with the device of a rank ``ratio`` times as slow as it was taken for. ``asked``: of the cluster as it is in the plan."""
    cluster = with_slow(asked.cluster, plan.parallelism, rank, ratio)
    slow = replace(asked, cluster=cluster)
    best = search(asked.graph, cluster, asked.job, constraints=asked.constraints, engine=asked.engine, keep=1).best
    assert best.forecast is not None, "a plan of the search has a forecast"
    today_s = _today_s(slow, plan, ratio)
    return Slowed(cluster, plan.parallelism, today_s, best.parallelism, best.forecast.step_time_s)


def _today_s(slow: Problem, plan: Plan, ratio: float) -> float:
    """A step of the plan's layout there. Where the layout does not go on groups as they lie, all devices wait for the slow one as if all
    were as slow."""
    try:
        return slow.priced(plan.parallelism).forecast.step_time_s
    except (BadInput, NotExpressible):
        assert plan.cluster is not None, "it was made for one"
        cluster = Cluster.resolve(plan.cluster)
        groups = tuple(scaled(group, ratio, SLOWED) for group in cluster.groups)
        as_slow = replace(slow, cluster=cluster.model_copy(update={"groups": groups}))
        return as_slow.priced(plan.parallelism).forecast.step_time_s


def with_slow(cluster: Cluster, layout: Parallelism, rank: int, ratio: float) -> Cluster:
    """The cluster with a rank's device ``ratio`` times as slow: where its group has several nodes its node, since devices of one node work
    together, else the device alone. Calibrations go: they are of one group alone."""
    workers = place(cluster, layout).workers if cluster.is_mixed else range(layout.world_size)
    worker, groups = list(workers)[rank], list(cluster.groups)
    at = 0
    while worker >= groups[at].num_devices:
        worker -= groups[at].num_devices
        at += 1
    group = groups[at].model_copy(update={"calibration": None})
    number, of = (
        (worker // group.devices_per_node, group.nodes) if group.nodes > 1 else (worker, group.devices_per_node)
    )
    if of == 1:
        parts, links = [scaled(group, ratio, SLOWED)], []
    else:
        slow = scaled(_part(group, 1), ratio, SLOWED).model_copy(update={"name": SLOW})
        others = _part(group, of - 1)
        # Ranks fill the groups in their order: as near as two groups come to where it was.
        parts = [others, slow] if 2 * number >= of - 1 else [slow, others]
        link = group.inter_node if group.nodes > 1 else group.intra_node
        links = _links(cluster, group, link)
    groups[at : at + 1] = parts
    alone = [one.model_copy(update={"calibration": None}) for one in groups]
    return cluster.model_copy(update={"groups": tuple(alone), "links": (*cluster.links, *links)})


def _links(cluster: Cluster, group: NodeGroup, own: Link | None) -> list[GroupLink]:
    """From the slow part to the rest of its group, and to the other groups as its group had them."""
    assert own is not None, "several nodes have a link between them"
    others = [one for one in cluster.links if group.name in one.between]
    ends = [(next(name for name in one.between if name != group.name), one.link) for one in others]
    return [GroupLink(between=(SLOW, name), link=link) for name, link in [(group.name, own), *ends]]


def _part(group: NodeGroup, count: int) -> NodeGroup:
    """So many nodes of a group, or devices where it has one node. What was measured stays as measured with all of them at work."""
    if group.nodes > 1:
        return group.model_copy(update={"nodes": count, "inter_node": group.inter_node if count > 1 else None})
    return group.model_copy(update={"devices_per_node": count, "measured": _with_all(group)})


def _with_all(group: NodeGroup) -> Measurements | None:
    """The samples of as many workers as the node has, as if fewer had been at work: the others still share its memory."""
    if group.measured is None:
        return None
    found = {}
    for key in ("matmul", "memory", "attention", "element_wise"):
        samples = getattr(group.measured, key)
        most = min((one.workers for one in samples), key=lambda n: abs(n - group.devices_per_node), default=0)
        found[key] = tuple(one for one in samples if one.workers == most)
    return group.measured.model_copy(update=found)
