"""torchtitan's FSDP2 and tensor parallelism: its own LLaMA, split by its own ``parallelize_llama``, stepped as its Trainer does.

It does not support CPUs. Changes for a CPU: its modules get the CPU as their device, and FSDP2 sums gradients with the
reduction that gloo has.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from task import Task
from torch.distributed.fsdp import FSDPModule
from transformers import LlamaForCausalLM

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


class Titan:
    """``tensor``: tensor parallel with sequence parallel, else FSDP2. ``reshard``: its ``fsdp_reshard_after_forward``."""

    def __init__(self, task: Task, accumulation: int, *, tensor: bool, reshard: str) -> None:
        os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
        _on_cpu()
        from torchtitan.config import JobConfig
        from torchtitan.distributed import ParallelDims
        from torchtitan.distributed.utils import get_train_context
        from torchtitan.models.llama3.infra.parallelize import parallelize_llama

        self.accumulation = accumulation
        world = dist.get_world_size()
        shard, tp = (1, world) if tensor else (world, 1)
        self.dims = ParallelDims(dp_replicate=1, dp_shard=shard, cp=1, tp=tp, pp=1, ep=1, etp=1, world_size=world)
        self.dims.build_mesh()
        config = JobConfig()
        config.training.seq_len = task.sequence_length
        config.training.mixed_precision_param = DTYPES[task.precision]
        config.training.mixed_precision_reduce = "float32"
        config.parallelism.fsdp_reshard_after_forward = reshard
        config.activation_checkpoint.mode = "none"
        self.model = parallelize_llama(_model(task), self.dims, config)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        self.context = get_train_context(tensor)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **task.optimizer.keywords())
        self.grad_clip = task.optimizer.grad_clip

    def step(self, input_ids: torch.Tensor) -> tuple[float, float]:
        from torchtitan.components.loss import IGNORE_INDEX, cross_entropy_loss
        from torchtitan.distributed.utils import clip_grad_norm_, dist_sum

        batch = self.dims.get_optional_mesh("batch")
        mine = input_ids if batch is None else input_ids.chunk(batch.size())[batch.get_local_rank()]
        labels = torch.nn.functional.pad(mine[:, 1:], (0, 1), value=IGNORE_INDEX)  # its data loader shifts them
        scored = dist_sum((labels != IGNORE_INDEX).sum(), batch) if batch else float((labels != IGNORE_INDEX).sum())
        losses = []
        self.optimizer.zero_grad()
        for ids, targets in zip(mine.chunk(self.accumulation), labels.chunk(self.accumulation), strict=True):
            with self.context():
                loss = cross_entropy_loss(self.model(ids), targets) / scored
                loss.backward()
            losses.append(loss.detach())
        norm = clip_grad_norm_(self.model.parameters(), self.grad_clip, foreach=True)
        self.optimizer.step()
        return dist_sum(torch.stack(losses).sum(), self.dims.get_optional_mesh("loss")), norm.item()


def _on_cpu() -> None:
    """Its modules ask once, when they are imported, and each keeps the answer under the same names."""
    import torchtitan.train

    assert torchtitan.train
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan") and hasattr(module, "device_type"):
            vars(module).update(device_type="cpu", device_module=torch.cpu)


def arguments_of(task: Task) -> Any:
    """torchtitan's arguments of the task's LLaMA."""
    from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs

    keys = task.model_keys()
    return TransformerModelArgs(
        dim=keys["hidden_size"],
        n_layers=keys["num_hidden_layers"],
        n_heads=keys["num_attention_heads"],
        n_kv_heads=keys["num_key_value_heads"],
        vocab_size=keys["vocab_size"],
        multiple_of=keys["intermediate_size"],  # it rounds 8/3 of the hidden size up to that
        norm_eps=1e-6,  # transformers' LlamaConfig
        rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0),  # none
        max_seq_len=task.sequence_length,
    )


def _model(task: Task) -> Any:
    """Its LLaMA with the weights of the task's, by its own adapter."""
    from torchtitan.models.llama3.model.model import Transformer
    from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter

    reference: LlamaForCausalLM = task.build()
    arguments = arguments_of(task)
    model = Transformer(arguments)
    weights = Llama3StateDictAdapter(arguments, None).from_hf(reference.state_dict())
    model.load_state_dict(weights)
    return model.train()
