"""Where the elements of a parameter lie: a rank's part as ranges of the whole, and the whole gathered from all parts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from ahp.runtime.ranks.mesh import EXPERT_AXES, Mesh
from ahp.runtime.tensor.collectives import join_segments
from ahp.runtime.torch_compat import local_tensor
from ahp.search.slicing.placement import Split

Ranges = list[tuple[int, int]]
"""``first, end`` along one dim, in the order in which a rank holds them."""


def ranges_held(
    shape: tuple[int, ...],
    split: Split | None,
    tensor: tuple[int, int],
    shard: tuple[int, int],
    *,
    expert: tuple[int, int] = (0, 1),
    shard_dim: int = 0,
) -> dict[int, Ranges]:
    """Which part of a parameter a rank holds, keyed by dim. ``tensor``, ``shard`` and ``expert`` are (rank, size) on those axes.

    A tensor-parallel rank has its share of each segment of the split dim, an expert-parallel rank one of equal chunks of the
    experts. FSDP2 gives each shard rank one of equal chunks of those rows; the last chunks may be shorter or empty.
    """
    ranges: dict[int, Ranges] = {}
    if not shape:
        return ranges
    if split is not None:
        rank, size = tensor
        ends = list(itertools.accumulate(split.segments))
        shares = [(end - whole, whole // size) for end, whole in zip(ends, split.segments, strict=True)]
        ranges[split.dim] = [(first + rank * share, first + (rank + 1) * share) for first, share in shares]
    for (rank, size), dim in ((expert, 0), (shard, shard_dim)):
        if size > 1:
            rows = ranges.get(dim, [(0, shape[dim])])
            count = sum(end - first for first, end in rows)
            chunk = -(-count // size)
            ranges[dim] = _between(rows, min(rank * chunk, count), min((rank + 1) * chunk, count))
    return ranges


def _between(ranges: Ranges, low: int, high: int) -> Ranges:
    """The elements ``low .. high`` of the ranges put one after the other, as ranges."""
    found, passed = [], 0
    for first, end in ranges:
        a, b = max(low - passed, 0), min(high - passed, end - first)
        if a < b:
            found.append((first + a, first + b))
        passed += end - first
    return found or [(ranges[0][0], ranges[0][0])]


def cut_to(ranges: Ranges, low: int, high: int) -> list[tuple[int, int, int]]:
    """The parts of the ranges in ``low .. high``: first, end, and how many rows of the ranges come before."""
    found, passed = [], 0
    for first, end in ranges:
        a, b = max(first, low), min(end, high)
        if a < b:
            found.append((a, b, passed + a - first))
        passed += end - first
    return found


@dataclass(frozen=True)
class ParameterLayout:
    """Where the parameters of this rank's stages lie: the part that this rank holds, and how the whole is gathered."""

    mesh: Mesh
    shapes: Mapping[str, tuple[int, ...]]
    """The whole shape of every parameter of the model, keyed by the hub's names."""
    splits: Mapping[str, Split]
    """Parameters that are split over the tensor-parallel axis, and how."""
    experts: frozenset[str]
    """Parameters that are divided over the expert-parallel axis."""
    uses_fsdp: bool
    parameters: Mapping[str, nn.Parameter]
    """The parameters that this rank holds a part of; DTensors where they are split."""

    def of_blocks(self, name: str, size: int) -> ParameterLayout:
        """The layout of a tensor with one element for each block of ``size`` along a parameter's last dim, under the parameter's name."""
        *rows, columns = self.shapes[name]
        splits, split = dict(self.splits), self.splits.get(name)
        if split is not None and split.dim == len(rows):
            splits[name] = replace(split, segments=tuple(segment // size for segment in split.segments))
        return replace(self, shapes={**self.shapes, name: (*rows, columns // size)}, splits=splits)

    def ranges(self, name: str, shard_rank: int | None = None, tensor_rank: int | None = None) -> dict[int, Ranges]:
        """Which part of a parameter this rank holds, or a rank at another place on the shard and tensor axes."""
        mesh, shape, split = self.mesh, self.shapes[name], self.splits.get(name)
        shard = mesh.shards[0] if shard_rank is None else shard_rank
        tensor = (mesh.rank("tp") if tensor_rank is None else tensor_rank, mesh.size("tp"))
        if name in self.experts:
            ranks = divmod(shard, mesh.size("ep"))
            sharded, expert = zip(ranks, (mesh.size(axis) for axis in EXPERT_AXES), strict=True)
            return ranges_held(shape, split, tensor, sharded, expert=expert, shard_dim=self._shard_dim(name))
        sharded = (shard, mesh.shards[1]) if self.uses_fsdp else (0, 1)
        return ranges_held(shape, split, tensor, sharded)

    def _shard_dim(self, name: str) -> int:
        """The dim along which FSDP2 has sharded the weights of experts; 0 if it has not."""
        parameter = self.parameters[name]
        assert isinstance(parameter, DTensor)
        assert parameter.device_mesh.mesh_dim_names is not None
        if "efsdp" not in parameter.device_mesh.mesh_dim_names:
            return 0
        placement: Any = parameter.placements[parameter.device_mesh.mesh_dim_names.index("efsdp")]
        return placement.dim  # of a Shard or a _StridedShard, which is no public class

    def own_part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor that is laid out like a parameter; the inverse of ``whole``."""
        return part_of(whole, self.ranges(name))

    def whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The whole of a parameter (or of its moment) on every rank that holds a part of it. Collective among those ranks."""
        mesh, split, expert = self.mesh, self.splits.get(name), name in self.experts
        if split is None and not expert:
            return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        # Axis by axis, as DTensor itself would do for rows that are split twice, but without its warning.
        shape = list(self.shapes[name])
        if split is not None:
            shape[split.dim] //= mesh.size("tp")
        if expert:
            shape[0] //= mesh.size("ep")
        axis = "efsdp" if expert else "dp_shard"
        rows = DTensor.from_local(
            local_tensor(tensor),
            mesh.holding(axis)[axis] if expert else mesh.weights[axis],
            [Shard(self._shard_dim(name) if expert else 0)],
            run_check=False,
            shape=torch.Size(shape),
            stride=_contiguous(shape),
        )
        mine = rows.full_tensor().contiguous()
        if expert:
            mine = torch.cat(_parts(mine, mesh.group("ep")))
        return mine if split is None else join_segments(_parts(mine, mesh.group("tp")), split.dim, split.segments)


def part_of(whole: torch.Tensor, held: dict[int, Ranges]) -> torch.Tensor:
    """The part of a tensor that the ranges name; a view if possible."""
    for dim, ranges in held.items():
        pieces = [whole.narrow(dim, first, end - first) for first, end in ranges]
        whole = torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0]
    return whole


def put_part(whole: torch.Tensor, held: dict[int, Ranges], part: torch.Tensor) -> None:
    """Write a part to its place in the whole."""
    if not held:
        whole.copy_(part)
        return
    (dim, ranges), *others = held.items()
    sizes = [end - first for first, end in ranges]
    for (first, end), piece in zip(ranges, part.split(sizes, dim), strict=True):
        put_part(whole.narrow(dim, first, end - first), dict(others), piece)


def _parts(mine: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """The parts of all ranks, which have the same shape."""
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(parts, mine, group=group)
    return parts


def _contiguous(shape: list[int]) -> tuple[int, ...]:
    """Row-major strides of a shape."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides)
