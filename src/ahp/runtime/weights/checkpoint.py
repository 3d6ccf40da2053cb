"""Writes and reads checkpoints whose content does not depend on the plan, in files of torch.distributed.checkpoint.

Every tensor is the whole one under the hub's name: sharded, but with its rows in the original order. A packed projection,
which a tensor-parallel rank holds as [q_r | k_r | v_r], is put back into [q | k | v] when it is written.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ahp.runtime.files import refuse_file
from ahp.runtime.shard.parameter_layout import ParameterLayout
from ahp.runtime.torch_compat import like_distributed, local_tensor
from ahp.runtime.training_state import TrainingState
from ahp.runtime.weights.metadata import METADATA, DataReader
from ahp.runtime.weights.same_tensors import refuse_other_tensors


def save(state: TrainingState, folder: Path) -> None:
    """Write a checkpoint. Collective. The folder may exist; making it appear whole or not at all is up to the caller. Raises BadInput for
    the path of a file."""
    refuse_file(folder)
    if (
        dist.get_rank() == 0
    ):  # an earlier checkpoint's, whose files are overwritten: with it a half-written one would load as a mix of both
        (folder / METADATA).unlink(missing_ok=True)
    dist.barrier()
    dcp.save(tensors_to_write(state), checkpoint_id=str(folder))


def load_weights(state: TrainingState, folder: Path) -> None:
    """Read only a checkpoint's parameters and buffers, in place: a third of its bytes under AdamW. Collective. Raises BadMetadata, and
    OtherTensors for a checkpoint of another model."""
    tensors, reader = _weights_of(state), DataReader(folder)
    refuse_other_tensors(folder, reader.metadata.state_dict_metadata, tensors, state)
    dcp.load(tensors, storage_reader=reader)
    for name, parameter in state.parameters.items():
        _take_over(state.layout, name, parameter, tensors[f"model.{name}"])
    state.buffers.after_load()


def load(state: TrainingState, folder: Path) -> None:
    """Read a checkpoint into the parameters and the optimizer, in place. Collective. Raises BadMetadata, and OtherTensors for a checkpoint of
    another model or job."""
    reader = DataReader(folder)
    tensors = tensors_of(state)
    refuse_other_tensors(folder, reader.metadata.state_dict_metadata, tensors, state)
    dcp.load(tensors, storage_reader=reader)
    for name, parameter in state.parameters.items():
        _take_over(state.layout, name, parameter, tensors[f"model.{name}"])
        if name in state.optimizer.shards:
            for key, moment in state.optimizer.moments(name).items():
                if key == "step":
                    moment.copy_(tensors[f"adam_step.{name}"])
                else:
                    layout = _layout_of(state.layout, name, moment)
                    _take_over(layout, name, _as_parameter(moment, parameter), tensors[f"{key}.{name}"])
    state.buffers.after_load()
    state.num_steps_done = int(tensors["num_steps_done"])
    state.loss_scale.take_over(tensors)


def tensors_to_write(state: TrainingState) -> dict[str, torch.Tensor]:
    """The tensors of ``tensors_of`` that this rank writes into a checkpoint. Collective."""
    return tensors_of(state, without=state.written_elsewhere)


def tensors_of(state: TrainingState, *, without: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """Name -> tensor, except for tensors of the parameters ``without``. Tensors that are not packed share memory with the live ones, so loading
    fills those directly."""
    found: dict[str, torch.Tensor] = {"num_steps_done": torch.tensor(state.num_steps_done)}
    found |= state.loss_scale.state()
    found |= _weights_of(state, without)
    for name, parameter in state.parameters.items():
        if name in state.optimizer.shards and name not in without:
            for key, moment in state.optimizer.moments(name).items():
                if key == "step":
                    found[f"adam_step.{name}"] = moment.detach()
                else:
                    layout = _layout_of(state.layout, name, moment)
                    found[f"{key}.{name}"] = _canonical(layout, name, _as_parameter(moment, parameter))
    return found


def _weights_of(state: TrainingState, without: Collection[str] = ()) -> dict[str, torch.Tensor]:
    found = {f"buffer.{name}": buffer for name, buffer in state.buffers.tensors().items()}
    for name, parameter in state.parameters.items():
        if name not in without:
            found[f"model.{name}"] = _canonical(state.layout, name, parameter.detach())
    return found


def _as_parameter(moment: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A moment as a part of a tensor that is distributed like its parameter; the scales of moments in 8 bits have fewer columns."""
    part = local_tensor(parameter)
    if not isinstance(parameter, DTensor) or (moment.dtype, moment.shape) == (part.dtype, part.shape):
        return like_distributed(moment, parameter)
    *rows, columns = parameter.shape
    shape = torch.Size((*rows, columns * moment.shape[-1] // part.shape[-1]))
    stride = torch.empty(shape, device="meta").stride()
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(moment, mesh, placements, run_check=False, shape=shape, stride=stride)


def _layout_of(layout: ParameterLayout, name: str, moment: torch.Tensor) -> ParameterLayout:
    """The layout of a moment: its parameter's, or for scales one element for each block of the parameter's columns."""
    columns = local_tensor(layout.parameters[name]).shape[-1:]
    return layout if moment.shape[-1:] == columns else layout.of_blocks(name, columns[0] // moment.shape[-1])


def _is_packed(layout: ParameterLayout, name: str) -> bool:
    split = layout.splits.get(name)
    return split is not None and len(split.segments) > 1


def _canonical(layout: ParameterLayout, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the hub's order; a packed one is gathered and then sharded over the shard axis again."""
    if not _is_packed(layout, name):
        return tensor
    # Through the device: its backend may not send tensors in host memory (engine.offload_optimizer).
    there = like_distributed(local_tensor(tensor).to(layout.mesh.device), tensor)
    return distribute_tensor(layout.whole(name, there), layout.mesh.weights["dp_shard"], [Shard(0)], src_data_rank=None)


def _take_over(layout: ParameterLayout, name: str, live: torch.Tensor, loaded: torch.Tensor) -> None:
    """Copy what was loaded into the live tensor, if the two do not share memory."""
    if not _is_packed(layout, name):
        return
    assert isinstance(loaded, DTensor)
    with torch.no_grad():
        local_tensor(live.detach()).copy_(layout.own_part(name, loaded.full_tensor()))
