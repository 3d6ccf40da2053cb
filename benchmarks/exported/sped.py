"""A user's script for DeepSpeed: ``deepspeed.initialize`` takes layout, optimizer, rate and clipping from the JSON."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["DS_ACCELERATOR"] = "cpu"  # before its import; it would look for a GPU

import deepspeed
import torch
import torch.distributed as dist

from exported import task, tell


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=int(os.environ["LOCAL_RANK"]))
    arguments = deepspeed.add_config_arguments(parser).parse_args()
    given, steps = task(), int(os.environ["EXPORTED_STEPS"])
    dist.init_process_group("gloo")
    model = given.build()
    engine, *_ = deepspeed.initialize(
        arguments, model=model, model_parameters=model.parameters(), dist_init_required=False
    )
    losses, norms = [], []
    for step in range(steps):
        total, rows = torch.zeros(()), engine.train_micro_batch_size_per_gpu()
        mine = given.batch(step).chunk(engine.dp_world_size)[dist.get_rank()]
        for ids in mine.split(rows):
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            own = _own_norm(engine)
            engine.step()
            total += loss.detach().float() / engine.gradient_accumulation_steps()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
        norms.append(own if own is not None else float(engine.get_global_grad_norm()))
    says = {
        "zero_stage": engine.zero_optimization_stage(),
        "dp_world_size": engine.dp_world_size,
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "optimizer": type(engine.optimizer).__name__,
        "base optimizer": type(engine.basic_optimizer).__name__,
    }
    tell(losses, norms, says)


def _own_norm(engine: deepspeed.DeepSpeedEngine) -> float | None:
    """Of the gradients that stage 0 has averaged over the ranks: it clips by their norm, and does not tell it."""
    if engine.zero_optimization_stage() or not engine.is_gradient_accumulation_boundary():
        return None
    grads = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(grads).item()


if __name__ == "__main__":
    main()
