"""The groups of a plan's cluster as plain data, whichever form of a cluster its file has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ahp.cluster.model import Cluster


def plain_groups(cluster: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The groups of ``Plan.cluster``, each as ``NodeGroup`` in plain data; empty if the plan names no cluster.

    What ``ahp plan`` has written is returned as it is: an older release may have written it. A form that only a person writes, such as
    ``{nodes: 1, devices_per_node: 8, device: H100}``, is read. Raises BadInput if it is no cluster.
    """
    if cluster is None:
        return []
    groups = cluster.get("groups")
    if "groups" in cluster and not (isinstance(groups, list) and any(map(_is_by_hand, groups))):
        return cluster["groups"]
    return Cluster.resolve(cluster).plain()["groups"]


def _is_by_hand(group: Any) -> bool:
    """Whether a group's device is a name of the catalogue, or one with changes, instead of all figures."""
    device = group.get("device") if isinstance(group, dict) else None
    return isinstance(device, str) or (isinstance(device, dict) and "base" in device)
