"""How ranks share a stage's weights: what they gather and reduce, in which groups, and how long each collective takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from ahp.cluster.model import NodeGroup
from ahp.engines.traits import ALL_ELEMENTS, Traits
from ahp.forecast.axes import ALONE
from ahp.forecast.communication import Times
from ahp.forecast.efficiency import is_cpu
from ahp.forecast.group import CollectiveKind, Group
from ahp.forecast.unit import Unit


class CommUnit(NamedTuple):
    """Elements of one unit of communication on one rank."""

    dense: int
    experts: int = 0
    tensors: tuple[int, ...] = ()
    """Elements of each weight in it, in the order of the forward pass; empty = one weight."""
    in_block: bool = False

    @property
    def total(self) -> int:
        return self.dense + self.experts

    @classmethod
    def of(cls, unit: Unit) -> CommUnit:
        """The unit of a block."""
        held = unit.weights
        return cls(held.parameters - held.experts, held.experts, held.tensors, in_block=True)

    def pieces(self, bucket: int) -> int:
        """How many collectives send the unit, where each takes whole weights until they have ``bucket`` elements; 0 = one collective."""
        return _pieces(self.tensors, bucket) if bucket else 1


@cache
def _pieces(tensors: tuple[int, ...], bucket: int) -> int:
    count = held = 0
    for elements in reversed(tensors):
        held += elements
        if held >= bucket:
            count, held = count + 1, 0
    return max(1, count)


class StageParameters(NamedTuple):
    """Elements of one stage on one rank."""

    dense: int
    experts: int
    first: bool
    """Whether the stage is the pipeline's first."""


@dataclass(frozen=True)
class DataParallel:
    """The groups over which a rank's weights are sharded and replicated, and what goes over them."""

    shard: Group
    replicate: Group
    traits: Traits
    micro_batches: int
    overlap: float
    """Share of a collective that can hide behind computation on this device: 0 on a CPU."""
    experts: tuple[Group, Group] = (ALONE, ALONE)
    """``shard`` and ``replicate`` for the weights of experts, which an expert-parallel group has once."""
    operator_s: float = 0.0
    """Host time of one operator."""
    host_is_device: bool = False
    """Whether operators wait for the host one by one (a CPU), instead of running behind it."""

    @classmethod
    def on(
        cls,
        nodes: NodeGroup,
        traits: Traits,
        micro_batches: int = 1,
        data: tuple[Group, Group] = (ALONE, ALONE),
        experts: tuple[Group, Group] = (ALONE, ALONE),
    ) -> DataParallel:
        """On nodes of one kind; ``data``: the groups of ``data_groups``, ``experts``: of ``expert_groups``."""
        on_cpu = is_cpu(nodes.device)
        overlap, operator_s = 0.0 if on_cpu else 1.0, nodes.device.kernel_launch_s
        return cls(*data, traits, micro_batches, overlap, experts, operator_s, on_cpu)

    @property
    def launch_s(self) -> float:
        """Seconds in which the host launches an operator of the model while the device goes on; 0 on a CPU, where the two are one."""
        return 0.0 if self.host_is_device else self.traits.host.launches_per_operator * self.operator_s

    @property
    def weight_bytes(self) -> int:
        """Bytes of one weight element as it is gathered."""
        return self.traits.states.compute_weight_bytes or self.traits.states.master_weight_bytes

    @property
    def _gradient_bytes(self) -> float:
        """Bytes of gradients sent per weight element, trained or not."""
        return self.traits.reduce.element_bytes * self.traits.states.trained_share

    @property
    def tensor_overlap(self) -> float:
        """Share of the tensor-parallel collectives of a backward pass that can hide on this device."""
        return self.overlap * self.traits.tensor.overlap_backward

    def gather_s(self, weights: CommUnit, network: Times, stage: StageParameters | None = None) -> float:
        """Seconds to gather one unit. ``stage``: the parameters of its stage; None = not known, which gives the least seconds."""
        seconds, bucket = 0.0, self.traits.gather.bucket_elements
        in_block_bytes = (weights.in_block and self.traits.gather.block_bytes) or self.weight_bytes
        of_experts_bytes = in_block_bytes if self.traits.fp8.experts else self.weight_bytes
        parts = self._parts(weights, stage)
        for (count, shard, _, held), each_bytes in zip(parts, (in_block_bytes, of_experts_bytes), strict=False):
            together = _together(weights, count, bucket, held)
            seconds += self._sent_s("all_gather", count, each_bytes, shard, weights, together, network)
        return seconds

    def reduce_s(self, weights: CommUnit, network: Times, stage: StageParameters | None = None) -> float:
        """Seconds to reduce a unit's gradients over the shard group; where nothing is sharded, over the replicas."""
        seconds, traits, bucket = 0.0, self.traits, self.reduce_bucket(stage)
        scatters = self.shard.size > 1 and not traits.reduce.to_all
        for count, shard, replicate, held in self._parts(weights, stage):
            kind, group = (
                ("reduce_scatter" if scatters else "all_reduce"),
                (shard if self.shard.size > 1 else replicate),
            )
            together = _together(weights, count, bucket, held)
            seconds += self._sent_s(kind, count, self._gradient_bytes, group, weights, together, network)
        return seconds

    def replicas_s(self, weights: CommUnit, network: Times) -> float:
        """Seconds of the second step of hybrid sharding: the shard is summed over the replicas, once per step."""
        if self.shard.size == 1:
            return 0.0
        return sum(
            network.time_s("all_reduce", count * self._gradient_bytes / shard.size, replicate)
            for count, shard, replicate, _ in self._parts(weights, None)
        )

    def reduce_bucket(self, stage: StageParameters | None) -> int:
        """Elements of gradients that one collective sums; 0 = those of one unit. ``stage``: None = the most of any stage."""
        other = self.traits.reduce.buckets_on_first_stage_alone and (stage is None or not stage.first)
        return max(ALL_ELEMENTS, self.traits.reduce.bucket_elements) if other else self.traits.reduce.bucket_elements

    def _sent_s(
        self,
        kind: CollectiveKind,
        count: int,
        each_bytes: float,
        group: Group,
        weights: CommUnit,
        together: float,
        network: Times,
    ) -> float:
        """One collective for a unit, one for each of its tensors, or the unit's share of one for many units."""
        if together:
            return count / together * network.time_s(kind, together * each_bytes, group)
        pieces = max(1, len(weights.tensors)) if self.traits.gather.each_weight else 1
        return pieces * network.time_s(kind, count * each_bytes / pieces, group)

    def _parts(self, weights: CommUnit, stage: StageParameters | None) -> list[tuple[int, Group, Group, int | None]]:
        """The unit's dense weights, and those of experts: (elements, shard group, replicas, such elements of the stage)."""
        parts = [(weights.dense, self.shard, self.replicate, stage.dense if stage else None)]
        if weights.experts:
            parts.append((weights.experts, *self.experts, stage.experts if stage else None))
        return parts


def _together(weights: CommUnit, count: int, bucket: int, held: int | None) -> float:
    """Elements of one collective for ``count`` elements of a unit whose stage holds ``held``; 0 = all of the unit."""
    if count >= bucket:
        return count / weights.pieces(bucket) if bucket else 0
    return bucket if held is None else min(bucket, held)
