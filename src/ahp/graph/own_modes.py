"""Traces a model the same under whatever modes of torch a program calls it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_ONE_AT_A_TIME = threading.RLock()
"""Tracing changes what all threads share: torch's tracers, the module, functions of transformers."""


@contextmanager
def own_modes() -> Iterator[None]:
    """With gradients, without autocast, tensors on the CPU: as a job computes, whatever the caller has set. Other threads wait."""
    with _ONE_AT_A_TIME, torch.inference_mode(False), torch.enable_grad(), ExitStack() as stack:
        if torch.is_autocast_enabled("cpu"):
            stack.enter_context(torch.autocast("cpu", enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield
