"""Seconds that stages wait for their weights and gradients: gathered, reduced, cast and copied, unit by unit.

Dims: J = ways to shard states with equal engine traits, R = kinds of recompute, S = stages, K = kinds of layers, L = layers of the
longest stage, P = L + 2 units of communication.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ahp.arrays import Floats, Ints
from ahp.engines.traits import Traits
from ahp.forecast.communication import Times
from ahp.forecast.data_parallel import CommUnit, DataParallel, StageParameters
from ahp.forecast.overlap import bucket_ends, exposed_ahead_s, exposed_behind_s, in_buckets, left_beside_ahead_s
from ahp.forecast.stage_table import StageTable
from ahp.forecast.states import cast_bytes, gradient_copy_bytes, last_copy_bytes
from ahp.forecast.units import Units

Parts = dict[str, Floats]
"""Seconds of a pass, by part; each broadcasts to [J, R, S]."""


def outside_blocks(units: Units, traits: Traits, *, first: bool, last: bool) -> tuple[int, int]:
    """Parameters of a stage outside blocks: those gathered before the blocks and sent after them, and the others.

    They are one unit, or the embedding and the head are units of their own: the forward pass needs the head's weights last, and
    the backward pass has the head's gradients first. The gradient of a weight that both share comes with the embedding's.
    """
    embedding = units.embedding.weights.parameters if first else 0
    head = units.head.weights.parameters if last else 0
    tied = units.tied_parameters if last and not first else 0
    shared = first and last and units.tied_parameters > 0
    return (embedding, head + tied) if traits.gather.ends_apart and not shared else (embedding + head + tied, 0)


@dataclass(frozen=True)
class StageUnits:
    """The units of communication of stages: each block, and what is outside blocks."""

    table: StageTable
    kinds: tuple[CommUnit, ...]
    """The unit of each kind of layer."""
    before: Ints
    """[S] Elements gathered before the blocks, and sent after them."""
    after: Ints
    """[S] Elements gathered after the blocks, and sent before them."""

    @classmethod
    def of(cls, units: Units, traits: Traits, table: StageTable) -> StageUnits:
        ends = [
            outside_blocks(units, traits, first=first, last=last) for first in (False, True) for last in (False, True)
        ]
        before, after = np.array(ends, dtype=np.int64)[2 * table.first + table.last].T
        return cls(table, tuple(map(CommUnit.of, units.blocks)), before, after)

    @cached_property
    def of_kinds(self) -> Ints:
        """[K] Elements of a block."""
        return np.array([unit.total for unit in self.kinds], dtype=np.int64)

    @cached_property
    def in_blocks(self) -> Ints:
        """[S]"""
        return self.table.counts @ self.of_kinds

    @cached_property
    def total(self) -> Ints:
        """[S]"""
        return self.before + self.after + self.in_blocks

    @cached_property
    def experts(self) -> Ints:
        """[S] Elements of experts."""
        return self.table.counts @ np.array([unit.experts for unit in self.kinds], dtype=np.int64)

    def held(self) -> list[StageParameters]:
        """[S] The parameters of each stage."""
        each = zip((self.total - self.experts).tolist(), self.experts.tolist(), self.table.first.tolist(), strict=True)
        return [StageParameters(dense, experts, bool(first)) for dense, experts, first in each]


SecondsOfUnit = Callable[[CommUnit, StageParameters], float]


@dataclass(frozen=True)
class UnitTimes:
    """Seconds of one kind of collective of the units."""

    kinds: Floats
    """[J, S, K], or [J, 1, K] where they are the same in all stages."""
    before: Floats
    """[J, S]"""
    after: Floats
    """[J, S]"""

    @classmethod
    def of(cls, units: StageUnits, seconds: SecondsOfUnit) -> UnitTimes:
        """The times of one layout; ``seconds``: of a unit in a stage."""
        held, has, seconds = units.held(), units.table.counts > 0, cache(seconds)  # most stages are equal
        ends = units.before.tolist(), units.after.tolist()
        kinds = [
            [seconds(unit, stage) if there else 0.0 for unit, there in zip(units.kinds, own, strict=True)]
            for stage, own in zip(held, has.tolist(), strict=True)
        ]
        return cls(
            np.array(kinds, dtype=float).reshape(1, len(held), len(units.kinds)),
            *(np.array([[seconds(CommUnit(count), at) for count, at in zip(end, held, strict=True)]]) for end in ends),
        )

    def of_stages(self, table: StageTable) -> Floats:
        """[J, S] Seconds of all units of each stage, one after the other."""
        return self.before + (table.counts * self.kinds).sum(axis=-1) + self.after

    def __add__(self, other: UnitTimes) -> UnitTimes:
        return UnitTimes(self.kinds + other.kinds, self.before + other.before, self.after + other.after)


@dataclass(frozen=True)
class SharedWeights:
    """The units of stages: seconds to gather weights, to reduce gradients and to sum them over replicas, and the bytes that copies move."""

    units: StageUnits
    gathers: UnitTimes
    reduces: UnitTimes
    replicas: UnitTimes
    cast_bytes: Floats
    """[J] Bytes moved per element and micro-batch to make the compute copy."""
    copied_bytes: Floats
    """[J] The same to copy gradients."""

    @classmethod
    def of(cls, units: StageUnits, data: DataParallel, network: Times) -> SharedWeights:
        """The times of one layout."""
        traits, shards = data.traits, data.shard.size
        return cls(
            units,
            UnitTimes.of(units, lambda unit, stage: data.gather_s(unit, network, stage)),
            UnitTimes.of(units, lambda unit, stage: data.reduce_s(unit, network, stage)),
            UnitTimes.of(units, lambda unit, _: data.replicas_s(unit, network)),
            np.array([cast_bytes(traits, shards)], dtype=float),
            np.array([gradient_copy_bytes(traits, shards, data.micro_batches)], dtype=float),
        )


@dataclass(frozen=True)
class WeightCommunication:
    """The units of some stages, and the computation that their collectives hide behind."""

    shared: SharedWeights
    windows_forward_s: Floats
    """[S, L] Seconds that collectives of weights can hide behind."""
    windows_backward_s: Floats
    """[R, S, L] The same in the backward pass, in its order."""
    data: DataParallel
    """Of any of the ways to shard states."""

    @property
    def units(self) -> StageUnits:
        return self.shared.units

    def add_gathers(self, forward: Parts, backward: Parts, first_forward: Parts, bytes_per_s: float) -> None:
        """Weights that are gathered and cast for the passes of a micro-batch, or once per step."""
        traits, units, table = self.data.traits, self.units, self.units.table
        cast_s = (self.shared.cast_bytes / bytes_per_s)[:, None, None]
        target = forward if traits.gather.forward == "per_micro_batch" else first_forward
        target["weight_gather"] = np.zeros((1, 1, 1))
        if traits.gather.forward != "never":
            # The unit before the blocks and the first block have no computation before them to hide behind.
            windows_s = self._after_bucket(self.windows_forward_s, table.kinds)
            last_s = (
                np.take_along_axis(windows_s, np.maximum(table.layers - 1, 0)[:, None], 1) if windows_s.size else 0.0
            )
            before_s, after_s = self.shared.gathers.before[..., None], self.shared.gathers.after[..., None]
            ahead_s = np.concatenate([self._gathers_s, after_s], axis=-1)
            behind_s = np.concatenate([windows_s[:, :-1], last_s + np.zeros((len(windows_s), 1))], axis=-1)
            shown_s = exposed_ahead_s(ahead_s, behind_s[..., : ahead_s.shape[-1] - 1], self._gather_overlap)
            target["weight_gather"] = (before_s[..., 0] + shown_s)[:, None]
        target["casts"] = target.get("casts", 0.0) + units.total * cast_s
        if traits.gather.backward == "per_micro_batch":
            # Weights outside blocks are kept from forward to backward.
            windows_s = self._after_bucket(self.windows_backward_s, self._backward(table.kinds))
            backward["weight_gather"] = exposed_ahead_s(
                self._backward(self._gathers_s)[:, None], windows_s[..., :-1], self._gather_overlap
            )
            backward["casts"] = units.in_blocks * cast_s

    def add_reductions(
        self, backward: Parts, last_backward: Parts, bytes_per_s: float, passes_behind: Ints | int = 0
    ) -> None:
        """Gradients that are copied and reduced, at every micro-batch or at the last.

        ``passes_behind`` [S]: backward passes of other stages that the rank computes after this stage's last one, behind which
        gradients can still travel.
        """
        shared, traits, total = self.shared, self.data.traits, self.units.total
        later_s = passes_behind * _in_order(self.windows_backward_s)
        last_backward["gradient_reduce"] = self._behind_s(shared.reduces + shared.replicas, later_s)
        if traits.reduce.every_micro_batch:
            backward["gradient_reduce"] = self._behind_s(shared.reduces, later_s)
            last_backward["gradient_reduce"] = last_backward["gradient_reduce"] - backward["gradient_reduce"]
        copied_s = total * shared.copied_bytes[:, None, None] / bytes_per_s
        backward["casts"] = backward.get("casts", 0.0) + copied_s
        if last_bytes := float(last_copy_bytes(traits, self.data.micro_batches)):
            last_backward["casts"] = np.asarray(total * last_bytes / bytes_per_s, dtype=float)[None, None]

    @property
    def _gather_overlap(self) -> float:
        return self.data.overlap * self.data.traits.gather.overlap

    @cached_property
    def _gathers_s(self) -> Floats:
        """[J, S, L]"""
        return self._of_layers(self.shared.gathers.kinds)

    def _of_layers(self, kinds_s: Floats) -> Floats:
        """[J, S, L] From [J, S or 1, K]."""
        table = self.units.table
        if kinds_s.shape[1] == 1:
            return table.of_layers(kinds_s[:, 0])
        padded = np.concatenate([kinds_s, np.zeros((*kinds_s.shape[:2], 1))], axis=-1)
        return np.take_along_axis(padded, table.kinds[None], axis=-1)

    def _backward(self, layers: NDArray[Any]) -> NDArray[Any]:
        """[..., S, L] The layers in the order of the backward pass."""
        at = self.units.table.backwards
        return np.take_along_axis(layers, at.reshape((1,) * (layers.ndim - 2) + at.shape), axis=-1)

    def _after_bucket(self, windows_s: Floats, kinds: Ints) -> Floats:
        """Windows [..., S, L] of a pass over layers of ``kinds``, 0 in the first bucket: it is gathered before any of its blocks computes."""
        bucket, layers = self.data.traits.gather.bucket_elements, self.units.table.layers
        if not bucket:
            return windows_s
        there = np.cumsum(np.append(self.units.of_kinds, 0)[kinds], axis=-1)
        at = np.arange(kinds.shape[1])
        at_once = np.minimum(((there < bucket) & (at < layers[:, None])).sum(axis=-1), np.maximum(layers - 1, 0))
        return np.where(at < at_once[:, None], 0.0, windows_s)

    def _behind_s(self, sent: UnitTimes, later_s: Floats | float) -> Floats:
        """[J, R, S] Exposed seconds of units in the order of the backward pass: the one after the blocks, the blocks, the one before them."""
        each_s = [sent.after[..., None], self._backward(self._of_layers(sent.kinds)), sent.before[..., None]]
        collectives_s = np.concatenate(each_s, axis=-1)[:, None]
        none = np.zeros((*self._windows_left_s.shape[:-1], 1))
        work_s = np.concatenate([none, self._windows_left_s, none], axis=-1)
        ends, pieces = self._buckets
        if ends is not None:
            collectives_s, work_s = in_buckets(collectives_s, ends), in_buckets(work_s, ends)
        overlap = self.data.overlap * self.data.traits.reduce.overlap
        return exposed_behind_s(collectives_s, work_s, overlap, pieces=pieces, later_s=later_s)

    @cached_property
    def _buckets(self) -> tuple[NDArray[np.bool_] | None, Ints]:
        """[S, P] each: whether a bucket ends with a unit, None where each unit is a bucket; and in how many pieces a unit is sent."""
        table = self.units.table
        of_first, of_others = (self.data.reduce_bucket(StageParameters(0, 0, first=first)) for first in (True, False))
        buckets = np.where(table.first, of_first, of_others).tolist()
        none = np.ones((len(buckets), 1), dtype=np.int64)
        of_kinds = {bucket: np.array([*(u.pieces(bucket) for u in self.units.kinds), 1]) for bucket in set(buckets)}
        kinds = self._backward(table.kinds)
        pieces = np.stack([of_kinds[bucket][own] for bucket, own in zip(buckets, kinds, strict=True)])
        pieces = np.concatenate([none, pieces, none], axis=1)
        if not any(buckets):
            return None, pieces
        sizes = [self.units.after[:, None], np.append(self.units.of_kinds, 0)[kinds], self.units.before[:, None]]
        rows = np.concatenate(sizes, axis=1)
        ends = np.array([bucket_ends(own, bucket) for own, bucket in zip(rows.tolist(), buckets, strict=True)])
        alone = rows >= np.array(buckets)[:, None]
        return ends, np.where(alone, pieces, 1)

    @cached_property
    def _windows_left_s(self) -> Floats:
        """[J, R, S, L] The part of a backward pass's windows that gathers of the next block's weights leave to the reductions of
        gradients: both go over the same network cards."""
        own_s = self.windows_backward_s[None]
        if self.data.traits.gather.backward != "per_micro_batch" or not own_s.shape[-1]:
            return own_s
        gathers_s = self._backward(self._gathers_s)[:, None]
        return left_beside_ahead_s(gathers_s, own_s, self._gather_overlap)


def _in_order(each_s: Floats) -> Floats:
    """Sums over the last dim, one after another."""
    return np.cumsum(each_s, axis=-1)[..., -1] if each_s.shape[-1] else np.zeros(each_s.shape[:-1])
