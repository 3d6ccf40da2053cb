"""Writes checkpoints beside training: copies on the host, a thread, and a process group of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from ahp.runtime.files import crc32
from ahp.runtime.torch_compat import like_distributed, local_tensor
from ahp.runtime.training_state import TrainingState
from ahp.runtime.weights.checkpoint import tensors_of

METADATA = ".metadata"
"""The file of torch's that rank 0 writes when all ranks have written; the others are called ``__RANK_NUMBER.distcp``."""


class BackgroundSaver:
    """Writes checkpoints in a thread while training goes on, with a process group of its own."""

    def __init__(self, state: TrainingState) -> None:
        self.state = state
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
        copied = {name: _copy(tensor) for name, tensor in tensors_of(self.state).items()}
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
