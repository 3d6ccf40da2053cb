"""Where the ranks of a layout lie: ranks are numbered along the mesh axes, the last one fastest, and fill the nodes in order."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ahp.forecast.group import Group
from ahp.plan import Axis, Parallelism


class Run(NamedTuple):
    """Ranks at equal distances."""

    size: int
    stride: int


def runs(parallelism: Parallelism, axes: Collection[Axis]) -> tuple[Run, ...]:
    """The ranks that differ only along some mesh axes, as runs of runs, the innermost first; adjacent axes are one run."""
    return numbered_runs(parallelism.axes, parallelism.degree, axes)


def numbered_runs(order: Sequence[Axis], degree_of: Callable[[Axis], int], axes: Collection[Axis]) -> tuple[Run, ...]:
    """``runs`` of ranks that are numbered along the axes of ``order``, outermost first."""
    found: list[Run] = []
    stride = 1
    for axis in reversed(order):
        degree = degree_of(axis)
        if axis in axes:
            if found and found[-1].size * found[-1].stride == stride:
                found[-1] = Run(found[-1].size * degree, found[-1].stride)
            else:
                found.append(Run(degree, stride))
        stride *= degree
    return tuple(found)


def first_of(ranks: tuple[Run, ...], count: int) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """The ``count`` innermost ranks of runs of runs, and the runs whose members are groups of these.

    Where only a part of a run belongs to them, its size is the greatest common divisor of the run's size and what is left of ``count``.
    """
    first: list[Run] = []
    rest: list[Run] = []
    for number, run in enumerate(ranks):
        last = number == len(ranks) - 1
        part = count if last or run.size % count == 0 else math.gcd(run.size, count)
        first.append(Run(part, run.stride))
        rest.append(Run(max(1, run.size // part), run.stride * part))
        count //= part
    return tuple(first), tuple(rest)


def group_of(ranks: tuple[Run, ...], devices_per_node: int, world: int) -> Group:
    """Runs of runs as the group of a collective: of all such groups among ``world`` ranks, one that reaches furthest.

    Where a run does not fill nodes evenly, some groups lie on more nodes than the first: of groups of three neighbors on
    nodes of eight, the third lies on two nodes.
    """
    size = math.prod(run.size for run in ranks)
    local = math.prod(min(run.size, max(1, devices_per_node // run.stride)) for run in ranks)
    first = Group(size, local, math.ceil(size / local))
    if world <= devices_per_node or all(_fills_nodes(run, devices_per_node) for run in ranks):
        return first
    furthest = _furthest(ranks, devices_per_node, world)
    return Group(size, min(local, furthest.local), max(first.nodes, furthest.nodes))


def _fills_nodes(run: Run, devices_per_node: int) -> bool:
    """Whether all groups of a run lie on nodes in the same way: within one node, on whole nodes, or each rank on its own node."""
    whole = run.size * run.stride
    within, beyond = devices_per_node % whole == 0, devices_per_node % run.stride == 0 and whole % devices_per_node == 0
    return within or beyond or run.stride % devices_per_node == 0


@lru_cache(maxsize=4096)
def _furthest(ranks: tuple[Run, ...], devices_per_node: int, world: int) -> Group:
    """The group on the most nodes; among these, the one with the fewest ranks on its fullest node."""
    members, starts, whole = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), 1
    for run in sorted((run for run in ranks if run.size > 1), key=lambda run: run.stride):
        # The ranks of other groups lie between the runs; they matter only for where a node begins.
        starts = _sums(starts, run.stride // whole, whole, devices_per_node)
        members = (members[:, None] + run.stride * np.arange(run.size)).ravel()
        whole = run.size * run.stride
    starts = _sums(starts, world // whole, whole, devices_per_node)
    found = [np.unique((start + members) // devices_per_node, return_counts=True)[1] for start in starts]
    nodes, local = max((len(counts), -int(counts.max())) for counts in found)
    return Group(len(members), -local, nodes)


def _sums(starts: NDArray[np.int64], count: int, stride: int, devices_per_node: int) -> NDArray[np.int64]:
    """Positions on a node of the ranks 0 .. ``count`` - 1 strides behind ``starts``."""
    steps = stride * np.arange(min(count, devices_per_node))
    # np.unique would import numpy.ma, 25 to 33 ms of the first plan in a process.
    return np.array(sorted(set(((starts[:, None] + steps) % devices_per_node).ravel().tolist())))


def axis_group(parallelism: Parallelism, axis: Axis, devices_per_node: int) -> Group:
    """The group of one mesh axis."""
    return group_of(runs(parallelism, (axis,)), devices_per_node, parallelism.world_size)


class PipelineAxis(NamedTuple):
    """How the places of a pipeline are numbered."""

    places: int
    stride: int
    """Ranks from one place to the next; this many adjacent ranks have the same place."""
    world: int

    @property
    def offsets(self) -> tuple[int, ...]:
        """The ranks of one place, counted from its first rank."""
        periods = range(0, self.world, self.places * self.stride)
        return tuple(start + offset for start in periods for offset in range(self.stride))

    def pair(self, first: int, second: int, devices_per_node: int) -> Group:
        """Two ranks of places ``first`` and ``second`` that send to each other: one of the pairs that are furthest apart."""
        period = self.places * self.stride
        # After this many periods, they begin at the same positions within nodes again.
        different = min(self.world // period, devices_per_node // math.gcd(devices_per_node, period))
        for start in range(0, different * period, period):
            ranks = (
                start + place * self.stride + offset for place in (first, second) for offset in (0, self.stride - 1)
            )
            if len({rank // devices_per_node for rank in ranks}) > 1:
                return Group(2, 1, 2)
        return Group(2, 2, 1)


def pipeline_axis(parallelism: Parallelism) -> PipelineAxis:
    """The pipeline axis of a layout."""
    places = parallelism.pipeline_parallel_degree
    found = runs(parallelism, ("pp",))
    stride = found[0].stride if found else parallelism.world_size
    return PipelineAxis(places, stride, parallelism.world_size)
