"""Divides Muon's matrices among the ranks that hold them: each is orthogonalized once, by its owner.

The ranks of one replica of a pipeline stage send owners their parts and get back their parts of the results, for a round of
matrices in one exchange each way; then the results go to the other replicas. Messages are in bf16, in which torch's Muon computes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ahp.runtime.ranks.mesh import Mesh
from ahp.runtime.shard.parameter_layout import ParameterLayout, Ranges, part_of, put_part
from ahp.runtime.tensor.collectives import exchange_rows
from ahp.runtime.torch_compat import orthogonalized

HELD_ELEMENTS = 2**27
"""How many elements of matrices an owner has at a time on average, and of results a replica is sent at once: 256 MiB in bf16, enough to
fill any link, little next to weights and their optimizer states. At least one matrix."""

Update = Callable[[str], torch.Tensor]
"""The name of a matrix -> this rank's part of its update before it is orthogonalized. Without side effects."""
Parts = Iterator[tuple[str, torch.Tensor]]
"""(name, this rank's part of the orthogonal matrix)."""


class LocalMatrices:
    """Every matrix on this rank, whole."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)

    def orthogonalized(self, update: Update) -> Parts:
        return ((name, orthogonalized(update(name))) for name in self.names)


@dataclass(frozen=True)
class Matrix:
    """A matrix and its owner."""

    name: str
    shape: tuple[int, int]
    replica: int
    """The replica of its owner."""
    owner: int
    """The owner's place among the ranks of that replica."""
    parts: tuple[dict[int, Ranges], ...]
    """The part that each of those ranks holds."""
    sources: tuple[int, ...]
    """Ranks that send the owner the parts: for each different part, one rank that has it."""

    def shape_of(self, place: int) -> list[int]:
        """The shape of a rank's part."""
        held = (self.parts[place].get(dim, [(0, size)]) for dim, size in enumerate(self.shape))
        return [sum(end - first for first, end in ranges) for ranges in held]

    def numel(self, place: int) -> int:
        return math.prod(self.shape_of(place))


