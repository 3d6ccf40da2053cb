"""The device mesh of a plan: named axes over the ranks of the job.

torch's DeviceMesh has no rows of different length. If stages have different widths, each has a mesh of its own, with a ``pp`` axis of
one rank, over process groups that all ranks make in the same order; and one group holds all ranks of a replica, across its stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ahp.errors import HardwareMismatch
from ahp.plan import Axis, Parallelism
from ahp.runtime.ranks.meeting import meet
from ahp.runtime.ranks.torch_compat import default_store, flatten_axes, groups_wait, time_limit, unflatten_axis

AXES: tuple[Axis, ...] = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The order of the mesh's dims, whatever the order in which ranks are numbered: FSDP2 wants ``dp_shard`` before ``tp``."""

EXPERT_AXES = ("efsdp", "ep")
"""The two axes that ``dp_shard`` of the weights becomes for experts: neighboring ranks (``ep``) hold different experts and send each
other their tokens; ranks that hold the same experts (``efsdp``) shard them. torchtitan's names."""

WEIGHT_AXES = ("pp", "dp_replicate", "dp_shard", "tp")
"""The axes that weights lie on. The ranks of the context axis hold the same weights, so they are further shards, or further replicas
if nothing is sharded (torchtitan's ``fsdp`` axis)."""


@dataclass(frozen=True)
class Mesh:
    """This rank's place on each axis, and the process groups along the axes."""

    device: torch.device
    places: tuple[torch.Tensor, ...]
    """For each pipeline rank, its ranks indexed by replica, shard, context and tensor rank."""
    whole: DeviceMesh
    """The same ranks by ``AXES``; only those of this rank's stage if stages have different widths."""
    weights: DeviceMesh
    """The same ranks by ``WEIGHT_AXES``: ``dp_replicate`` and ``dp_shard`` are passed to FSDP2, context ranks included."""
    data: DeviceMesh
    """The flattened ``dp_replicate x dp_shard``: ranks that see different sequences."""
    sizes: dict[str, int]
    ranks: dict[str, int]
    """This rank's coordinate on each axis. Both are kept here because DeviceMesh makes a new mesh at every query."""
    shards: tuple[int, int]
    """(rank, size) on the ``dp_shard`` axis of the weights."""
    num_replicas: int
    """Size of the ``dp_replicate`` axis of the weights."""
    experts: DeviceMesh | None
    """``weights`` with ``EXPERT_AXES`` in place of ``dp_shard``; None if every rank has all experts."""
    pipeline: dist.ProcessGroup
    """The ranks that a micro-batch passes through: one per pipeline rank, or all ranks of a replica if stages have different widths."""
    joined: dict[tuple[str, ...], dist.ProcessGroup] = field(default_factory=dict)
    """The groups along one or several axes of ``weights`` if stages have different widths; all ranks have to make them together."""

    def size(self, axis: str) -> int:
        return self.sizes[axis]

    def rank(self, axis: str) -> int:
        """This rank's coordinate on an axis."""
        return self.ranks[axis]

    def group(self, axis: str) -> dist.ProcessGroup:
        return self.pipeline if axis == "pp" else self.holding(axis).get_group(axis)

    def over(self, axes: tuple[str, ...], name: str) -> dist.ProcessGroup:
        """The ranks along several axes of ``weights``. Collective."""
        return self.joined[axes] if self.joined else flatten_axes(self.weights, axes, name).get_group()

    def peers(self, pipeline_rank: int) -> torch.Tensor:
        """The ranks of a pipeline rank with this rank's replica and context rank, indexed by shard and tensor rank."""
        return self.places[pipeline_rank][self.rank("dp_replicate"), :, self.rank("cp")]

    def place_in_pipeline(self, pipeline_rank: int) -> int:
        """The place of a pipeline rank in the group ``pipeline``, or of its first rank if stages have different widths."""
        if not self.joined:
            return pipeline_rank
        return dist.get_group_rank(self.pipeline, int(self.places[pipeline_rank][self.rank("dp_replicate"), 0, 0, 0]))

    def holding(self, axis: str) -> DeviceMesh:
        """The mesh that has an axis."""
        if axis not in EXPERT_AXES:
            return self.whole
        assert self.experts is not None
        return self.experts

    @property
    def data_rank(self) -> int:
        return self.data.get_local_rank()

    @property
    def token_rank(self) -> int:
        """This rank's number among the ranks that see different tokens: ``data x cp``."""
        return self.data_rank * self.size("cp") + self.rank("cp")

    @property
    def ranks_in_a_block(self) -> int:
        """How many ranks with neighbouring ``token_rank`` exchange tokens inside of blocks: for attention, or for experts."""
        return math.lcm(self.size("cp"), 1 if self.experts is None else self.size("ep"))

    def __str__(self) -> str:
        return f"rank {dist.get_rank()}: " + " ".join(f"{axis} {self.rank(axis)}/{self.size(axis)}" for axis in AXES)


