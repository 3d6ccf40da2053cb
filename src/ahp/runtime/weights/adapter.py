"""A run's adapters as files that peft reads: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ahp.graph.lora import ADAPTER, is_adapter
from ahp.graph.models import is_masked
from ahp.plan import Plan
from ahp.runtime.training_state import TrainingState


@dataclass(frozen=True)
class Adapter:
    """What a model's adapters are, apart from their values."""

    config: Any
    """peft's ``LoraConfig``, with the layers that it found."""

    @classmethod
    def of(cls, module: nn.Module, plan: Plan) -> Adapter | None:
        """From a module that ``with_adapters`` prepared under this plan; None without adapters."""
        if plan.job.lora is None:
            return None
        configs: Any = module.peft_config
        config = copy.deepcopy(configs[ADAPTER])
        config.inference_mode = True
        config.base_model_name_or_path = plan.init_from or (plan.model if isinstance(plan.model, str) else None)
        config.task_type = None if is_masked(module) else "CAUSAL_LM"
        return cls(config)

    def export(self, state: TrainingState, folder: Path, writers: dict[str, int]) -> None:
        """Write both files on rank 0, which gets every matrix whole. Collective. ``writers``: the pipeline rank that has each parameter."""
        mesh = state.layout.mesh
        mine: dict[str, torch.Tensor] = {}
        for name in sorted(filter(is_adapter, state.parameters)):
            if writers[name] == mesh.rank("pp"):
                whole = state.layout.whole(name, state.parameters[name].detach())
                mine[f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}"] = whole.cpu().contiguous()
        first = dist.get_rank() == int(mesh.places[mesh.rank("pp")].flatten()[0])
        found: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(mine if first else {}, found)
        if found is not None:
            from safetensors.torch import save_file

            folder.mkdir(parents=True, exist_ok=True)
            merged = {name: tensor for part in found for name, tensor in part.items()}
            save_file(merged, folder / "adapter_model.safetensors", metadata={"format": "pt"})
            self.config.save_pretrained(str(folder))
        dist.barrier()
