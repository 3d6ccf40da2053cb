"""Replicated data parallel: gradients summed over replicas, bucket by bucket, while backward still runs.

A bucket holds the gradients of one block, as FSDP2 would reduce them. Under FSDP2 its hook hands over each reduced
buffer; without it, hooks on the parameters tell when a bucket is complete.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from ahp.runtime.torch_compat import like_distributed, local_tensor


class Bucket:
    """The parameters whose gradients are sent together."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.num_ready = 0
        self.flat: torch.Tensor | None = None

    def flatten(self) -> torch.Tensor:
        """All gradients there are in one buffer; each ``grad`` becomes a view of it, so that the sum needs no copy back."""
        found = [p for p in self.parameters if p.grad is not None]
        self.flat = (
            torch.cat([local_tensor(p.grad).reshape(-1) for p in found if p.grad is not None])
            if found
            else torch.zeros(0)
        )
        offset = 0
        for parameter in found:
            assert parameter.grad is not None
            local = local_tensor(parameter.grad)
            view = self.flat[offset : offset + local.numel()].view(local.shape)
            parameter.grad = like_distributed(view, parameter)
            offset += local.numel()
        return self.flat


class Replicas:
    """The replicas of one rank's parameters, and the sums that are under way."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.armed = False
        """Whether the backward that runs is the last of the step: gradients of earlier micro-batches stay here."""
        self.buckets: list[Bucket] = []
        self.pending: list[dist.Work] = []

    def watch(self, units: list[nn.Module]) -> None:
        """Make a bucket of each unit's parameters that are in none yet."""
        seen = {id(p) for bucket in self.buckets for p in bucket.parameters}
        for unit in units:
            own = [p for p in unit.parameters() if p.requires_grad and id(p) not in seen]
            seen.update(id(p) for p in own)
            if own:
                bucket = Bucket(own)
                self.buckets.append(bucket)
                for parameter in own:
                    parameter.register_post_accumulate_grad_hook(self._hook(bucket))

    def _hook(self, bucket: Bucket) -> Callable[[torch.Tensor], None]:
        def ready(parameter: torch.Tensor) -> None:
            if self.armed:
                bucket.num_ready += 1
                if bucket.num_ready == len(bucket.parameters):
                    self.start(bucket.flatten())

        return ready

    def start(self, buffer: torch.Tensor) -> None:
        """Begin to sum a buffer in place; replicas run the same graph, so they all begin in the same order."""
        if buffer.numel() == 0:
            return
        work = dist.all_reduce(buffer, group=self.group, async_op=True)
        assert work is not None
        self.pending.append(work)

    def finish(self) -> None:
        """Begin what no hook has begun (parameters without a gradient, torch's pipeline schedules), and wait for all."""
        for bucket in self.buckets:
            if bucket.flat is None:
                self.start(bucket.flatten())
            bucket.flat, bucket.num_ready = None, 0
        for work in self.pending:
            work.wait()
        self.pending.clear()
