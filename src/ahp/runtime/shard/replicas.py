"""Replicated data parallel: gradients summed over replicas, bucket by bucket, while backward still runs.

Under FSDP2 its hook hands over the reduced buffer of each unit. Without FSDP2, hooks on the parameters place each gradient in its
bucket, and the last gradient starts the sum. A bucket holds 25 MiB, as in DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node

from ahp.engines.ahp import REPLICA_BUCKET_BYTES
from ahp.runtime.torch_compat import like_distributed, local_tensor

Gradients = tuple[torch.Tensor | None, ...]
"""A parameter's gradient as autograd hands it to a node: one tensor, or None if nothing gave a gradient."""


class Bucket:
    """Parameters whose gradients are sent together, in memory that is kept from step to step: on a CPU, new pages at each step
    cost more than the copies into them."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.num_ready = 0
        self.flat: torch.Tensor | None = None
        """All gradients, one after the other. Allocated when the first one comes."""
        self.parts: list[torch.Tensor] = []
        """The slice of ``flat`` that belongs to each parameter."""
        self.zeros: set[int] = set()
        """In this step, the ``id`` of each parameter without a gradient on this rank."""

    def place(self, number: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """Write a parameter's first gradient of the step to its slice. Returns a view that autograd keeps as ``grad`` and adds later
        micro-batches to in place; None if there is a ``grad`` already."""
        parameter = self.parameters[number]
        if parameter.grad is not None:
            return None
        part = self._memory()[1][number]
        part.copy_(local_tensor(gradient))
        return like_distributed(part.detach(), parameter)

    def collected(self) -> torch.Tensor:
        """``flat`` with all gradients, however they came to ``grad``, and zeros for parameters without one, because another replica may have
        one. Each ``grad`` is then its slice."""
        flat, parts = self._memory()
        for parameter, part in zip(self.parameters, parts, strict=True):
            if parameter.grad is None:
                self.zeros.add(id(parameter))
                part.zero_()
                parameter.grad = like_distributed(part.detach(), parameter)
            elif (gradient := local_tensor(parameter.grad)).data_ptr() != part.data_ptr():
                part.copy_(gradient)
                parameter.grad = like_distributed(part.detach(), parameter)
        return flat

    def _memory(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        if self.flat is None:
            like = [local_tensor(parameter.detach()) for parameter in self.parameters]
            self.flat = like[0].new_empty(sum(tensor.numel() for tensor in like))
            offset = 0
            for tensor in like:
                # Autograd keeps a gradient that has its parameter's strides, and copies any other.
                strides = torch.empty_like(tensor, device="meta").stride()
                self.parts.append(self.flat.as_strided(tensor.shape, strides, offset))
                offset += tensor.numel()
        return self.flat, self.parts


def packed(parameters: Iterable[nn.Parameter], num_bytes: int) -> list[list[nn.Parameter]]:
    """The parameters in lists; a list ends with the parameter that brings it to ``num_bytes`` or more."""
    lists: list[list[nn.Parameter]] = []
    held = num_bytes
    for parameter in parameters:
        if held >= num_bytes:
            lists.append([])
            held = 0
        lists[-1].append(parameter)
        held += local_tensor(parameter).nbytes
    return lists


def accumulation_of(parameter: nn.Parameter) -> Node:
    """The autograd node that adds to ``parameter.grad``. A hook on the parameter itself would also run for ``torch.autograd.grad``,
    which the chunked loss calls for each chunk."""
    with torch.enable_grad():
        view = parameter.expand_as(parameter)
    assert view.grad_fn is not None
    node = view.grad_fn.next_functions[0][0]
    assert node is not None
    return node


class Replicas:
    """Sums the gradients of one rank over its replicas, and holds the sums in flight."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.armed = False
        """Whether the running backward is the last of the step: gradients are not sent after earlier micro-batches."""
        self.buckets: list[Bucket] = []
        self.num_begun = 0
        """How many buckets have begun their sum in this step."""
        self.accumulations: list[Node] = []
        """Held here because autograd keeps these nodes, and their hooks, only as long as a graph has them."""
        self.pending: list[dist.Work] = []

    def watch(self, modules: list[nn.Module]) -> None:
        """Make buckets of the parameters that are in none yet. ``modules``: in the order in which backward reaches them."""
        seen = {id(p) for bucket in self.buckets for p in bucket.parameters}
        new: dict[int, nn.Parameter] = {}
        for module in modules:
            # Within a module backward mostly reaches the parameters defined last first.
            for parameter in reversed(list(module.parameters())):
                if parameter.requires_grad and id(parameter) not in seen:
                    new.setdefault(id(parameter), parameter)
        for parameters in packed(new.values(), REPLICA_BUCKET_BYTES):
            bucket = Bucket(parameters)
            self.buckets.append(bucket)
            for number, parameter in enumerate(parameters):
                accumulation = accumulation_of(parameter)
                accumulation.register_prehook(_placing(bucket, number))
                accumulation.register_hook(self._counting(bucket))
                self.accumulations.append(accumulation)

    def _counting(self, bucket: Bucket) -> Callable[..., None]:
        def after_accumulation(*_: Gradients) -> None:
            if self.armed:
                bucket.num_ready += 1
                self._start_buckets()

        return after_accumulation

    def _start_buckets(self, *, rest: bool = False) -> None:
        """Begin the sums of buckets that are ready, or of all the ``rest``. Always in the order of the list: if the data decide which gradients
        exist, replicas have buckets ready in different orders."""
        for bucket in self.buckets[self.num_begun :]:
            if not rest and bucket.num_ready < len(bucket.parameters):
                return
            self.start(bucket.collected())
            self.num_begun += 1

    def start(self, buffer: torch.Tensor, needed: bool = False) -> None:
        """Begin to sum a buffer in place; if it is ``needed`` at once, wait for all sums. All replicas must call this in the same order."""
        if buffer.numel() == 0:
            return
        work = dist.all_reduce(buffer, group=self.group, async_op=True)
        assert work is not None
        self.pending.append(work)
        if needed:
            self._wait()

    def _wait(self) -> None:
        for work in self.pending:
            work.wait()
        self.pending.clear()

    def forget(self) -> None:
        """Drop what a step left behind when it raised, after waiting for the sums in flight, which all replicas began."""
        self._wait()
        self.num_begun = 0
        for bucket in self.buckets:
            bucket.num_ready, bucket.zeros = 0, set()

    def finish(self) -> set[int]:
        """Begin the sums that no hook has begun (parameters without a gradient, torch's pipeline schedules), and wait for all. Returns the ``id``
        of each parameter that had no gradient on this rank."""
        self._start_buckets(rest=True)
        self.num_begun, zeros = 0, set[int]()
        for bucket in self.buckets:
            zeros |= bucket.zeros
            bucket.num_ready, bucket.zeros = 0, set()
        self._wait()
        return zeros


def _placing(bucket: Bucket, number: int) -> Callable[[Gradients], Gradients | None]:
    def before_accumulation(gradients: Gradients) -> Gradients | None:
        kept = None if gradients[0] is None else bucket.place(number, gradients[0])
        return None if kept is None else (kept,)

    return before_accumulation
