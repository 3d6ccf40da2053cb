"""Activations that are computed again in backward instead of kept."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Context = Callable[[], AbstractContextManager[Any]]


def recompute(block: nn.Module, around: Context = nullcontext) -> None:
    """Keep nothing of a block's forward but its inputs, in place; backward runs it again, within ``around``.

    Its forward alone is wrapped: parameter names stay, and hooks on the block (FSDP2's) run once, outside.
    """
    forward = block.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), around()), **kwargs)

    block.forward = run  # type: ignore[method-assign]
