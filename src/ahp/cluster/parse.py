"""Clusters from the user's words: the short form, a dict, a file, a name.

Short form: ``[NODESx][DEVICES_PER_NODEx]DEVICE[@GBPS]``. ``8x8xH100-SXM-80GB`` is 8 nodes of 8; ``8xA100-SXM-80GB``
one node of 8; ``64xA100-SXM-80GB`` 8 nodes of 8, the usual width; ``1x64xA100-SXM-80GB`` one node of 64; ``H100`` one
device. Hosts of 4 GB200 (``64x4xGB200-NVL72``) are joined by NVLink, as the catalogue says. ``@400`` gives a node 400 Gb/s per direction
instead of the usual rate. ``+`` stands between groups of different devices: ``8xH100-SXM-80GB+2x8xA100-SXM-80GB``; a group is named after
its device, and two groups are connected by the slower of their usual networks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from ahp.cluster import catalogue
from ahp.cluster.domains import given_domain, usual_domain
from ahp.cluster.meshes import refuse_wrong_switch
from ahp.cluster.model import CLUSTER_SCHEMA_VERSION, Cluster, Device, GroupLink, Link, NodeGroup, Rate, Watts
from ahp.errors import BadInput, bad_input
from ahp.job import Record
from ahp.plan import validated
from ahp.whole_files import save
from ahp.yaml_text import read_mapping, written_yaml

_SHORT = re.compile(
    r"(?:(?P<nodes>[-+.\d]+)x)??(?:(?P<devices>[-+.\d]+)x)?(?P<device>[a-z].*?)(?:@(?P<gbps>[^@]*))?", re.I
)
_COUNT = re.compile(r"[1-9][0-9]*")
MOST_DIGITS = 9
"""The most digits of a count; Python refuses to read a number of more than 4,300."""
WIDEST_PLAIN = 8
"""Devices given without a width are one node up to this number, whatever is usual: boards for eight of every card are sold [Empirical]."""
Gbps = Annotated[float, Field(ge=1e-6)]
"""Gigabits per second, at least a thousand bits."""
NetworkKind = Literal["infiniband", "efa", "slingshot", "ethernet"]
"""``networks`` of catalogue.yaml. ethernet: RoCE, or sockets if a node has less than 100 Gb/s; efa: AWS's."""
FailureRate = Annotated[float, Field(gt=0)]


class DeviceOverrides(Record):
    """A catalogue device with some figures changed."""

    base: str
    memory_bytes: int | None = Field(default=None, ge=10**8)
    """At least 100 MB: a smaller number is one of another unit."""
    memory_bandwidth_bytes_per_s: Rate | None = None
    host_bandwidth_bytes_per_s: Rate | None = None
    power_limit_w: Watts | None = None


class GroupDescription(Record):
    """Nodes of one kind, as a user writes them."""

    name: str = "nodes"
    nodes: int = Field(default=1, ge=1, le=1_000_000)
    devices_per_node: int | None = Field(default=None, ge=1, le=10_000)
    """None = what is usual for the device."""
    devices_per_nvlink_domain: int | None = Field(default=None, ge=1)
    """Devices of the whole nodes that NVLink joins; None = what is usual for the device."""
    nvlink_switch: bool | None = None
    """Whether a switch joins the devices of a node; None = what is known about the device."""
    device: str | dict[str, Any]
    """A catalogue name, a catalogue name with overrides (``base`` and figures), or all the figures of a device."""
    inter_node_gbps: Gbps | None = None
    """Gb/s of one node, per direction; None = what is usual for the device."""
    inter_node_network: NetworkKind | None = None
    """The kind of network between nodes, which sets the time of a hop; None = what is usual for the device."""
    inter_node_latency_us: float | None = Field(default=None, ge=0)
    """Microseconds of one hop between nodes, if it was measured; None = that of ``inter_node_network``."""


class NodesDescription(GroupDescription):
    """A cluster of one kind of nodes, as a user writes it."""

    failures_per_device_hour: FailureRate | None = None
    """Failures that stop a job, per device and hour; None = the value in reliability.yaml."""


class LinkDescription(Record):
    """The connection of two groups, as a user writes it."""

    between: tuple[str, str]
    gbps: Gbps
    """Gb/s of one node, per direction."""
    latency_us: float | None = Field(default=None, ge=0)
    """Microseconds; None = that of the usual network of the first group."""


class MixedDescription(Record):
    """Groups of nodes that differ, and what connects them."""

    groups: tuple[GroupDescription, ...] = Field(min_length=1)
    links: tuple[LinkDescription, ...] = ()
    failures_per_device_hour: FailureRate | None = None


