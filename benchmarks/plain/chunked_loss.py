"""The loss some tokens at a time, so that the logits never exist whole: head and cross-entropy in one function that makes the
gradients with the logits, after Liger Kernel (arXiv 2410.10989, section 3.2). On replicas, as DDP has them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from task import Task
from torch import nn
from transformers import LlamaForCausalLM

from plain.ddp import PlainDDP

IGNORED = -100


class ChunkedCrossEntropy(torch.autograd.Function):
    """hidden [tokens, hidden], weight [vocabulary, hidden], targets [tokens] -> mean over the scored tokens."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunk_tokens: int
    ) -> torch.Tensor:
        of_hidden, of_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        scored = targets != IGNORED
        share = scored / scored.sum()
        total = torch.zeros(())
        for part in torch.arange(len(hidden)).split(chunk_tokens):
            rows = slice(int(part[0]), int(part[-1]) + 1)
            logits = hidden[rows] @ weight.t()
            target = targets[rows].clamp(min=0).unsqueeze(1)
            sums = logits.logsumexp(1, keepdim=True)
            total += ((sums - logits.gather(1, target)).squeeze(1) * share[rows]).sum()
            gradient = logits.sub_(sums).exp_()  # the softmax
            gradient.scatter_add_(1, target, torch.full_like(sums, -1.0)).mul_(share[rows].unsqueeze(1))
            torch.mm(gradient, weight, out=of_hidden[rows])
            of_weight.addmm_(gradient.t(), hidden[rows])
        ctx.save_for_backward(of_hidden, of_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_hidden, of_weight = ctx.saved_tensors
        return of_hidden * gradients[0], of_weight * gradients[0], None, None


class InChunks(nn.Module):
    """LLaMA that gives its loss alone."""

    def __init__(self, whole: LlamaForCausalLM, chunk_tokens: int) -> None:
        super().__init__()
        self.model, self.lm_head, self.chunk_tokens = whole.model, whole.lm_head, chunk_tokens

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        hidden = self.model(input_ids=input_ids).last_hidden_state.flatten(0, 1)
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()
        return SimpleNamespace(loss=ChunkedCrossEntropy.apply(hidden, self.lm_head.weight, targets, self.chunk_tokens))


def chunked_loss(task: Task, accumulation: int, *, chunk_tokens: int) -> PlainDDP:
    return PlainDDP(task, accumulation, InChunks(task.build(), chunk_tokens))
