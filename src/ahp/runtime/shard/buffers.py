"""Buffers that are part of the model's state (moving averages, counters): the same values on every rank that holds them.

A forward writes them from this rank's rows only. After each step the first rank of a stage sends its values to the stage's
other ranks, as DistributedDataParallel's ``broadcast_buffers`` does: the result is what some rank computed, whatever a buffer
holds (a mean of queues, codes or counters would be meaningless). Buffers that are not persistent are left to the module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn

from ahp.errors import BadInput
from ahp.runtime.ranks.mesh import Mesh
from ahp.runtime.ranks.torch_compat import groups_wait, time_limit


class Buffers:
    """The buffers of one rank's stages, keyed by the hub's names.

    A module that several stages have, such as the model itself, has its buffers on each of them. The first stage that wrote a
    buffer in a step did it as the whole model would: later stages do not call the module, or call it with zeros.
    """

    def __init__(
        self, models: Sequence[nn.Module], stages: Mapping[int, nn.Module], mesh: Mesh, stage_ranks: Sequence[int]
    ) -> None:
        """``models``: one for every stage of the pipeline; ``stages``: this rank's models, keyed by stage number;
        ``stage_ranks``: the pipeline rank that holds each stage. Collective."""
        names = [persistent_buffers(model) for model in models]
        self.stages, self.mesh, self.stage_ranks = stages, mesh, stage_ranks
        self.names = {index: names[index] for index in stages}
        self.group = _ranks_of_stage(mesh) if any(names) else None
        counts = Counter(chain(*names))
        self.shared = {n: b for found in names for n, b in found.items() if counts[n] > 1}
        """Buffers that several stages have: a meta tensor of their shape and type."""
        self._last: dict[tuple[int, str], torch.Tensor] = {}
        """Values of the shared buffers on each stage here, after the last step."""
        self._before: list[tuple[int, str, torch.Tensor]] = []
        """Stage, name and value of each buffer here before the step."""
        self._remember()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Each buffer of this rank once. Looked up at every call, because a forward may replace the tensor."""
        found: dict[str, torch.Tensor] = {}
        for index, names in self.names.items():
            for name in names:
                found.setdefault(name, self._buffer(index, name))
        return found

    @torch.no_grad()
    def after_load(self) -> None:
        """Copy what was read into ``tensors`` to all stages of this rank."""
        found = self.tensors()
        for index, names in self.names.items():
            for name in names:
                self._buffer(index, name).copy_(found[name])
        self._remember()

    @torch.no_grad()
    def before_step(self) -> None:
        """Keep the values that ``after_step`` gives back if the step is left out."""
        places = ((index, name) for index, names in self.names.items() for name in names)
        self._before = [(index, name, self._buffer(index, name).clone()) for index, name in places]

    @torch.no_grad()
    def after_step(self, left_out: torch.Tensor) -> None:
        """Give a buffer the same values on all ranks that hold it: those from before the step if ``left_out``, bool scalar on the device
        and the same on every rank, is true. Collective."""
        for index, name, before in self._before:
            buffer = self._buffer(index, name)
            buffer.copy_(torch.where(left_out, before, buffer))
        self._before.clear()
        if self.group is not None:
            for index, names in self.names.items():
                _broadcast([self._buffer(index, name) for name in names], self.group, source=0)
        if self.shared:
            self._take_from_first_writers()
            self._remember()

    def _buffer(self, index: int, name: str) -> torch.Tensor:
        buffer, expected = self.stages[index].get_buffer(name), self.names[index][name]
        if buffer.shape != expected.shape or buffer.dtype != expected.dtype:
            raise BadInput(
                f"module: its forward gives the buffer {name} the shape {list(buffer.shape)} and the type {buffer.dtype}, "
                f"it was built with {list(expected.shape)} and {expected.dtype}; keep them, or register it with persistent=False"
            )
        return buffer

    def _take_from_first_writers(self) -> None:
        num_stages, group = len(self.stage_ranks), self.mesh.group("pp")
        written = [
            min((index for index in self.names if self._has_changed(index, name)), default=num_stages)
            for name in self.shared
        ]
        first = torch.tensor(written, device=self.mesh.device)
        dist.all_reduce(first, op=dist.ReduceOp.MIN, group=group)
        for (name, like), writer in zip(self.shared.items(), first.tolist(), strict=True):
            if writer == num_stages:
                continue
            here = [index for index in self.names if name in self.names[index]]
            source = writer if writer in here else here[0] if here else None
            buffer = torch.empty_like(like, device=self.mesh.device) if source is None else self._buffer(source, name)
            _broadcast([buffer], group, source=self.mesh.place_in_pipeline(self.stage_ranks[writer]))
            for index in here:
                self._buffer(index, name).copy_(buffer)

    def _has_changed(self, index: int, name: str) -> bool:
        return (index, name) in self._last and not torch.equal(self._buffer(index, name), self._last[index, name])

    def _remember(self) -> None:
        self._last = {
            (index, name): self._buffer(index, name).detach().clone()
            for index, names in self.names.items()
            for name in names
            if name in self.shared
        }


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Meta tensors with the shapes and types of persistent buffers, under every name that a buffer has."""
    state = model.state_dict(keep_vars=True)
    named = model.named_buffers(remove_duplicate=False)
    return {name: torch.empty_like(buffer, device="meta") for name, buffer in named if name in state}


def _ranks_of_stage(mesh: Mesh) -> dist.ProcessGroup | None:
    """The group of ranks that hold the same stages as this one; None if it is alone. Collective."""
    axes = ("dp_replicate", "dp_shard", "tp")
    if mesh.places[mesh.rank("pp")].numel() == 1:
        return None
    with groups_wait(time_limit(mesh.device)):
        return mesh.over(axes, "stage")


def _broadcast(buffers: list[torch.Tensor], group: dist.ProcessGroup, source: int) -> None:
    """Broadcast buffers in one message, whatever their types."""
    if not buffers:
        return
    packed = torch.cat([buffer.contiguous().reshape(-1).view(torch.uint8) for buffer in buffers])
    dist.broadcast(packed, group=group, group_src=source)
    sizes = [buffer.numel() * buffer.element_size() for buffer in buffers]
    for buffer, part in zip(buffers, packed.split(sizes), strict=True):
        # A part may begin at an address that is not aligned for its type.
        buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))