def resolve(what: Cluster | Mapping[str, Any] | str | Path) -> Cluster:
    """A cluster from anything that describes or names one. Raises BadInput if ``what`` does not."""
    if isinstance(what, Cluster):
        return what
    if isinstance(what, Mapping):
        return from_dict(dict(what))
    if isinstance(what, Path):
        return from_file(what)
    if not isinstance(what, str):
        raise bad_input("cluster", what, "must be a Cluster, a dict, a file, a short form, local, slurm or kubernetes")
    if what == "local":
        from ahp.cluster.local import local_cluster

        return local_cluster()
    name, at, gbps = what.partition("@")
    if name in ("slurm", "kubernetes"):
        from ahp.cluster import managers

        given = _gbps(gbps, what) if at else None
        return managers.slurm(gbps=given) if name == "slurm" else managers.kubernetes(gbps=given)
    if what.endswith((".yaml", ".yml", ".json")) or "/" in what or Path(what).is_file():
        return from_file(Path(what))
    return from_text(what)


def from_text(text: str) -> Cluster:
    """Read the short form (see the top of this file)."""
    if not isinstance(text, str):
        raise bad_input("cluster", text, "must be a text such as 8x8xH100-SXM-80GB")
    parts = _parts(text)
    if len(parts) == 1:
        return from_dict(_described(text), f"cluster {text!r}")
    if not all(parts):
        raise bad_input("cluster", text, "each side of + must be a group of devices, such as 8xH100+8xA100")
    groups = [_described(part) for part in parts]
    names = [re.sub(r"[^a-z0-9]+", "-", group["device"].split("-")[0].lower()) for group in groups]
    for number, (group, name) in enumerate(zip(groups, names, strict=True), 1):
        group["name"] = name if names.count(name) == 1 else f"{name}-{number}"
    return from_dict({"groups": groups}, f"cluster {text!r}")


def _parts(text: str) -> list[str]:
    """The short form of each group of nodes."""
    return [part.strip() for part in text.split("+")]


def _described(text: str) -> dict[str, Any]:
    """The description of one group, read from its short form."""
    if catalogue.lookup(text.split("@")[0]) is not None:  # device names hold an x themselves: RTX 4090, MI300X
        nodes, devices, (device, _, gbps) = None, None, text.partition("@")
    else:
        found = _SHORT.fullmatch(text.strip())
        if found is None:
            rule = "not NODESxDEVICESxDEVICE (such as 8x8xH100-SXM-80GB), nor a file"
            raise bad_input("cluster", text, rule, _turned(text))
        nodes, devices, device, gbps = found["nodes"], found["devices"], found["device"], found["gbps"] or ""
        if catalogue.lookup(device) is None and (meant := _turned(text)):
            raise bad_input("cluster", text, "the numbers stand before the device, with x between", meant)
    description: dict[str, Any] = {
        "nodes": _count("nodes", nodes, text),
        "devices_per_node": _count("devices per node", devices, text),
        "device": device,
    }
    if nodes is None and (width := _usual_width(device, description["devices_per_node"] or 1)):
        description["nodes"], rest = divmod(description["devices_per_node"], width)
        description["devices_per_node"] = width
        if rest:
            whole = [f"{(description['nodes'] + more) * width}x{device}" for more in (0, 1)]
            rule = f"{device} come in nodes of {width}, and this number does not fill whole nodes"
            raise bad_input("cluster", text, rule, [*whole, f"1x{text}"])
    if "@" in text:
        description["inter_node_gbps"] = _gbps(gbps, text)
    return description


def _turned(text: str) -> list[str]:
    """The short form that a text may mean, ``2x8H100`` or ``H100x8``: the numbers first, and ``x`` between; empty if there is none."""
    for pattern in (r"(?P<counts>[\dx]*\d)(?P<device>[a-z].*)", r"(?P<device>[a-z].*?)x(?P<counts>\d+(x\d+)?)"):
        found = re.fullmatch(pattern, text.strip(), re.I)
        if found and found["counts"].count("x") < 2 and catalogue.lookup(found["device"]) is not None:
            return [f"{found['counts']}x{found['device']}"]
    return []


def _usual_width(device: str, count: int) -> int | None:
    """Devices per node if ``count`` devices, given without a width, are more than one usual node; None if they are one."""
    entry = catalogue.lookup(device)
    if entry is None or entry.device.name == catalogue.CPU or count <= max(WIDEST_PLAIN, entry.devices_per_node):
        return None
    return entry.devices_per_node


def width_words(text: object) -> str | None:
    """A note on the assumed width of nodes, if a short form gives only devices, and more than one node holds; else None."""
    return "; ".join(filter(None, map(_width_words, _parts(text)))) or None if isinstance(text, str) else None


