"""Muon: docs.pytorch.org/docs/stable/generated/torch.optim.Muon.html for the matrices of the blocks, AdamW for the rest, as it
says. On replicas, as DDP has them: each updates everything."""

from __future__ import annotations

import torch
from task import Task

from plain.ddp import PlainDDP


class MuonAndAdamW:
    """Two optimizers as one."""

    def __init__(self, model: torch.nn.Module, task: Task) -> None:
        matrices = {name: p for name, p in model.named_parameters() if ".layers." in name and p.ndim == 2}
        rest = [p for name, p in model.named_parameters() if name not in matrices]
        self.muon = torch.optim.Muon(matrices.values(), **task.optimizer.muon_keywords())
        self.adamw = torch.optim.AdamW(rest, **task.optimizer.keywords())

    def step(self) -> None:
        self.muon.step()
        self.adamw.step()

    def zero_grad(self) -> None:
        self.muon.zero_grad()
        self.adamw.zero_grad()


def muon(task: Task, accumulation: int) -> PlainDDP:
    model = task.build()
    return PlainDDP(task, accumulation, model, MuonAndAdamW(model, task))
