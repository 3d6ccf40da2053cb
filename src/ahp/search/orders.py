"""The orders of mesh axes that differ in which ranks share a node.

Only the innermost axes matter: once the ranks of an axis are a node's devices apart, each lies on another node, whatever the
order of the outer axes. So orders are built from the inside until a node is full, the other axes follow in their usual order,
and of orders that place the ranks of every group in the same way one is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import permutations
from typing import NamedTuple

from ahp.cached_method import cached_method
from ahp.forecast.groups import OF_A_REPLICA, joined
from ahp.forecast.mesh import Run, first_of, numbered_runs
from ahp.plan import AXES, Axis

Order = tuple[Axis, ...]


class Within(NamedTuple):
    """Where the groups of one replica lie: how many ranks of each group share a node."""

    tensor: int
    context: int
    expert: int
    pipeline: tuple[int, int]
    """How many ranks of a pipeline share a node; and their stride if nodes do not begin at the same place of every pipeline, else 0."""
    uneven: tuple[tuple[Axis, int], ...] = ()
    """If some axis does not fill nodes evenly, the axes in order with their degrees: they decide which groups lie on more nodes than
    others of their axis."""


class Ordered(NamedTuple):
    """One way to lay the ranks of some degrees on nodes."""

    order: Order | None
    """None = the usual one."""
    within: Within


@dataclass(frozen=True)
class Degrees:
    """Ranks along each mesh axis, and how many ranks of the data and context axes (``folded``: and of the tensor axis) share the experts."""

    of: tuple[int, ...]
    """In the order of ``AXES``."""
    expert: int
    folded: bool = False

    @cached_property
    def nest(self) -> bool:
        """Whether the ranks that share experts are whole axes and an even part of one more, in any order of axes."""
        return self.expert == 1 or all(degree & (degree - 1) == 0 for degree in (*self.of, self.expert))

    def usual(self) -> Order:
        """The axes with a degree above 1 in their usual order."""
        return tuple(axis for axis, degree in zip(AXES, self.of, strict=True) if degree > 1)


class Orders:
    """The different orders of axes on nodes of ``devices_per_node`` devices."""

    def __init__(self, devices_per_node: int, refused: Callable[[Order], str | None]) -> None:
        """``refused``: why the engine cannot number ranks in an order. Refused orders are left out, except for the usual one."""
        self.devices_per_node, self.refused = devices_per_node, cache(refused)

    def different(self, degrees: Degrees, given: Order | None = None) -> tuple[Ordered, ...]:
        """One order for each way in which ranks can lie, the usual one first; ``given``: the only order to consider."""
        if given is not None:
            usual = degrees.usual()
            if sorted(given) != sorted(usual):
                return ()
            within, _ = _lie(self.devices_per_node, degrees, given)
            return (Ordered(None if given == usual else given, within),)
        of = degrees.of
        if degrees.nest:  # then more whole nodes along an axis change nothing, except for ranks that share experts
            of = tuple(self._fewest(degree, degrees.expert) for degree in of)
        return self._different(Degrees(of, degrees.expert, degrees.folded), degrees.usual())

    def _fewest(self, degree: int, expert: int) -> int:
        """The fewest ranks of an axis that lie on nodes as ``degree`` ranks do."""
        per_node = self.devices_per_node
        return degree if degree % per_node else max(per_node, math.gcd(degree, expert))

    @cached_method
    def _different(self, degrees: Degrees, usual: Order) -> tuple[Ordered, ...]:
        found: dict[object, Ordered] = {}
        alone = math.prod(degrees.of) <= self.devices_per_node or self._only_usual(usual)
        for order in (usual,) if alone else self._orders(degrees.of, usual, degrees.nest):
            place = _lie(self.devices_per_node, degrees, order)
            found.setdefault(place, Ordered(None if order == usual else order, place[0]))
        return tuple(found.values())

    @cached_method
    def _only_usual(self, usual: Order) -> bool:
        """Whether the engine numbers ranks along these axes in the usual order alone."""
        return all(order == usual or self.refused(order) for order in permutations(usual))

    @cached_method
    def _orders(self, of: tuple[int, ...], usual: Order, nest: bool) -> tuple[Order, ...]:
        """The orders of these degrees that can place ranks differently and that the engine does not refuse; ``nest``: see ``Degrees``."""
        orders = self._from_inside(dict(zip(AXES, of, strict=True)), usual, nest)
        return tuple(order for order in orders if order == usual or not self.refused(order))

    def _from_inside(
        self, degree_of: dict[Axis, int], usual: Order, nest: bool, inner: Order = (), stride: int = 1
    ) -> Iterator[Order]:
        outer: Order = tuple(axis for axis in usual if axis not in inner)
        if not outer or (nest and stride % self.devices_per_node == 0):
            yield outer + inner
            return
        for axis in reversed(outer):
            yield from self._from_inside(degree_of, usual, nest, (axis, *inner), stride * degree_of[axis])


def _lie(per_node: int, degrees: Degrees, order: Order) -> tuple[Within, object]:
    """Where the ranks of a replica lie, and a key for where the ranks that hold the same weights lie."""
    axes, expert, alike = _axes(per_node, degrees.of, order, degrees.folded), 1, ()
    if degrees.expert > 1:
        shards = max(1, axes.holders // degrees.expert)
        expert, alike = _share_nodes(per_node, axes.holding, axes.replicas, degrees.expert, shards)
    # If every axis fills nodes evenly, the counts per node say everything; otherwise every order is taken as different.
    key = axes.data, alike, None if axes.even and degrees.nest else order
    return axes.within._replace(expert=expert), key


class _Axes(NamedTuple):
    """Where the ranks along each axis lie, however many share the experts."""

    even: bool
    """Whether every axis fills nodes evenly."""
    data: tuple[int, int]
    """How many replicas share a node, of those with shards of one replica's states, and of those with whole states."""
    within: Within
    """With one rank in each group that shares the experts."""
    holding: tuple[Run, ...]
    """The ranks of a replica that can share experts."""
    replicas: tuple[Run, ...]
    holders: int
    """How many ranks of a replica can share experts."""


