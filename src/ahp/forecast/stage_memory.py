"""Memory of all stages at once: weights, activations of one micro-batch, and messages between stages.

Dims: S = stages, K = kinds of layers, L = layers, W = pipeline ranks, V = stages of a rank. All figures are whole numbers, so that
no sum depends on its order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from ahp.arrays import Ints
from ahp.engines.traits import Receives
from ahp.forecast.segment import Recompute
from ahp.forecast.stage_table import StageTable
from ahp.forecast.states import Weights
from ahp.forecast.unit import Unit
from ahp.forecast.units import Units
from ahp.schedule.actions import Schedule
from ahp.schedule.messages import waiting


@dataclass(frozen=True)
class StageMemory:
    """Memory of each stage of a pipeline, [S] each."""

    weights: Weights
    kept: Ints
    """Bytes of activations of one micro-batch between its forward and its backward."""
    in_layers: Ints
    """Bytes at the peak of the layers' backward passes, beyond ``kept``; what the head keeps is free then."""
    at_head: Ints
    """Bytes at the peak of the head, beyond ``kept``."""
    freed: Ints
    """Bytes of the gap that the head leaves (``SegmentMemory``)."""

    @classmethod
    def of(cls, units: Units, recompute: Recompute, table: StageTable) -> StageMemory:
        return cls(
            stage_weights(units, table), kept_bytes(units, recompute, table), *temporary_bytes(units, recompute, table),
            units.head.memory.freed * table.last,
        )  # fmt: skip

    @classmethod
    def on_devices(cls, each: Sequence[StageMemory], which: Sequence[int]) -> StageMemory:
        """The memory of a pipeline on several kinds of devices. ``each``: all stages on each kind; ``which``: the kind of each stage."""
        at = np.array(which, dtype=np.int64), np.arange(len(which))
        weights = (np.stack([getattr(one.weights, field.name) for one in each])[at] for field in fields(Weights))
        others = (field.name for field in fields(cls)[1:])
        return cls(Weights(*weights), *(np.stack([getattr(one, name) for one in each])[at] for name in others))


def stage_weights(units: Units, table: StageTable) -> Weights:
    """The parameters of each stage."""
    names = "parameters", "experts", "shapes"
    parameters, experts, shapes = (_of_kinds(getattr(u.weights, name) for u in units.blocks) for name in names)
    has, tied = table.counts > 0, units.tied_parameters
    head = (units.head.weights.parameters + tied) * table.last
    outside = units.embedding.weights.parameters * table.first + head - tied * table.last * table.first
    return Weights(
        total=table.counts @ parameters + outside,
        largest_block=_largest(has, parameters),
        outside_blocks=outside,
        head=head,
        experts=table.counts @ experts,
        shapes=_largest(has, shapes),
        largest_without_experts=_largest(has, parameters - experts),
    )


def kept_of_kinds(units: Units, recompute: Recompute) -> Ints:
    """[K] Bytes that a layer keeps of one micro-batch."""
    return _of_kinds(u.memory.saved - dropped_bytes(u, units, recompute) for u in units.blocks)


def kept_beside_layers(units: Units, table: StageTable) -> Ints:
    """[S] Bytes that a stage keeps of one micro-batch, besides those of its layers."""
    ends = units.embedding.memory.saved * table.first + units.head.memory.saved * table.last
    return ends + units.output_bytes * (1 - table.last)


def kept_bytes(units: Units, recompute: Recompute, table: StageTable) -> Ints:
    """[S] Bytes of activations of one micro-batch between its forward and its backward."""
    as_they_are = (table.counts - table.recomputed) @ kept_of_kinds(units, "none")
    kept = as_they_are + table.recomputed @ kept_of_kinds(units, recompute) + kept_beside_layers(units, table)
    if recompute == "none":
        return kept
    return kept + _largest(table.recomputed > 0, _of_kinds(u.memory.masks for u in units.blocks))


