"""ZeRO-1, ZeRO-2 and ZeRO-3: docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html (FSDP2, one unit per block). In fp16 with
the loss scaled, as docs.pytorch.org/docs/stable/notes/amp_examples.html does it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from task import Task
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class PlainFSDP:
    """``zero_stage`` 3 frees a block's weights after its forward; 2 keeps them until the step's last backward; 1 sums gradients
    after that one alone."""

    def __init__(self, task: Task, accumulation: int, zero_stage: int) -> None:
        self.accumulation, self.zero_stage = accumulation, zero_stage
        policy = (
            MixedPrecisionPolicy(param_dtype=DTYPES[task.precision], reduce_dtype=torch.float32)
            if task.precision in DTYPES
            else MixedPrecisionPolicy()
        )
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = task.build()
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=zero_stage == 3)
        fully_shard(self.model, mesh=mesh, mp_policy=policy, reshard_after_forward=zero_stage == 3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **task.optimizer.keywords())
        self.scaler = torch.amp.GradScaler("cpu", enabled=task.precision == "fp16")
        self.grad_clip = task.optimizer.grad_clip

    def step(self, input_ids: torch.Tensor) -> tuple[float, float]:
        assert isinstance(self.model, FSDPModule)
        mine = input_ids.chunk(dist.get_world_size())[dist.get_rank()]
        total = torch.zeros(())
        for number, ids in enumerate(mine.chunk(self.accumulation), start=1):
            last = number == self.accumulation
            self.model.set_is_last_backward(last)
            self.model.set_requires_gradient_sync(last or self.zero_stage > 1)
            self.model.set_reshard_after_backward(last or self.zero_stage == 3)
            loss = self.model(input_ids=ids, labels=ids).loss / self.accumulation
            self.scaler.scale(loss).backward()
            total += loss.detach()
        self.scaler.unscale_(self.optimizer)
        norm = clip_grad_norm_(self.model.parameters(), self.grad_clip)
        assert isinstance(norm, DTensor)
        whole_norm = norm.full_tensor().item()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size(), whole_norm
