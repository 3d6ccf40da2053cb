"""Compiled blocks: docs.pytorch.org/tutorials/recipes/regional_compilation.html. On replicas, as DDP has them."""

from __future__ import annotations

from task import Task

from plain.ddp import PlainDDP


def compiled(task: Task, accumulation: int) -> PlainDDP:
    """Each block by itself: alike as they are, they are compiled once."""
    model = task.build()
    for layer in model.model.layers:
        layer.compile()
    return PlainDDP(task, accumulation, model)
