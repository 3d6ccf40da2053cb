"""A cluster with somewhat more of one piece of its hardware, in its figures and in its measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ahp.cluster.domains import joined
from ahp.cluster.model import (
    AttentionSample,
    Cluster,
    CollectiveSample,
    ElementWiseSample,
    Link,
    MatmulSample,
    Measurements,
    MemorySample,
    NodeGroup,
)
from ahp.job import Record
from ahp.words import percent

MORE = 1.1
"""Factor by which a piece of hardware is improved: an upgrade that can be bought, and small enough that the gain per
percent can be compared between pieces."""

Better = Callable[[NodeGroup], NodeGroup]


def better_clusters(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """The cluster with ``MORE`` times one piece of hardware, for each piece that it has, and that change in words."""
    more = f"{percent(MORE - 1)} more"
    widths = [joined(group).devices_per_node for group in cluster.groups]
    links = {
        "network between nodes": [link.link for link in cluster.links] + [group.inter_node for group in cluster.groups],
        "network within nodes": [
            group.intra_node for group, width in zip(cluster.groups, widths, strict=True) if width > 1
        ],
    }
    several = cluster.num_devices > max(widths)
    for words, better in _PIECES.items():
        if (words in links and not any(links[words])) or (words == "network between nodes" and not several):
            continue
        changed = cluster.with_groups(map(better, cluster.groups))
        if words == "network between nodes":
            wider = tuple(link.model_copy(update={"link": _wider(link.link)}) for link in cluster.links)
            changed = changed.model_copy(update={"links": wider})
        yield f"{more} {words}", changed


def _device(group: NodeGroup, **figures: Any) -> NodeGroup:
    return group.model_copy(update={"device": group.device.model_copy(update=figures)})


def _more_memory(group: NodeGroup) -> NodeGroup:
    return _device(group, memory_bytes=round(MORE * group.device.memory_bytes))


def _more_bandwidth(group: NodeGroup) -> NodeGroup:
    wider = _device(group, memory_bandwidth_bytes_per_s=MORE * group.device.memory_bandwidth_bytes_per_s)
    return _remeasured(wider, _is_streaming)


def _more_flops(group: NodeGroup) -> NodeGroup:
    peaks = {precision: MORE * peak for precision, peak in group.device.peak_flops_per_s.items()}
    return _remeasured(_device(group, peak_flops_per_s=peaks), _is_arithmetic)


def _more_within(group: NodeGroup) -> NodeGroup:
    wider = group.model_copy(update={"intra_node": _wider(group.intra_node)})
    # Collectives are measured on one node.
    return _remeasured(wider, lambda sample: isinstance(sample, CollectiveSample))


def _more_between(group: NodeGroup) -> NodeGroup:
    return group if group.inter_node is None else group.model_copy(update={"inter_node": _wider(group.inter_node)})


_PIECES: dict[str, Better] = {
    "FLOPS": _more_flops,
    "memory": _more_memory,
    "memory bandwidth": _more_bandwidth,
    "network within nodes": _more_within,
    "network between nodes": _more_between,
}


def _wider(link: Link) -> Link:
    return link.model_copy(update={"bandwidth_bytes_per_s": MORE * link.bandwidth_bytes_per_s})


def _is_arithmetic(sample: Record) -> bool:
    """Whether arithmetic bounds a sample: products, fused attention, and operators that take an exponential of every element."""
    silu = isinstance(sample, ElementWiseSample) and sample.kind == "silu"
    return silu or isinstance(sample, (MatmulSample, AttentionSample))


def _is_streaming(sample: Record) -> bool:
    """Whether memory bandwidth bounds a sample: streams, and operators that compute next to nothing."""
    add = isinstance(sample, ElementWiseSample) and sample.kind == "add"
    return add or isinstance(sample, MemorySample)


def _remeasured(group: NodeGroup, improves: Callable[[Record], bool]) -> NodeGroup:
    """The group with those samples ``MORE`` times as fast for which ``improves`` is true."""
    if group.measured is None:
        return group

    def again(sample: Any) -> Any:
        if not improves(sample):
            return sample
        if isinstance(sample, MemorySample):
            return sample.model_copy(update={"bytes_per_s": MORE * sample.bytes_per_s})
        return sample.model_copy(update={"seconds": sample.seconds / MORE})

    tables = {name: tuple(map(again, getattr(group.measured, name))) for name in Measurements.model_fields}
    return group.model_copy(update={"measured": group.measured.model_copy(update=tables)})
