"""A run's weights as files that transformers reads: safetensors under the hub's names, a part of them on each rank.

Parameters are gathered one after the other on the device, already in the files' dtype, by the ranks that hold them. The pieces of each go to
the rank that writes their file, and a file is written, beside the next gathers, as soon as it is full: no host ever holds
more of the model than one file for each of its ranks, and no rank waits for another longer than one file takes.
"""

from __future__ import annotations

import copy
import json
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ahp.graph.lora import Adapted, adapted_weights, base_name, is_adapter
from ahp.runtime.training_state import TrainingState
from ahp.runtime.weights.hub_names import InFiles, Piece, kept_buffers, piece_of

FILE_BYTES = 5 * 10**9
"""Of one file at most, but for a tensor that is larger; what transformers wrote by default up to its version 4."""


@dataclass
class File:
    """Tensors that are written together, by one rank."""

    pipeline_rank: int
    pieces: list[Piece] = field(default_factory=list)
    num_bytes: int = 0
    name: str = ""
    writer: int = 0
    """Among the ranks of the pipeline rank."""


@dataclass(frozen=True)
class Stored:
    """A parameter or buffer that is exported."""

    pipeline_rank: int
    """The one that writes it, where several hold it."""
    dtype: torch.dtype
    form: InFiles


def export_hf(
    state: TrainingState,
    folder: Path,
    *,
    in_files: dict[str, InFiles],
    writers: dict[str, int],
    config: Any,
    dtype: torch.dtype,
) -> None:
    """Write model.safetensors (several files and an index, where it is larger than one) and config.json. Collective.

    ``writers``: of each parameter the pipeline rank that writes it. ``dtype``: of parameters; buffers keep theirs. Tensors have the names and
    shapes that ``save_pretrained`` gives them: every expert of a mixture its own, where it has. Raises OSError on every rank
    where one could not write.
    """
    mesh = state.layout.mesh
    adapted = {one.weight: one for stage in state.stages.values() for one in adapted_weights(stage.model)}
    pp, column = mesh.rank("pp"), mesh.places[mesh.rank("pp")].flatten().tolist()
    folder.mkdir(parents=True, exist_ok=True)
    buffers = {name: buffer for stage in state.stages.values() for name, buffer in kept_buffers(stage.model)}
    stored = {
        name: Stored(rank, dtype, in_files[base_name(name)]) for name, rank in writers.items() if not is_adapter(name)
    }
    stored |= _stored_buffers(buffers, in_files, pp)
    files = plan_files(stored, [ranks.numel() for ranks in mesh.places])
    writer = _Writer(
        folder, {piece.stored: file for file in files for piece in file.pieces}, column.index(dist.get_rank())
    )
    for name, one in sorted(stored.items()):
        if one.pipeline_rank != pp:
            continue
        if name in buffers:
            writer.take(buffers[name], one.form)
        else:
            writer.take(_whole(state, name, adapted.get(name), dtype), one.form)  # collective
    _raise_together(writer.finish())
    if dist.get_rank() == 0:
        _write_index(folder, files)
        if config is not None and hasattr(config, "save_pretrained"):
            saved = copy.deepcopy(config)
            setattr(saved, "dtype" if hasattr(saved, "dtype") else "torch_dtype", dtype)
            saved.save_pretrained(folder)
    dist.barrier()


def _whole(state: TrainingState, name: str, adapted: Adapted | None, dtype: torch.dtype) -> torch.Tensor:
    """A parameter as it is exported, on every rank that holds a part of it. Collective among those."""
    if adapted is None:
        return state.layout.whole(name, state.parameters[name].detach().to(dtype))
    parts = (state.layout.whole(one, state.parameters[one].detach()) for one in (name, adapted.a, adapted.b))
    return adapted.merged(*parts).to(dtype)


def _stored_buffers(buffers: dict[str, torch.Tensor], in_files: dict[str, InFiles], pp: int) -> dict[str, Stored]:
    """Of the buffers of all stages, the lowest pipeline rank that has each one and its dtype. Collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (pp, {name: buffer.dtype for name, buffer in buffers.items()}))
    stored: dict[str, Stored] = {}
    for rank, dtypes in sorted(found, key=lambda one: one[0]):
        for name, dtype in dtypes.items():
            stored.setdefault(name, Stored(rank, dtype, in_files[name]))
    return stored


def plan_files(stored: dict[str, Stored], num_writers: list[int]) -> list[File]:
    """Which tensors are in which file, and who writes it: alike on every rank. ``num_writers``: ranks of each pipeline rank, which take turns."""
    files: list[File] = []
    for rank, writers in enumerate(num_writers):
        mine: list[File] = []
        for _, one in sorted((name, one) for name, one in stored.items() if one.pipeline_rank == rank):
            for piece in one.form.pieces:
                num_bytes = torch.Size(piece.shape).numel() * one.dtype.itemsize
                if not mine or (mine[-1].pieces and mine[-1].num_bytes + num_bytes > FILE_BYTES):
                    mine.append(File(rank, writer=len(mine) % writers))
                mine[-1].pieces.append(piece)
                mine[-1].num_bytes += num_bytes
        files += mine
    for number, file in enumerate(files, 1):
        file.name = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
    return files


class _Writer:
    """Collects the tensors of this rank's files on the host, and writes each file in a thread when it is full."""

    def __init__(self, folder: Path, file_of: dict[str, File], rank: int) -> None:
        self.folder, self.file_of, self.rank = folder, file_of, rank
        self.tensors: dict[str, torch.Tensor] = {}
        """Of the file that is being filled."""
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="export")
        self.writing: Future[None] | None = None
        self.error: str | None = None

    def take(self, tensor: torch.Tensor, form: InFiles) -> None:
        """Keep what this rank writes of a whole parameter."""
        for piece in form.pieces:
            file = self.file_of[piece.stored]
            if file.writer != self.rank or self.error is not None:
                continue
            if not self.tensors:
                self._wait()
            self.tensors[piece.stored] = piece_of(tensor, piece).cpu()
            if len(self.tensors) == len(file.pieces):
                self.writing = self.thread.submit(self._write, self.folder / file.name, self.tensors)
                self.tensors = {}

    def finish(self) -> str | None:
        """Wait for the last file. What could not be written, in words."""
        self._wait()
        self.thread.shutdown()
        return self.error

    def _wait(self) -> None:
        """For the file before, so that a rank never holds two that are full. An error is kept, so that the others are not left alone in a gather."""
        writing, self.writing = self.writing, None
        try:
            if writing is not None:
                writing.result()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"

    @staticmethod
    def _write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        from safetensors.torch import save_file

        save_file(tensors, path, metadata={"format": "pt"})


def _raise_together(error: str | None) -> None:
    """Collective."""
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for rank, found in enumerate(errors):
        if found is not None:
            raise OSError(f"the weights cannot be written: rank {rank}: {found}")


def _write_index(folder: Path, files: list[File]) -> None:
    """What transformers finds the tensors of several files by."""
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(file.num_bytes for file in files)},
            "weight_map": {piece.stored: file.name for file in files for piece in file.pieces},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
