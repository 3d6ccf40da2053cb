"""A run's weights as files that transformers reads: safetensors under the hub's names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ahp.runtime.training_state import TrainingState
from ahp.runtime.weights.hub_names import InFiles, kept_buffers, pieces_of


def export_hf(
    state: TrainingState, folder: Path, *, in_files: dict[str, InFiles], writer_of: Callable[[str], int], config: Any
) -> None:
    """Write model.safetensors (one file for each pipeline rank, with an index, if there are several) and config.json.

    ``writer_of``: the pipeline rank that writes a parameter. Tensors have the names and shapes that ``save_pretrained`` gives them: every expert of a mixture its own, where it has.
    """
    from safetensors.torch import save_file

    mesh = state.layout.mesh
    folder.mkdir(parents=True, exist_ok=True)
    pp, degree = mesh.rank("pp"), mesh.size("pp")
    writes = mesh.token_rank == 0 and mesh.rank("tp") == 0
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in sorted(state.parameters.items()):
        tensor = state.layout.whole(name, parameter.detach())  # collective
        if writes and writer_of(name) == pp:
            tensors |= pieces_of(tensor.cpu(), in_files[name])
    for stage in state.stages.values() if writes else ():
        for name, buffer in kept_buffers(stage.model):
            tensors |= pieces_of(buffer.cpu(), in_files[name])
    file = "model.safetensors" if degree == 1 else f"model-{pp + 1:05d}-of-{degree:05d}.safetensors"
    if writes:
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if degree > 1:
        _write_index(folder, file, tensors, writes)
    if dist.get_rank() == 0 and config is not None and hasattr(config, "save_pretrained"):
        config.save_pretrained(folder)
    dist.barrier()


def _write_index(folder: Path, file: str, tensors: dict[str, torch.Tensor], writes: bool) -> None:
    mine = (
        (dict.fromkeys(tensors, file), sum(t.numel() * t.element_size() for t in tensors.values())) if writes else None
    )
    found: list[tuple[dict[str, str], int] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    if dist.get_rank() == 0:
        parts = [part for part in found if part is not None]
        index = {
            "metadata": {"total_size": sum(size for _, size in parts)},
            "weight_map": {name: where for names, _ in parts for name, where in names.items()},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
