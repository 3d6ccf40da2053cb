"""Expert parallel: each worker has some experts of every mixture, and copies of tokens travel to them (GShard, arXiv 2006.16668;
torchtitan's expert parallelism), beside FSDP2 for everything else."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from task import Task
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers.models.mixtral.modeling_mixtral import MixtralExperts


class AllToAll(torch.autograd.Function):
    """``sent[r]`` rows of ``x`` go to worker r, ``received[r]`` come from it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        ctx.sent, ctx.received = sent, received
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return AllToAll.apply(gradients[0], ctx.received, ctx.sent), None, None


class SomeExperts(nn.Module):
    """This worker's share of Mixtral's experts, called as they are."""

    def __init__(self, whole: MixtralExperts) -> None:
        super().__init__()
        rank, self.size = dist.get_rank(), dist.get_world_size()
        self.num_experts, self.act_fn = whole.num_experts, whole.act_fn
        self.gate_up_proj = nn.Parameter(whole.gate_up_proj.detach().chunk(self.size)[rank].clone())
        self.down_proj = nn.Parameter(whole.down_proj.detach().chunk(self.size)[rank].clone())

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states [tokens, hidden], top_k_index and top_k_weights [tokens, experts of a token]"""
        order = top_k_index.flatten().argsort(stable=True)  # copies of tokens by expert, and so by worker
        counts = torch.bincount(top_k_index.flatten(), minlength=self.num_experts)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        each = arriving.view(self.size, -1)  # [worker, expert of those here]
        sent, received = counts.view(self.size, -1).sum(1).tolist(), each.sum(1).tolist()
        copies = AllToAll.apply(hidden_states[order // top_k_index.shape[1]], sent, received)
        here = torch.arange(each.shape[1]).repeat(self.size).repeat_interleave(arriving)
        by_expert = here.argsort(stable=True)
        results = self._experts(copies[by_expert], each.sum(0))
        back = AllToAll.apply(results[by_expert.argsort()], received, sent)
        chosen = back[order.argsort()].view(*top_k_index.shape, -1)
        return (chosen * top_k_weights.unsqueeze(-1)).sum(1)

    def _experts(self, copies: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ends = counts.cumsum(0, dtype=torch.int32)
        gate, up = F.grouped_mm(copies, self.gate_up_proj.transpose(1, 2), offs=ends).chunk(2, -1)
        return F.grouped_mm(self.act_fn(gate) * up, self.down_proj.transpose(1, 2), offs=ends)


class PlainExpertParallel:
    """ZeRO-2 for all weights that every worker needs. The gradient of an expert is complete where it is."""

    def __init__(self, task: Task, accumulation: int) -> None:
        assert accumulation == 1
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = task.build_mixture()
        self.experts: list[nn.Parameter] = []
        for layer in self.model.model.layers:
            layer.mlp.experts = SomeExperts(layer.mlp.experts)
            own = list(layer.mlp.experts.parameters())
            fully_shard(layer, mesh=mesh, reshard_after_forward=False, ignored_params=set(own))
            self.experts += own
        fully_shard(self.model, mesh=mesh, reshard_after_forward=False, ignored_params=set(self.experts))
        self.sharded = [p for p in self.model.parameters() if isinstance(p, DTensor)]
        groups = [{"params": self.sharded}, {"params": self.experts}]
        self.optimizer = torch.optim.AdamW(groups, **task.optimizer.keywords())
        self.grad_clip = task.optimizer.grad_clip

    def step(self, input_ids: torch.Tensor) -> tuple[float, float]:
        assert isinstance(self.model, FSDPModule)
        rank, size = dist.get_rank(), dist.get_world_size()
        mine = input_ids.chunk(size)[rank]
        loss = self.model(input_ids=mine, labels=mine).loss
        loss.backward()
        of_experts = [p.grad for p in self.experts if p.grad is not None]
        torch._foreach_div_(of_experts, size)  # FSDP2 has taken the mean of the others
        of_sharded = [p.grad for p in self.sharded if p.grad is not None]
        norm = get_total_norm(of_sharded)
        assert isinstance(norm, DTensor)
        both = torch.stack((loss.detach() / size, get_total_norm(of_experts).square()))
        dist.all_reduce(both)
        whole_norm = (both[1] + norm.full_tensor().square()).sqrt()
        clip_grads_with_norm_(self.sharded, self.grad_clip, whole_norm)
        clip_grads_with_norm_(self.experts, self.grad_clip, whole_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return both[0].item(), whole_norm.item()
