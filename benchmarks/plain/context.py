"""Context parallel: each worker has some tokens of every sequence, and attention sees them all.

torch's own ``context_parallel`` has no CPU kernel (torch 2.13: flash, efficient and cuDNN attention of GPUs alone), so both
methods are written after their papers: Ring Attention (arXiv 2310.01889) with zig-zag parts, as
github.com/zhuzilin/ring-flash-attention does it, and DeepSpeed-Ulysses (arXiv 2309.14509).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from task import Task
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from transformers import AttentionInterface

IGNORED = -100
aten = torch.ops.aten


class PlainContextParallel:
    """The same weights on every worker, as DDP has them; each worker's loss is the sum over its own tokens."""

    def __init__(self, task: Task, accumulation: int, method: str) -> None:
        assert accumulation == 1
        rank, size, group = dist.get_rank(), dist.get_world_size(), dist.new_group()
        AttentionInterface.register("plain", partial(ATTENTION[method], group))
        model = task.build()
        model.set_attn_implementation("plain")
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        positions = torch.arange(task.sequence_length)
        if method == "ring":
            parts = positions.chunk(2 * size)
            self.mine = torch.cat((parts[rank], parts[2 * size - 1 - rank]))
        else:
            self.mine = positions.chunk(size)[rank]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **task.optimizer.keywords())
        self.grad_clip = task.optimizer.grad_clip

    def step(self, input_ids: torch.Tensor) -> tuple[float, float]:
        targets = F.pad(input_ids[:, 1:], (0, 1), value=IGNORED)
        scored = (targets != IGNORED).sum()
        logits = self.model(input_ids=input_ids[:, self.mine], position_ids=self.mine.unsqueeze(0)).logits
        mine = targets[:, self.mine].flatten()
        loss = F.cross_entropy(logits.flatten(0, 1), mine, ignore_index=IGNORED, reduction="sum") / scored
        (loss * dist.get_world_size()).backward()  # DDP takes the mean of the gradients
        norm = clip_grad_norm_(self.model.parameters(), self.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        return total.item(), norm.item()


class AllToAll(torch.autograd.Function):
    """``x[r]`` goes to worker r; what comes from worker r is the r-th of the result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return AllToAll.apply(gradients[0], ctx.group), None


def by_heads(
    group: dist.ProcessGroup, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """Some heads of all tokens in the place of all heads of some; queries, keys and values in one message.

    q [batch, heads, tokens / workers, width], k and v with fewer heads -> [batch, tokens / workers, heads, width]
    """
    size = group.size()
    heads = [x.shape[1] // size for x in (q, k, v)]
    packed = torch.cat([x.unflatten(1, (size, -1)).movedim(1, 0) for x in (q, k, v)], 2)
    q, k, v = AllToAll.apply(packed, group).movedim(0, 2).flatten(2, 3).split(heads, 1)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    back = AllToAll.apply(out.unflatten(2, (size, -1)).movedim(2, 0), group)
    return back.movedim(0, 1).flatten(1, 2).transpose(1, 2), None


def ring(
    group: dist.ProcessGroup, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """Keys and values go round the workers; shapes as in ``by_heads``."""
    return Ring.apply(q, torch.stack((k, v)), group).transpose(1, 2), None


ATTENTION = {"ring": ring, "all-to-all": by_heads}


class Ring(torch.autograd.Function):
    """q [batch, heads, tokens / workers, width], kv [2, batch, key heads, tokens / workers, width]"""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, kv: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        half, held = q.shape[2] // 2, kv
        out, lse = torch.empty(0), torch.empty(0)
        for number in range(group.size()):
            coming = Sending(held, group) if number + 1 < group.size() else None
            queries, keys = seen(number, group, half)
            found = aten._scaled_dot_product_flash_attention_for_cpu(
                q[:, :, queries], held[0, :, :, keys], held[1, :, :, keys], 0.0, number == 0
            )
            if number == 0:
                out, lse = found
            else:
                join(out[:, :, queries], lse[:, :, queries], *found)
            held = held if coming is None else coming.wait()
        ctx.save_for_backward(q, kv, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (q, kv, out, lse), group = ctx.saved_tensors, ctx.group
        half, held, gradient = q.shape[2] // 2, kv, gradients[0].contiguous()
        of_q, of_kv, behind = torch.zeros_like(q), torch.zeros_like(kv), None
        for number in range(group.size()):
            coming = Sending(held, group) if number + 1 < group.size() else None
            queries, keys = seen(number, group, half)
            found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient[:, :, queries], q[:, :, queries], held[0, :, :, keys], held[1, :, :, keys],
                out[:, :, queries], lse[:, :, queries].contiguous(), 0.0, number == 0,
            )  # fmt: skip
            of_q[:, :, queries] += found[0]
            of_kv = of_kv if behind is None else behind.wait()  # those of keys go with them, one round behind
            of_kv[0, :, :, keys] += found[1]
            of_kv[1, :, :, keys] += found[2]
            behind = Sending(of_kv, group)
            held = held if coming is None else coming.wait()
        assert behind is not None
        return of_q, behind.wait(), None


def seen(number: int, group: dist.ProcessGroup, half: int) -> tuple[slice, slice]:
    """Of the queries here and the keys that came so many places, those that meet: a worker has a part from either end."""
    if number == 0:
        return slice(None), slice(None)
    earlier = number <= group.rank()
    return (slice(None), slice(0, half)) if earlier else (slice(half, None), slice(None))


def join(out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor) -> None:
    """Add attention over more keys, in place: each part counts by its share of the softmax."""
    share = torch.sigmoid(more_lse - lse)
    out.lerp_(more, share.unsqueeze(-1))
    lse.sub_(F.logsigmoid(lse - more_lse))


class Sending:
    """A tensor on its way to the next worker, and the one before's on its way here."""

    def __init__(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.tensor, self.coming = tensor, torch.empty_like(tensor)
        rank, size = group.rank(), group.size()
        self.work = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % size),
                dist.P2POp(dist.irecv, self.coming, group=group, group_peer=(rank - 1) % size),
            ]
        )

    def wait(self) -> torch.Tensor:
        for work in self.work:
            work.wait()
        return self.coming