@lru_cache(maxsize=1 << 16)
def _axes(per_node: int, of: tuple[int, ...], order: Order, folded: bool) -> _Axes:
    stride, even, degree_of = 1, True, dict(zip(AXES, of, strict=True))
    strides, local = dict.fromkeys(AXES, 0), dict.fromkeys(AXES, 1)
    for axis in reversed(order):
        degree = degree_of[axis]
        strides[axis], local[axis] = min(stride, per_node), min(degree, max(1, per_node // stride))
        if stride < per_node:
            whole = stride * degree
            even &= per_node % stride == 0 and (per_node % whole == 0 if whole < per_node else whole % per_node == 0)
        stride *= degree
    uneven: tuple[tuple[Axis, int], ...] = () if even else tuple((axis, degree_of[axis]) for axis in order)
    within = Within(local["tp"], local["cp"], 1, (local["pp"], 0 if even else strides["pp"]), uneven)
    axes: tuple[Axis, ...] = (*OF_A_REPLICA, "tp") if folded else OF_A_REPLICA
    data, degree = (local["dp_replicate"], local["dp_shard"]), degree_of.__getitem__
    holding, replicas = numbered_runs(order, degree, axes), numbered_runs(order, degree, ("dp_replicate",))
    return _Axes(even, data, within, holding, replicas, math.prod(map(degree, axes)))


@lru_cache(maxsize=1 << 16)
def _share_nodes(
    per_node: int, within: tuple[Run, ...], between: tuple[Run, ...], expert: int, shards: int
) -> tuple[int, tuple[int, ...]]:
    share, alike = first_of(joined(within, between), expert)
    parts = alike, *first_of(alike, shards)

    def local(ranks: tuple[Run, ...]) -> int:
        return math.prod(min(run.size, max(1, per_node // run.stride)) for run in ranks)

    return local(share), tuple(map(local, parts))