def _width_words(text: str) -> str | None:
    found = _SHORT.fullmatch(text)
    if found is None or found["nodes"] is not None or not _COUNT.fullmatch(found["devices"] or ""):
        return None
    count = int(found["devices"])
    width = _usual_width(found["device"], count)
    if width is None or catalogue.lookup(text.split("@")[0]) is not None:
        return None
    return f"{text} is read as {count // width} nodes of {width}, the usual width; 1x{text} is one node"


def from_dict(data: dict[str, Any], where: str = "cluster") -> Cluster:
    """Read a description or the plain form of a cluster (what ``Cluster.plain`` returns and cluster.yaml holds).

    ``where`` names the source in errors. Raises BadInput for unknown keys, unknown devices and impossible figures.
    """
    if not isinstance(data, Mapping):
        raise bad_input(
            where, data, "must be a mapping of keys, such as nodes, devices_per_node, device; or groups, links"
        )
    groups = data.get("groups")
    if isinstance(groups, (list, tuple)) and any(isinstance(g, Mapping) and "intra_node" in g for g in groups):
        version = data.get("schema_version", CLUSTER_SCHEMA_VERSION)
        if version != CLUSTER_SCHEMA_VERSION:
            raise BadInput(
                f"schema_version = {version!r}: this version of AHP reads {CLUSTER_SCHEMA_VERSION}; "
                "write it again with: ahp probe"
            )
        return validated(Cluster, data, where)
    if groups is None:
        _refuse_misspelled_groups(data, where)
        nodes = validated(NodesDescription, data, where)
        return Cluster(groups=(_group(nodes, where),), failures_per_device_hour=nodes.failures_per_device_hour)
    return _mixed(validated(MixedDescription, data, where), where)


def _refuse_misspelled_groups(data: dict[str, Any], where: str) -> None:
    """Raises BadInput for a mixed cluster whose ``groups`` is spelled wrong; read as one group, it would lack a device."""
    keys = [*NodesDescription.model_fields, "groups"]
    meant = (key for key in data if get_close_matches(str(key), keys, n=1) == ["groups"])
    if "device" not in data and (wrong := next(meant, None)) is not None:
        raise BadInput(f"{where}: {wrong}: unknown key (did you mean: groups?)")


def from_file(path: Path) -> Cluster:
    """Read cluster.yaml (or the same as JSON)."""
    data = read_mapping(path, "cluster", f"; write one with: ahp probe -o {path}")
    if "job" in data or "cluster" in data:
        raise BadInput(
            f"cluster = {str(path)!r}: a plan or a config, not a cluster; what it has under its key cluster may be a file of its own"
        )
    return from_dict(data, str(path))


def to_file(cluster: Cluster, path: Path) -> None:
    """Write cluster.yaml under another name, then rename it, so that a reader never sees half of it. Raises BadInput if it cannot be written."""
    save(path, to_text(cluster))


def to_text(cluster: Cluster) -> str:
    """The text of cluster.yaml."""
    return written_yaml(cluster.plain())


