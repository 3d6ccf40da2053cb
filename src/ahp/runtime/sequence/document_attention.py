"""Attention by the lengths of documents: no mask [sequence, sequence], and no work across documents.

Blocks get the starts of documents instead of a mask (``ahp.graph.document_starts``). Each call of ``scaled_dot_product_attention`` in
them becomes FlashAttention over sequences of different lengths, with all tokens of a micro-batch in one row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ahp.engines.ahp import needs_masks
from ahp.errors import BadInput
from ahp.graph.call import Documents, Sight
from ahp.graph.document_starts import DocumentStarts, document_starts
from ahp.plan import Plan
from ahp.runtime.sequence.ulysses import ATTENTION, query_of
from ahp.runtime.torch_compat import FakeTensor, attention_of_lengths

LOWEST_CAPABILITY = (8, 0)
"""The compute capability that FlashAttention-2 needs."""


def document_attention(
    module: nn.Module, documents: Documents, plan: Plan, device: torch.device
) -> tuple[DocumentAttention | None, str]:
    """The attention of a model whose documents do not see each other, None = masks; and the reason.

    The one place where this is decided. A forecast follows the same reasons (``ahp.forecast.documents``).
    """
    reason = needs_masks(plan.job, plan.parallelism, plan.engine) or _needs_masks_on(device)
    if reason is None:
        found = document_starts(module, documents, plan.job.sequence_length)
        if isinstance(found, DocumentStarts):
            return DocumentAttention(
                found, plan.parallelism.micro_batch_size
            ), "FlashAttention by the lengths of documents"
        reason = found
    return None, f"masks [sequence, sequence], because {reason}"


def _needs_masks_on(device: torch.device) -> str | None:
    """Why this device has no kernel for attention by lengths; None if it has."""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"FlashAttention by lengths is for NVIDIA's GPUs, and this is {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < LOWEST_CAPABILITY:
        return f"FlashAttention needs compute capability 8.0, and {torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}"
    return None


class DocumentAttention:
    """Makes the blocks of a model attend within documents only."""

    def __init__(self, starts: DocumentStarts, rows: int) -> None:
        """``rows``: how many a micro-batch has."""
        self.documents, self.sights, self.rows = starts.documents, starts.sights, rows
        self.room = 1
        """How many documents of a micro-batch there is room for: a power of two that only grows, because a compiled graph would be
        made again for every other number."""

    def make_room(self, position_ids: torch.Tensor) -> None:
        """Make room for the documents of the next micro-batches [rows, sequence]. Reads the tensor: on the CPU, that waits for no device."""
        counts = (position_ids == 0).sum(1) + (position_ids[:, 0] != 0)
        most = int(counts.view(-1, self.rows).sum(1).max())
        self.room = max(self.room, 1 << (most - 1).bit_length())

    def attend(self, block: nn.Module, number: int) -> None:
        """Make a block's attention go by lengths, in place. To be called after it is compiled, and before it is made to recompute."""
        forward, sight = block.forward, self.sights[number]

        def run(*args: Any, **kwargs: Any) -> Any:
            with WithinDocuments(self, sight):
                return forward(*args, **kwargs)

        block.forward = run  # type: ignore[method-assign]


class WithinDocuments(TorchFunctionMode):
    """Within, attention that gets the starts of documents instead of a mask attends within these documents."""

    def __init__(self, attention: DocumentAttention, sight: Sight) -> None:
        super().__init__()
        self.attention, self.sight = attention, sight

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ATTENTION and not isinstance(
            query_of(args, kwargs), FakeTensor
        ):  # fake tensors: the block is being traced
            return _attention(self.attention.room, self.sight, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attention(
    room: int,
    sight: Sight,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Like ``torch.nn.functional.scaled_dot_product_attention``; ``attn_mask`` bool [B, 1, 1, S], true where a document starts."""
    batch, heads, length, width = query.shape
    if attn_mask is None or attn_mask.shape != (batch, 1, 1, length) or is_causal or dropout_p:
        raise BadInput(
            "job.document_mask = True: attention is called otherwise than when the model was traced (valid: False)"
        )
    bounds = bounds_of(attn_mask.reshape(-1), room)
    q, k, v = (x.transpose(1, 2).reshape(batch * length, x.shape[1], width) for x in (query, key, value))
    out = attention_of_lengths(q, k, v, bounds, length, (sight.before, sight.after), scale)
    return out.view(batch, length, heads, width).transpose(1, 2)


def bounds_of(starts: torch.Tensor, room: int) -> torch.Tensor:
    """int32 [room + 1]: where each document begins in a row of tokens, and where the last one ends; spare documents are empty.

    ``starts``: bool [tokens]. The shape does not depend on the documents, and nothing waits for the device.
    """
    numbers = torch.arange(1, room + 2, device=starts.device)
    return torch.searchsorted(starts.cumsum(0), numbers, out_int32=True)
