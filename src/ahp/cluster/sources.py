"""What the figures of a cluster stand on, in words: datasheets, a measurement, runs that corrected them."""

from __future__ import annotations

from ahp.cluster.model import Cluster

CATALOGUE = "catalogue"
"""The source of a cluster that was not measured."""
CORRECTED = "groups corrected by"
"""What follows in the source of a mixed cluster are the runs that corrected the figures of its groups."""


def figures_of(cluster: Cluster) -> str:
    """``datasheet figures``, or who measured them and when."""
    datasheet = cluster.source.partition(",")[0] == CATALOGUE and not is_measured(cluster)
    return cluster.source.replace(CATALOGUE, "datasheet figures", 1) if datasheet else cluster.source


def stands_on(cluster: Cluster) -> str:
    """``figures_of`` the cluster, and the runs that corrected its forecasts."""
    known = cluster.groups[0].calibration  # a mixed cluster has none
    if known is None:
        return figures_of(cluster)
    times = f"{known.step_ratio:.3g} times what its figures say"
    return f"{figures_of(cluster)}; steps are forecast to take {times}, as measured in {known.source}"


def is_measured(cluster: Cluster) -> bool:
    """Whether anybody measured a group."""
    return any(group.measured is not None for group in cluster.groups)


def is_corrected(cluster: Cluster) -> bool:
    """Whether runs have corrected its forecasts."""
    return CORRECTED in cluster.source or any(group.calibration is not None for group in cluster.groups)
