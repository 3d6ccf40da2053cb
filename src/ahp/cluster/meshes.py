"""Nodes whose devices no switch joins: each pair has links of its own, and a group has the links between its members (meshes.yaml).

This is the one place that decides whether a node has a switch: the cluster's ``nvlink_switch``, else what the table knows about the device.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

from ahp.errors import bad_input
from ahp.job import Record
from ahp.shipped import shipped


class Mesh(Record):
    """One way in which the devices of a node are joined without a switch."""

    starts: tuple[str, ...]
    """Of the names of devices."""
    devices_per_node: tuple[int, ...]
    switch: Literal["never", "rarely", "usually"]
    """Whether such nodes can have one after all. ``rarely``, ``usually``: what is assumed where the cluster does not say."""
    links: int
    """Of one device."""
    rings: dict[int, int]
    """How many rings that share no link the first n devices hold."""
    source: str

    def share(self, num_devices: int) -> float:
        """Of a device's links, those that a group of ``num_devices`` on one node can use."""
        return self.rings[num_devices] / self.links


def mesh_of(device: str, devices_per_node: int, nvlink_switch: bool | None) -> Mesh | None:
    """The links of such nodes; None where every device reaches every other with all of its links, as through a switch."""
    mesh = _known(device, devices_per_node)
    if mesh is None or nvlink_switch or (nvlink_switch is None and mesh.switch == "usually"):
        return None
    return mesh


def is_open(device: str, devices_per_node: int, nvlink_switch: bool | None) -> bool:
    """Whether such a node is a whole board without a switch, or a part of one with a switch, and the cluster does not say which."""
    mesh = _known(device, devices_per_node)
    if mesh is None or mesh.switch != "usually" or nvlink_switch is not None:
        return False
    return devices_per_node == max(mesh.devices_per_node)


def on_part(device: str, devices_per_node: int, nvlink_switch: bool | None) -> bool | None:
    """``nvlink_switch`` of a group of which ``devices_per_node`` devices a node are used; None where the links of so few are not known."""
    return nvlink_switch if nvlink_switch or _known(device, devices_per_node) else None


def refuse_wrong_switch(
    key: str,
    nvlink_switch: bool | None,
    device: str,
    devices_per_node: int,
    devices_per_nvlink_domain: int | None,
    *,
    has_nvlink: bool = True,
) -> None:
    """Raises BadInput for a switch in nodes that never have one, for nodes without one whose links are not known, and without NVLink.

    ``key``: as the user has written it. ``has_nvlink``: False where the catalogue says that the device has none.
    """
    if nvlink_switch is None:
        return
    mesh = _known(device, devices_per_node)
    if nvlink_switch and mesh is not None and mesh.switch == "never":
        raise bad_input(key, nvlink_switch, f"nodes of {devices_per_node} {device} have no switch", ["false", "null"])
    if mesh is None and not has_nvlink:
        raise bad_input(key, nvlink_switch, f"{device} has no NVLink", ["null"])
    if mesh is None and not nvlink_switch:
        rule = f"the links of a node of {devices_per_node} {device} without a switch are not known{_counts(device)}"
        raise bad_input(key, nvlink_switch, rule, ["true", "null"])
    if devices_per_nvlink_domain is not None and not nvlink_switch:
        rule = f"NVLink joins {devices_per_nvlink_domain} devices of several nodes, which takes a switch"
        raise bad_input(key, nvlink_switch, rule, ["true", "null"])


def _known(device: str, devices_per_node: int) -> Mesh | None:
    return next((mesh for mesh in _of_device(device) if devices_per_node in mesh.devices_per_node), None)


def _counts(device: str) -> str:
    """The nodes of this device whose links are known, in words; empty if there are none."""
    counts = sorted({count for mesh in _of_device(device) for count in mesh.devices_per_node})
    return f", only those of nodes of {', '.join(map(str, counts))}" if counts else ""


def _of_device(device: str) -> list[Mesh]:
    return [mesh for mesh in _meshes() if device.startswith(mesh.starts)]


@cache
def _meshes() -> tuple[Mesh, ...]:
    return tuple(Mesh.model_validate(row) for row in shipped("ahp.cluster", "meshes.yaml"))
