"""Tensor parallel: docs.pytorch.org/tutorials/intermediate/TP_tutorial.html, with loss parallel over the vocabulary.

Without the tutorial's sequence parallelism, which the layout on the other side does not have either.
"""

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
    loss_parallel,
    parallelize_module,
)
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

IGNORED = -100


class PlainTensorParallel:
    """Attention and MLP take their input once as a replicated DTensor, so that its gradient is summed once in each."""

    def __init__(self, task: Task, accumulation: int) -> None:
        self.accumulation = accumulation
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = task.build()
        whole = {"input_kwarg_layouts": {"hidden_states": Replicate()},
                 "desired_input_kwarg_layouts": {"hidden_states": Replicate()}}  # fmt: skip
        block = {
            "self_attn": PrepareModuleInput(**whole),
            "self_attn.q_proj": ColwiseParallel(),
            "self_attn.k_proj": ColwiseParallel(),
            "self_attn.v_proj": ColwiseParallel(),
            "self_attn.o_proj": RowwiseParallel(),
            "mlp": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)),
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(),
        }
        for layer in self.model.model.layers:
            parallelize_module(layer, mesh, block)
        ends = {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        }
        parallelize_module(self.model, mesh, ends)
        # Norms stay plain tensors, whole on every worker. The fused optimizer and the norm take one kind at a time.
        parameters = list(self.model.parameters())
        self.split = [p for p in parameters if isinstance(p, DTensor)]
        self.whole = [p for p in parameters if not isinstance(p, DTensor)]
        groups = [{"params": self.split}, {"params": self.whole}]
        self.optimizer = torch.optim.AdamW(groups, **task.optimizer.keywords())
        self.grad_clip = task.optimizer.grad_clip

    def step(self, input_ids: torch.Tensor) -> tuple[float, float]:
        total = torch.zeros(())
        for ids in input_ids.chunk(self.accumulation):
            with loss_parallel():
                logits = self.model(input_ids=ids).logits
                targets = F.pad(ids[:, 1:], (0, 1), value=IGNORED)
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
                loss = loss / self.accumulation
                loss.backward()
            total += loss.full_tensor().detach() if isinstance(loss, DTensor) else loss.detach()
        norm = self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total.item(), norm

    def _clip(self) -> float:
        """``clip_grad_norm_`` over parameters of both kinds."""
        of_split = get_total_norm([p.grad for p in self.split if p.grad is not None])
        of_whole = get_total_norm([p.grad for p in self.whole if p.grad is not None])
        if isinstance(of_split, DTensor):
            of_split = of_split.full_tensor()
        norm = torch.linalg.vector_norm(torch.stack((of_split, of_whole)))
        for parameters in (self.split, self.whole):
            clip_grads_with_norm_(parameters, self.grad_clip, norm)
        return norm.item()
