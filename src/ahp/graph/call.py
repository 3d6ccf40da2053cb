"""How AHP calls a model, and where the logits are in what it returns: one way for the graph and for the runtime."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ahp.errors import BadInput


def model_arguments(
    module: nn.Module, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of ``module`` for token ids [B, S], and their places in their documents where several share
    a sequence: nothing else, no cache of keys, and no balance loss of a mixture of experts (the runtime makes it from what the
    routers say)."""
    positions = {} if position_ids is None else {"position_ids": position_ids}
    config = getattr(module, "config", None)
    if not hasattr(config, "use_cache") or not hasattr(module, "prepare_inputs_for_generation"):
        return (input_ids,), positions
    no_balance = {"output_router_logits": False} if getattr(config, "output_router_logits", False) else {}
    return (), {"input_ids": input_ids, "use_cache": False, **positions, **no_balance}


def call_model(module: nn.Module, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> Any:
    """What ``module`` returns for token ids [B, S], and their places in their documents where several share a sequence."""
    args, kwargs = model_arguments(module, input_ids, position_ids)
    return module(*args, **kwargs)


def logits_of(output: Any) -> torch.Tensor:
    """The logits [B, S, V] in a model's output: the tensor itself, ``.logits``, ``["logits"]`` or a tuple's first.

    Raises BadInput when there are none, or when they are of another shape.
    """
    if isinstance(output, dict) and "logits" in output:
        output = output["logits"]
    output = getattr(output, "logits", output)
    if isinstance(output, (tuple, list)) and output:
        output = output[0]
    if isinstance(output, torch.Tensor) and output.dim() == 3:
        return output
    what = list(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
    raise BadInput(f"model: its forward returned {what}; logits [batch, sequence, vocabulary] were expected")