class OwnedMatrices:
    """The matrices of this rank's stages, divided among the ranks that hold them."""

    def __init__(self, layout: ParameterLayout, names: Iterable[str]) -> None:
        """Collective."""
        mesh = layout.mesh
        self.device = mesh.device
        self.replica, self.num_replicas = mesh.weights.get_local_rank("dp_replicate"), mesh.num_replicas
        self.replicas = mesh.weights.get_group("dp_replicate")
        self.group = mesh.over(("dp_shard", "tp"), "replica")
        self.place = self.group.rank()
        places = _places(mesh, self.group)
        shapes: dict[str, tuple[int, int]] = {name: layout.shapes[name] for name in names}  # type: ignore[misc]
        num_owners = self.num_replicas * len(places)
        self.rounds: list[list[Matrix]] = []
        for some in in_rounds(shapes, num_owners):
            self.rounds.append([])
            for name, owner in assign_owners({name: shapes[name] for name in some}, num_owners).items():
                replica, place = divmod(owner, len(places))
                parts = tuple(layout.ranges(name, *at) for at in places)
                sources = sources_of(parts, places, place)
                self.rounds[-1].append(Matrix(name, shapes[name], replica, place, parts, sources))

    def orthogonalized(self, update: Update) -> Parts:
        """This rank's part of every orthogonalized matrix. Collective."""
        for matrices in self.rounds:
            ours = [m for m in matrices if m.replica == self.replica]
            owned = self._gathered(ours, update)
            for name in owned:
                owned[name] = orthogonalized(owned[name])
            parts = self._returned(ours, owned)
            owned.clear()  # frees memory before the next round
            yield from parts.items() if self.num_replicas == 1 else self._of_all_replicas(matrices, parts)
            parts.clear()

    def _gathered(self, matrices: list[Matrix], update: Update) -> dict[str, torch.Tensor]:
        """The matrices that this rank owns, whole."""
        moves = [(m, source, m.owner, source) for m in matrices for source in m.sources]
        owned: dict[str, torch.Tensor] = {}
        for m, source, part in self._exchange(moves, lambda m, _: update(m.name).bfloat16()):
            if m.name not in owned:
                owned[m.name] = part.new_empty(m.shape)
            put_part(owned[m.name], m.parts[source], part)
        return owned

    def _returned(self, matrices: list[Matrix], owned: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This rank's part of each of the matrices."""
        moves = [(m, m.owner, place, place) for m in matrices for place in range(len(m.parts))]
        arrived = self._exchange(moves, lambda m, place: part_of(owned[m.name], m.parts[place]))
        return {m.name: part for m, _, part in arrived}

    def _exchange(
        self, moves: list[tuple[Matrix, int, int, int]], piece: Callable[[Matrix, int], torch.Tensor]
    ) -> Iterator[tuple[Matrix, int, torch.Tensor]]:
        """(matrix, whose part, the part) for each part that comes to this rank. ``moves``: (matrix, from, to, whose part), the same
        on every rank."""
        if all(origin == to for _, origin, to, _ in moves):
            yield from ((m, of, piece(m, of)) for m, origin, _, of in moves if origin == self.place)
            return
        ranks = range(self.group.size())
        leaving = [[(m, of) for m, origin, to, of in moves if (origin, to) == (self.place, rank)] for rank in ranks]
        coming = [[(m, of) for m, origin, to, of in moves if (origin, to) == (rank, self.place)] for rank in ranks]
        sent, received = ([sum(m.numel(of) for m, of in some) for some in each] for each in (leaving, coming))
        nothing = torch.empty(0, device=self.device).bfloat16()
        packed = torch.cat([nothing, *(piece(m, of).reshape(-1) for some in leaving for m, of in some)])
        (arrived,) = exchange_rows((packed,), sent, received, self.group)
        flat = [(m, of) for some in coming for m, of in some]
        for (m, of), part in zip(flat, arrived.split([m.numel(of) for m, of in flat]), strict=True):
            yield m, of, part.view(m.shape_of(of))

    def _of_all_replicas(self, matrices: list[Matrix], parts: Mapping[str, torch.Tensor]) -> Parts:
        """``parts`` of this replica's matrices, and the parts of matrices of the other replicas."""
        for replica in range(self.num_replicas):
            theirs = {m.name: m for m in matrices if m.replica == replica}
            for names in _buckets({name: m.numel(self.place) for name, m in theirs.items()}):
                some = [theirs[name] for name in names]
                sizes = [m.numel(self.place) for m in some]
                if replica == self.replica:
                    packed = torch.cat([parts[m.name].reshape(-1) for m in some])
                else:
                    packed = torch.empty(sum(sizes), device=self.device).bfloat16()
                dist.broadcast(packed, group=self.replicas, group_src=replica)
                for m, part in zip(some, packed.split(sizes), strict=True):
                    yield m.name, part.view(m.shape_of(self.place))


def flops(shape: tuple[int, int]) -> int:
    """FLOPs of one Newton-Schulz iteration. With sides r <= c, the products are r x c by c x r, r x r by r x r, and r x r by r x c."""
    r, c = sorted(shape)
    return 4 * r * r * c + 2 * r**3


def assign_owners(shapes: Mapping[str, tuple[int, int]], num_owners: int) -> dict[str, int]:
    """The owner of each matrix: the most expensive first, each to whoever has the least to do (Graham's rule, at most a third
    above the best there is)."""
    load = [(0, owner) for owner in range(num_owners)]
    owners: dict[str, int] = {}
    for name in sorted(shapes, key=lambda name: (-flops(shapes[name]), name)):
        work, owner = heapq.heappop(load)
        owners[name] = owner
        heapq.heappush(load, (work + flops(shapes[name]), owner))
    return owners


def in_rounds(shapes: Mapping[str, tuple[int, int]], num_owners: int) -> list[list[str]]:
    """The matrices in order of cost, in rounds: a round has similar matrices, as many as the owners can hold."""
    ordered = sorted(shapes, key=lambda name: (-flops(shapes[name]), name))
    return _buckets({name: -(-math.prod(shapes[name]) // num_owners) for name in ordered})


def _buckets(elements: Mapping[str, int]) -> list[list[str]]:
    """Lists of consecutive names that have at most HELD_ELEMENTS together, or of a single name."""
    found: list[list[str]] = []
    room = 0
    for name, count in elements.items():
        if count > room or not found:
            found.append([])
            room = HELD_ELEMENTS
        found[-1].append(name)
        room -= count
    return found


Place = tuple[int, int]
"""A rank's place in its replica of a stage: which shard it has, and which tensor-parallel part."""


def _places(mesh: Mesh, group: dist.ProcessGroup) -> list[Place]:
    """The place of each rank of the group, in the group's order."""
    weights = mesh.weights
    assert weights.mesh_dim_names is not None
    shard, tensor = (weights.mesh_dim_names.index(axis) for axis in ("dp_shard", "tp"))
    found = []
    for rank in dist.get_process_group_ranks(group):
        at = (weights.mesh == rank).nonzero()[0].tolist()
        found.append((at[shard], at[tensor]))
    return found


def sources_of(parts: Sequence[dict[int, Ranges]], places: Sequence[Place], owner: int) -> tuple[int, ...]:
    """Ranks that together have each different part once: the owner itself first, then ranks with its tensor-parallel part."""
    found: dict[str, int] = {}
    for place in sorted(range(len(parts)), key=lambda p: (p != owner, places[p][1] != places[owner][1], p)):
        found.setdefault(repr(sorted(parts[place].items())), place)
    return tuple(sorted(found.values()))
