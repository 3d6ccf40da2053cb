"""Nodes whose devices compute slower or faster by a ratio, and links that send slower or faster by one."""

from __future__ import annotations

from ahp.cluster.model import Link, Measurements, NodeGroup


def scaled(group: NodeGroup, ratio: float, source: str) -> NodeGroup:
    """The nodes with ``ratio`` times the seconds of every operator, in the device's figures and in measurements; links and collectives stay.

    ``source``: the reason, added to the source of the figures.
    """
    device = group.device
    slower = {
        "peak_flops_per_s": {name: peak / ratio for name, peak in device.peak_flops_per_s.items()},
        "memory_bandwidth_bytes_per_s": device.memory_bandwidth_bytes_per_s / ratio,
        "kernel_launch_s": device.kernel_launch_s * ratio,
        "source": f"{device.source}; {source}",
    }
    measured = None if group.measured is None else _measured(group.measured, ratio)
    return group.model_copy(update={"device": device.model_copy(update=slower), "measured": measured})


def scaled_link(link: Link, ratio: float, source: str) -> Link:
    """A link that takes ``ratio`` times the seconds for every message. ``source``: the reason, added to the source of its figures."""
    return Link(
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / ratio,
        latency_s=link.latency_s * ratio,
        source=f"{link.source}; {source}",
    )


def _measured(tables: Measurements, ratio: float) -> Measurements:
    timed = {
        key: tuple(one.model_copy(update={"seconds": one.seconds * ratio}) for one in getattr(tables, key))
        for key in ("matmul", "attention", "element_wise")
    }
    memory = tuple(one.model_copy(update={"bytes_per_s": one.bytes_per_s / ratio}) for one in tables.memory)
    return tables.model_copy(update={**timed, "memory": memory})
