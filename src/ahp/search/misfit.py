"""What to say when nothing fits: the nearest miss, by how much it misses, and changes that make it fit, each checked by a search."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice

import numpy as np

from ahp.cluster.model import Cluster, NodeGroup
from ahp.cluster.parse import WIDEST_PLAIN
from ahp.config import Constraints
from ahp.errors import BadInput, NothingFits
from ahp.forecast.efficiency import is_cpu
from ahp.plan import Forecast, Parallelism
from ahp.search.bounds.level import TOGETHER
from ahp.search.bounds.space_bounds import Bounds
from ahp.search.exact import Place
from ahp.search.pairs import Pair
from ahp.search.problem import Problem
from ahp.search.space import build
from ahp.stage_place import in_words
from ahp.words import gib, of_gib, part_words

NEAREST = 40
"""Most layouts priced to find the one that needs the least memory, in the order of a lower bound of it."""

MAY_FIT = 80
"""Most layouts priced to find one that fits."""

CHUNK_TOKENS = 2048
"""Tokens of a chunk of the loss that is tried (docs/runtime/compute.md)."""

TIMES_MORE_NODES = (2, 4, 8, 16, 32, 64)
SHORTEST_SEQUENCE = 128

Changes = Iterable[tuple[str, Problem]]
"""Changes to a problem, each in words and made."""

Fits = Callable[[Problem], str | None]
"""A layout of a problem that fits, in words; None if none does."""


def nothing_fits(used: Problem, *, remedies: bool = True) -> NothingFits:
    """The error to raise when no legal layout fits; with ``remedies``, it lists the changes that were found to work."""
    miss = nearest(used)
    assert miss is not None, "called without a legal layout"
    layout, forecast = miss
    lines = [f"nothing fits: the nearest miss, {layout.short()}, {by_how_much(forecast, used.capacity_bytes)}"]
    if not remedies:
        return NothingFits(lines[0])
    each = ([one] for one in freed(used))
    found = what_helps(
        [*each, lighter(used), more_devices(used), more_nodes(used), shorter(used, _fits)],
        _fits,
        _larger_and_shorter(used),
    )
    return NothingFits("\n  ".join([*lines, *found]))


def what_helps(families: Iterable[Changes], fits: Fits, last: Changes = ()) -> list[str]:
    """The first change of each family that makes something fit, or else of ``last``, each with what then fits; or what was tried in vain."""
    found, tried = list[str](), list[str]()
    for family in families:
        for words, changed in family:
            if (fit := fits(changed)) is not None:
                found.append(f"would fit: {words} ({fit})")
                break
            tried.append(words)
    if not found:
        last_fits = ((words, fits(changed)) for words, changed in last)
        found = [f"would fit: {words} ({fit})" for words, fit in last_fits if fit is not None][:1]
    return found or [f"tried, and does not fit either: {'; '.join(tried) or 'nothing, no change is known'}"]


def _larger_and_shorter(used: Problem) -> Changes:
    """Shorter sequences on the most devices that a node is known to hold."""
    for words, larger in [*more_devices(used)][-1:]:
        yield from ((f"{words} and {more}", changed) for more, changed in shorter(larger, _fits))


def nearest(used: Problem, *, fitting: bool = False) -> Pair | None:
    """The first layout found that fits, else the legal layout that needs the least memory. None if no layout is legal, and on mixed clusters,
    whose placements have no order by memory. ``fitting``: None if none fits, which takes a fraction of the time."""
    if used.cluster.is_mixed:
        return None
    try:
        space = build(used)
    except BadInput:
        return None
    bounds, found = Bounds(used, space), None
    for place in islice(_that_may_fit(bounds), MAY_FIT) if fitting else _by_memory(bounds):
        layout = space.layout(*place)
        if (forecast := used.price_or_none(layout)) is None:
            continue
        if found is None or forecast.needed_bytes < found[1].needed_bytes:
            found = layout, forecast
        if forecast.fits:
            return layout, forecast
    return None if fitting else found


def _by_memory(bounds: Bounds) -> list[Place]:
    """The ``NEAREST`` rows with the lowest memory bounds. Blocks are opened until none left can hold one of these rows."""
    blocks, found = bounds.blocks_bytes(), list[tuple[float, Place]]()
    for block in np.argsort(blocks, kind="stable").tolist():
        if len(found) == NEAREST and blocks[block] >= found[-1][0]:
            break
        needs = bounds.needs_bytes(block)
        least = np.argsort(needs, kind="stable")[:NEAREST].tolist()
        found = sorted([*found, *((float(needs[row]), (block, row)) for row in least)])[:NEAREST]
    return [place for _, place in found]


def _that_may_fit(bounds: Bounds) -> Iterator[Place]:
    """The row with the lowest memory bound of each block that may fit; the blocks with the lowest bounds first."""
    blocks, most = bounds.blocks_bytes(), bounds.most_that_fits_bytes()
    order = np.argsort(blocks, kind="stable")[: int((blocks <= most).sum())].tolist()
    for at in range(0, len(order), TOGETHER):
        for block in bounds.that_may_fit(order[at : at + TOGETHER]):
            needs = bounds.needs_bytes(block)
            if needs.min() <= most:
                yield block, int(needs.argmin())


def by_how_much(forecast: Forecast, capacity_bytes: int) -> str:
    over = forecast.needed_bytes - capacity_bytes
    need = f"needs {of_gib(forecast.needed_bytes, capacity_bytes)}"
    if over <= 0:
        return f"{need}, and fits with probability {forecast.fit_words} only (0.95 is asked)"
    parts = sorted(forecast.memory.items(), key=lambda item: -item[1])[:2]
    most = ", ".join(f"{part_words(part)} {gib(amount)}" for part, amount in parts)
    return f"{need}, {gib(over)} too much (most of it: {most})"


def _fits(changed: Problem) -> str | None:
    """A layout that fits, in words; None if none does."""
    if (fit := nearest(changed, fitting=True)) is None:
        return None
    return f"{fit[0].short()}: {of_gib(fit[1].needed_bytes, changed.capacity_bytes)}"


def freed(used: Problem) -> Changes:
    """The problem without each of the user's constraints in turn, then without any."""
    given = used.constraints.given
    for key, value in given.items():
        freed = Constraints(**{other: kept for other, kept in given.items() if other != key})
        yield f"parallelism.{key} free instead of {in_words(value)}", replace(used, constraints=freed)
    if len(given) > 1:
        yield "parallelism: auto", replace(used, constraints=Constraints())


