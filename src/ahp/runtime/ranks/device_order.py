"""Which worker takes which place of the mesh, where a plan says on which devices of a mixed cluster its stages lie.

Workers are numbered through the groups in the cluster's order, as many in each as the plan uses. A launcher numbers them node by node, in whatever order its
nodes came: so each worker says what it computes on, and they are numbered anew by that. torch numbers the ranks of a process group in rising
order, so the places of the mesh are made the ranks: a worker joins with the place that its device has.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from ahp.cluster import catalogue
from ahp.cluster.cells import Placement, place
from ahp.cluster.model import Cluster
from ahp.errors import BadInput, HardwareMismatch, bad_input
from ahp.forecast.mixed_rules import illegal_placement
from ahp.plan import Plan


def placement_of(plan: Plan) -> Placement | None:
    """The cells of a plan for a mixed cluster, None for any other. Raises BadInput when they do not go on it."""
    cluster = Cluster.resolve(plan.cluster) if plan.cluster is not None else None
    if cluster is None or not cluster.is_mixed:
        return None
    if reason := illegal_placement(cluster, plan.job, plan.parallelism):
        raise BadInput(reason)
    return place(cluster, plan.parallelism)


def mesh_places(plan: Plan) -> list[int] | None:
    """The place in the mesh of each worker, by its number from the launcher; None where it is that number."""
    placement = placement_of(plan)
    workers = placement.workers if placement is not None else []
    if workers == sorted(workers):
        return None
    places = {worker: rank for rank, worker in enumerate(workers)}
    return [places[worker] for worker in range(len(places))]


GROUP = "AHP_GROUP"
"""Variable of a host with the name of its group in the cluster's file: processor cores look alike, and so do GPUs that no catalogue knows."""
READ_S = 60.0
"""For which a worker waits for what another one says, after all have met."""


def own_group(plan: Plan, device: torch.device) -> str | None:
    """The group of a mixed cluster that this worker's device belongs to; None where that is not to be seen.

    Raises BadInput where the host's ``AHP_GROUP`` names none.
    """
    names = [group["name"] for group in (plan.cluster or {}).get("groups", [])]
    given = os.environ.get(GROUP)
    if given is not None:
        if given not in names:
            raise bad_input(GROUP, given, "the plan's cluster has no such group", names)
        return given
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    known = catalogue.match(found.name, found.total_memory)
    groups = (plan.cluster or {}).get("groups", [])
    alike = [group["name"] for group in groups if known is not None and group["device"]["name"] == known.device.name]
    return alike[0] if len(alike) == 1 else None


def numbers(used: dict[str, int], said: Sequence[str | None]) -> list[int] | None:
    """The number that each worker has in the plan, by the launcher's number; None where that is the same, or not all have said their group.

    ``used``: workers of each group, in the order of their numbers. Raises HardwareMismatch where others are there than the plan uses.
    """
    if None in said:
        return None
    there = Counter(said)
    if dict(there) != used:
        words = ", ".join(f"{there.get(name, 0)} on {name}" for name in dict.fromkeys([*used, *map(str, said)]))
        wanted = ", ".join(f"{count} on {name}" for name, count in used.items())
        raise HardwareMismatch(
            f"the plan needs {wanted} workers, and there are {words}; start that many, or plan again"
        )
    groups = list(used)
    order = sorted(range(len(said)), key=lambda worker: (groups.index(str(said[worker])), worker))
    found = [order.index(worker) for worker in range(len(said))]
    return None if found == sorted(found) else found


def agreed_numbers(store: dist.Store, worker: int, size: int, plan: Plan, device: torch.device) -> list[int] | None:
    """``numbers``, from what all workers say at the launcher's store. Collective. None for a cluster of one group."""
    placement = placement_of(plan)
    if placement is None:
        return None
    store.set(f"ahp/group/{worker}", json.dumps(own_group(plan, device)))
    keys = [f"ahp/group/{other}" for other in range(size)]
    store.wait(keys, timedelta(seconds=READ_S))
    return numbers(placement.used, [json.loads(value) for value in store.multi_get(keys)])


def check_device(plan: Plan, rank: int, device: torch.device) -> None:
    """Raise HardwareMismatch where a GPU is another than the plan has at this place of the mesh.

    Workers on processor cores stand for any device, and a GPU that nobody knows may be the right one.
    """
    placement = placement_of(plan)
    if placement is None or device.type != "cuda":
        return
    assert plan.cluster is not None, "else there is no placement"
    group = placement.group_of(rank)
    wanted = next(one["device"]["name"] for one in plan.cluster["groups"] if one["name"] == group)
    found = torch.cuda.get_device_properties(device)
    known = catalogue.match(found.name, found.total_memory)
    if known is not None and catalogue.lookup(wanted) is not None and known.device.name != wanted:
        raise HardwareMismatch(
            f"rank {rank} runs on {found.name}, the plan places it on {wanted} (group {group!r}); leave torch.distributed to "
            f"AHP, which numbers workers by their devices, or start them in the order of the cluster's groups, {', '.join(f'{count} workers on {name}' for name, count in placement.used.items())}, or plan again"
        )
