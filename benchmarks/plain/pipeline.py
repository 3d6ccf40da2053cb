"""Pipeline parallel: docs.pytorch.org/tutorials/intermediate/pipelining_tutorial.html, split by hand into stages."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from task import Task
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import LlamaForCausalLM

SCHEDULES = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}
IGNORED = -100


class LlamaStage(nn.Module):
    """Some of LLaMA's blocks; the embedding on the first stage, norm and head on the last."""

    def __init__(self, model: LlamaForCausalLM, index: int, num_stages: int) -> None:
        super().__init__()
        layers = model.model.layers
        per_stage = -(-len(layers) // num_stages)
        self.embed_tokens = model.model.embed_tokens if index == 0 else None
        self.layers = layers[index * per_stage : (index + 1) * per_stage]
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


def causal_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token; logits [batch, sequence, vocabulary], labels [batch, sequence]."""
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)


class PlainPipeline:
    """One stage per worker under one of torch's schedules."""

    def __init__(self, task: Task, num_micro_batches: int, schedule: str) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        self.first, self.last = rank == 0, rank == size - 1
        self.model = LlamaStage(task.build(), rank, size)
        stage = PipelineStage(self.model, rank, size, torch.device("cpu"))
        self.schedule = SCHEDULES[schedule](stage, num_micro_batches, loss_fn=causal_loss)
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
