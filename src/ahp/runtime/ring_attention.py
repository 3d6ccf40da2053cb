"""Ring attention: every rank has the queries of its own tokens, and keys and values go round the ranks.

Ring Attention, arXiv 2310.01889. Under a causal mask the last tokens have most of the work, so each rank has one chunk of the
sequence from either end (zig-zag, as in Llama 3, arXiv 2407.21783, section 3.3.2): then all have the same in every round.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ahp.runtime import partial_attention
from ahp.runtime.context import Context
from ahp.runtime.partial_attention import Rule, hidden_value
from ahp.runtime.uncompiled import uncompiled


@dataclass(frozen=True)
class Mask:
    """Which keys the queries see: all, under ``causal`` those up to their own place, and what ``whole`` says."""

    causal: bool
    whole: torch.Tensor | None = None
    """[B or 1, H or 1, S or 1, S]: true where a key is seen, or numbers that are added to the products."""


@uncompiled
def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, scale: float, context: Context
) -> torch.Tensor:
    """Attention of this rank's tokens to all tokens of the sequence. Collective, forward and backward.

    q [B, H, S / ranks, D], k and v [B, G, S / ranks, D], of the tokens that ``context`` gives this rank. No gradient goes to
    the mask. It stays outside of compiled graphs, in which torch has no sending from rank to rank.
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
        k, v = k.contiguous(), v.contiguous()
        out, sums = None, None
        held = (k, v)
        for number in range(context.size):
            sending = Sending(held, context) if number < context.size - 1 else None
            work = _work(context, number, q, Mask(causal, mask), scale)
            found = partial_attention.forward(
                q[:, :, work.queries], held[0][:, :, work.keys], held[1][:, :, work.keys], work.rule
            )
            out, sums = _joined(out, sums, *found, work.queries)
            if sending is not None:
                held = sending.received()
        assert out is not None
        assert sums is not None
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, sums, mask)
        ctx.causal, ctx.scale, ctx.context = causal, scale, context
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, sums, mask = ctx.saved_tensors
        context: Context = ctx.context
        gradient = gradients[0].contiguous()
        # Sums over rounds and ranks, so in fp32. Those of keys and values go round with them, one round behind.
        of_q, of_k, of_v = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
        held, behind = (k, v), None
        for number in range(context.size):
            sending = Sending(held, context) if number < context.size - 1 else None
            work = _work(context, number, q, Mask(ctx.causal, mask), ctx.scale)
            queries, keys = work.queries, work.keys
            found = partial_attention.backward(
                gradient[:, :, queries], q[:, :, queries], held[0][:, :, keys], held[1][:, :, keys],
                out[:, :, queries], sums[:, :, queries].contiguous(), work.rule,
            )  # fmt: skip
            if behind is not None:
                of_k, of_v = behind.received()
            for total, more, part in ((of_q, found[0], queries), (of_k, found[1], keys), (of_v, found[2], keys)):
                total[:, :, part] += more
            behind = Sending((of_k, of_v), context)
            if sending is not None:
                held = sending.received()
        assert behind is not None
        of_k, of_v = behind.received()  # after as many rounds as ranks, those of this rank's own keys are back
        return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), None, None, None, None


@dataclass(frozen=True)
class _Work:
    """What a round computes: which of the rank's queries with which of the keys that it has then."""

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
    if source < context.rank:  # its first chunk is before both of this rank's, its last one after both
        return _Work(everything, slice(0, half), rule)
    return _Work(
        slice(half, None), everything, rule
    )  # this rank's last chunk is after both of them, its first before both


def _block(whole: torch.Tensor, source: int, q: torch.Tensor, context: Context) -> torch.Tensor:
    """Of a mask, this rank's rows and the columns of another's keys, in the form of ``Rule.mask``."""
    rows = whole if whole.shape[-2] == 1 else context.own(whole, -2)
    block = context.own(rows, -1, source)
    lowest = hidden_value(q.dtype)
    if block.dtype == torch.bool:
        added = torch.zeros(block.shape, dtype=q.dtype, device=q.device).masked_fill(~block, lowest)
    else:
        added = block.to(q.dtype).clamp(min=lowest)
    return added.expand(*added.shape[:-2], q.shape[2], added.shape[-1])


def _joined(
    out: torch.Tensor | None,
    sums: torch.Tensor | None,
    more: torch.Tensor,
    more_sums: torch.Tensor,
    queries: slice,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over more keys for some of the queries (the last ones): each part counts by its share of the softmax."""
    if out is None or sums is None:
        return more.float(), more_sums
    before = queries.start or 0
    old, old_sums = out[:, :, before:], sums[:, :, before:]
    new_sums = torch.logaddexp(old_sums, more_sums)
    new = old * (old_sums - new_sums).exp().unsqueeze(-1) + more * (more_sums - new_sums).exp().unsqueeze(-1)
    if not before:
        return new, new_sums
    return torch.cat((out[:, :, :before], new), 2), torch.cat((sums[:, :, :before], new_sums), 2)


class Sending:
    """Tensors on their way to the next rank of the ring, and such from the rank before on their way here."""

    def __init__(self, tensors: tuple[torch.Tensor, torch.Tensor], context: Context) -> None:
        self.kept = tensors  # their memory, until they are sent
        self.coming = torch.empty_like(tensors[0]), torch.empty_like(tensors[1])
        to, source = context.neighbours()
        operations = [dist.P2POp(dist.isend, tensor, to, context.group) for tensor in tensors]
        operations += [dist.P2POp(dist.irecv, tensor, source, context.group) for tensor in self.coming]
        self.work = dist.batch_isend_irecv(operations)

    def received(self) -> tuple[torch.Tensor, torch.Tensor]:
        for work in self.work:
            work.wait()
        return self.coming
