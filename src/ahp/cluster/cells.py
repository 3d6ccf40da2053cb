"""Which devices of a cluster compute what: cells, their ranks, and the workers that have these.

A cell is one pipeline rank of one replica: ``shard x context x tensor`` devices of one group of nodes. It lies on one node,
or on whole nodes; devices that are left over stay idle. Within a group cells follow each other in the order of the mesh:
pipeline ranks slowest, then replicas. Ranks are places of the mesh. Workers are what a launcher starts and numbers: through
the groups in the cluster's order, and through a group's cells; so without ``stages``, where the cells fill the groups in the
order of the mesh, a worker's number is its rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ahp.cluster.model import Cluster, Link, NodeGroup
from ahp.plan import Parallelism


def cell_width(parallelism: Parallelism) -> int:
    """Devices of one cell."""
    p = parallelism
    return p.data_parallel_shard_degree * p.context_parallel_degree * p.tensor_parallel_degree


def cells_of(group: NodeGroup, width: int) -> int:
    """Cells of ``width`` devices that a group holds: each on one node, or on whole nodes; 0 where neither goes."""
    if width <= group.devices_per_node:
        return group.nodes * (group.devices_per_node // width)
    nodes, rest = divmod(width, group.devices_per_node)
    return 0 if rest else group.nodes // nodes


def link_between(cluster: Cluster, one: str, other: str) -> Link | None:
    """What connects two groups of a cluster, or the nodes of one; None where nothing does."""
    if one == other:
        return next(group.inter_node for group in cluster.groups if group.name == one)
    return next((found.link for found in cluster.links if set(found.between) == {one, other}), None)


@dataclass(frozen=True, slots=True)
class Cell:
    """The devices of one pipeline rank of one replica."""

    group: str
    width: int
    devices_per_node: int
    index: int
    """Among the group's cells."""
    first_rank: int
    first_worker: int
    """Both go on by one from device to device."""
    nodes_per_domain: int = 1
    """Nodes that NVLink joins."""

    def node_of(self, offset: int) -> int:
        """The node of the group that holds the cell's worker ``offset``; nodes that NVLink joins are one."""
        if self.width <= self.devices_per_node:
            return self.index // (self.devices_per_node // self.width) // self.nodes_per_domain
        return (self.index * self.width + offset) // self.devices_per_node // self.nodes_per_domain

    def shares_node(self, other: Cell) -> bool:
        """Whether all workers of both are on one node."""
        ends = {cell.node_of(offset) for cell in (self, other) for offset in (0, cell.width - 1)}
        return self.group == other.group and len(ends) == 1

    def nodes(self, count: int, stride: int) -> Iterator[int]:
        """The nodes of ``count`` of its workers, ``stride`` apart, from the first on."""
        return (self.node_of(number * stride) for number in range(count))


@dataclass(frozen=True)
class Placement:
    """All cells of a layout: ``cells[replica][pipeline rank]``."""

    cells: tuple[tuple[Cell, ...], ...]

    @cached_property
    def used(self) -> dict[str, int]:
        """Workers of each group that has some, in the order of their numbers."""
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
        place, replicas = rank // self.cells[0][0].width, len(self.cells)
        return self.cells[place % replicas][place // replicas].group


def named_groups(cluster: Cluster, parallelism: Parallelism) -> list[tuple[str, ...]] | None:
    """The group of each cell, ``[pipeline rank][replica]``: as ``stages`` says, else the groups filled in order; None when the
    cells outnumber what there is."""
    replicas, ranks = parallelism.data_parallel_replicate_degree, parallelism.pipeline_parallel_degree
    if parallelism.stages is not None:
        # The first stage of each rank; rules.illegal refuses others of it that lie elsewhere.
        return [stage.groups(replicas) for stage in parallelism.stages[:ranks]]
    width, needed = cell_width(parallelism), replicas * ranks
    names: list[str] = []
    for group in cluster.groups:
        names += [group.name] * min(cells_of(group, width), needed - len(names))
    if len(names) < needed:
        return None
    return [tuple(names[rank * replicas : (rank + 1) * replicas]) for rank in range(ranks)]


def place(cluster: Cluster, parallelism: Parallelism) -> Placement:
    """Where every cell of a legal layout lies (``ahp.forecast.rules.illegal`` has been asked)."""
    columns = named_groups(cluster, parallelism)
    assert columns is not None, "rules.illegal refuses more cells than there are"
    width = cell_width(parallelism)
    per_node = {group.name: group.devices_per_node for group in cluster.groups}
    per_domain = {group.name: group.nodes_per_domain for group in cluster.groups}
    counts = Counter(name for column in columns for name in column)
    first_worker, total = {}, 0
    for name in per_node:
        first_worker[name] = total
        total += counts[name] * width
    placed: Counter[str] = Counter()
    cells: list[list[Cell]] = []
    for column in columns:
        cells.append([])
        for name in column:
            worker = first_worker[name] + placed[name] * width
            rank = placed.total() * width
            cells[-1].append(Cell(name, width, per_node[name], placed[name], rank, worker, per_domain[name]))
            placed[name] += 1
    return Placement(tuple(zip(*cells, strict=True)))
