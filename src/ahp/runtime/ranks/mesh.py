"""The device mesh of a plan: named axes over the ranks of the job."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ahp.errors import HardwareMismatch
from ahp.plan import Axis, Parallelism
from ahp.runtime.ranks.meeting import meet
from ahp.runtime.torch_compat import default_store, flatten_axes, groups_wait, time_limit, unflatten_axis

AXES: tuple[Axis, ...] = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""As the dims of the mesh follow each other whatever the order in which ranks are numbered: FSDP2 wants ``dp_shard`` before ``tp``."""

EXPERT_AXES = ("efsdp", "ep")
"""What ``dp_shard`` of the weights is to those of experts: neighbouring ranks hold different ones and send each other their tokens;
those that hold the same ones shard them. torchtitan's names."""

WEIGHT_AXES = ("pp", "dp_replicate", "dp_shard", "tp")
"""Where weights lie. The ranks of the context axis hold the same ones, so they are further shards, or further replicas where
nothing is sharded (torchtitan's ``fsdp`` axis)."""


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands on each axis, and the process groups along them."""

    device: torch.device
    whole: DeviceMesh
    """The same ranks by ``AXES``."""
    weights: DeviceMesh
    """The same ranks by ``WEIGHT_AXES``: ``dp_replicate`` and ``dp_shard`` are what FSDP2 is given, context ranks included."""
    data: DeviceMesh
    """The flattened ``dp_replicate x dp_shard``: ranks that see different sequences."""
    sizes: dict[str, int]
    ranks: dict[str, int]
    """This rank's coordinate on each axis. Both kept here because DeviceMesh makes a new mesh at every question."""
    shards: tuple[int, int]
    """(rank, size) on the ``dp_shard`` axis of the weights."""
    num_replicas: int
    """Size of the ``dp_replicate`` axis of the weights."""
    experts: DeviceMesh | None
    """``weights`` with ``EXPERT_AXES`` in the place of ``dp_shard``; None where every rank has all experts."""

    def size(self, axis: str) -> int:
        return self.sizes[axis]

    def rank(self, axis: str) -> int:
        """This rank's coordinate on an axis."""
        return self.ranks[axis]

    def group(self, axis: str) -> dist.ProcessGroup:
        return self.holding(axis).get_group(axis)

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
        """Among the ranks that see different tokens: ``data x cp``."""
        return self.data_rank * self.size("cp") + self.rank("cp")

    def __str__(self) -> str:
        return f"rank {dist.get_rank()}: " + " ".join(f"{axis} {self.rank(axis)}/{self.size(axis)}" for axis in AXES)


def build_mesh(parallelism: Parallelism, device: torch.device) -> Mesh:
    """A mesh over the ranks of the initialised default group. Collective. Raises HardwareMismatch on another world size, NoAnswer
    with the ranks that do not come."""
    world = dist.get_world_size()
    if parallelism.world_size != world:
        raise HardwareMismatch(
            f"parallelism: its degrees multiply to {parallelism.world_size} ranks, but {world} are running "
            f"({parallelism.short()}); start {parallelism.world_size} workers or plan again for {world}"
        )
    # Groups are made within the limit of a collective, and so ranks that still build a model are waited for before.
    meet(default_store(), dist.get_rank(), world, at="making of the mesh")
    with groups_wait(time_limit(device)):
        return _build(parallelism, device)


def _build(parallelism: Parallelism, device: torch.device) -> Mesh:
    numbered = ranks_by_place(parallelism)
    whole = DeviceMesh(device.type, numbered, mesh_dim_names=AXES)
    weights = whole
    if parallelism.context_parallel_degree > 1:
        # dp_shard and cp are neighbours, and a layout that shards nothing has a dp_shard of 1: so either is a reshape.
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
        whole,
        weights,
        data,
        {**{axis: parallelism.degree(axis) for axis in AXES}, "efsdp": shards // degree, "ep": degree},
        ranks,
        (weights.get_local_rank("dp_shard"), shards),
        parallelism.weight_replicas,
        experts,
    )


def ranks_by_place(parallelism: Parallelism) -> torch.Tensor:
    """The rank at each place of the mesh, with one dim for each axis: ranks are numbered as ``mesh_order`` says."""
    numbered: list[Axis] = [*(axis for axis in AXES if parallelism.degree(axis) == 1), *parallelism.axes]
    ranks = torch.arange(parallelism.world_size).view([parallelism.degree(axis) for axis in numbered])
    # A copy: torch 2.11 reads the order of the axes off the strides, and a dim of size 1 may have any in a view.
    return ranks.permute([numbered.index(axis) for axis in AXES]).clone(memory_format=torch.contiguous_format)
