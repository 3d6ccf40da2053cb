"""Device memory that ranks need, and how likely it is to fit; for columns of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from ahp.cluster.model import Device
from ahp.forecast.constants import margins
from ahp.forecast.efficiency import is_cpu
from ahp.forecast.states import Figures, Floats, UnitBytes


class Outside(NamedTuple):
    """Bytes of a device that lie outside the allocator, and what kind of allocator it has."""

    communicators: Figures
    context: Figures
    by_stream: Figures = 1.0
    """1 where the allocator keeps what a stream has freed for this stream alone, as on GPUs; 0 on CPUs, which have no streams."""

    @property
    def total(self) -> Figures:
        return self.communicators + self.context

    @classmethod
    def of(cls, device: Device, num_groups: Figures) -> Outside:
        """For a rank with the communicators of ``num_groups`` process groups."""
        by_stream = 0.0 if is_cpu(device) else 1.0
        each = by_stream * margins.value("communicator_bytes")
        return cls(np.rint(num_groups * each), device.reserved_memory_bytes, by_stream)


@dataclass(frozen=True)
class RankMemory:
    """All parts of one rank, in bytes; ``parts`` adds up to what the device must have."""

    parts: dict[str, int]
    allocated: int
    reserved: int

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class RanksMemory:
    """``RankMemory`` of many ranks, [W] each."""

    parts: dict[str, Floats]
    allocated: Floats
    reserved: Floats

    @property
    def total(self) -> Floats:
        return self.reserved + self.parts["communicators"] + self.parts["context"]

    def of(self, rank: int) -> RankMemory:
        """The memory of one rank."""
        parts = {part: int(count[rank]) for part, count in self.parts.items()}
        return RankMemory(parts, int(self.allocated[rank]), int(self.reserved[rank]))


@dataclass(frozen=True)
class PlaceMemory:
    """Ranks that need the same memory, at one place of the pipeline on one kind of device, and the device of each rank."""

    ranks: tuple[int, ...]
    device: str
    capacity_bytes: int
    memory: RankMemory


def ranks_memory(
    parts: Mapping[str, Figures], outside: Outside, pooled: Figures = 0.0, gap: Figures = 0.0
) -> RanksMemory:
    """Add what the allocator keeps beyond these parts (``slack_bytes``), and what lies outside of the allocator."""
    allocated = np.atleast_1d(sum(parts.values()))
    slack = slack_bytes(allocated, pooled * outside.by_stream, gap * outside.by_stream)
    whole = {
        **parts, "allocator_slack": slack, "communicators": outside.communicators, "context": outside.context
    }  # fmt: skip
    each = {part: np.broadcast_to(count, allocated.shape) for part, count in whole.items()}
    return RanksMemory(each, allocated, allocated + slack)


class Peak(NamedTuple):
    """Bytes besides states and activations when a rank's memory is the fullest."""

    temporaries: Figures
    gathered: Figures
    reduced: Figures

    @classmethod
    def of(cls, units: UnitBytes, in_layers: Figures, at_head: Figures) -> Peak:
        """The larger of two peaks: while layers run backward, or while the loss is computed. ``in_layers``, ``at_head``: their temporaries."""
        is_head = np.greater_equal(at_head + units.at_head, in_layers + units.gathered + units.reduced)
        return cls(
            np.maximum(np.where(is_head, at_head, in_layers), 0.0),
            np.where(is_head, units.at_head, units.gathered),
            np.where(is_head, 0.0, units.reduced),
        )

    @property
    def total(self) -> Figures:
        return self.temporaries + self.gathered + self.reduced


