"""DeepSpeed's ZeRO stages: www.deepspeed.ai/getting-started, with torch's fused AdamW as the optimizer."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from task import Task


class DeepSpeedZero:
    """``deepspeed.initialize`` around the model; its engine accumulates, clips and updates."""

    def __init__(self, task: Task, accumulation: int, zero_stage: int) -> None:
        os.environ["DS_ACCELERATOR"] = "cpu"  # before its import; it would look for a GPU
        os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
        import deepspeed

        model = task.build()
        self.accumulation = accumulation
        config = {
            "train_batch_size": task.global_batch_size,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": task.optimizer.grad_clip,
            "zero_optimization": {"stage": zero_stage},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": task.precision == "bf16"},
        }
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), **task.optimizer.keywords()),
            config=config,
            dist_init_required=False,
        )

    def step(self, input_ids: torch.Tensor) -> tuple[float, float]:
        mine = input_ids.chunk(dist.get_world_size())[dist.get_rank()]
        total = torch.zeros(())
        for ids in mine.chunk(self.accumulation):
            loss = self.engine(input_ids=ids, labels=ids).loss
            self.engine.backward(loss)
            self.engine.step()
            total += loss.detach().float() / self.accumulation
        dist.all_reduce(total)
        return total.item() / dist.get_world_size(), float(self.engine.get_global_grad_norm())
