"""The ranks of a collective, and what it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of one collective: how many in all, how many on one node, on how many nodes."""

    size: int
    local: int
    nodes: int


def on_nodes(size: int, local: int) -> Group:
    """A group of ``size`` ranks with ``local`` of them on each node, fewer on the last."""
    return Group(size, local, -(-size // local))


def strided_group(size: int, stride: int, devices_per_node: int) -> Group:
    """``size`` ranks, ``stride`` apart, on nodes of ``devices_per_node`` devices."""
    return on_nodes(size, min(size, max(1, devices_per_node // stride)))
