"""Which devices of a cluster compute what: cells, their ranks, and the workers that have these ranks.

A cell is one pipeline rank of one replica: ``shard x context x tensor`` devices of one group of nodes, as wide as its stage. It lies on
one node, or on whole nodes; leftover devices stay idle. Within a group cells follow each other in the order of the mesh: pipeline ranks
slowest, then replicas; a cell that does not fit on the rest of a node begins the next node. Ranks are places in the mesh. Workers are
what a launcher starts, numbered through the groups in the cluster's order, and through the cells of a group. So without ``stages``,
when the cells fill the groups in the order of the mesh, a worker's number is its rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from ahp.cluster.model import Cluster, Link, NodeGroup
from ahp.plan import Parallelism


def cell_widths(parallelism: Parallelism) -> tuple[int, ...]:
    """Number of devices of a cell, for each pipeline rank."""
    return tuple(shard * tensor * parallelism.context_parallel_degree for shard, tensor in parallelism.widths)


def cells_of(group: NodeGroup, width: int) -> int:
    """How many cells of ``width`` devices a group holds: each on one node, or on whole nodes; 0 if neither fits."""
    if width <= group.devices_per_node:
        return group.nodes * (group.devices_per_node // width)
    nodes, rest = divmod(width, group.devices_per_node)
    return 0 if rest else group.nodes // nodes


def first_devices(group: NodeGroup, widths: Iterable[int]) -> list[int] | None:
    """The first device, among the group's, of each cell, for cells of these widths in a row; None if they do not fit."""
    found, free, per_node = [], 0, group.devices_per_node
    for width in widths:
        if width > per_node and width % per_node:
            return None
        if free % per_node and free % per_node + width > per_node:
            free += per_node - free % per_node
        found.append(free)
        free += width
    return found if free <= group.num_devices else None


def link_between(cluster: Cluster, one: str, other: str) -> Link | None:
    """The link between two groups of a cluster, or between the nodes of one; None if there is none."""
    if one == other:
        return next(group.inter_node for group in cluster.groups if group.name == one)
    return next((found.link for found in cluster.links if set(found.between) == {one, other}), None)


@dataclass(frozen=True, slots=True)
class Cell:
    """The devices of one pipeline rank of one replica."""

    group: str
    width: int
    devices_per_node: int
    first_device: int
    """Index among the group's devices."""
    first_rank: int
    first_worker: int
    """Indices, ranks and workers all go up by one from device to device."""
    nodes_per_domain: int = 1
    """Nodes that NVLink joins."""

    def node_of(self, offset: int) -> int:
        """The node of the group that holds the cell's worker ``offset``; nodes that NVLink joins count as one."""
        return (self.first_device + offset) // self.devices_per_node // self.nodes_per_domain

    def shares_node(self, other: Cell) -> bool:
        """Whether all workers of both are on one node."""
        ends = {cell.node_of(offset) for cell in (self, other) for offset in (0, cell.width - 1)}
        return self.group == other.group and len(ends) == 1

    def nodes(self, count: int, stride: int) -> Iterator[int]:
        """The nodes of ``count`` of the cell's workers, ``stride`` apart, beginning with the first."""
        return (self.node_of(number * stride) for number in range(count))


@dataclass(frozen=True)
class Placement:
    """All cells of a layout: ``cells[replica][pipeline rank]``."""

    cells: tuple[tuple[Cell, ...], ...]

    @cached_property
    def used(self) -> dict[str, int]:
        """Number of workers of each group that has any, in the order of the workers' numbers."""
        cells = sorted((cell for row in self.cells for cell in row), key=lambda cell: cell.first_worker)
        used: Counter[str] = Counter()
        for cell in cells:
            used[cell.group] += cell.width
        return dict(used)

    @property
    def workers(self) -> list[int]:
        """The number of the worker that has each rank."""
        columns = zip(*self.cells, strict=True)
        return [cell.first_worker + i for column in columns for cell in column for i in range(cell.width)]

    def group_of(self, rank: int) -> str:
        """The group whose device has a rank."""
        return next(c.group for row in self.cells for c in row if 0 <= rank - c.first_rank < c.width)


def named_groups(cluster: Cluster, parallelism: Parallelism) -> list[tuple[str, ...]] | None:
    """The group of each cell, ``[pipeline rank][replica]``: from ``stages``, or else by filling the groups in order; None when
    the groups cannot hold all cells."""
    replicas, ranks = parallelism.data_parallel_replicate_degree, parallelism.pipeline_parallel_degree
    if parallelism.stages is not None:
        # The first stage of each rank; rules.illegal refuses ranks whose other stages lie elsewhere.
        return [stage.groups(replicas) for stage in parallelism.stages[:ranks]]
    width, needed = cell_widths(parallelism)[0], replicas * ranks  # without stages all are equal
    names: list[str] = []
    for group in cluster.groups:
        names += [group.name] * min(cells_of(group, width), needed - len(names))
    if len(names) < needed:
        return None
    return [tuple(names[rank * replicas : (rank + 1) * replicas]) for rank in range(ranks)]


def place(cluster: Cluster, parallelism: Parallelism) -> Placement:
    """The place of every cell of a layout, which must be legal (``ahp.forecast.rules.illegal``)."""
    columns = named_groups(cluster, parallelism)
    assert columns is not None, "rules.illegal refuses more cells than there are"
    widths = cell_widths(parallelism)
    here: dict[str, list[tuple[int, int, int]]] = {group.name: [] for group in cluster.groups}
    first_rank = 0
    for rank, column in enumerate(columns):
        for replica, name in enumerate(column):
            here[name].append((rank, replica, first_rank))
            first_rank += widths[rank]
    cells: dict[tuple[int, int], Cell] = {}
    worker = 0
    for group in cluster.groups:
        devices = first_devices(group, [widths[rank] for rank, _, _ in here[group.name]])
        assert devices is not None, "rules.illegal refuses cells that do not fit on their group"
        for (rank, replica, first), device in zip(here[group.name], devices, strict=True):
            cells[replica, rank] = Cell(
                group.name, widths[rank], group.devices_per_node, device, first, worker, group.nodes_per_domain
            )
            worker += widths[rank]
    rows = range(parallelism.data_parallel_replicate_degree)
    return Placement(tuple(tuple(cells[replica, rank] for rank in range(len(columns))) for replica in rows))
