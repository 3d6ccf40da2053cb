"""NVLink domains: the devices of a node, or of several nodes that share NVLink switches (an NVL72 rack of 18 hosts of 4).

Hosts are what is started, lost and counted; domains are where devices communicate over NVLink. ``joined`` turns hosts into domains, for
code that prices communication.
"""

from __future__ import annotations

from collections.abc import Sequence

from ahp.cluster.catalogue import Entry, lookup
from ahp.cluster.model import NodeGroup
from ahp.errors import bad_input


def joined(group: NodeGroup) -> NodeGroup:
    """The group with each NVLink domain treated as a single node.

    Its inter-node bandwidth is the sum over the domain's hosts. The last domain is treated as full even if hosts do not fill it; use ``group``
    for the real number of devices.
    """
    hosts = min(group.nodes_per_domain, group.nodes)
    if hosts == 1:
        return group
    link = group.inter_node
    if link is not None:
        link = link.model_copy(update={"bandwidth_bytes_per_s": hosts * link.bandwidth_bytes_per_s})
    update = {"nodes": -(-group.nodes // hosts), "devices_per_node": hosts * group.devices_per_node, "inter_node": link}
    return group.model_copy(update={**update, "devices_per_nvlink_domain": None})


def usual_domain(entry: Entry, nodes: int, devices_per_node: int) -> int | None:
    """Devices of a domain for ``nodes`` hosts, if the user gives none: the largest power of two of hosts that a rack holds, as jobs are placed
    (``sbatch --segment 16``, 64 devices of 72), or a rack if hosts fill racks, or only a whole one holds them all. None = no nodes joined."""
    whole = (entry.devices_per_nvlink_domain or 0) // devices_per_node
    if nodes == 1 or whole <= 1:
        return None
    even = 1 << (whole.bit_length() - 1)
    hosts = whole if nodes % whole == 0 or even < nodes <= whole else even
    return None if hosts == 1 else hosts * devices_per_node


def domain_of(device: str, nodes: int, devices_per_node: int) -> dict[str, int]:
    """The ``NodeGroup`` field for such nodes; empty unless the catalogue knows the device and its NVLink leaves the node."""
    entry = None if nodes == 1 else lookup(device)
    domain = entry and usual_domain(entry, nodes, devices_per_node)
    return {"devices_per_nvlink_domain": domain} if domain else {}


def given_domain(entry: Entry, devices: int, devices_per_node: int, where: str) -> int | None:
    """The domain that the user gives; None if it is one node. Raises BadInput for parts of nodes and for devices without NVLink."""
    key = f"{where}: devices_per_nvlink_domain"
    if not entry.has_nvlink:
        raise bad_input(key, devices, f"{entry.device.name} has no NVLink", ["null"])
    if devices % devices_per_node:
        below = devices // devices_per_node * devices_per_node
        near = [n for n in (below, below + devices_per_node) if n]
        raise bad_input(key, devices, f"a domain has whole nodes of {devices_per_node} devices", near)
    return None if devices == devices_per_node else devices


def hosts_per_domain(hosts: Sequence[int]) -> int:
    """How many hosts per domain to plan with, from the hosts in each domain of a job, in order: as many as in the first if only the last has
    fewer, else the fewest."""
    return hosts[0] if len({*hosts[:-1]}) <= 1 and hosts[-1] <= hosts[0] else min(hosts)
