"""Replicated data parallel: docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html, with ``no_sync`` to accumulate."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Protocol

import torch
import torch.distributed as dist
from task import Task
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_


class Updates(Protocol):
    """The methods of an optimizer that DDP's step calls."""

    def step(self) -> None: ...

    def zero_grad(self) -> None: ...


class PlainDDP:
    """DDP with its buckets as the gradients, which spares a copy.

    ``model``: the task's, where something is done to it first; called with ``input_ids`` and ``labels`` it gives ``loss``.
    ``optimizer``: of its parameters, where it is not AdamW alone.
    """

    def __init__(
        self, task: Task, accumulation: int, model: nn.Module | None = None, optimizer: Updates | None = None
    ) -> None:
        self.accumulation = accumulation
        self.model = DistributedDataParallel(task.build() if model is None else model, gradient_as_bucket_view=True)
        adamw = torch.optim.AdamW(self.model.parameters(), **task.optimizer.keywords()) if optimizer is None else None
        self.optimizer: Updates = optimizer or adamw
        self.grad_clip = task.optimizer.grad_clip

    def step(self, input_ids: torch.Tensor) -> tuple[float, float]:
        mine = input_ids.chunk(dist.get_world_size())[dist.get_rank()]
        total = torch.zeros(())
        for number, ids in enumerate(mine.chunk(self.accumulation), start=1):
            with nullcontext() if number == self.accumulation else self.model.no_sync():
                loss = self.model(input_ids=ids, labels=ids).loss / self.accumulation
                loss.backward()
            total += loss.detach()
        norm = clip_grad_norm_(self.model.parameters(), self.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size(), norm.item()
