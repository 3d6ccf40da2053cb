"""Finds where a loss or a gradient that is not a number comes from: the first module, and the rank that holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ahp.runtime.pipeline.schedules import Inputs, Runner, split_rows
from ahp.runtime.shard.fsdp import without_backward
from ahp.runtime.torch_compat import local_tensor, pytree


def find_fault(
    runner: Runner,
    micro_batch_size: int,
    inputs: Inputs,
    labels: torch.Tensor,
    *,
    names: Sequence[str],
    bad_gradients: Sequence[str],
) -> str:
    """The fault in words, from a forward pass over this rank's rows with the weights of the failed step, which leaves buffers as they were.
    Collective.

    ``names``: all parameters in the model's order; ``bad_gradients``: this rank's parameters whose gradient norm was not a number.
    Under tensor parallelism a block runs as one rewritten graph, so the block is named and not a module inside it. The module at fault
    is the first to run whose output has a NaN or a positive infinity (masks hold negative ones). If all outputs are numbers, a gradient
    is at fault: that of the last parameter in the model's order whose gradient norm is not a number, because backward carries a fault
    from there to all parameters before it."""
    seen: list[tuple[int, str]] = []
    stages = runner.stages.values()
    modules = [module for stage in stages for module in stage.modules()]
    with ExitStack() as hooks, torch.no_grad(), _kept_buffers(modules), without_backward(stages):
        for index, stage in runner.stages.items():
            for name, module in stage.model.named_modules():
                # Before all other hooks: a hook of the last block may leave the model there (runtime/compute/chunked_loss.py).
                watch = module.register_forward_hook(_watch(seen, index, name), prepend=True)
                hooks.callback(watch.remove)
        for part, targets in split_rows(inputs, labels, micro_batch_size):
            runner.evaluate(part, targets)
    forward = min(seen, key=lambda fault: fault[0]) if seen else None  # the first that ran, in the first stage at fault
    order = list(names)
    gradient = max(bad_gradients, key=order.index, default=None)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (forward, gradient))
    return _words(found, order)


@contextmanager
def _kept_buffers(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Gives modules back the buffers that they have now, and their values."""
    held = [(module, dict(module._buffers)) for module in modules]
    values = [(buffer, buffer.clone()) for _, buffers in held for buffer in buffers.values() if buffer is not None]
    try:
        yield
    finally:
        for module, buffers in held:
            module._buffers.update(buffers)
        for buffer, value in values:
            buffer.copy_(value)


def _watch(seen: list[tuple[int, str]], index: int, name: str) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point()]
        if any(bool((tensor.isnan() | tensor.isposinf()).any()) for tensor in tensors):
            weights = module.named_parameters()
            bad = next((n for n, p in weights if not local_tensor(p.detach()).isfinite().all()), None)
            seen.append(
                (index, (name or type(module).__name__) + (f", whose {bad} is not a number either" if bad else ""))
            )

    return hook


def _words(found: list[tuple[tuple[int, str] | None, str | None]], order: list[str]) -> str:
    """``found``: for each rank, the first fault of its forward (stage, module) and the last parameter with a bad gradient."""
    forward = min(((fault[0], rank, fault[1]) for rank, (fault, _) in enumerate(found) if fault), default=None)
    if forward is not None:
        return f"the first module whose output is not a number: {forward[2]} (rank {forward[1]})"
    gradients = [(order.index(name), -rank, name) for rank, (_, name) in enumerate(found) if name]
    if gradients:
        _, rank, name = max(gradients)
        return f"all outputs are numbers; the first gradient in backward that is not a number: {name} (rank {-rank})"
    return "all outputs and gradients are numbers; only the loss or the norm overflows"
