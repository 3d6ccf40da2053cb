"""Keeps AdamW's moments in host memory under ``engine.offload_optimizer``: a few at a time come to the device and go back.

The update itself is still torch's fused AdamW on the device, so that it is exactly the same; weights and gradients, which FSDP2
computes with, stay there too. Two of the four fp32 numbers of a parameter leave the device.

While one bucket is updated, the next comes in and the one before goes back, each way on its own stream:

    stream in        bucket 0   bucket 1   bucket 2   ...
    stream compute              update 0   update 1   update 2   ...
    stream out                             bucket 0   bucket 1   bucket 2   ...

AdamW works element by element, so a bucket can hold a part of a weight: moments on the device never exceed the slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.adamw import adamw as adamw_update

from ahp.engines.ahp import OFFLOAD_BUCKET_BYTES
from ahp.errors import HardwareMismatch

MOMENTS = ("exp_avg", "exp_avg_sq")
NUM_SLOTS = 4
"""Buckets on the device at once: one comes in, one is updated, one goes back, and a spare one so that none waits for another."""
ALIGNED_BYTES = 256
"""Alignment of parts: torch's fused kernels read sixteen bytes at once, those for CPUs a cache line."""


def refuse_without_host(device: torch.device) -> None:
    """Raises HardwareMismatch if the device's memory is the host's."""
    if device.type == "cpu":
        raise HardwareMismatch(
            "engine.offload_optimizer = True: on a CPU the optimizer's states are in the host's memory already (valid: False)"
        )


@dataclass(frozen=True)
class Part:
    """Elements ``first .. end`` of a flattened shard, and their place in the bucket's slot."""

    shard: torch.Tensor
    first: int
    end: int
    at: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """These elements of a tensor like the shard; shares its memory."""
        return tensor.detach().reshape(-1)[self.first : self.end]

    def in_slot(self, slot: torch.Tensor) -> torch.Tensor:
        """Their place in a slot [moments, elements]: a view [moments, end - first]."""
        return slot[:, self.at : self.at + self.end - self.first]


@dataclass
class Bucket:
    """Parts of one AdamW parameter group that come to the device together."""

    group: dict[str, Any]
    """AdamW's settings for them."""
    parts: list[Part] = field(default_factory=list)
    num_elements: int = 0
    """Elements that the parts take in a slot, with gaps between them for alignment."""


class HostMoments:
    """Keeps the moments of an AdamW in host memory, pinned if the device is a GPU, and takes its steps."""

    def __init__(self, adamw: torch.optim.AdamW, *, bucket_bytes: int = OFFLOAD_BUCKET_BYTES) -> None:
        """``bucket_bytes``: the most bytes of moments that are on the device at once."""
        self.adamw = adamw
        self.shards: list[torch.Tensor] = [shard for group in adamw.param_groups for shard in group["params"]]
        """All shards; empty ones are in no bucket but count their steps."""
        for shard in self.shards:
            state = adamw.state[shard]
            state["step"] = torch.zeros((), dtype=torch.float32, device=shard.device)
            for key in MOMENTS:
                state[key] = torch.zeros(shard.shape, dtype=shard.dtype, pin_memory=shard.is_cuda)
        self.device = self.shards[0].device
        self.buckets = _buckets(adamw.param_groups, bucket_bytes // NUM_SLOTS)
        device = torch.get_device_module(self.device)
        self.incoming, self.outgoing = device.Stream(), device.Stream()

    @torch.no_grad()
    def step(self) -> None:
        """Like ``AdamW.step``, bucket by bucket: parameters without a gradient stay as they are. Gradients are dropped.

        All moments are back once the compute stream has passed this step, so they can be read only after ``wait``.
        """
        updated = {shard for shard in self.shards if shard.grad is not None}
        device = torch.get_device_module(self.device)
        compute = device.current_stream(self.device)
        slots = self._slots()
        is_free = [device.Event() for _ in slots]
        self.incoming.wait_stream(compute)  # whatever had a slot's memory before may still read it
        for number, bucket in enumerate(self.buckets):
            slot, free = slots[number % NUM_SLOTS], is_free[number % NUM_SLOTS]
            parts = [part for part in bucket.parts if part.shard in updated]
            with device.stream(self.incoming):
                if number >= NUM_SLOTS:
                    self.incoming.wait_event(free)
                self._copy(parts, slot, to_host=False)
            compute.wait_stream(self.incoming)
            self._update(bucket.group, parts, slot)
            self.outgoing.wait_stream(compute)
            with device.stream(self.outgoing):
                self._copy(parts, slot, to_host=True)
                free.record(self.outgoing)
        compute.wait_stream(self.outgoing)  # so that the next user of the slots' memory comes after the copies
        self._count(updated)
        for shard in self.shards:
            shard.grad = None

    def _count(self, updated: set[torch.Tensor]) -> None:
        """Count one step, unless ``found_inf`` is set, as by AMP's gradient scaler at an overflow: then the kernels did nothing."""
        overflowed = getattr(self.adamw, "found_inf", None)
        for shard in updated:
            self.adamw.state[shard]["step"] += 1 if overflowed is None else 1 - overflowed

    def _slots(self) -> list[torch.Tensor]:
        """Slots of [moments, elements]. Allocated for a step, when activations are gone, and freed after it."""
        like = self.shards[0]
        return [
            like.new_empty((len(MOMENTS), max(bucket.num_elements for bucket in self.buckets[number::NUM_SLOTS])))
            for number in range(min(NUM_SLOTS, len(self.buckets)))
        ]

    def _copy(self, parts: list[Part], slot: torch.Tensor, *, to_host: bool) -> None:
        for part in parts:
            for key, here in zip(MOMENTS, part.in_slot(slot), strict=True):
                host = part.of(self.adamw.state[part.shard][key])
                target, source = (host, here) if to_host else (here, host)
                target.copy_(source, non_blocking=True)

    def _update(self, group: dict[str, Any], parts: list[Part], slot: torch.Tensor) -> None:
        """torch's fused AdamW on these parts, whose moments are in the slot. Uses the attributes that AMP's gradient scaler sets, as
        ``AdamW.step`` does."""
        here = [part.in_slot(slot) for part in parts]
        beta1, beta2 = group["betas"]
        adamw_update(
            [part.of(part.shard) for part in parts],
            [part.of(part.shard.grad) for part in parts if part.shard.grad is not None],
            [moments[0] for moments in here],
            [moments[1] for moments in here],
            [],
            # A shard's own count goes up once a step, however many parts it has.
            [self.adamw.state[part.shard]["step"].clone() for part in parts],
            fused=True,
            grad_scale=getattr(self.adamw, "grad_scale", None),
            found_inf=getattr(self.adamw, "found_inf", None),
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def wait(self) -> None:
        """Wait until the moments in host memory are those after the last step."""
        torch.get_device_module(self.device).synchronize(self.device)


def _buckets(groups: list[dict[str, Any]], slot_bytes: int) -> list[Bucket]:
    """The shards of AdamW's groups in order, cut so that every bucket is full except for the last of a group."""
    buckets: list[Bucket] = []
    for group in groups:
        bucket: Bucket | None = None
        for shard in group["params"]:
            assert shard.is_contiguous(), "its elements are counted as they lie in memory"
            aligned = ALIGNED_BYTES // shard.element_size()
            capacity = max(aligned, slot_bytes // (len(MOMENTS) * ALIGNED_BYTES) * aligned)
            first = 0
            while first < shard.numel():
                if bucket is None or bucket.num_elements == capacity:
                    bucket = Bucket(group)
                    buckets.append(bucket)
                end = min(shard.numel(), first + capacity - bucket.num_elements)
                bucket.parts.append(Part(shard, first, end, bucket.num_elements))
                bucket.num_elements += -(-(end - first) // aligned) * aligned
                first = end
    return buckets