def _gbps(text: str, whole: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise bad_input("cluster", whole, f"after @ the Gb/s of one node must be a number, not {text!r}") from None


def _count(what: str, text: str | None, whole: str) -> int | None:
    if text is None:
        return 1
    if not _COUNT.fullmatch(text):
        raise bad_input("cluster", whole, f"{what} must be a whole number of at least 1, not {text!r}")
    if len(text) > MOST_DIGITS:
        raise BadInput(f"cluster: {what} has {len(text)} digits (valid: up to {MOST_DIGITS})")
    return int(text)


def _group(description: GroupDescription, where: str) -> NodeGroup:
    entry, device = _device(description.device, where)
    devices_per_node = description.devices_per_node or entry.devices_per_node
    inter_node: Link | None = None
    if description.inter_node_gbps is not None:
        inter_node = entry.network(description.inter_node_gbps, f"given by the user; {entry.network_source}")
    elif description.nodes > 1:
        inter_node = entry.inter_node(devices_per_node)
        if inter_node is None:
            raise BadInput(
                f"{where}: inter_node_gbps is missing: there is no usual network for {device.name}; give the Gb/s of one node per direction, "
                f"such as inter_node_gbps: 100, or in the short form {description.nodes}x{devices_per_node}x{device.name}@100"
            )
    inter_node = _with_hop(inter_node, description, entry, where)
    domain = usual_domain(entry, description.nodes, devices_per_node)
    if description.devices_per_nvlink_domain is not None:
        domain = given_domain(entry, description.devices_per_nvlink_domain, devices_per_node, where)
    domain = None if description.nodes == 1 else domain
    switch, key = description.nvlink_switch, f"{where}: nvlink_switch"
    refuse_wrong_switch(key, switch, device.name, devices_per_node, domain, has_nvlink=entry.has_nvlink)
    return NodeGroup(
        name=description.name,
        nodes=description.nodes,
        devices_per_node=devices_per_node,
        devices_per_nvlink_domain=domain,
        nvlink_switch=switch,
        device=device,
        intra_node=entry.intra_node,
        inter_node=inter_node,
    )


def _with_hop(link: Link | None, description: GroupDescription, entry: catalogue.Entry, where: str) -> Link | None:
    """The network with the hop latency that the user describes."""
    kind, latency_us = description.inter_node_network, description.inter_node_latency_us
    for key, value in (("inter_node_network", kind), ("inter_node_latency_us", latency_us)):
        if value is not None and link is None:
            raise bad_input(f"{where}: {key}", value, "a single node without inter_node_gbps has no network")
    if link is None or (kind is None and latency_us is None):
        return link
    if latency_us is not None and kind is not None:
        rule = "the kind of a network sets the time of a hop, and so does inter_node_latency_us: give only one"
        raise bad_input(f"{where}: inter_node_network", kind, rule)
    if latency_us is not None:
        return _with_latency(link, latency_us)
    if entry.device.name == catalogue.CPU:
        raise bad_input(f"{where}: inter_node_network", kind, "workers on a CPU use gloo over TCP; leave it out")
    assert kind is not None
    return catalogue.with_network(link, kind)


def _device(given: str | dict[str, Any], where: str) -> tuple[catalogue.Entry, Device]:
    """The catalogue entry for links and usual values, and the device with the user's figures."""
    if isinstance(given, str):
        entry = catalogue.find(given)
        return entry, entry.device
    if "base" not in given and "name" in given:
        device = validated(Device, given, f"{where}: device")
        return catalogue.find(device.name, "device.name"), device
    overrides = validated(DeviceOverrides, given, f"{where}: device")
    entry = catalogue.find(overrides.base, "device.base")
    figures = overrides.model_dump(exclude={"base"}, exclude_none=True)
    if not figures:
        return entry, entry.device
    source = f"{', '.join(figures)}: given by the user; {entry.device.source}"
    return entry, entry.device.model_copy(update={**figures, "source": source})


def _mixed(description: MixedDescription, where: str) -> Cluster:
    groups = tuple(_group(g, f"{where}: groups.{i}") for i, g in enumerate(description.groups))
    names = [group.name for group in groups]
    if len(set(names)) < len(names):
        raise BadInput(f"{where}: groups.name = {names}: every group of a mixed cluster needs its own name")
    given: dict[frozenset[str], GroupLink] = {}
    for link in description.links:
        for name in link.between:
            if name not in names:
                raise bad_input(f"{where}: links.between", name, "no group has this name", names)
        pair = frozenset(link.between)
        if len(pair) < 2 or pair in given:
            raise bad_input(
                f"{where}: links.between", list(link.between), "must be two different groups, each pair once", names
            )
        given[pair] = GroupLink(between=link.between, link=_given_link(link, description.groups[0]))
    pairs = combinations(zip(groups, description.groups, strict=True), 2)
    links = tuple(
        given.get(frozenset((a.name, b.name))) or _usual_link(a, a_words, b, b_words, where)
        for (a, a_words), (b, b_words) in pairs
    )
    return Cluster(groups=groups, links=links, failures_per_device_hour=description.failures_per_device_hour)


def _given_link(link: LinkDescription, any_group: GroupDescription) -> Link:
    entry, _ = _device(any_group.device, "groups.0")
    network = entry.network(link.gbps, f"given by the user; {entry.network_source}")
    return network if link.latency_us is None else _with_latency(network, link.latency_us)


def _with_latency(network: Link, latency_us: float) -> Link:
    return catalogue.with_latency(network, latency_us * 1e-6, "given by the user")


def _usual_link(
    a: NodeGroup, a_words: GroupDescription, b: NodeGroup, b_words: GroupDescription, where: str
) -> GroupLink:
    """The connection of two groups when the user gives none: the slower of their networks."""
    networks = []
    for group, words in ((a, a_words), (b, b_words)):
        network = group.inter_node or _device(words.device, where)[0].inter_node(group.devices_per_node)
        if network is None:
            raise bad_input(
                "links",
                [],
                f"add {{between: [{a.name}, {b.name}], gbps: 100}}, or in the short form @100 after {group.device.name}, which has no usual "
                "network",
            )
        networks.append(network)
    slower = min(networks, key=lambda network: network.bandwidth_bytes_per_s)
    source = f"links not given: the slower network of the two groups; {slower.source}"
    return GroupLink(between=(a.name, b.name), link=slower.model_copy(update={"source": source}))
