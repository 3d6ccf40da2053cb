"""Writes checkpoints while training goes on: copies on the host, a thread, and a process group of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from ahp.runtime.files import read_back
from ahp.runtime.host_copy import pinned_like
from ahp.runtime.torch_compat import like_distributed, local_tensor
from ahp.runtime.training_state import TrainingState
from ahp.runtime.weights.checkpoint import tensors_to_write
from ahp.runtime.weights.metadata import METADATA, BadMetadata, as_data


class HostCopies:
    """Host memory for this rank's part of a checkpoint: made once and used by all checkpoints, page-locked if a GPU copies to
    it. As much as the weights and optimizer states of the rank take on its device."""

    def __init__(self) -> None:
        self.memory: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def make(self, tensors: dict[str, torch.Tensor]) -> None:
        """Make the memory; the values of the tensors do not matter. The system provides pages at the first write only, slower than a copy,
        so they are written here. Runs in a thread during the first step, without DTensor operators: these suspend tracing in all
        threads, and the step may be tracing a block.
        """
        for name, tensor in tensors.items():
            memory = self._memory(name, local_tensor(tensor))
            if not memory.is_pinned():
                memory.zero_()

    @torch.no_grad()
    def of(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies, distributed like the tensors. On a GPU they are complete once its current stream has reached this point."""
        return {
            name: like_distributed(self._copy(name, local_tensor(tensor.detach())), tensor)
            for name, tensor in tensors.items()
        }

    def _copy(self, name: str, source: torch.Tensor) -> torch.Tensor:
        return self._memory(name, source).copy_(source, non_blocking=True)

    def _memory(self, name: str, source: torch.Tensor) -> torch.Tensor:
        memory = self.memory.get(name)
        if memory is None or (memory.shape, memory.dtype) != (source.shape, source.dtype):
            memory = pinned_like(source) if source.is_cuda else torch.empty_like(source)
            self.memory[name] = memory
        return memory


class BackgroundSaver:
    """Writes checkpoints in a thread while training goes on, with a process group of its own. The thread makes the memory for them as soon
    as the saver exists, so that no step waits for it if the saver is made before the first step."""

    def __init__(self, state: TrainingState) -> None:
        self.state = state
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)  # every rank is in it
        self.group = group
        """Separate from the main thread's groups, whose collectives go on at the same time."""
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self.copies = HostCopies()
        self._busy = self.thread.submit(self.copies.make, tensors_to_write(state))

    def start(self, folder: Path, complete: Callable[[dict[str, int]], None]) -> Future[None]:
        """Copy this rank's part of the state to the host, then write it. Collective, and so is what the thread does.

        The host waits for the checkpoint before this one, whose memory it takes, but not for the copies: what a GPU computes after this
        call comes after the copies in its stream. On rank 0 the thread calls ``complete(checksums)``, crc32 by file name, once every
        rank's files have been read back from the disk. The future is done when this rank's work is; it holds the error of a rank that
        could not write.
        """
        wait([self._busy])
        copied = self.copies.of(tensors_to_write(self.state))
        copies_made = torch.cuda.Event() if self.state.layout.mesh.device.type == "cuda" else None
        if copies_made is not None:
            copies_made.record()
        self._busy = self.thread.submit(self._write, copied, copies_made, folder, complete)
        return self._busy

    def _write(
        self,
        state: dict[str, torch.Tensor],
        copies_made: torch.cuda.Event | None,
        folder: Path,
        complete: Callable[[dict[str, int]], None],
    ) -> None:
        if copies_made is not None:
            copies_made.synchronize()
        dcp.save(state, checkpoint_id=str(folder), process_group=self.group)
        checksums = self._verified(folder)
        if dist.get_rank() == 0:
            complete(checksums)

    def _verified(self, folder: Path) -> dict[str, int]:
        """crc32 of all ranks' files by name, each read back from the disk. Collective; every rank raises OSError if any rank fails."""
        rank = dist.get_rank()
        mine: dict[str, int] | str
        try:
            mine = {file.name: read_back(file) for file in folder.glob(f"__{rank}_*")}
            if rank == 0:  # it writes the metadata when all ranks have written their files
                mine[METADATA] = read_back(folder / METADATA)
                as_data(folder)
        except (OSError, BadMetadata) as error:
            mine = str(error)
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, mine, group=self.group)
        for part in parts:
            if isinstance(part, str):
                raise OSError(part)
        return {name: value for part in parts for name, value in part.items()}
