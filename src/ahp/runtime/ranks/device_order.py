"""Which worker takes which place of the mesh, where a plan says on which devices of a mixed cluster its stages lie.

Workers are numbered by the launcher: node by node, through the groups in the cluster's order, as many in each as the plan
uses. torch numbers the ranks of a process group in rising order, so the places of the mesh are made the ranks: a worker
joins with the place that its device has.
"""

from __future__ import annotations

import torch

from ahp.cluster import catalogue
from ahp.cluster.cells import Placement, place
from ahp.cluster.model import Cluster
from ahp.errors import BadInput, HardwareMismatch
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
            f"rank {rank} runs on {found.name}, the plan places it on {wanted} (group {group!r}); start the nodes in the order of "
            f"the cluster's groups, {', '.join(f'{count} workers on {name}' for name, count in placement.used.items())}, or plan again"
        )
