"""What would fit if one node were lost, or one device of a single node: the best plan on what is left."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ahp.cluster.model import Cluster
from ahp.config import Constraints
from ahp.plan import Parallelism, Plan
from ahp.search.counts import smaller
from ahp.search.fastest import fastest
from ahp.search.misfit import nearest
from ahp.search.one_group import Fastest
from ahp.search.pairs import Pair
from ahp.search.problem import Problem, with_devices
from ahp.search.reasons import does_not_fit
from ahp.search.ties import TIED
from ahp.words import compared, number_of, percent, seconds

MANY_DEVICES = 64
"""On more devices, a search for the best plan of each number of devices takes longer than the plan did: 8.3 of 10.8 s for 70 B on 512 H100."""


@dataclass(frozen=True)
class Lost:
    """The same job, with the same global batch, on what is left."""

    what: str
    left: int
    """Number of devices left."""
    plan: Parallelism | None
    step_time_s: float | None
    verdict: str
    faster: str | None = None
    """If this takes less time than the plan: that fewer devices are faster, and how to use fewer."""

    def plain(self) -> dict[str, Any]:
        """As data for JSON."""
        return {
            "lost": self.what,
            "devices_left": self.left,
            "parallelism": None if self.plan is None else self.plan.model_dump(mode="json"),
            "step_time_s": self.step_time_s,
            "verdict": self.verdict,
        }

    def words(self) -> str:
        """One line for people."""
        return f"If {self.what} were lost: {self.verdict}"


def one_lost(asked: Problem, best: Plan) -> Lost:
    """What the job would run on if one node of ``asked.cluster`` were lost; in a mixed cluster, a node of the largest group.

    ``asked``: the whole cluster, with what the user has fixed. If nothing fits with the fixed keys, they are freed.
    """
    assumed = best.priced
    what, cluster = _without_one(asked.cluster)
    if cluster is None:
        return Lost(what, 0, None, None, "nothing is left to run on")
    left = cluster.num_devices
    if _still_there(best, cluster):
        verdict = f"the {left} devices left are enough for the same plan, which takes {best.parallelism.world_size}"
        return Lost(what, left, best.parallelism, assumed.step_time_s, verdict)
    remains = asked.on(cluster)
    work = assumed.step_time_s * best.parallelism.world_size
    found, freed = _fastest(remains, best.parallelism, work), ""
    if found is None and asked.constraints.given:
        found = _fastest(replace(remains, constraints=Constraints()), best.parallelism, work)
        freed = f", with {', '.join(asked.constraints.given)} free"
    if found is None or found.best is None:
        return Lost(what, left, None, None, _why_nothing(remains))
    layout, forecast = found.best
    speed = _compared(1 - assumed.step_time_s / forecast.step_time_s)
    used = "" if layout.world_size == left else f" on {layout.world_size} of the {left} devices left"
    verdict = f"{layout.short()}{used}, {seconds(forecast.step_time_s)} a step, {speed}{freed}"
    faster = None if freed else _fewer_are_faster(asked.cluster, assumed.step_time_s, found.best)
    return Lost(what, left, layout, forecast.step_time_s, verdict, faster)


def _fewer_are_faster(cluster: Cluster, all_s: float, fewer: Pair) -> str | None:
    """What to say if all devices take longer than some, by more than the forecast can tell apart: because of a slow network between nodes,
    or a number of devices that divides badly."""
    layout, forecast = fewer
    less = 1 - forecast.step_time_s / all_s
    if less <= TIED:
        return None
    use = "leave that node out of the cluster" if cluster.is_mixed else "--objective tokens-per-day chooses how many"
    on = f"{number_of(layout.world_size, 'device')} of {cluster.num_devices}"
    return f"fewer devices are faster: {layout.short()} on {on}, {seconds(forecast.step_time_s)} a step, {percent(less)} less; {use}"


def _compared(loss: float) -> str:
    if loss < -1.0:
        return f"{1.0 - loss:.1f} times as many tokens/s"
    return compared(loss, "fewer tokens/s", "more tokens/s", "as many tokens/s")


def _still_there(best: Plan, cluster: Cluster) -> bool:
    """Whether the plan's devices are still there, or others of the same groups in their place."""
    assert best.cluster is not None, "a plan of the search has a cluster"
    there = {group.name: group.num_devices for group in cluster.groups}
    return all(group.num_devices <= there.get(group.name, 0) for group in Cluster.resolve(best.cluster).groups)


def _without_one(cluster: Cluster) -> tuple[str, Cluster | None]:
    """What is lost, in words, and the rest of the cluster; None if nothing is left."""
    if cluster.num_devices == 1:
        return "the only device", None
    if not cluster.is_mixed:
        group = cluster.groups[0]
        nodes, per_node = group.nodes, group.devices_per_node
        lost, what = (per_node, f"one of {nodes} nodes") if nodes > 1 else (1, f"one of {per_node} devices")
        return what, with_devices(cluster, cluster.num_devices - lost)
    largest = max(cluster.groups, key=lambda group: group.num_devices)
    what = f"one of {largest.nodes} nodes of {largest.name}" if largest.nodes > 1 else f"the node of {largest.name}"
    fewer = [largest.model_copy(update={"nodes": largest.nodes - 1})] if largest.nodes > 1 else []
    left = (part for group in cluster.groups for part in (fewer if group is largest else [group]))
    return what, cluster.with_groups(left)


def _fastest(remains: Problem, before: Parallelism, work: float) -> Fastest | None:
    """The shortest step on all or some of the devices; None if no number of devices has a plan that fits.

    Numbers of devices are tried from the largest. The search of one ends when its bounds are above the best time of a larger one; numbers below
    half of what is left are tried only if no larger one has a plan. With more than ``MANY_DEVICES``, where a proof takes as long as the search
    did, times that the forecast cannot tell apart count as equal, and no number is tried whose devices would have to do more than in the plan.

    Args:
        remains: the job on what is left.
        before: the plan's layout.
        work: device seconds of one step of the plan.
    """
    if remains.cluster.is_mixed:
        return fastest(remains, like=before)  # its layouts include those on one group alone
    found: Fastest | None = None
    many = remains.cluster.num_devices > MANY_DEVICES
    for cluster in smaller(remains.cluster)[::-1]:
        best_s = found.best[1].step_time_s if found is not None and found.best is not None else float("inf")
        if best_s < float("inf") and (
            2 * cluster.num_devices < remains.cluster.num_devices or (many and best_s * cluster.num_devices <= work)
        ):
            break
        one = fastest(remains.on(cluster), best_s, slack=TIED if many else 0.0)
        if one is not None and one.best is not None and one.best[1].step_time_s < best_s:
            found = one
    return found


def _why_nothing(remains: Problem) -> str:
    """The nearest miss on the most devices that have a legal layout."""
    free = replace(remains, constraints=Constraints())
    for cluster in smaller(free.cluster)[::-1]:
        part = free.on(cluster)
        miss = nearest(part)
        if miss is not None:
            reason = does_not_fit(miss[1], part.capacity_bytes)
            return f"no plan of the same batch fits on what is left; the nearest, {miss[0].short()}, {reason}"
    return f"no layout of {remains.cluster.num_devices} devices or fewer is legal for this batch"
