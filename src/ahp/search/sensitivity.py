"""What the best plan would be on slightly better hardware: one piece of it at a time, searched again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from ahp.errors import BadInput, NotExpressible
from ahp.job import Record
from ahp.plan import Parallelism
from ahp.search.fastest import fastest
from ahp.search.one_group import Pair
from ahp.search.problem import Problem
from ahp.search.reasons import TIE
from ahp.words import percent, seconds

MORE = 1.1
"""How much more of a piece of hardware there is made to be: an upgrade that can be bought, and small enough that what it
brings per cent can be compared between pieces."""

Better = Callable[[NodeGroup], NodeGroup]


@dataclass(frozen=True)
class Move:
    """One piece of hardware improved."""

    change: str
    layout: Parallelism
    """The best there."""
    step_time_s: float
    gain: float
    """Share of today's step that is saved."""
    stays: bool
    """Whether the layout is today's."""

    def plain(self) -> dict[str, Any]:
        """As data for JSON."""
        layout = self.layout.model_dump(mode="json")
        return {"change": self.change, "parallelism": layout, "step_time_s": self.step_time_s, "gain": self.gain,
                "layout_stays": self.stays}  # fmt: skip

    def words(self) -> str:
        """One line for people."""
        if self.stays and abs(self.gain) < TIE:
            return f"{self.change}: changes nothing"
        then = "the layout stays" if self.stays else f"the best is then {self.layout.short()}"
        return f"{self.change}: {seconds(self.step_time_s)} a step, {percent(self.gain)} less; {then}"


def sensitivity(asked: Problem, layout: Parallelism) -> list[Move]:
    """The best layout with ``MORE`` of each piece of hardware, the most useful first.

    ``layout`` is a candidate everywhere, so that what the search leaves open (its cut into stages) cannot make better
    hardware look worse.
    """
    today_s = asked.price(layout).step_time_s
    found = []
    for change, cluster in better_clusters(asked.cluster):
        there = asked.on(cluster)
        kept = _kept(there, layout)
        # Of two that are as fast the one that is there already: so only what is faster by more is looked for.
        ceiling_s = float("inf") if kept is None else kept[1].step_time_s * (1 - TIE)
        pairs = [pair for pair in (kept, _searched(there, ceiling_s, layout)) if pair is not None]
        best = min(pairs, key=lambda pair: pair[1].step_time_s * (1 - TIE * (pair[0] == layout)))
        gain = 1 - best[1].step_time_s / today_s
        found.append(Move(change, best[0], best[1].step_time_s, gain, best[0] == layout))
    return sorted(found, key=lambda move: move.step_time_s)


def _searched(there: Problem, ceiling_s: float, today: Parallelism) -> Pair | None:
    found = fastest(there, ceiling_s, today)
    return None if found is None else found.best


def _kept(there: Problem, layout: Parallelism) -> Pair | None:
    try:
        return layout, there.price(layout)
    except (BadInput, NotExpressible):
        return None


def better_clusters(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """The cluster with ``MORE`` of each piece of hardware that it has, in the figures and in what was measured."""
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
        changed = cluster.model_copy(update={"groups": tuple(map(better, cluster.groups))})
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
    """Products, fused attention, and operators that take an exponential of every element."""
    silu = isinstance(sample, ElementWiseSample) and sample.kind == "silu"
    return silu or isinstance(sample, (MatmulSample, AttentionSample))


def _is_streaming(sample: Record) -> bool:
    """Streams, and operators that do next to nothing with what they read."""
    add = isinstance(sample, ElementWiseSample) and sample.kind == "add"
    return add or isinstance(sample, MemorySample)


def _remeasured(group: NodeGroup, improves: Callable[[Record], bool]) -> NodeGroup:
    """The group with those of its samples ``MORE`` times as fast which the piece of hardware improves."""
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
