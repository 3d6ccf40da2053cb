"""Assigns workers to places of the mesh, for a plan that places its stages on the devices of a mixed cluster.

A plan numbers workers through the groups in the cluster's order, as many in each as it uses. A launcher numbers them node by node, in
whatever order its nodes came, so each worker reports what it computes on, and they are renumbered by that. torch sorts the ranks of a
process group, so the places of the mesh become the ranks: a worker joins with the place of its device.
"""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ahp.cluster import catalogue, sense
from ahp.cluster.cells import Placement, place
from ahp.cluster.model import Cluster
from ahp.cluster.plain_groups import plain_groups
from ahp.errors import BadInput, HardwareMismatch, bad_input
from ahp.forecast.mixed_rules import illegal_placement
from ahp.plan import Plan


def placement_of(plan: Plan) -> Placement | None:
    """The placement of a plan on a mixed cluster, None for any other cluster. Raises BadInput if the plan does not fit the cluster."""
    cluster = Cluster.resolve(plan.cluster) if plan.cluster is not None else None
    if cluster is None or not cluster.is_mixed:
        return None
    if reason := illegal_placement(cluster, plan.job, plan.parallelism):
        raise BadInput(reason)
    return place(cluster, plan.parallelism)


def mesh_places(plan: Plan) -> list[int] | None:
    """The place of each worker in the mesh, indexed by its number in the plan; None if the two are equal."""
    placement = placement_of(plan)
    workers = placement.workers if placement is not None else []
    if workers == sorted(workers):
        return None
    places = {worker: rank for rank, worker in enumerate(workers)}
    return [places[worker] for worker in range(len(places))]


GROUP = "AHP_GROUP"
"""Environment variable that names a host's group in the cluster's file, if nothing else identifies it: processor cores look alike."""
READ_S = 60.0
"""How long a worker waits for what another one reports, after all have met."""


def own_group(plan: Plan, device: torch.device) -> str | None:
    """The group of a mixed cluster that this worker's device belongs to; None if that cannot be seen.

    Raises BadInput if the host's ``AHP_GROUP`` names no group of the cluster.
    """
    names = [group["name"] for group in plain_groups(plan.cluster)]
    given = os.environ.get(GROUP)
    if given is not None:
        if given not in names:
            raise bad_input(GROUP, given, "the plan's cluster has no such group", names)
        return given
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    known = catalogue.match(found.name, found.total_memory)
    groups = plain_groups(plan.cluster)
    alike = [group["name"] for group in groups if known is not None and group["device"]["name"] == known.device.name]
    return alike[0] if len(alike) == 1 else None


def probed_group(plan: Plan, device: torch.device) -> str | None:
    """The group that this host was in when it was probed with the others (``ahp probe --nodes``): by its name, or, for processor cores, by
    its hardware; None if no group matches, or several do."""
    groups = plain_groups(plan.cluster)
    named = [group["name"] for group in groups if socket.gethostname() in group.get("hosts", ())]
    if len(named) == 1 or device.type != "cpu":
        return named[0] if len(named) == 1 else None
    own = sense.cpu_name(), sense.physical_cores(), sense.cpu_quota()
    alike = [group["name"] for group in groups if group.get("hosts") and _has(group.get("host", {})) == own]
    return alike[0] if len(alike) == 1 else None


def _has(host: Mapping[str, Any]) -> tuple[str | None, int | None, float | None]:
    return host.get("cpu"), host.get("cores"), host.get("processors")


@dataclass(frozen=True)
class Said:
    """A worker's report about itself when all meet."""

    host: str
    group: str | None
    """Known from its GPU, or from the user."""
    probed: str | None
    """Known from the cluster's file, which lists the host."""


def groups_of(plan: Plan, said: Sequence[Said]) -> list[str | None]:
    """The group of each worker; None if neither source knows it and the cluster was not probed.

    Workers on a single host stand for those of the cluster's hosts, as in ``ahp verify``: what the file knows of that host is ignored. Raises
    HardwareMismatch for a host whose group a probed cluster does not know: its place would be chance.
    """
    if len({one.host for one in said}) == 1:
        return [one.group for one in said]
    found = [one.group or one.probed for one in said]
    groups = plain_groups(plan.cluster)
    strangers = sorted({one.host for one, group in zip(said, found, strict=True) if group is None})
    if strangers and any(group.get("hosts") for group in groups):
        known = "; ".join(f"{group['name']}: {', '.join(group.get('hosts', ()))}" for group in groups)
        raise HardwareMismatch(
            f"{', '.join(strangers)}: of none of the groups of the probed cluster ({known}); set {GROUP}=NAME there, or probe the hosts again"
        )
    return found


def numbers(used: dict[str, int], said: Sequence[str | None]) -> list[int] | None:
    """The number of each worker in the plan, indexed by the launcher's number; None if the two are equal, or if any group is unknown.

    ``used``: number of workers of each group, in the order of their numbers. Raises HardwareMismatch if the workers are not those of the plan.
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
    """``numbers``, from what all workers report at the launcher's store. Collective. None if the plan's cluster is not mixed."""
    placement = placement_of(plan)
    if placement is None:
        return None
    own = Said(socket.gethostname(), own_group(plan, device), probed_group(plan, device))
    store.set(f"ahp/group/{worker}", json.dumps(asdict(own)))
    keys = [f"ahp/group/{other}" for other in range(size)]
    store.wait(keys, timedelta(seconds=READ_S))
    said = [Said(**json.loads(value)) for value in store.multi_get(keys)]
    return numbers(placement.used, groups_of(plan, said))


def check_device(plan: Plan, rank: int, device: torch.device) -> None:
    """Raise HardwareMismatch if a GPU is not the one that the plan has at this place of the mesh.

    Workers on processor cores stand for any device, and a GPU that is not in the catalogue may be the right one.
    """
    placement = placement_of(plan)
    if placement is None or device.type != "cuda":
        return
    assert plan.cluster is not None, "else there is no placement"
    group = placement.group_of(rank)
    wanted = next(one["device"]["name"] for one in plain_groups(plan.cluster) if one["name"] == group)
    found = torch.cuda.get_device_properties(device)
    known = catalogue.match(found.name, found.total_memory)
    if known is not None and catalogue.lookup(wanted) is not None and known.device.name != wanted:
        raise HardwareMismatch(
            f"rank {rank} runs on {found.name}, the plan places it on {wanted} (group {group!r}); leave torch.distributed to "
            f"AHP, which numbers workers by their devices, or start them in the order of the cluster's groups, {', '.join(f'{count} workers on {name}' for name, count in placement.used.items())}, or plan again"
        )
