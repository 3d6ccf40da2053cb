"""Pipeline parallel: docs.pytorch.org/tutorials/intermediate/pipelining_tutorial.html, split by hand into stages; several on a
worker under the schedules that take them."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from task import Task
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleDualPipeV, ScheduleZBVZeroBubble
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import LlamaForCausalLM

IGNORED = -100


class LlamaStage(nn.Module):
    """Some of LLaMA's blocks; the embedding on the first stage, norm and head on the last."""

    def __init__(self, model: LlamaForCausalLM, index: int, num_stages: int) -> None:
        super().__init__()
        self.embed_tokens = model.model.embed_tokens if index == 0 else None
        self.layers = model.model.layers[cut(len(model.model.layers), index, num_stages)]
        self.rotary_emb = model.model.rotary_emb
        self.norm = model.model.norm if index == num_stages - 1 else None
        self.lm_head = model.lm_head if index == num_stages - 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(x) if self.embed_tokens is not None else x
        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        rotary = self.rotary_emb(hidden, position_ids=positions)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary)
        if self.norm is not None and self.lm_head is not None:
            return self.lm_head(self.norm(hidden))
        return hidden


def cut(num_layers: int, index: int, num_stages: int) -> slice:
    """The blocks of a stage: where they do not go round, the stages with embedding and head have fewer."""
    fewest, more = divmod(num_layers, num_stages)
    first = (num_stages - more) // 2  # of those with one more
    start, end = (i * fewest + min(max(i - first, 0), more) for i in (index, index + 1))
    return slice(start, end)


def causal_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token; logits [batch, sequence, vocabulary], labels [batch, sequence]."""
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)


class PlainPipeline:
    """One of torch's schedules, with one stage on each worker or two."""

    def __init__(self, task: Task, num_micro_batches: int, schedule: str) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        kind = get_schedule_class(schedule)
        single = issubclass(kind, PipelineScheduleSingle)
        folded = issubclass(kind, ScheduleZBVZeroBubble | ScheduleDualPipeV)  # down the workers and up again
        num_stages = size if single else 2 * size
        mine = [rank] if single else [rank, num_stages - 1 - rank] if folded else [rank, size + rank]
        self.first, self.last = 0 in mine, num_stages - 1 in mine
        whole = task.build()
        self.model = nn.ModuleList(LlamaStage(whole, index, num_stages) for index in mine)
        stages = [
            PipelineStage(part, index, num_stages, torch.device("cpu"))
            for part, index in zip(self.model, mine, strict=True)
        ]
        self.schedule = kind(stages[0] if single else stages, num_micro_batches, loss_fn=causal_loss)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **task.optimizer.keywords())
        self.grad_clip = task.optimizer.grad_clip

    def step(self, input_ids: torch.Tensor) -> tuple[float, float]:
        losses: list[torch.Tensor] = []
        self.schedule.step(
            *((input_ids,) if self.first else ()),
            target=input_ids if self.last else None,
            losses=losses if self.last else None,
            return_outputs=False,
        )
        mean = torch.stack([loss.detach() for loss in losses]).mean() if self.last else torch.zeros(())
        mine = get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        both = torch.stack((mean, mine.square()))
        dist.all_reduce(both)
        norm = both[1].sqrt()
        clip_grads_with_norm_(self.model.parameters(), self.grad_clip, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return both[0].item(), norm.item()
