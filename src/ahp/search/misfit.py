"""When nothing fits: the nearest miss, by how much, and what would make it fit, each checked by a search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ahp.cluster.model import Cluster, Link, NodeGroup
from ahp.config import Constraints
from ahp.errors import BadInput, NotExpressible, NothingFits
from ahp.plan import Forecast, Parallelism
from ahp.search.bounds.space_bounds import Bounds
from ahp.search.exact import Place
from ahp.search.problem import Problem
from ahp.search.reasons import needed_bytes
from ahp.search.space import Space, build
from ahp.words import gib, of_gib, part_words

NEAREST = 40
"""Layouts priced to find the one that needs the least, in the order of a lower bound of their memory."""

MOST_TIMES_MORE_NODES = 64
SHORTEST_SEQUENCE = 128


@dataclass(frozen=True)
class Nearest:
    """The layout that comes nearest to fitting."""

    layout: Parallelism
    forecast: Forecast


def nothing_fits(used: Problem, *, remedies: bool = True) -> NothingFits:
    """The error to raise when no legal layout fits, with every remedy that was found to work, where they are asked for."""
    miss = nearest(used)
    assert miss is not None, "called without a legal layout"
    lines = [
        f"nothing fits: the nearest miss, {miss.layout.short()}, {by_how_much(miss.forecast, used.capacity_bytes)}"
    ]
    if not remedies:
        return NothingFits(lines[0])
    families = freed(used), more_nodes(used), shorter(used)
    tried: list[str] = []
    for family in families:
        for words, changed in family:
            remedy = _checked(words, changed)
            if remedy is not None:
                lines.append(f"would fit: {remedy}")
                if family is not families[0]:
                    break  # of more nodes or shorter sequences the smallest change is enough
            else:
                tried.append(words)
    if len(lines) == 1:
        lines.append(f"tried, and does not fit either: {'; '.join(tried) or 'nothing, no change is known'}")
    return NothingFits("\n  ".join(lines))


def nearest(used: Problem) -> Nearest | None:
    """The legal layout that needs the least memory; the one that fits, where one does. None without a legal one."""
    try:
        space = build(used)
    except BadInput:
        return None
    found: Nearest | None = None
    for place in _by_memory(used, space):
        layout = space.layout(*place)
        try:
            forecast = used.price(layout)
        except (BadInput, NotExpressible):
            continue
        if found is None or needed_bytes(forecast) < needed_bytes(found.forecast):
            found = Nearest(layout, forecast)
        if forecast.fits:
            return Nearest(layout, forecast)
    return found


def _by_memory(used: Problem, space: Space) -> list[Place]:
    """The rows that need the least by their lower bound. A block is opened until none left can hold one of them."""
    bounds, found = Bounds(used, space), list[tuple[float, Place]]()
    blocks = bounds.blocks_bytes()
    for block in np.argsort(blocks, kind="stable").tolist():
        if len(found) == NEAREST and blocks[block] >= found[-1][0]:
            break
        needs = bounds.needs_bytes(block)
        least = np.argsort(needs, kind="stable")[:NEAREST].tolist()
        found = sorted([*found, *((float(needs[row]), (block, row)) for row in least)])[:NEAREST]
    return [place for _, place in found]


def by_how_much(forecast: Forecast, capacity_bytes: int) -> str:
    over = needed_bytes(forecast) - capacity_bytes
    need = f"needs {of_gib(needed_bytes(forecast), capacity_bytes)}"
    if over <= 0:
        return f"{need}, and fits with probability {forecast.fit_probability:.2f} only (0.95 is asked)"
    parts = sorted(forecast.memory.items(), key=lambda item: -item[1])[:2]
    most = ", ".join(f"{part_words(part)} {gib(amount)}" for part, amount in parts)
    return f"{need}, {gib(over)} too much (most of it: {most})"


def _checked(words: str, changed: Problem) -> str | None:
    """The remedy with the layout that proves it, or None when it does not help."""
    fit = nearest(changed)
    if fit is None or not fit.forecast.fits:
        return None
    return f"{words} ({fit.layout.short()}: {of_gib(needed_bytes(fit.forecast), changed.capacity_bytes)})"


def freed(used: Problem) -> Iterator[tuple[str, Problem]]:
    """Without one of the user's constraints, then without any."""
    given = used.constraints.given
    for key, value in given.items():
        freed = Constraints(**{other: kept for other, kept in given.items() if other != key})
        yield f"parallelism.{key} free instead of {value}", replace(used, constraints=freed)
    if len(given) > 1:
        yield "parallelism: auto", replace(used, constraints=Constraints())


def more_nodes(used: Problem) -> Iterator[tuple[str, Problem]]:
    """More of the same nodes; only where it is known what connects them, or what usually does."""
    if used.cluster.is_mixed:
        return
    group = used.cluster.groups[0]
    times = 2
    while times <= MOST_TIMES_MORE_NODES:
        nodes = group.nodes * times
        network = group.inter_node or _usual_network(group, nodes)
        if network is None:
            return
        larger = group.model_copy(update={"nodes": nodes, "inter_node": network})
        yield f"{nodes} nodes instead of {group.nodes}", used.on(used.cluster.model_copy(update={"groups": (larger,)}))
        times *= 2


def _usual_network(group: NodeGroup, nodes: int) -> Link | None:
    """What usually connects nodes of a device in the catalogue; None for one that is not in it."""
    try:
        usual = Cluster.from_dict(
            {"nodes": nodes, "devices_per_node": group.devices_per_node, "device": group.device.name}
        )
    except BadInput:
        return None
    return usual.groups[0].inter_node


def shorter(used: Problem) -> Iterator[tuple[str, Problem]]:
    """Shorter sequences; only where the model can be traced again from its description."""
    if used.graph.model is None:
        return
    from ahp.graph.kept import analyze

    length = used.job.sequence_length // 2
    while length >= SHORTEST_SEQUENCE:
        job = used.job.model_copy(update={"sequence_length": length})
        yield (
            f"job.sequence_length {length} instead of {used.job.sequence_length}",
            replace(used, job=job, graph=analyze(used.graph.model, job, attention=used.engine.attention)),
        )
        length //= 2
