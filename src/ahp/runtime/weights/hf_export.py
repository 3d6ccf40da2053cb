"""Writes a run's weights as files that transformers reads: safetensors under the hub's names, each rank some of the files.

The ranks that hold a parameter gather it on the device, already in the files' dtype, one parameter after the other. The rank that writes
a file keeps its pieces, and writes the file as soon as it is full, overlapped with the next gathers: no host ever holds
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

from ahp.errors import bad_input
from ahp.graph.lora import Adapted, adapted_weights, base_name, is_adapter
from ahp.runtime.files import refuse_file
from ahp.runtime.training_state import TrainingState
from ahp.runtime.weights.hub_names import InFiles, Piece, kept_buffers, piece_of

FILE_BYTES = 5 * 10**9
DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.float64
"""Types that weights are written in: in another type a file would not hold their values."""
"""The most bytes of one file, except for a larger tensor; transformers' default up to its version 4."""


@dataclass
class File:
    """Tensors that one rank writes together."""

    pipeline_rank: int
    pieces: list[Piece] = field(default_factory=list)
    num_bytes: int = 0
    name: str = ""
    writer: int = 0
    """The writing rank's place among the ranks of the pipeline rank."""


@dataclass(frozen=True)
class Stored:
    """A parameter or buffer that is exported."""

    pipeline_rank: int
    """The pipeline rank that writes it, if several hold it."""
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
    """Write model.safetensors (several files and an index, if one is too small), config.json and generation_config.json. Collective.

    ``writers``: the pipeline rank that writes each parameter. ``dtype``: of parameters; buffers keep theirs. Tensors have the names and
    shapes that ``save_pretrained`` gives them, for instance one tensor for each expert. Raises OSError on every rank
    if any rank could not write.
    """
    mesh = state.layout.mesh
    adapted = {one.weight: one for stage in state.stages.values() for one in adapted_weights(stage.model)}
    pp, column = mesh.rank("pp"), mesh.places[mesh.rank("pp")].flatten().tolist()
    if dtype not in DTYPES:
        raise bad_input("dtype", dtype, "weights are written as floating-point numbers of 16 bits or more", DTYPES)
    refuse_file(folder)
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
        _write_generation_config(next(iter(state.stages.values())).model, folder)
    dist.barrier()


def _whole(state: TrainingState, name: str, adapted: Adapted | None, dtype: torch.dtype) -> torch.Tensor:
    """A parameter as it is exported, on every rank that holds a part of it. Collective among those ranks."""
    if adapted is None:
        return state.layout.whole(name, state.parameters[name].detach().to(dtype))
    parts = (state.layout.whole(one, state.parameters[one].detach()) for one in (name, adapted.a, adapted.b))
    return adapted.merged(*parts).to(dtype)


def _stored_buffers(buffers: dict[str, torch.Tensor], in_files: dict[str, InFiles], pp: int) -> dict[str, Stored]:
    """The buffers of all stages, each with its dtype and the lowest pipeline rank that has it. Collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (pp, {name: buffer.dtype for name, buffer in buffers.items()}))
    stored: dict[str, Stored] = {}
    for rank, dtypes in sorted(found, key=lambda one: one[0]):
        for name, dtype in dtypes.items():
            stored.setdefault(name, Stored(rank, dtype, in_files[name]))
    return stored


def plan_files(stored: dict[str, Stored], num_writers: list[int]) -> list[File]:
    """Which tensors are in which file, and who writes it: the same on every rank. ``num_writers``: ranks of each pipeline rank, which take turns."""
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
        """The tensors of the file that is being filled."""
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="export")
        self.writing: Future[None] | None = None
        self.error: str | None = None

    def take(self, tensor: torch.Tensor, form: InFiles) -> None:
        """Keep the pieces of a whole parameter that this rank writes."""
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
        """Wait for the last file. Returns the error in words if a file could not be written."""
        self._wait()
        self.thread.shutdown()
        return self.error

    def _wait(self) -> None:
        """Wait for the file before, so that a rank never holds two full files. An error is kept, so that other ranks do not hang in a gather."""
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
    """Raise OSError on all ranks if any has an error. Collective."""
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for rank, found in enumerate(errors):
        if found is not None:
            raise OSError(f"the weights cannot be written: rank {rank}: {found}")


def _write_generation_config(model: Any, folder: Path) -> None:
    """Write how the model generates text, if it does. Unlike ``save_pretrained`` it refuses no setting: the weights would be lost with it."""
    found = getattr(model, "generation_config", None)
    if found is not None and model.can_generate():
        found.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])


def _write_index(folder: Path, files: list[File]) -> None:
    """Write the index by which transformers finds the tensors of several files."""
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(file.num_bytes for file in files)},
            "weight_map": {piece.stored: file.name for file in files for piece in file.pieces},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
