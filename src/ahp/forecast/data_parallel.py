"""How ranks share a stage's weights: what they gather and reduce, in which groups, and how long each collective takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from ahp.engines.engine import ALL_ELEMENTS, Traits
from ahp.forecast.communication import Group, Kind, Times
from ahp.forecast.unit import Unit
from ahp.forecast.units import ALONE


class Weights(NamedTuple):
    """Elements of one unit of communication on one rank."""

    dense: int
    experts: int = 0
    tensors: tuple[int, ...] = ()
    """Of each weight that it consists of, in the order of the forward pass; none = one."""
    in_block: bool = False

    @property
    def total(self) -> int:
        return self.dense + self.experts

    @classmethod
    def of(cls, unit: Unit) -> Weights:
        """Of a block."""
        return cls(unit.parameters - unit.experts, unit.experts, unit.tensors, in_block=True)

    def pieces(self, bucket: int) -> int:
        """Collectives that it is sent in, where each takes whole weights until they are as many elements as ``bucket``; 0 = one."""
        return _pieces(self.tensors, bucket) if bucket else 1


@cache
def _pieces(tensors: tuple[int, ...], bucket: int) -> int:
    count = held = 0
    for elements in reversed(tensors):
        held += elements
        if held >= bucket:
            count, held = count + 1, 0
    return max(1, count)


class Held(NamedTuple):
    """Elements of one stage on one rank."""

    dense: int
    experts: int
    first: bool
    """Whether it is the pipeline's first."""

    @property
    def total(self) -> int:
        return self.dense + self.experts


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
    """The same two groups for the weights of experts, which an expert-parallel group has once."""
    operator_s: float = 0.0
    """Host time of one operator."""
    host_is_device: bool = False
    """Whether operators wait for the host one by one (a CPU), instead of running behind it."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of one weight element as it is gathered."""
        return self.traits.compute_weight_bytes or self.traits.master_weight_bytes

    def gather_s(self, weights: Weights, network: Times, stage: Held | None = None) -> float:
        """Seconds of gathering one unit. ``stage``: what its stage holds; None = whatever it may hold, the least that it takes."""
        seconds, bucket = 0.0, self.traits.gather_bucket_elements
        each_bytes = (weights.in_block and self.traits.gathered_block_bytes) or self.weight_bytes
        for count, shard, _, held in self._parts(weights, stage):
            together = _together(weights, count, bucket, held)
            seconds += self._sent_s("all_gather", count, each_bytes, shard, weights, together, network)
        return seconds

    def reduce_s(self, weights: Weights, network: Times, stage: Held | None = None) -> float:
        """The same of its gradients, over the shard group; where nothing is sharded, over the replicas."""
        seconds, traits, bucket = 0.0, self.traits, self.reduce_bucket(stage)
        scatters = self.shard.size > 1 and not traits.reduces_to_all
        for count, shard, replicate, held in self._parts(weights, stage):
            kind, group = (
                ("reduce_scatter" if scatters else "all_reduce"),
                (shard if self.shard.size > 1 else replicate),
            )
            together = _together(weights, count, bucket, held)
            seconds += self._sent_s(kind, count, traits.reduce_bytes, group, weights, together, network)
        return seconds

    def replicas_s(self, weights: Weights, network: Times) -> float:
        """The second step of a hybrid: the shard is summed over the replicas, once per step."""
        if self.shard.size == 1:
            return 0.0
        return sum(
            network.time_s("all_reduce", count * self.traits.reduce_bytes / shard.size, replicate)
            for count, shard, replicate, _ in self._parts(weights, None)
        )

    def reduce_bucket(self, stage: Held | None) -> int:
        """Elements of gradients that one collective sums; 0 = those of one unit. ``stage``: None = any, the most."""
        other = self.traits.buckets_on_first_stage_alone and (stage is None or not stage.first)
        return max(ALL_ELEMENTS, self.traits.reduce_bucket_elements) if other else self.traits.reduce_bucket_elements

    def _sent_s(
        self, kind: Kind, count: int, each_bytes: int, group: Group, weights: Weights, together: float, network: Times
    ) -> float:
        """One collective for a unit, one for each of its tensors, or the unit's share of one for many units."""
        if together:
            return count / together * network.time_s(kind, together * each_bytes, group)
        pieces = max(1, len(weights.tensors)) if self.traits.gathers_each_weight else 1
        return pieces * network.time_s(kind, count * each_bytes / pieces, group)

    def _parts(self, weights: Weights, stage: Held | None) -> list[tuple[int, Group, Group, int | None]]:
        """What is held by how many ranks alike: (elements, shard group, replicas, elements of the stage)."""
        parts = [(weights.dense, self.shard, self.replicate, stage.dense if stage else None)]
        if weights.experts:
            parts.append((weights.experts, *self.experts, stage.experts if stage else None))
        return parts


def _together(weights: Weights, count: int, bucket: int, held: int | None) -> float:
    """Elements of one collective for ``count`` elements of a unit whose stage holds ``held``; 0 = all of the unit."""
    if count >= bucket:
        return count / weights.pieces(bucket) if bucket else 0
    return bucket if held is None else min(bucket, held)


def cast_bytes(data: DataParallel) -> float:
    """Bytes moved per weight element to make the compute copy: the shard cast, and the gathered buffer copied out."""
    traits, shards = data.traits, data.shard.size
    cast = (traits.master_weight_bytes + traits.compute_weight_bytes) / shards
    copied = 2 * data.weight_bytes if shards > 1 else 0
    return (cast if traits.compute_weight_bytes not in (0, traits.master_weight_bytes) else 0.0) + copied


def gradient_copy_bytes(data: DataParallel) -> float:
    """Bytes moved per weight element and micro-batch: the gradient into the type and buffer it waits in, or is sent from."""
    traits, made = data.traits, data.weight_bytes
    if traits.fused_gradient_accumulation:
        return 0.0
    if traits.reduces_every_micro_batch:
        # Into the flat buffer; then the shard is added to the earlier ones.
        added = 0.0 if data.micro_batches == 1 else 2 * traits.gradient_bytes / data.shard.size
        return made + traits.reduce_bytes + added
    # The first is kept as it is, or cast; each later one is read, and added in one kernel to the sum, which is read and written.
    first = made + traits.gradient_bytes if made != traits.gradient_bytes else 0.0
    later = made + 2 * traits.gradient_bytes
    return (first + (data.micro_batches - 1) * later) / data.micro_batches
