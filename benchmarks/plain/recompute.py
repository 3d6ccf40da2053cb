"""Recompute: docs.pytorch.org/docs/stable/checkpoint.html, a block at a time; selective after
pytorch.org/blog/activation-checkpointing-techniques. On replicas, as DDP has them."""

from __future__ import annotations

from functools import partial

import torch
from task import Task
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from plain.ddp import PlainDDP

KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]
"""Products with a weight, and attention: what takes long."""


def recompute(task: Task, accumulation: int, *, selective: bool) -> PlainDDP:
    """Each block keeps its inputs alone, and where it is ``selective`` the results of what takes long."""
    model = task.build()
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)  # the model draws no random numbers
    if selective:
        again = partial(again, context_fn=partial(create_selective_checkpoint_contexts, KEPT))
    for layer in model.model.layers:
        layer.forward = partial(again, layer.forward)
    return PlainDDP(task, accumulation, model)
