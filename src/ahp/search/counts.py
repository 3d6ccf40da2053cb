"""How many devices to use, if fewer than all can be better: the best plan for each number of devices.

On a given number of devices every objective is best where the step is shortest. So each number is settled by a search
for its shortest step, up to a ceiling: the step above which another number of devices is known to be better. Perfect
scaling of a plan to other numbers is no bound (fewer devices may avoid collectives, more may avoid recompute); the lower
bounds of the space on exactly that number are, and they end its search, often before a layout is priced.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from time import perf_counter

from ahp.cluster.model import Cluster
from ahp.errors import AhpError, BadInput, NothingFits
from ahp.search.by_speed import ranking_with_any_kernels
from ahp.search.choice import Choice, Settled
from ahp.search.fastest import fastest
from ahp.search.feasible_space import legal_rows
from ahp.search.method import Method
from ahp.search.misfit import more_nodes, nothing_fits
from ahp.search.objective import Objective, Scale
from ahp.search.one_group import Fastest
from ahp.search.pairs import Pair
from ahp.search.problem import OF_PLACEMENTS, Problem, with_devices
from ahp.words import WORTH_TELLING, duration, number_of, percent

ALL_UP_TO = 16
"""Every number of nodes, or of devices within a node, is tried up to here; beyond it only numbers of three significant binary digits,
20, 24, 28, 32, 40 ...: neighbors differ by at most a quarter, and few others divide into degrees."""


def smaller(cluster: Cluster) -> list[Cluster]:
    """The cluster and its parts, fewest devices first: whole nodes, or some devices of one node.

    For a mixed cluster: all of it, and each group with its parts.
    """
    if cluster.is_mixed:
        found = [cluster, *(part for group in cluster.groups for part in smaller(cluster.with_groups([group])))]
        return sorted(found, key=lambda one: one.num_devices)
    group = cluster.groups[0]
    parts = {*_numbers(group.devices_per_node), *(n * group.devices_per_node for n in _numbers(group.nodes))}
    parts.discard(cluster.num_devices)
    return [*filter(None, (with_devices(cluster, number) for number in sorted(parts))), cluster]


def _to_compare(asked: Problem) -> list[Cluster]:
    """``smaller``, with the part of the cluster that is used if no layout can use all of it."""
    clusters = smaller(asked.cluster)
    if asked.cluster.is_mixed:
        some = any(key in asked.constraints.given for key in OF_PLACEMENTS)  # a group alone has no such keys
        return [cluster for cluster in clusters if cluster.is_mixed or not some]
    try:
        used = legal_rows(asked).problem.cluster
    except AhpError:  # if no other number is legal either, that is reported later
        return clusters
    others = [cluster for cluster in clusters if cluster.num_devices != used.num_devices]
    return sorted([used, *others], key=lambda one: one.num_devices)


def _numbers(most: int) -> list[int]:
    """The numbers worth trying, up to and including ``most``."""
    found, number, step = [], 1, 1
    while number < most:
        found.append(number)
        if number >= ALL_UP_TO and number & (number - 1) == 0:
            step = number // 4
        number += step
    return [*found, most]


def choose(asked: Problem, objective: Objective, keep: int) -> Choice:
    """The best number of devices and its rivals, at most ``keep`` numbers with a plan. Raises NothingFits if no plan on
    any number of devices will do; BadInput for an objective that does not suit the cluster.
    """
    start, scale = perf_counter(), Scale(objective, asked)
    clusters = _to_compare(asked)
    if objective.name == "fewest-devices":
        settled = _that_reach(scale, clusters, keep)
    else:
        settled = _best_of_each(scale, clusters if objective.name == "cost" else clusters[::-1], keep)
    settled = _each_once(settled)
    with_plan = [one for one in settled if one.worth is not None]
    if not with_plan:
        raise _none(scale, settled)
    order = sorted(with_plan, key=lambda one: _place(objective, one))
    shown = order[:keep]
    rest = [one for one in settled if one not in shown]
    return Choice(scale, shown[0], tuple(shown[1:]), tuple(rest), perf_counter() - start)


def _place(objective: Objective, one: Settled) -> tuple[float, ...]:
    assert one.worth is not None, "only numbers of devices with a plan are sorted"
    by_devices = objective.name == "fewest-devices"
    return (one.devices, one.worth.score) if by_devices else (one.worth.score, one.devices)


def _best_of_each(scale: Scale, clusters: Iterable[Cluster], keep: int) -> list[Settled]:
    """Every number of devices, with its best plan if that can be among the best ``keep``."""
    settled: list[Settled] = []
    for cluster in clusters:
        weight = scale.weight(cluster)
        scores = sorted(one.worth.score for one in settled if one.worth is not None)
        limit = scores[keep - 1] if len(scores) >= keep else float("inf")
        ceiling_s = 0.0 if weight == float("inf") else limit / weight
        found = fastest(scale.asked.on(cluster), ceiling_s)
        if found is not None:
            settled.append(_settled(scale, found, weight))
    return settled


def _each_once(settled: Iterable[Settled]) -> list[Settled]:
    """One entry for each set of devices: the best plan of a mixed cluster may use only one of its groups, which is tried alone too."""
    found: dict[tuple[tuple[str, int, int], ...], Settled] = {}
    for one in settled:
        groups = one.found.problem.cluster.groups
        key = tuple((group.name, group.nodes, group.devices_per_node) for group in groups)
        before = found.get(key, one)
        better = one if before.worth is None else before
        found[key] = replace(better, lowest_score=min(before.lowest_score, one.lowest_score))
    return list(found.values())


def _that_reach(scale: Scale, clusters: Iterable[Cluster], keep: int) -> list[Settled]:
    """Numbers of devices, the fewest first, until ``keep`` numbers reach the target."""
    settled: list[Settled] = []
    for cluster in clusters:
        # A step of exactly the target reaches it, so the ceiling lies a rounding error above.
        found = fastest(scale.asked.on(cluster), scale.target_s * (1 + 1e-12))
        if found is None:
            continue
        reaches = found.best is not None and found.best[1].step_time_s <= scale.target_s
        settled.append(_settled(scale, found, 1.0, reaches))
        if sum(one.worth is not None for one in settled) == keep:
            break
    return settled


def _settled(scale: Scale, found: Fastest, weight: float, wanted: bool = True) -> Settled:
    worth = scale.worth(found.problem.cluster, found.best[1].step_time_s) if found.best and wanted else None
    lowest = float("inf") if found.at_least_s == float("inf") else weight * found.at_least_s
    return Settled(found, worth, lowest)


def _none(scale: Scale, settled: list[Settled]) -> AhpError:
    """The error to raise if no number of devices has a plan that will do."""
    asked = scale.asked if scale.asked.cluster.is_mixed else legal_rows(scale.asked).problem
    found = fastest(asked)
    if found is None or found.best is None:
        return _refusal_of_mixed(asked) if asked.cluster.is_mixed else nothing_fits(asked)
    if scale.objective.name == "fewest-devices":
        return _out_of_reach(scale, asked, found.best)
    apart = duration(1.0 / scale.failures(settled[0].found.problem.cluster).per_s)
    rule = f"a failure every {apart} on {number_of(settled[0].devices, 'device')} leaves no time to train, and more devices fail more often"
    key, rate = scale.failure_rate
    return BadInput(f"{key} = {rate:g}: {rule}")


def _refusal_of_mixed(asked: Problem) -> AhpError:
    """Why a mixed cluster has no plan: the error of a search for the shortest step, which finds none either."""
    try:
        ranking_with_any_kernels(asked, 1, None, Method())
    except AhpError as refusal:
        return refusal
    raise AssertionError("called without a plan")


def _out_of_reach(scale: Scale, asked: Problem, best: Pair) -> NothingFits:
    """The error with the fastest layout, by how much it misses the target, and how many nodes would reach it."""
    target = scale.objective.target_tokens_per_s or 0.0
    speed = asked.job.tokens_per_step / best[1].step_time_s
    devices = asked.cluster.num_devices
    share = f", {percent(speed / target)} of it" if speed / target >= WORTH_TELLING else ""
    missed = f"{best[0].short()}, makes {speed:,.0f} tokens/s{share}"
    rule = f"out of reach: the fastest layout of {number_of(devices, 'device')}, {missed}"
    lines = [f"objective.target_tokens_per_s = {target:g}: {rule}"]
    for words, larger in more_nodes(asked):
        found = fastest(larger, scale.target_s)
        if found is not None and found.best is not None and found.best[1].step_time_s <= scale.target_s:
            speed = asked.job.tokens_per_step / found.best[1].step_time_s
            lines.append(f"would reach it: {words} ({found.best[0].short()}: {speed:,.0f} tokens/s)")
            break
    return NothingFits("\n  ".join(lines))
