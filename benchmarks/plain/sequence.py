"""Tensor parallel with sequence parallel: docs.pytorch.org/tutorials/intermediate/TP_tutorial.html, its whole plan, with loss
parallel over the vocabulary."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from task import Task
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

IGNORED = -100


class PlainSequenceParallel:
    """Between attention and MLP each worker has its part of the tokens, [batch, sequence / workers, hidden]."""

    def __init__(self, task: Task, accumulation: int) -> None:
        self.accumulation = accumulation
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = task.build()
        tokens, whole = Shard(1), Replicate()
        keywords = {"input_kwarg_layouts": {"hidden_states": tokens},
                    "desired_input_kwarg_layouts": {"hidden_states": whole}}  # fmt: skip
        block = {
            "input_layernorm": SequenceParallel(),
            "self_attn": PrepareModuleInput(**keywords),
            "self_attn.q_proj": ColwiseParallel(),
            "self_attn.k_proj": ColwiseParallel(),
            "self_attn.v_proj": ColwiseParallel(),
            "self_attn.o_proj": RowwiseParallel(output_layouts=tokens),
            "post_attention_layernorm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=(tokens,), desired_input_layouts=(whole,)),
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(output_layouts=tokens),
        }
        for layer in self.model.model.layers:
            parallelize_module(layer, mesh, block)
        ends = {
            "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=tokens),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False),
        }
        parallelize_module(self.model, mesh, ends)
        parameters = list(self.model.parameters())
        self.norms = [p for p in parameters if p.ndim == 1]
        self.optimizer = torch.optim.AdamW(parameters, **task.optimizer.keywords())
        self.grad_clip = task.optimizer.grad_clip

    def step(self, input_ids: torch.Tensor) -> tuple[float, float]:
        positions = torch.arange(input_ids.shape[1]).unsqueeze(0)  # of all tokens, which the model cannot count
        total = torch.zeros(())
        for ids in input_ids.chunk(self.accumulation):
            with loss_parallel():
                logits = self.model(input_ids=ids, position_ids=positions).logits
                targets = F.pad(ids[:, 1:], (0, 1), value=IGNORED)
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
                loss = loss / self.accumulation
                loss.backward()
            assert isinstance(loss, DTensor)
            total += loss.full_tensor().detach()
        for p in self.norms:  # each worker has the sum over its tokens
            assert isinstance(p.grad, DTensor)
            p.grad = p.grad.redistribute(placements=[Replicate()])
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = get_total_norm(gradients)
        assert isinstance(norm, DTensor)
        norm = norm.full_tensor()
        clip_grads_with_norm_(self.model.parameters(), self.grad_clip, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total.item(), norm.item()
