"""Workers that share cores: while some wait in a pipeline, those that compute have the cores to themselves.

Probe times workers that all compute at once, each waiting for its turns on a core. A schedule leaves some workers idle, and
the others then wait less. All that compute at one moment speed up by one factor, so that the schedule runs as before, only
faster: each moment is scaled by the share of a node's workers that compute in it, the largest share of all nodes.
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
    """How many workers took turns on a core while probe timed them; 1 where each had its own core, or probe did not run."""
    cores = nodes.host.cores
    if not is_cpu(nodes.device) or cores is None or nodes.measured is None or not nodes.measured.matmul:
        return 1.0
    return max(1.0, nearest_workers(nodes.measured.matmul, nodes.devices_per_node)[0].workers / cores)


def least_share(turns: float, pipeline: int | NDArray[np.int64]) -> Floats:
    """Least factor on a schedule's seconds with all workers at once, for ``pipeline`` ranks."""
    return np.where(np.asarray(pipeline) > 1, 1.0 / turns, 1.0)


def share(timeline: Timeline, axis: PipelineAxis, devices_per_node: int, turns: float) -> float:
    """Factor on a schedule's seconds with all workers at once: the mean over time of the share of a node's workers that
    compute, at least one worker for each core."""
    spans = [
        (np.array(starts), np.array(ends)) for starts, ends in zip(timeline.starts_s, timeline.ends_s, strict=True)
    ]
    edges_s = np.unique(np.concatenate([[0.0, timeline.makespan_s], *(edge for span in spans for edge in span)]))
    # A rank does one action after another: it computes where more actions have started than ended.
    computes = [
        np.searchsorted(starts, edges_s[:-1], "right") - np.searchsorted(ends, edges_s[:-1], "right")
        for starts, ends in spans
    ]
    part = _of_nodes(axis, devices_per_node) @ np.array(computes)
    return float(np.diff(edges_s) @ np.maximum(part.max(axis=0), 1.0 / turns)) / timeline.makespan_s


def _of_nodes(axis: PipelineAxis, devices_per_node: int) -> Floats:
    """[nodes, places] Share of each node's workers that are at each place of the pipeline; equal nodes appear once."""
    ranks = Counter(
        ((place * axis.stride + offset) // devices_per_node, place)
        for place in range(axis.places)
        for offset in axis.offsets
    )
    nodes = np.zeros((max(node for node, _ in ranks) + 1, axis.places))
    for (node, place), count in ranks.items():
        nodes[node, place] = count / devices_per_node
    return np.unique(nodes, axis=0)
