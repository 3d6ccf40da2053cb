"""Attention of blocks that hold a part of each sequence: all context ranks compute ``scaled_dot_product_attention`` together.

``ring``: ahp.runtime.sequence.ring. ``all-to-all``: ranks exchange tokens for heads, so that each has some heads of the whole
sequence, and exchange back after attention (DeepSpeed-Ulysses, arXiv 2309.14509).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from ahp.errors import BadInput, bad_input
from ahp.runtime.sequence.attention_module import MODULE, attend_by_parts
from ahp.runtime.sequence.context import Context
from ahp.runtime.sequence.ring import Mask, ring_attention
from ahp.runtime.tensor.collectives import exchange_rows, gather_shared
from ahp.runtime.torch_compat import FakeTensor
from ahp.search.slicing.placement import Split

ATTENTION = {F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default}


class InContext(TorchFunctionMode):
    """Within, attention of this rank's tokens sees the whole sequence."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context = context

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (MODULE, *ATTENTION) or isinstance(query_of(args, kwargs), FakeTensor):
            return func(*args, **(kwargs or {}))  # fake tensors: the block is being traced
        if func in ATTENTION:
            return _attention(self.context, *args, **(kwargs or {}))
        with self:
            return attend_by_parts(*args, **(kwargs or {}))


def query_of(args: Any, kwargs: Any) -> torch.Tensor:
    """The queries of a call of attention."""
    return args[0] if args else kwargs["query"]


def _attention(
    context: Context,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Like ``torch.nn.functional.scaled_dot_product_attention``; query [B, H, S / ranks, D], the mask of the whole sequence."""
    mask = Mask(is_causal, None if attn_mask is None else _whole(attn_mask, query.shape[2], context))
    if context.method == "all-to-all":
        return _by_heads(context, query, key, value, mask, dropout_p, scale)
    if dropout_p or (attn_mask is not None and attn_mask.requires_grad):
        what = "with dropout" if dropout_p else "that adds a trainable tensor"
        raise bad_input("context_parallel_method", "ring", f"attention {what} cannot go round", ["all-to-all"])
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return ring_attention(query, key, value, mask, scale, context)


def _whole(mask: torch.Tensor, own: int, context: Context) -> torch.Tensor:
    """A mask as [B or 1, H or 1, S or 1, S]. A mask of keys only was cut like the tokens, and is gathered."""
    mask = mask[(None,) * (4 - mask.dim())]
    rows, keys = mask.shape[-2:]
    length = own * context.size
    if rows == 1 and keys == own:
        # each rank's heads give a trainable mask a part of its gradient; a ring refuses one
        trained = mask.requires_grad and context.method == "all-to-all"
        return gather_shared(mask, Split(3, (length,)), context.group) if trained else context.gathered(mask, -1)
    if rows not in (1, length) or keys != length:
        raise BadInput(
            f"context_parallel_degree = {context.size}: a block makes a mask of {rows} x {keys} tokens from one of the sequence "
            f"of {length}; blocks must hand it to attention as it is"
        )
    return mask


def _by_heads(
    context: Context,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Mask,
    dropout_p: float,
    scale: float | None,
) -> torch.Tensor:
    heads, ranks = query.shape[1], context.size
    # Fewer key heads than ranks, or a number that the ranks do not divide: each head is repeated as often as needed.
    times = ranks // math.gcd(key.shape[1], ranks)
    if times > 1:
        key, value = (x.repeat_interleave(times, 1) for x in (key, value))
    q, k, v = _tokens_for_heads((query, key, value), context.group)
    whole = mask.whole
    if whole is not None and whole.shape[1] == heads > 1:
        whole = whole.chunk(ranks, 1)[context.rank]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=whole, dropout_p=dropout_p, is_causal=mask.causal, scale=scale,
        enable_gqa=k.shape[1] != q.shape[1],
    )  # fmt: skip
    return _heads_for_tokens(out, context.group)


def _tokens_for_heads(tensors: tuple[torch.Tensor, ...], group: dist.ProcessGroup) -> tuple[torch.Tensor, ...]:
    """Each tensor from [B, heads, S / ranks, D] to [B, heads / ranks, S, D]; in one message if all heads have one width."""
    parts = tuple(x.unflatten(1, (group.size(), -1)).movedim(1, 0) for x in tensors)
    if len({x.shape[-1] for x in parts}) > 1:
        return tuple(x.movedim(0, 2).flatten(2, 3) for x in _exchanged(parts, group))
    (found,) = _exchanged((torch.cat(parts, 2),), group)
    return found.movedim(0, 2).flatten(2, 3).split([x.shape[2] for x in parts], 1)


def _heads_for_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[B, heads / ranks, S, D] -> [B, heads, S / ranks, D], in memory [B, S / ranks, heads, D] as torch's kernels leave it: a captured block
    may view that, because its ``contiguous()`` was traced away."""
    (found,) = _exchanged((x.unflatten(2, (group.size(), -1)).movedim(2, 0),), group)
    return found.permute(1, 3, 0, 2, 4).flatten(2, 3).contiguous().transpose(1, 2)


def _exchanged(tensors: tuple[torch.Tensor, ...], group: dist.ProcessGroup) -> tuple[torch.Tensor, ...]:
    """``x[r]`` of each tensor goes to rank r; entry r of the result comes from rank r."""
    each = [1] * group.size()
    return exchange_rows(tensors, each, each, group)
