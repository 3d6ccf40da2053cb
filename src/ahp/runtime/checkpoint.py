"""What a checkpoint holds, in a form that no plan leaves a mark on; files by torch.distributed.checkpoint.

Every tensor is the whole one under the hub's name: sharded, but in its own order of rows. A packed projection, which
a tensor-parallel rank holds as [q_r | k_r | v_r], is put back into [q | k | v] on the way out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ahp.runtime.hub_names import kept_buffers, pieces_of
from ahp.runtime.layout import own_part, whole
from ahp.runtime.run_folder import crc32
from ahp.runtime.torch_compat import like_distributed, local_tensor

if TYPE_CHECKING:
    from ahp.runtime.parallelize import Parallel

METADATA = ".metadata"
"""The file of torch's that rank 0 writes when all ranks have written; the others are called ``__RANK_NUMBER.distcp``."""


def save(parallel: Parallel, folder: Path) -> None:
    """Write a checkpoint. Collective. The folder may exist; the caller makes it appear at once or not at all."""
    dcp.save(_state(parallel), checkpoint_id=str(folder))


class BackgroundSaver:
    """Writes checkpoints in a thread while training goes on, with a process group of its own."""

    def __init__(self, parallel: Parallel) -> None:
        self.parallel = parallel
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)  # every rank is in it
        self.group = group
        """Apart from the main thread's, whose collectives go on meanwhile."""
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")

    def start(self, folder: Path, complete: Callable[[dict[str, int]], None]) -> Future[None]:
        """Copy this rank's part of the state to the host, then write it. Collective, and so is what the thread does.

        On rank 0 ``complete(checksums)`` is called in the thread once every rank's files are written: crc32 by file name.
        The future ends when this rank's work has; it holds the error of a rank that could not write.
        """
        copied = {name: _copy(tensor) for name, tensor in _state(self.parallel).items()}
        return self.thread.submit(self._write, copied, folder, complete)

    def _write(self, state: dict[str, torch.Tensor], folder: Path, complete: Callable[[dict[str, int]], None]) -> None:
        dcp.save(state, checkpoint_id=str(folder), process_group=self.group)
        rank = dist.get_rank()
        mine = {file.name: crc32(file) for file in folder.glob(f"__{rank}_*")}
        if rank == 0:
            mine[METADATA] = crc32(folder / METADATA)
        found: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(mine, found if rank == 0 else None, dst=0, group=self.group)
        if rank == 0:
            complete({name: value for part in found for name, value in part.items()})


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with memory of its own on the host, distributed as it was."""
    local = local_tensor(tensor.detach())
    return like_distributed(local.to("cpu", copy=True), tensor)


def load(parallel: Parallel, folder: Path) -> None:
    """Read a checkpoint into the parameters and the optimizer, in place. Collective."""
    state = _state(parallel)
    dcp.load(state, checkpoint_id=str(folder))
    for name, parameter in parallel.parameters.items():
        _take_over(parallel, name, parameter, state[f"model.{name}"])
        if name in parallel.optimizer.shards:
            for key, moment in parallel.optimizer.moments(name).items():
                if key == "step":
                    moment.copy_(state[f"adam_step.{name}"])
                else:
                    _take_over(parallel, name, like_distributed(moment, parameter), state[f"{key}.{name}"])
    parallel.held.refresh_twins()
    parallel.num_steps_done = int(state["num_steps_done"])
    parallel.loss_scale.take_over(state)


def _state(parallel: Parallel) -> dict[str, torch.Tensor]:
    """Name -> tensor. What is not packed shares memory with the live tensors, so loading fills them directly."""
    state: dict[str, torch.Tensor] = {"num_steps_done": torch.tensor(parallel.num_steps_done)}
    state |= parallel.loss_scale.state()
    for name, parameter in parallel.parameters.items():
        state[f"model.{name}"] = _canonical(parallel, name, parameter.detach())
        if name in parallel.optimizer.shards:
            for key, moment in parallel.optimizer.moments(name).items():
                if key == "step":
                    state[f"adam_step.{name}"] = moment.detach().clone().cpu()
                else:
                    state[f"{key}.{name}"] = _canonical(parallel, name, like_distributed(moment, parameter))
    return state


def _is_packed(parallel: Parallel, name: str) -> bool:
    split = parallel.splits.get(name)
    return split is not None and len(split.segments) > 1


def _canonical(parallel: Parallel, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the hub's order; a packed one is gathered for it and then spread over the shard axis again."""
    if not _is_packed(parallel, name):
        return tensor
    # From the device: its backend may carry nothing that lies in host memory (engine.offload_optimizer).
    there = like_distributed(local_tensor(tensor).to(parallel.mesh.device), tensor)
    return distribute_tensor(
        whole(parallel, name, there), parallel.mesh.weights["dp_shard"], [Shard(0)], src_data_rank=None
    )


def _take_over(parallel: Parallel, name: str, live: torch.Tensor, loaded: torch.Tensor) -> None:
    """Copy what was loaded into the live tensor, where the two do not share memory."""
    if not _is_packed(parallel, name):
        return
    assert isinstance(loaded, DTensor)
    with torch.no_grad():
        local_tensor(live.detach()).copy_(own_part(parallel, name, loaded.full_tensor()))


def export_hf(parallel: Parallel, folder: Path) -> None:
    """Write model.safetensors (one file for each pipeline rank, with an index, if there are several) and config.json.

    Tensors have the names and shapes that ``save_pretrained`` gives them: every expert of a mixture its own, where it has.
    """
    from safetensors.torch import save_file

    mesh = parallel.mesh
    folder.mkdir(parents=True, exist_ok=True)
    pp, degree = mesh.rank("pp"), mesh.size("pp")
    writes = mesh.token_rank == 0 and mesh.rank("tp") == 0
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in sorted(parallel.parameters.items()):
        tensor = whole(parallel, name, parameter.detach())  # collective
        if writes and parallel.ties.holders[name][0] == pp:
            tensors |= pieces_of(tensor.cpu(), parallel.in_files[name])
    for stage in parallel.stages.values() if writes else ():
        for name, buffer in kept_buffers(stage.model):
            tensors |= pieces_of(buffer.cpu(), parallel.in_files[name])
    file = "model.safetensors" if degree == 1 else f"model-{pp + 1:05d}-of-{degree:05d}.safetensors"
    if writes:
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if degree > 1:
        _write_index(parallel, folder, file, tensors, writes)
    if dist.get_rank() == 0 and parallel.config is not None and hasattr(parallel.config, "save_pretrained"):
        parallel.config.save_pretrained(folder)
    dist.barrier()


def _write_index(parallel: Parallel, folder: Path, file: str, tensors: dict[str, torch.Tensor], writes: bool) -> None:
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
