"""Lets a TorchFunctionMode take over the attention inside ``nn.MultiheadAttention``: torch hands the function of that module to the mode as one
call, and what it calls inside does not reach the mode."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from ahp.errors import BadInput

MODULE = F.multi_head_attention_forward
_INSIDE = FunctionType(
    MODULE.__code__, {**MODULE.__globals__, "has_torch_function": lambda _: False}, MODULE.__name__, MODULE.__defaults__
)
"""The same function, which is not handed to a mode as one call: each call inside is."""


def attend_by_parts(*args: Any, attn_mask: torch.Tensor | None = None, is_causal: bool = False, **kwargs: Any) -> Any:
    """``F.multi_head_attention_forward`` on a rank's part of each sequence, with calls that reach a mode. It refuses a mask of whole sequences, so the
    mask goes straight to the attention."""
    if attn_mask is None or is_causal:  # then the mask is a hint
        return _INSIDE(*args, attn_mask=attn_mask, is_causal=is_causal, **kwargs)
    if kwargs.get("key_padding_mask") is not None:
        raise BadInput(
            "nn.MultiheadAttention gets key_padding_mask beside attn_mask, of which parts of sequences take one"
        )
    with _Masked(attn_mask):
        return _INSIDE(*args, **kwargs)


class _Masked(TorchFunctionMode):
    """Within, attention has this mask: [S, S] or [B x H, S, S]."""

    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.mask = mask

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, key, value, _, dropout, causal = args
        mask = self.mask if self.mask.dim() == 2 else self.mask.unflatten(0, query.shape[:2])
        return func(query, key, value, mask, dropout, causal)
