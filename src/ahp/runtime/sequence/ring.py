"""Ring attention: every rank has the queries of its own tokens, and keys and values travel around the ring of ranks.

Ring Attention, arXiv 2310.01889. Under a causal mask the last tokens have most of the work, so each rank has one chunk of the
sequence from either end (zig-zag, as in Llama 3, arXiv 2407.21783, section 3.3.2): then all have the same work in every round.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ahp.runtime.compute.recompute import saved_once
from ahp.runtime.compute.uncompiled import uncompiled
from ahp.runtime.sequence import partial_attention
from ahp.runtime.sequence.context import Context
from ahp.runtime.sequence.partial_attention import Rule, hidden_value


@dataclass(frozen=True)
class Mask:
    """Which keys the queries see: all; with ``causal`` those up to their own position; with ``whole`` those it allows."""

    causal: bool
    whole: torch.Tensor | None = None
    """[B or 1, H or 1, S or 1, S]: true where a key is seen, or numbers that are added to the products."""


@uncompiled
def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, scale: float, context: Context
) -> torch.Tensor:
    """Attention of this rank's tokens to all tokens of the sequence. Collective, forward and backward.

    q [B, H, S / ranks, D], k and v [B, G, S / ranks, D], of the tokens that ``context`` gives this rank. No gradient goes to
    the mask. It stays outside of compiled graphs, in which torch cannot send from rank to rank.
    """
    return _Ring.apply(q, k, v, mask.whole, mask.causal, scale, context)  # type: ignore[no-any-return]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        scale: float,
        context: Context,
    ) -> torch.Tensor:
        shapes, own = (k.shape, v.shape), _packed(k, v)
        out, sums = saved_once(lambda: _rounds(q, own, shapes, Mask(causal, mask), scale, context))
        ctx.save_for_backward(q, own, out, sums, mask)
        ctx.shapes, ctx.causal, ctx.scale, ctx.context = shapes, causal, scale, context
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, held, out, sums, mask = ctx.saved_tensors
        context: Context = ctx.context
        gradient = gradients[0].contiguous()
        # Gradients are sums over rounds and ranks, so fp32. Those of keys and values follow them around the ring, one round behind.
        of_q = of_held = torch.empty(0)
        behind = None
        for number in range(context.size):
            sending = Sending(held, context) if number < context.size - 1 else None
            work = _work(context, number, q, Mask(ctx.causal, mask), ctx.scale)
            keys, values = _unpacked(held, ctx.shapes)
            queries, part = work.queries, work.keys
            found = partial_attention.backward(
                gradient[:, :, queries], q[:, :, queries], keys[:, :, part], values[:, :, part],
                out[:, :, queries], sums[:, :, queries].contiguous(), work.rule,
            )  # fmt: skip
            if behind is None:  # all queries, all keys
                of_q, of_held = found[0].float(), _packed(found[1].float(), found[2].float())
            else:
                of_held = behind.received()
                of_keys, of_values = _unpacked(of_held, ctx.shapes)
                of_q[:, :, queries] += found[0]
                of_keys[:, :, part] += found[1]
                of_values[:, :, part] += found[2]
            behind = Sending(of_held, context)
            if sending is not None:
                held = sending.received()
        assert behind is not None
        # After as many rounds as ranks, the gradients of this rank's own keys are back.
        of_k, of_v = _unpacked(behind.received(), ctx.shapes)
        return of_q.to(q.dtype), of_k.to(q.dtype), of_v.to(q.dtype), None, None, None, None


def _rounds(
    q: torch.Tensor,
    own: torch.Tensor,
    shapes: tuple[torch.Size, torch.Size],
    mask: Mask,
    scale: float,
    context: Context,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention [B, H, S / ranks, D] and the log-sum-exp of its products; ``own``: this rank's keys and values."""
    held = own
    out = sums = torch.empty(0)
    for number in range(context.size):
        sending = Sending(held, context) if number < context.size - 1 else None
        work = _work(context, number, q, mask, scale)
        keys, values = _unpacked(held, shapes)
        more, more_sums = partial_attention.forward(
            q[:, :, work.queries], keys[:, :, work.keys], values[:, :, work.keys], work.rule
        )
        if number == 0:  # all queries
            out, sums = more.float(), more_sums
        else:
            _join(out[:, :, work.queries], sums[:, :, work.queries], more.float(), more_sums)
        if sending is not None:
            held = sending.received()
    return out.to(q.dtype), sums


def _packed(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Keys and values in one piece of memory, so that they travel as one message."""
    return torch.cat((keys.reshape(-1), values.reshape(-1)))


def _unpacked(held: torch.Tensor, shapes: tuple[torch.Size, torch.Size]) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = held.split([shape.numel() for shape in shapes])
    return keys.view(shapes[0]), values.view(shapes[1])


@dataclass(frozen=True)
class _Work:
    """What a round computes: which of the rank's queries with which of the keys that it holds in that round."""

    queries: slice
    keys: slice
    rule: Rule


def _work(context: Context, number: int, q: torch.Tensor, mask: Mask, scale: float) -> _Work:
    """In round i a rank has the keys of the rank i places before it."""
    everything, rule = slice(None), Rule(scale)
    source, half = (context.rank - number) % context.size, q.shape[2] // 2
    if mask.whole is not None:
        return _Work(everything, everything, replace(rule, mask=_block(mask.whole, source, q, context)))
    if not mask.causal:
        return _Work(everything, everything, rule)
    if source == context.rank:  # the tokens of a rank are in rising order
        return _Work(everything, everything, replace(rule, causal=True))
    if source < context.rank:  # the source's first chunk is before both of this rank's, its last one after both
        return _Work(everything, slice(0, half), rule)
    return _Work(
        slice(half, None), everything, rule
    )  # this rank's last chunk is after both of the source's, its first before both


def _block(whole: torch.Tensor, source: int, q: torch.Tensor, context: Context) -> torch.Tensor:
    """This rank's rows of a mask and the columns of the source rank's keys, in the form of ``Rule.mask``."""
    rows = whole if whole.shape[-2] == 1 else context.own(whole, -2)
    block = context.own(rows, -1, source)
    lowest = hidden_value(q.dtype)
    if block.dtype == torch.bool:
        added = torch.zeros(block.shape, dtype=q.dtype, device=q.device).masked_fill(~block, lowest)
    else:
        added = block.to(q.dtype).clamp(min=lowest)
    return added.expand(*added.shape[:-2], q.shape[2], added.shape[-1])


def _join(out: torch.Tensor, sums: torch.Tensor, more: torch.Tensor, more_sums: torch.Tensor) -> None:
    """Add attention over more keys, in place: each part counts by its share of the softmax."""
    new_sums = torch.logaddexp(sums, more_sums)
    out.lerp_(more, (more_sums - new_sums).exp().unsqueeze(-1))
    sums.copy_(new_sums)


class Sending:
    """Sends a tensor to the next rank of the ring, and receives one like it from the previous rank."""

    def __init__(self, tensor: torch.Tensor, context: Context) -> None:
        self.kept = tensor  # keeps its memory until it is sent
        self.coming = torch.empty_like(tensor)
        to, source = context.neighbours()
        self.work = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, to, context.group),
                dist.P2POp(dist.irecv, self.coming, source, context.group),
            ]
        )

    def received(self) -> torch.Tensor:
        for work in self.work:
            work.wait()
        return self.coming
