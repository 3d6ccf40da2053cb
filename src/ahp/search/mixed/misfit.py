"""When nothing fits, on one group or over several: the nearest miss, and what would make it fit, each checked by a search."""

from __future__ import annotations

from bisect import bisect_left

from ahp.cluster.model import NodeGroup
from ahp.errors import AhpError, NothingFits
from ahp.search.misfit import Changes, Fits, by_how_much, freed, lighter, nearest, shorter, what_helps
from ahp.search.mixed.explain import on_fullest
from ahp.search.mixed.find import Budget, MixedOutcome, find_over
from ahp.search.mixed.space import spaces_of
from ahp.search.mixed.widths import given_widths
from ahp.search.pairs import Pair
from ahp.search.problem import Problem

FEW = Budget(shapes=10, forecasts=200, near=0, every=False, bound=False)
"""A small search that finds whether something fits."""

MORE_NODES = (2, 4, 8, 16)
"""Factors by which a group's nodes are multiplied."""


def nothing_fits_anywhere(
    asked: Problem, over: MixedOutcome | None, alone: list[tuple[str, str]], *, remedies: bool
) -> NothingFits:
    """The error to raise, with every remedy that was found to work, where they are asked for."""
    lines = ["nothing fits, on one group or over several"]
    if over is not None and over.misfits:
        lines.append(_nearest_miss(asked, over))
    elif over is not None and over.size:
        lines.append(f"over several groups: all {over.size:,} shapes need more memory than their devices have")
    lines += [f"{name} alone: {refusal.splitlines()[0]}" for name, refusal in alone]
    if not remedies:
        return NothingFits("\n  ".join(lines))
    known: dict[int, tuple[Problem, str | None]] = {}

    def fits(changed: Problem) -> str | None:
        if id(changed) not in known:
            known[id(changed)] = changed, that_fits(changed, asked)
        return known[id(changed)][1]

    found = what_helps((freed(asked), lighter(asked), _more_nodes(asked, fits), shorter(asked, fits)), fits)
    return NothingFits("\n  ".join([*lines, *found]))


def _nearest_miss(asked: Problem, over: MixedOutcome) -> str:
    def capacity(pair: Pair) -> int:
        return on_fullest(asked, pair).capacity_bytes

    miss = min(over.misfits, key=lambda pair: pair[1].needed_bytes / capacity(pair))
    return f"over several groups the nearest miss, {miss[0].short()}, {by_how_much(miss[1], capacity(miss))}"


def that_fits(changed: Problem, asked: Problem | None = None) -> str | None:
    """A layout that fits, in words; None where a brief search finds none. ``asked``: the problem before the change, in which nothing fits."""
    known: tuple[NodeGroup, ...] = ()
    kept = "job", "constraints", "engine"
    if asked is not None and all(getattr(changed, key) == getattr(asked, key) for key in kept):
        known = asked.cluster.groups
    placed = changed.constraints.stages is not None or changed.constraints.micro_batches_per_replica is not None
    try:
        for group in changed.cluster.groups:
            if placed or group in known:
                continue
            alone = changed.on(changed.cluster.with_groups([group]))
            if (found := nearest(alone, fitting=True)) is not None:
                return f"{group.name} alone: {found[0].short()}"
        if (only := given_widths(changed)) is not None:
            return only.short() if changed.price(only).fits else None
        spaces = spaces_of(changed)
        if not spaces or spaces[0].refusal() is not None:
            return None
        outcome = find_over(changed, spaces, FEW, float("inf"), 1)
    except AhpError:
        return None
    return outcome.fitting[0][0].short() if outcome.fitting else None


def _more_nodes(asked: Problem, fits: Fits) -> Changes:
    """More nodes in one of the groups, where the link between its nodes is known: the fewest that help, or the most that are tried.

    ``fits``: returns None where nothing fits. The most nodes are tried first: where even they do not help, fewer are not tried.
    """
    found: list[tuple[int, str, Problem]] = []
    for group in asked.cluster.groups:
        if group.inter_node is None:
            continue
        larger = {times: _with_nodes(asked, group, times) for times in MORE_NODES}
        *fewer, most = MORE_NODES
        times = most
        if fits(larger[most][1]):
            times = MORE_NODES[bisect_left(fewer, True, key=lambda times: fits(larger[times][1]) is not None)]
        found.append((times, *larger[times]))
    yield from (more[1:] for more in sorted(found, key=lambda more: more[0]))


def _with_nodes(asked: Problem, group: NodeGroup, times: int) -> tuple[str, Problem]:
    more = group.model_copy(update={"nodes": group.nodes * times})
    larger = asked.cluster.with_groups(more if one is group else one for one in asked.cluster.groups)
    return f"{more.nodes} nodes in {group.name} instead of {group.nodes}", asked.on(larger)
