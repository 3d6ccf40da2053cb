"""Workers that share cores: while some wait in a pipeline, those that compute have the cores to themselves.

Probe times workers that all compute at once, each waiting for its turns on a core. A schedule leaves some idle, and then
the others wait less. All that compute at one moment are faster by one factor, so that they stay in step, and the schedule
runs as it does with all at once, only that time passes faster: each moment takes the part of a node's workers that compute
in it, of several nodes the largest.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from ahp.arrays import Floats
from ahp.cluster.model import NodeGroup
from ahp.forecast.efficiency import is_cpu
from ahp.forecast.mesh import PipelineAxis
from ahp.forecast.tables import nearest_workers
from ahp.schedule.simulate import Timeline


def turns(nodes: NodeGroup) -> float:
    """Workers that took turns on a core while they were timed; 1 where each had its own, or nobody timed them."""
    cores = nodes.host.cores
    if not is_cpu(nodes.device) or cores is None or nodes.measured is None or not nodes.measured.matmul:
        return 1.0
    return max(1.0, nearest_workers(nodes.measured.matmul, nodes.devices_per_node)[0].workers / cores)


def least_share(turns: float, pipeline: int | NDArray[np.int64]) -> Floats:
    """Of its seconds with all workers at once, what a schedule over so many pipeline ranks takes at least."""
    return np.where(np.asarray(pipeline) > 1, 1.0 / turns, 1.0)


def share(timeline: Timeline, axis: PipelineAxis, devices_per_node: int, turns: float) -> float:
    """Of its seconds with all workers at once, what a schedule takes: the mean over time of the part of a node's workers that
    compute, at least a worker for each core."""
    spans = [
        (np.array(starts), np.array(ends)) for starts, ends in zip(timeline.starts_s, timeline.ends_s, strict=True)
    ]
    edges_s = np.unique(np.concatenate([[0.0, timeline.makespan_s], *(edge for span in spans for edge in span)]))
    # A rank does one thing after another: it computes where more has started than ended.
    computes = [
        np.searchsorted(starts, edges_s[:-1], "right") - np.searchsorted(ends, edges_s[:-1], "right")
        for starts, ends in spans
    ]
    part = _of_nodes(axis, devices_per_node) @ np.array(computes)
    return float(np.diff(edges_s) @ np.maximum(part.max(axis=0), 1.0 / turns)) / timeline.makespan_s


def _of_nodes(axis: PipelineAxis, devices_per_node: int) -> Floats:
    """[nodes, places] Of each node's workers, those of each place of the pipeline; nodes that are alike once."""
    ranks = Counter(
        ((place * axis.stride + offset) // devices_per_node, place)
        for place in range(axis.places)
        for offset in axis.offsets
    )
    nodes = np.zeros((max(node for node, _ in ranks) + 1, axis.places))
    for (node, place), count in ranks.items():
        nodes[node, place] = count / devices_per_node
    return np.unique(nodes, axis=0)
