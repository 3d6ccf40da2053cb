"""What a forecast assumes where the cluster does not say whether a switch joins the devices of a node."""

from __future__ import annotations

from ahp.cluster.meshes import is_open
from ahp.cluster.model import Cluster, NodeGroup
from ahp.forecast.axes import axes_of
from ahp.forecast.groups import data_groups
from ahp.forecast.mesh import pipeline_axis
from ahp.plan import Parallelism


def open_switch(cluster: Cluster, parallelism: Parallelism) -> str | None:
    """A remark for nodes that may be boards of four without a switch, if two or three ranks communicate within one; else None.

    Groups of four have all links of such a board, so that their forecast is the same but for sums in the switch.
    """
    for group in cluster.groups:
        if _is_open(group) and _has_small_groups(parallelism, group.devices_per_node):
            return (
                f"{group.devices_per_node} {group.device.name} may be a board without an NVLink switch, where two ranks have a third of the "
                "links and three have two thirds; a switch is assumed: nvlink_switch of the cluster (true, false) says which"
            )
    return None


def _is_open(group: NodeGroup) -> bool:
    measured = group.measured is not None and bool(group.measured.collectives)
    return not measured and is_open(group.device.name, group.devices_per_node, group.nvlink_switch)


def _has_small_groups(parallelism: Parallelism, devices_per_node: int) -> bool:
    axes = axes_of(parallelism, devices_per_node)
    groups = [axes.tensor, axes.context, axes.expert, *data_groups(parallelism, devices_per_node)]
    if parallelism.pipeline_parallel_degree > 1:
        groups.append(pipeline_axis(parallelism).pair(0, 1, devices_per_node))
    return any(group.nodes == 1 and group.size in (2, 3) for group in groups)