def lighter(used: Problem) -> Changes:
    """Settings of the engine with which the same job needs less memory: the loss in chunks, AdamW's moments in host memory, and both."""
    found: dict[str, int | bool] = {}
    if used.engine.loss_chunk_tokens is None and used.job.sequence_length > CHUNK_TOKENS:
        found["loss_chunk_tokens"] = CHUNK_TOKENS
    if not used.engine.offload_optimizer and not any(is_cpu(group.device) for group in used.cluster.groups):
        found["offload_optimizer"] = True
    both = [found] if len(found) > 1 else []
    for settings in [*({key: value} for key, value in found.items()), *both]:
        changed = replace(used, engine=used.engine.model_copy(update=settings))
        if changed.refused(Parallelism()) is None:
            yield " and ".join(f"engine.{key} {str(value).lower()}" for key, value in settings.items()), changed


def more_devices(used: Problem) -> Changes:
    """More of the same devices in a single node, if it is known what connects them. Not for CPUs: workers on a processor share its
    memory."""
    group = used.cluster.groups[0]
    if used.cluster.is_mixed or group.nodes > 1 or is_cpu(group.device):
        return
    for count in (2, 4, WIDEST_PLAIN):
        if count > group.devices_per_node and (usual := _usual(group, 1, count)) is not None:
            node = Cluster(groups=(usual.model_copy(update={"device": group.device}),))
            yield f"{count} devices instead of {group.devices_per_node}", used.on(node)


def _usual(group: NodeGroup, nodes: int, per_node: int) -> NodeGroup | None:
    """Devices of the group's kind with their usual links; None for a device that is not in the catalog."""
    with suppress(BadInput):
        return Cluster.from_dict({"nodes": nodes, "devices_per_node": per_node, "device": group.device.name}).groups[0]


def more_nodes(used: Problem) -> Changes:
    """More of the same nodes, if it is known what connects them or what usually does."""
    if used.cluster.is_mixed:
        return
    group = used.cluster.groups[0]
    for times in TIMES_MORE_NODES:
        nodes = group.nodes * times
        usual = _usual(group, nodes, group.devices_per_node)
        network = group.inter_node or (usual and usual.inter_node)
        if network is None:
            return
        larger = group.model_copy(update={"nodes": nodes, "inter_node": network})
        yield f"{nodes} nodes instead of {group.nodes}", used.on(used.cluster.with_groups([larger]))


def shorter(used: Problem, fits: Callable[[Problem], object]) -> Changes:
    """Shorter sequences, if the model can be traced again from its description.

    ``fits``: whether a problem has a layout that fits. The shortest length is checked first: if nothing fits there, it alone is yielded.
    """
    if used.graph.model is None:
        return
    # Powers of two, whose graphs are shipped or kept already where the length asked for is none.
    powers = (1 << power for power in reversed(range((used.job.sequence_length - 1).bit_length())))
    lengths = [length for length in powers if length >= SHORTEST_SEQUENCE]
    if not lengths:
        return
    shortest = _with_sequence(used, lengths[-1])
    for length in lengths if fits(shortest) else lengths[-1:]:
        changed = shortest if length == lengths[-1] else _with_sequence(used, length)
        yield f"job.sequence_length {length} instead of {used.job.sequence_length}", changed


def _with_sequence(used: Problem, length: int) -> Problem:
    from ahp.graph.kept import analyze

    job = used.job.model_copy(update={"sequence_length": length})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the user was warned about the requested length, and did not request these
        graph = analyze(used.graph.model, job, attention=used.engine.attention)
    return replace(used, job=job, graph=graph)
