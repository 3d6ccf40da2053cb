"""A user's script for ``accelerate launch --config_file``: ``Accelerator`` takes the layout from what the launcher sets.

accelerate has FSDP only for GPUs. Changes for processor cores: its state says that it joined through gloo on devices that may shard, and
FSDP2 sums gradients with the reduction that gloo has.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule

from exported import task, tell


def main() -> None:
    given, steps, accumulation = task(), int(os.environ["EXPORTED_STEPS"]), int(os.environ["EXPORTED_ACCUMULATION"])
    sharded = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    if sharded:
        PartialState._prepare_backend = lambda self, *args, **keywords: ("gloo", DistributedType.MULTI_GPU)
        PartialState.set_device = _on_cores
    accelerator = Accelerator(cpu=not sharded, gradient_accumulation_steps=accumulation)
    module = given.build()
    model, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters(), **given.optimizer.keywords()))
    if isinstance(model, FSDPModule):
        _sum_with_gloo(model)
    losses, norms = [], []
    for step in range(steps):
        total = torch.zeros(())
        mine = given.batch(step).chunk(dist.get_world_size())[dist.get_rank()]
        for ids in mine.chunk(accumulation):
            with accelerator.accumulate(model):
                loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(
                        float(_whole(accelerator.clip_grad_norm_(model.parameters(), given.optimizer.grad_clip)))
                    )
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach().float() / accumulation
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    tell(losses, norms, _layout(accelerator, model))
    accelerator.end_training()  # leaves the process group: threads of gloo's that outlive main can abort the process


def _on_cores(state: PartialState) -> None:
    state.device = torch.device("cpu")


def _sum_with_gloo(model: Any) -> None:
    """gloo has no reduction that averages, so FSDP2 divides before it sums."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def _whole(norm: Any) -> torch.Tensor:
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def _layout(accelerator: Accelerator, model: Any) -> dict[str, Any]:
    kind = accelerator.distributed_type.value
    if not isinstance(model, FSDPModule):
        return {"distributed_type": kind, "num_processes": accelerator.num_processes}
    config = accelerator.parallelism_config
    plugin = accelerator.state.fsdp_plugin
    first = next(model.parameters())
    return {
        "distributed_type": kind,
        "num_processes": accelerator.num_processes,
        "dp_shard_size": config.dp_shard_size if config else None,
        "reshard_after_forward": plugin.reshard_after_forward,
        "parameters": f"{first.placements[0]!s} over {first.device_mesh.size()}",
        "units": sum(isinstance(module, FSDPModule) for module in model.modules()),
    }


if __name__ == "__main__":
    main()
