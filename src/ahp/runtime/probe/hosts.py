"""``probe`` of several hosts at once: each host measures itself, then pairs of hosts measure their links; the result is one cluster."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from ahp.about import __version__
from ahp.cluster import measure, team
from ahp.cluster.catalogue import CPU
from ahp.cluster.hosts import grouping, links
from ahp.cluster.hosts.grouping import Probed
from ahp.cluster.hosts.links import Direction
from ahp.cluster.hosts.rounds import rounds
from ahp.cluster.measure import Progress
from ahp.cluster.model import Cluster, NodeGroup
from ahp.errors import AhpError, BadInput
from ahp.runtime.probe.meeting import Meeting, own_name

LINK_WORKER = "ahp.runtime.probe.link_worker"
QUICK_S, FULL_S = 0.2, 1.0
"""How long messages of one size are sent, one way: long compared with the time slices of a processor."""
MOST_CPU_STREAMS = 4
"""[Empirical] One connection of gloo carries 2.9 GB/s (``ahp.cluster.local``): four fill 90 Gb/s."""


@dataclass(frozen=True)
class ProbedHosts:
    """The cluster that several hosts form, and how it was found."""

    cluster: Cluster
    names: tuple[str, ...]
    """The hosts' names, in the order of their numbers; a name that occurs twice includes the number."""
    members: tuple[tuple[int, ...], ...]
    """Numbers of each group's hosts."""
    directions: tuple[Direction, ...]
    rounds: int
    all_rounds: int
    warnings: tuple[str, ...]


def probe_hosts(
    meeting: Meeting,
    *,
    check: Callable[[], None],
    quick: bool,
    workers: int | None,
    progress: Progress,
    folder: Any,
) -> ProbedHosts | None:
    """Sense and measure this host and its links, together with all hosts that have met. Collective.

    Args:
        meeting: this host's meeting with the others.
        check: called by the first host before anything is measured; an error that it raises ends the probe on all hosts.
        quick, workers, progress, folder: as in ``probe``.

    Returns the cluster on the first host, None on the others. Raises BadInput if hosts run different versions or see different kinds of
    devices, AhpError if a host fails, or if two do not reach each other.
    """
    names = _alike(meeting)
    meeting.decided_by_first(check)
    said = meeting.all_of(
        "nodes",
        lambda: _own(quick=quick, workers=workers, progress=progress, folder=folder).model_dump(mode="json"),
    )
    shown = [f"{name} (host {at})" if names.count(name) > 1 else name for at, name in enumerate(names)]
    hosts = [Probed(name, NodeGroup.model_validate(nodes)) for name, nodes in zip(names, said, strict=True)]
    members = grouping.grouped(hosts)
    groups = grouping.as_nodes(hosts, members)
    of_host = [next(at for at, group in enumerate(members) if host in group) for host in range(len(hosts))]
    plan = rounds(of_host)
    progress("links", 1.0)
    pairs = [pair for each in meeting.all_of("links", lambda: _links(meeting, hosts, plan, quick)) for pair in each]
    directions = _directions(pairs, shown, _streams(hosts))
    missing = {frozenset(pair) for pairs in plan for pair in pairs} - {
        frozenset((d.sender, d.receiver)) for d in directions
    }
    if missing:
        raise AhpError(
            f"{len(missing)} pairs of hosts were not measured, such as {[shown[at] for at in min(map(sorted, missing))]}"
        )
    if not meeting.place.is_first:
        return None
    source = f"probe of {len(names)} hosts, {datetime.date.today()}, torch {version('torch')}"
    found = links.joined(groups, members, shown, directions, source)
    disturbed = [
        f"{host.name}: {host.nodes.device.source}" for host in hosts if measure.DISTURBED in host.nodes.device.source
    ]
    every = len(names) - 1 + len(names) % 2
    return ProbedHosts(
        found.cluster,
        tuple(shown),
        tuple(map(tuple, members)),
        tuple(directions),
        len(plan),
        every,
        (*found.warnings, *disturbed),
    )


def _alike(meeting: Meeting) -> list[str]:
    """The hosts' names, in the order of their numbers. Raises BadInput if versions differ."""
    ours = {"name": own_name(), "ahp": __version__, "torch": version("torch")}
    said = meeting.all_of("who", lambda: ours)
    for program in ("ahp", "torch"):
        if len({one[program] for one in said}) > 1:
            versions = ", ".join(f"{one[program]} on {one['name']}" for one in said)
            raise BadInput(f"the hosts have different versions of {program} ({versions}); install one on all")
    return [one["name"] for one in said]


def _own(**options: Any) -> NodeGroup:
    [group] = measure.probe(num_nodes=1, **options).groups
    return group


def _streams(hosts: Sequence[Probed]) -> int:
    """How many devices of each host send at once, so that a message does not stand for one card of several."""
    least = min(host.nodes.devices_per_node for host in hosts)
    return min(least, MOST_CPU_STREAMS) if hosts[0].nodes.device.name == CPU else least


def _links(meeting: Meeting, hosts: Sequence[Probed], plan: Any, quick: bool) -> list[dict[str, Any]]:
    """The measurements of this host's links by its processes."""
    settings = {
        "workers": _streams(hosts),
        "host": meeting.place.number,
        "hosts": meeting.place.size,
        "endpoint": meeting.place.endpoint,
        "rounds": plan,
        "budget_s": QUICK_S if quick else FULL_S,
        "device": "cpu" if hosts[0].nodes.device.name == CPU else "cuda",
    }
    return list(team.results(settings, LINK_WORKER))


def _directions(pairs: Sequence[dict[str, Any]], names: Sequence[str], streams: int) -> list[Direction]:
    found = []
    for said in pairs:
        low, high = said["pair"]
        if "error" in said:
            raise AhpError(
                f"{names[low]} and {names[high]} do not reach each other: {said['error']}; name the interface of the network between the hosts to "
                "both libraries (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), and let them reach each other's ports"
            )
        for sender, receiver in ((low, high), (high, low)):
            seconds = {int(size): taken for size, taken in said[str(sender)].items()}
            found.append(links.direction(sender, receiver, streams, seconds))
    return found
