"""Replicated data parallel: gradients summed over replicas, bucket by bucket, while backward still runs.

A bucket holds the gradients of one block, as FSDP2 would reduce them. Under FSDP2 its hook hands over each reduced
buffer; without it, hooks on the parameters write each gradient to its bucket, and the last one starts the sum.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node

from ahp.runtime.torch_compat import like_distributed, local_tensor

Gradients = tuple[torch.Tensor, ...]
"""Of one parameter, as autograd hands it to a node: one tensor."""


class Bucket:
    """The parameters whose gradients are sent together."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.num_ready = 0
        self.flat: torch.Tensor | None = None
        """The step's sum of all gradients, one after the other. Made for each step, so that it takes no memory while the forward runs."""
        self.parts: list[torch.Tensor] = []
        """Of each parameter, its part of ``flat``."""

    def take(self, number: int, gradient: torch.Tensor) -> torch.Tensor:
        """Write the whole gradient of a parameter to its part: ``gradient`` and what earlier micro-batches left in ``grad``.

        So the addition that autograd would do in ``grad`` fills the bucket, and nothing is copied. Returns what autograd can keep as ``grad``.
        """
        if self.flat is None:
            self._allocate()
        parameter, part = self.parameters[number], self.parts[number]
        if parameter.grad is None:
            part.copy_(local_tensor(gradient))
        else:
            torch.add(local_tensor(parameter.grad), local_tensor(gradient), out=part)
            parameter.grad = None
        self.num_ready += 1
        return like_distributed(part.detach(), parameter)

    def _allocate(self) -> None:
        like = [local_tensor(parameter) for parameter in self.parameters]
        self.flat = like[0].new_empty(sum(tensor.numel() for tensor in like))
        self.parts, offset = [], 0
        for tensor in like:
            # Autograd keeps a gradient that lies in memory as its parameter does, and copies any other.
            strides = torch.empty_like(tensor, device="meta").stride()
            self.parts.append(self.flat.as_strided(tensor.shape, strides, offset))
            offset += tensor.numel()

    def is_full(self) -> bool:
        """Whether ``flat`` has every gradient."""
        return self.num_ready == len(self.parameters)

    def flatten(self) -> torch.Tensor:
        """All gradients that there are in one buffer, however they came to ``grad``; each ``grad`` becomes a part of it."""
        found = [p for p in self.parameters if p.grad is not None]
        locals_ = [local_tensor(p.grad) for p in found if p.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in locals_]) if found else torch.zeros(0)
        for parameter, part in zip(found, flat.split([gradient.numel() for gradient in locals_]), strict=True):
            parameter.grad = like_distributed(part.view(local_tensor(parameter).shape), parameter)
        return flat

    def hand_over(self) -> None:
        """Let each ``grad`` be a part of ``flat``, and be ready for the next step."""
        if self.is_full():
            for parameter, part in zip(self.parameters, self.parts, strict=True):
                parameter.grad = like_distributed(part, parameter)
        self.num_ready, self.flat, self.parts = 0, None, []


def accumulation_of(parameter: nn.Parameter) -> Node:
    """The node of autograd's that adds to ``parameter.grad``. A hook on the parameter itself would run for ``torch.autograd.grad`` too,
    by which the loss in chunks makes the gradient of each chunk."""
    with torch.enable_grad():
        view = parameter.expand_as(parameter)
    assert view.grad_fn is not None
    node = view.grad_fn.next_functions[0][0]
    assert node is not None
    return node


class Replicas:
    """The replicas of one rank's parameters, and the sums that are under way."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.armed = False
        """Whether the backward that runs is the last of the step: gradients of earlier micro-batches stay here."""
        self.buckets: list[Bucket] = []
        self.accumulations: list[Node] = []
        """Autograd keeps such a node only as long as a graph has it, and its hooks with it."""
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
                for number, parameter in enumerate(own):
                    accumulation = accumulation_of(parameter)
                    accumulation.register_prehook(self._hook(bucket, number))
                    self.accumulations.append(accumulation)

    def _hook(self, bucket: Bucket, number: int) -> Callable[[Gradients], Gradients | None]:
        def before_accumulation(gradients: Gradients) -> Gradients | None:
            if not self.armed:
                return None
            kept = bucket.take(number, gradients[0])
            if bucket.is_full():
                assert bucket.flat is not None
                self.start(bucket.flat)
            return (kept,)

        return before_accumulation

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
            if not bucket.is_full():
                self.start(bucket.flatten())
            bucket.hand_over()
        for work in self.pending:
            work.wait()
        self.pending.clear()