def build_mesh(parallelism: Parallelism, device: torch.device) -> Mesh:
    """A mesh over the ranks of the initialized default group. Collective. Raises HardwareMismatch on another world size, NoAnswer
    with the ranks that do not come."""
    world = dist.get_world_size()
    if parallelism.world_size != world:
        raise HardwareMismatch(
            f"parallelism: its degrees multiply to {parallelism.world_size} ranks, but {world} are running "
            f"({parallelism.short()}); start {parallelism.world_size} workers or plan again for {world}"
        )
    # Groups must be made within a collective's time limit, so first wait for the ranks that still build a model.
    meet(default_store(), dist.get_rank(), world, at="making of the mesh")
    with groups_wait(time_limit(device)):
        return (_build_by_stage if parallelism.has_unlike_widths else _build)(parallelism, device)


def _build(parallelism: Parallelism, device: torch.device) -> Mesh:
    numbered = ranks_by_place(parallelism)
    whole = DeviceMesh(device.type, numbered, mesh_dim_names=AXES)
    weights = whole
    if parallelism.context_parallel_degree > 1:
        # dp_shard and cp are neighbors, and a layout that shards nothing has a dp_shard of 1, so both cases are a reshape.
        p = parallelism
        shape = p.pipeline_parallel_degree, p.weight_replicas, p.weight_shards, p.tensor_parallel_degree
        weights = DeviceMesh(device.type, numbered.reshape(shape), mesh_dim_names=WEIGHT_AXES)
    ranks = {axis: whole.get_local_rank(axis) for axis in AXES}
    degree, shards = parallelism.expert_parallel_degree, parallelism.weight_shards
    experts = unflatten_axis(weights, "dp_shard", (shards // degree, degree), EXPERT_AXES) if degree > 1 else None
    if experts is not None:
        ranks |= {axis: experts.get_local_rank(axis) for axis in EXPERT_AXES}
    data = flatten_axes(whole, ("dp_replicate", "dp_shard"), "dp")
    return Mesh(
        device,
        ranks_by_stage(parallelism),
        whole,
        weights,
        data,
        {**{axis: parallelism.degree(axis) for axis in AXES}, "efsdp": shards // degree, "ep": degree},
        ranks,
        (weights.get_local_rank("dp_shard"), shards),
        parallelism.weight_replicas,
        experts,
        whole.get_group("pp"),
    )


STAGE_AXES, STAGE_WEIGHT_AXES = AXES[1:], WEIGHT_AXES[1:]
"""The axes of the ranks of one stage."""
DATA = ("dp_replicate", "dp_shard")
JOINED = (DATA, ("dp_shard", "tp"), (*DATA, "tp"))
"""Sets of ``STAGE_WEIGHT_AXES`` along which one joint group is needed (``Mesh.over``)."""


def _build_by_stage(parallelism: Parallelism, device: torch.device) -> Mesh:
    places, layouts = (
        ranks_by_stage(parallelism),
        [*map(parallelism.of_rank, range(parallelism.pipeline_parallel_degree))],
    )
    groups = _Groups()
    of_ranks: dict[tuple[str, ...], dist.ProcessGroup] = {}
    of_weights: dict[tuple[str, ...], dist.ProcessGroup] = {}
    for ranks, own in zip(places, layouts, strict=True):
        of_ranks |= groups.along(ranks, STAGE_AXES, (DATA,))
        of_weights |= groups.along(_by_weights(ranks, own), STAGE_WEIGHT_AXES, JOINED)
    pipelines = [
        groups.of([int(rank) for ranks in places for rank in ranks[replica].flatten()])
        for replica in range(parallelism.data_parallel_replicate_degree)
    ]
    alone = [groups.of([rank]) for rank in range(parallelism.world_size)]
    stage = next(number for number, ranks in enumerate(places) if dist.get_rank() in ranks)
    ranks, own = places[stage], layouts[stage]
    dims = [_mine(alone), *(of_ranks[axis,] for axis in STAGE_AXES)]
    weights = whole = DeviceMesh.from_group(dims, device.type, mesh=ranks[None], mesh_dim_names=AXES)
    if own.context_parallel_degree > 1:
        dims = [_mine(alone), *(of_weights[axis,] for axis in STAGE_WEIGHT_AXES)]
        held = _by_weights(ranks, own)[None]
        weights = DeviceMesh.from_group(dims, device.type, mesh=held, mesh_dim_names=WEIGHT_AXES)
    at = {axis: whole.get_local_rank(axis) for axis in AXES} | {"pp": stage}
    return Mesh(
        device,
        places,
        whole,
        weights,
        DeviceMesh.from_group(of_ranks[DATA], device.type, mesh_dim_names=("dp",)),
        {**{axis: own.degree(axis) for axis in AXES}, "efsdp": own.weight_shards, "ep": 1},
        at,
        (weights.get_local_rank("dp_shard"), own.weight_shards),
        own.weight_replicas,
        None,
        _mine(pipelines),
        of_weights,
    )


def _by_weights(ranks: torch.Tensor, own: Parallelism) -> torch.Tensor:
    """The ranks of one stage by ``STAGE_WEIGHT_AXES``; ``ranks``: the same by ``STAGE_AXES``, where ``dp_shard`` and ``cp`` are neighbors."""
    return ranks.reshape(own.weight_replicas, own.weight_shards, own.tensor_parallel_degree)


class _Groups:
    """Process groups, each made once. Every rank asks for all groups in the same order, including those that it is not in."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def of(self, ranks: list[int]) -> dist.ProcessGroup | None:
        """The group of these ranks; None if this rank is not one of them. Collective."""
        key = tuple(sorted(ranks))
        if key not in self._made:
            group = dist.new_group(list(key))
            self._made[key] = group if isinstance(group, dist.ProcessGroup) and dist.get_rank() in key else None
        return self._made[key]

    def along(
        self, ranks: torch.Tensor, names: tuple[str, ...], joined: Iterable[tuple[str, ...]]
    ) -> dict[tuple[str, ...], dist.ProcessGroup]:
        """This rank's groups along each axis and along the ``joined`` sets of axes; none if it is not in this stage. ``ranks``: those of a
        stage, by the axes ``names``. Collective."""
        found = {}
        for axes in (*((axis,) for axis in names), *joined):
            dims = [names.index(axis) for axis in axes]
            others = [dim for dim in range(len(names)) if dim not in dims]
            lines = ranks.permute(*others, *dims).reshape(-1, torch.Size(ranks.shape[dim] for dim in dims).numel())
            if (group := _mine([self.of(line) for line in lines.tolist()], needed=False)) is not None:
                found[axes] = group
        return found


def _mine(groups: list[dist.ProcessGroup | None], *, needed: bool = True) -> Any:
    """The group that this rank is in."""
    found = next((group for group in groups if group is not None), None)
    assert found is not None or not needed
    return found


def ranks_by_stage(parallelism: Parallelism) -> tuple[torch.Tensor, ...]:
    """For each pipeline rank, its ranks indexed by replica, shard, context and tensor rank."""
    if not parallelism.has_unlike_widths:
        return tuple(ranks_by_place(parallelism))
    found, first = [], 0
    for own in map(parallelism.of_rank, range(parallelism.pipeline_parallel_degree)):
        shape = [own.degree(axis) for axis in STAGE_AXES]
        size = torch.Size(shape).numel()
        found.append(torch.arange(first, first + size).view(shape))
        first += size
    return tuple(found)


def ranks_by_place(parallelism: Parallelism) -> torch.Tensor:
    """The rank at each place of a mesh of equally wide stages, with one dim for each axis; ranks are numbered in ``mesh_order``."""
    numbered: list[Axis] = [*(axis for axis in AXES if parallelism.degree(axis) == 1), *parallelism.axes]
    ranks = torch.arange(parallelism.world_size).view([parallelism.degree(axis) for axis in numbered])
    # A copy: torch 2.11 derives the order of the axes from the strides, and a dim of size 1 can have any stride in a view.
    return ranks.permute([numbered.index(axis) for axis in AXES]).clone(memory_format=torch.contiguous_format)