def temporary_bytes(units: Units, recompute: Recompute, table: StageTable) -> tuple[Ints, Ints]:
    """[S] Bytes at the peak of the layers' backward passes and at that of the head, beyond what is kept."""
    in_block = np.maximum(
        _largest(table.counts > table.recomputed, needs_of_kinds(units, "none")),
        _largest(table.recomputed > 0, needs_of_kinds(units, recompute)),
    )
    return peak_bytes(units, in_block, table)


def needs_of_kinds(units: Units, recompute: Recompute) -> Ints:
    """[K] Bytes at the peak of a layer's backward pass beyond what is kept, with what is recomputed before it."""
    again = (made_again(u, recompute, dropped_bytes(u, units, recompute)) for u in units.blocks)
    return _of_kinds(u.memory.backward_extra + more for u, more in zip(units.blocks, again, strict=True))


def peak_bytes(units: Units, in_block: Ints, table: StageTable) -> tuple[Ints, Ints]:
    """[S] Bytes at the peak of layers that need ``in_block`` at most, and of the head. What the head keeps is free when layers begin."""
    head = units.head.memory
    at_head = max(head.forward_extra, head.backward_extra) * table.last
    return in_block - head.saved * table.last, at_head


def dropped_bytes(unit: Unit, units: Units, recompute: Recompute) -> int:
    """Bytes that recompute saves of what a block keeps; below 0 where the results it keeps are more than backward needs."""
    memory = unit.memory
    match recompute:
        case "none":
            return 0
        case "core":
            return memory.saved_in_core
        case "chains":
            return memory.saved_in_chains
        case "beside_products":
            return memory.saved - units.hidden_bytes - memory.beside_products.kept
        case "every_second_product":
            return memory.saved - units.hidden_bytes - memory.every_second_product.kept
        case "read" | "full":
            return max(0, memory.saved - units.hidden_bytes)


def made_again(unit: Unit, recompute: Recompute, dropped: int) -> int:
    """Bytes that one block recomputes before its backward pass."""
    memory = unit.memory
    match recompute:
        case "none":
            return 0
        case "beside_products":
            return memory.beside_products.made_again
        case "every_second_product":
            return memory.every_second_product.made_again
        case "read" | "full":
            return max(memory.saved, memory.forward_extra)
    return dropped


def receives_from(own: Ints, p: int) -> Ints:
    """[W] From how many stages ranks with the stages ``own`` [W, V] of ``p`` ranks receive, in both passes; none if a rank is alone."""
    return ((own > 0) * 1 + (own < p * own.shape[1] - 1)).sum(axis=1) * (p > 1)


def received_bytes(
    own: Ints, p: int, hidden_bytes: int, micro_batches: int, receives: Receives, order: Schedule | None = None
) -> Ints:
    """[W] Bytes for what ranks with the stages ``own`` [W, V] of ``p`` ranks receive: activations from the stage before, gradients from the
    stage after. ``order``: the order of all ranks, if no pattern makes it.

    A message that was read is an activation of the layer that read it, and is counted there.
    """
    sides = receives_from(own, p)
    if p == 1:
        return sides
    if receives == "all":
        return sides * micro_batches * hidden_bytes
    messages = sides
    if receives == "waiting" and own.shape[1] > 1:
        # Where a rank has several stages, messages come before their turn: up to p + 1 under torch's patterns.
        messages = np.minimum(np.maximum(sides, p + 1), sides * micro_batches)
    if receives == "waiting" and order is not None:
        messages = np.maximum(messages, waiting(order))
    return messages * hidden_bytes


def _of_kinds(figures: Iterable[int]) -> Ints:
    return np.array([*figures], dtype=np.int64)


def _largest(has: NDArray[np.bool_], of_kinds: Ints) -> Ints:
    """[S] The largest figure of the kinds that a stage has; 0 where it has none."""
    return (has * of_kinds).max(axis=1, initial=0)
