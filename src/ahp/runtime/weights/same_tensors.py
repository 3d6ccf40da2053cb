"""Checks that a checkpoint holds the tensors that are to be filled from it, and no others of a model, before any of them changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ahp.errors import BadInput
from ahp.runtime.training_state import TrainingState

MODEL, BUFFER = "model.", "buffer."
"""Prefixes of the names of weights and of buffers in a checkpoint."""
MOMENT = "exp_avg."
"""Prefix of the names of AdamW's first moments. Their type is the job's, whereas that of frozen weights is the precision's."""
OPTIMIZERS = {"momentum_buffer.": "muon", "exp_avg.codes.": "adamw8bit"}
"""Prefixes of names of states that only one optimizer has, and that optimizer; adamw has none of its own."""


class OtherTensors(BadInput):
    """A checkpoint of another model, or of another job."""


def refuse_other_tensors(
    folder: Path, saved: Mapping[str, Any], wanted: Mapping[str, torch.Tensor], state: TrainingState
) -> None:
    """``saved``: metadata of each tensor of the checkpoint; ``wanted``: the tensors that this rank reads from it. Collective: raises OtherTensors on
    all ranks, with the fault that the first rank with a fault finds."""
    fault = next(_faults(saved, wanted, state), None)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (fault, [name for name in wanted if name.startswith(BUFFER)]))
    fault = next((difference for difference, _ in found if difference is not None), None) or _unused_buffer(
        saved, found
    )
    if fault is not None:
        raise OtherTensors(
            f"folder = {str(folder)!r}: holds a checkpoint of another model or job: {fault} (valid: one of this model, under this "
            "job.optimizer.name, job.dtype and job.lora)"
        )


def _faults(saved: Mapping[str, Any], wanted: Mapping[str, torch.Tensor], state: TrainingState) -> Iterator[str]:
    """The faults that this rank can see, in words; the model's names and shapes are the same on all ranks."""
    for name in (name for name in wanted if name not in saved):
        yield _why_missing(name, saved, state)
    for name, tensor in wanted.items():
        there, here = list(saved[name].size), list(tensor.shape)
        if there != here:
            yield f"{name} has the shape {there} there, and {here} here"
        was, now = saved[name].properties.dtype, tensor.dtype
        if name.startswith(MOMENT) and was != now:
            yield f"job.dtype: {name} has the type {was} there, and {now} here"
    for name in saved:
        if name.startswith(MODEL) and name.removeprefix(MODEL) not in state.layout.shapes:
            yield f"it has {name}, which would not be used"


def _why_missing(name: str, saved: Mapping[str, Any], state: TrainingState) -> str:
    if name.startswith("loss_scale."):
        return "job.precision = 'fp16': it has no scale of the loss, and was not written in fp16"
    if _with_adapters(saved) != _with_adapters(f"{MODEL}{name}" for name in state.layout.shapes):
        return f"job.lora: it was written {'with' if _with_adapters(saved) else 'without'} adapters"
    named, before = state.optimizer.settings.name, _optimizer_of(saved)
    if not name.startswith((MODEL, BUFFER)) and named != before:
        return f"job.optimizer.name = {named!r}: it was written under {before}"
    frozen = next(
        (each for each in state.optimizer.shards if name.endswith(f".{each}") and f"{MODEL}{each}" in saved), None
    )
    if frozen is not None and not name.startswith(MODEL):
        return f"{frozen} was frozen there, and has no state of the optimizer; freeze it before ahp.parallelize again, or take weights_alone=True"
    return f"it has no {name}"


def _with_adapters(names: Any) -> bool:
    return any(name.startswith(MODEL) and ".lora_A." in name for name in names)


def _optimizer_of(saved: Mapping[str, Any]) -> str:
    found = (name for begin, name in OPTIMIZERS.items() if any(each.startswith(begin) for each in saved))
    return next(found, "adamw")


def _unused_buffer(saved: Mapping[str, Any], found: list[Any]) -> str | None:
    """A buffer of the checkpoint that no stage has, in words."""
    used = {name for _, names in found for name in names}
    name = next((name for name in saved if name.startswith(BUFFER) and name not in used), None)
    return None if name is None else f"it has {name}, which would not be used"
