"""Accelerate's replicated data parallel: huggingface.co/docs/accelerate, with ``accumulate`` for micro-batches."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from task import Task


class AccelerateDDP:
    """``Accelerator.prepare`` around model and optimizer."""

    def __init__(self, task: Task, accumulation: int) -> None:
        rank, world = str(dist.get_rank()), str(dist.get_world_size())
        os.environ.update(
            RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, ACCELERATE_USE_CPU="true"
        )  # all on this machine: else it asks for the address of another
        from accelerate import Accelerator

        self.accumulation = accumulation
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
        model = task.build()
        optimizer = torch.optim.AdamW(model.parameters(), **task.optimizer.keywords())
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.grad_clip = task.optimizer.grad_clip

    def step(self, input_ids: torch.Tensor) -> tuple[float, float]:
        mine = input_ids.chunk(dist.get_world_size())[dist.get_rank()]
        total = torch.zeros(())
        norm = 0.0
        for ids in mine.chunk(self.accumulation):
            with self.accelerator.accumulate(self.model):
                loss = self.model(input_ids=ids, labels=ids).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norm = float(self.accelerator.clip_grad_norm_(self.model.parameters(), self.grad_clip))
                self.optimizer.step()
                self.optimizer.zero_grad()
            total += loss.detach() / self.accumulation
        dist.all_reduce(total)
        return total.item() / dist.get_world_size(), norm
