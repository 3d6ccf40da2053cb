"""torchtitan 0.2.2's own Trainer on processor cores: its ConfigManager reads the TOML, its Trainer builds the layout and steps.

It does not support CPUs. Changes for a CPU: its modules get the CPU as their device, memory is not looked up, and
FSDP2 sums gradients with the reduction that gloo has. The model, the weights and the batches come in as a TrainSpec of the user's own.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torchtitan.train
from rivals.titan import arguments_of
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torchtitan.components import metrics
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config import ConfigManager
from torchtitan.models.llama3 import get_train_spec
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.protocols.train_spec import register_train_spec

from exported import task, tell

NAME, FLAVOR = "exported", "task"
CPU = SimpleNamespace(set_device=lambda which: None, current_device=lambda: 0, synchronize=lambda: None)
for module in [module for name, module in sys.modules.items() if name.startswith("torchtitan")]:
    if hasattr(module, "device_type"):  # asked once, when it was imported, and kept under the same names
        vars(module).update(device_type="cpu", device_module=CPU)


class Batches(BaseDataLoader):
    """The rows of this data-parallel rank, a micro-batch at a time; labels are shifted, as its own loader does."""

    def __init__(self, given: Any, rows: int, rank: int, ranks: int) -> None:
        self.given, self.rows, self.rank, self.ranks = given, rows, rank, ranks

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for step in range(int(os.environ["EXPORTED_STEPS"])):
            mine = self.given.batch(step).chunk(self.ranks)[self.rank]
            labels = torch.nn.functional.pad(mine[:, 1:], (0, 1), value=IGNORE_INDEX)
            for ids, targets in zip(mine.split(self.rows), labels.split(self.rows), strict=True):
                yield {"input": ids}, targets

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def on_gloo(parallelize: Callable[..., Any]) -> Callable[..., Any]:
    def build(*args: Any, **keywords: Any) -> Any:
        model = parallelize(*args, **keywords)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    return build


def register(given: Any) -> None:
    own = get_train_spec()
    metrics.build_device_memory_monitor = lambda: SimpleNamespace(
        device_name="CPU",
        reset_peak_stats=lambda: None,
        get_peak_stats=lambda: metrics.DeviceMemStats(0.0, 0.0, 0.0, 0.0, 0, 0),
        device_capacity_gib=0.0,
    )
    spec = dataclasses.replace(
        own,
        model_args={FLAVOR: arguments_of(given)},
        parallelize_fn=on_gloo(own.parallelize_fn),
        build_tokenizer_fn=None,
        build_dataloader_fn=lambda *, dp_world_size, dp_rank, job_config, tokenizer: Batches(
            given, job_config.training.local_batch_size, dp_rank, dp_world_size
        ),
    )
    register_train_spec(NAME, spec)


def main() -> None:
    given = task()
    register(given)
    trainer = torchtitan.train.Trainer(ConfigManager().parse_args())
    weights = Llama3StateDictAdapter(trainer.model_args, None).from_hf(given.build().state_dict())
    for part in trainer.model_parts:
        own = {name: weights[name] for name in part.state_dict() if name in weights}
        set_model_state_dict(part, own, options=StateDictOptions(full_state_dict=True))
    losses, norms = [], []

    def record(step: int, loss: float, largest: float, norm: float, extra_metrics: Any = None) -> None:
        losses.append(float(loss))
        norms.append(float(norm))

    trainer.metrics_processor.log = record
    trainer.metrics_processor.should_log = lambda step: True
    trainer.train()
    dims = trainer.parallel_dims
    says = {name: getattr(dims, name) for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")}
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    if dims.pp == 1 or last:  # the loss of a pipeline is the last stage's
        os.environ["RANK"] = "0"
        tell(losses, norms, {**says, "gradient_accumulation_steps": trainer.gradient_accumulation_steps})
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