def while_training(
    states: Mapping[str, Figures],
    units: UnitBytes,
    activations: Figures,
    peak: Peak,
    pipeline_buffers: Figures,
    *,
    micro_batches: int,
    visiting: Figures = 0.0,
) -> dict[str, Figures]:
    """Bytes that ranks allocate, part by part. When the activations are gone, the last unit is reduced, and after that ``visiting`` states come
    for the update."""
    gradients = states["gradients"]
    kept_gradients, kept_activations = gradients, activations
    if micro_batches == 1:
        # With a single backward pass gradients grow as activations go: the peak is at its start or at its end.
        at_start = np.greater_equal(activations, gradients)
        kept_gradients = np.where(at_start, 0.0, gradients)
        kept_activations = np.where(at_start, activations, 0.0)
    gone = kept_activations + kept_gradients - gradients + peak.total
    has_flat = np.any(states.get("flat_copies", 0.0))  # only one engine has any
    return {
        **{part: count for part, count in states.items() if part != "flat_copies" or has_flat},
        "optimizer_states": states["optimizer_states"] + np.maximum(0.0, visiting - np.maximum(gone, units.last)),
        "gathered_weights": states["gathered_weights"] + peak.gathered,
        "gradients": kept_gradients,
        "reduce_buffers": states["reduce_buffers"] + peak.reduced + np.maximum(0.0, units.last - gone),
        "activations": kept_activations,
        "temporaries": peak.temporaries,
        "pipeline_buffers": pipeline_buffers,
    }


def pooled_bytes(units: UnitBytes, activations: Figures) -> Figures:
    """Bytes that the allocator keeps for other streams. ``while_training`` counts the larger of activations and the gradients that take
    their place, but each has memory of its own."""
    return units.pooled + np.minimum(activations, units.grown)


def slack_bytes(allocated: Figures, pooled: Figures = 0.0, gap: Figures = 0.0) -> Figures:
    """Bytes that the allocator reserves beyond what is allocated. ``pooled``: bytes kept for other streams; ``gap``: free memory between
    tensors that nothing at the peak fits into, which counts where it is more than usual."""
    return np.maximum(np.rint(allocated * (margins.value("reserved_over_allocated") - 1)), gap) + pooled


def device_bytes(allocated: Figures, outside: Outside, pooled: Figures = 0.0, gap: Figures = 0.0) -> Figures:
    """Bytes that a device must have for ``allocated`` bytes in tensors."""
    whole = np.floor(allocated)
    return whole + slack_bytes(whole, pooled * outside.by_stream, gap * outside.by_stream) + outside.total


def most_allocated(device_bytes: Figures, outside: Outside) -> Figures:
    """The most bytes in tensors for which ``device_bytes`` of a device are enough: the inverse of the function ``device_bytes``."""
    return (device_bytes + 1.0 - outside.total) / margins.value("reserved_over_allocated") + 1.0


def in_tensors(kept_bytes: Figures) -> Figures:
    """Bytes in tensors that lose their room on a device where the allocator keeps ``kept_bytes`` for other streams."""
    return kept_bytes / margins.value("reserved_over_allocated")


FIT_PROBABILITY = 0.95
"""The probability that ``Forecast.fits`` asks for."""


def fit_probability(total_bytes: float, capacity_bytes: float) -> float:
    """Probability that the real need is within the capacity: the forecast's error is log-normal.

    All ranks of a layout share the formula's error, so the fullest rank decides for all.
    """
    return 0.5 * (1.0 + math.erf(math.log(capacity_bytes / total_bytes) / (_need_error() * math.sqrt(2.0))))


def most_that_fits(capacity_bytes: float) -> float:
    """Bytes above which a forecast does not fit: ``fit_probability`` solved for its first argument."""
    return capacity_bytes * math.exp(-NormalDist().inv_cdf(FIT_PROBABILITY) * _need_error())


def activation_room(ranks: RanksMemory, capacity_bytes: float, micro_batches: int) -> Floats:
    """[W] Bytes of activations that each rank can keep and still fit, with all else that it has. The gradients take the place of a single
    micro-batch's activations (``while_training``), so these can be as large as the gradients."""
    outside = Outside(ranks.parts["communicators"], ranks.parts["context"])
    pooled = ranks.parts["allocator_slack"] - slack_bytes(ranks.allocated)
    most = most_allocated(most_that_fits(capacity_bytes) - pooled, outside)
    kept = ranks.parts["activations"] + (ranks.parts["gradients"] if micro_batches == 1 else 0)
    return np.maximum(0.0, np.asarray(kept + most - ranks.allocated))


def _need_error() -> float:
    """Standard error of the log of a rank's need: from what its tensors take, and from what the allocator adds to them."""
    return math.hypot(margins.value("allocated_error"), margins.value("reserved_error"))
