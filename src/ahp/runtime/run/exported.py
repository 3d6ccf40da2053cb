"""A run's weights as a folder that transformers reads: config, generation config, safetensors, tokenizer."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from ahp.cluster.sense import memory_available_bytes
from ahp.errors import AhpError, BadInput
from ahp.plan import Parallelism, Plan
from ahp.runtime.data.tokenizer import copy_for_transformers, opened, save_for_transformers, tokenizer_of
from ahp.runtime.files import crc32
from ahp.runtime.run import export_mark
from ahp.runtime.run.folder import RunFolder
from ahp.runtime.run.given import GENERATION
from ahp.words import gib

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import nn

ROOM = 1.2
"""[Empirical] Memory required, as a multiple of the weights': a fifth more is far above what one sequence's activations take."""


def publish(
    run: RunFolder, aside: Path, plan: Plan, tokenizer: Tokenizer, step: int, checksums: dict[str, int] | None = None
) -> Path:
    """Complete a folder of safetensors, and replace the run's older export with it. ``checksums``: of its files of weights, where they are known."""
    published = tokenizer_of(plan, run.given_folder)
    if published is not None:
        copy_for_transformers(published, aside)
    else:
        save_for_transformers(tokenizer, aside)
    if (run.given_folder / GENERATION).is_file():  # the model was built from its config, and has other settings
        shutil.copyfile(run.given_folder / GENERATION, aside / GENERATION)
    export_mark.write(aside, step, checksums or {})
    shutil.rmtree(run.weights_folder, ignore_errors=True)
    aside.rename(run.weights_folder)
    return run.weights_folder


def newest(run: RunFolder, plan: Plan) -> Path:
    """The folder with the newest checkpoint's weights; converts them now if the run has not (it was stopped).

    Exported weights that are damaged are put away and converted again. A run that goes on removes older checkpoints: if the newest is removed
    while it is read here, there is a newer one, which is read instead. Raises BadInput if there is no checkpoint for that, or the newest is damaged.
    """
    while True:
        newest_now = [checkpoint.path for checkpoint in run.checkpoints()[-1:]]
        try:
            return _newest(run, plan)
        except (AhpError, OSError, CheckpointException):  # whatever the missing files lead to
            if all(path.exists() for path in newest_now):
                raise


def _newest(run: RunFolder, plan: Plan) -> Path:
    checkpoints = run.checkpoints()
    written = run.exported_step()
    newest_saved = checkpoints[-1].step if checkpoints else 0
    if written is not None and written >= newest_saved and run.has_whole_weights(since=written):
        return run.weights_folder
    if not checkpoints:
        run.refuse_lost_checkpoints()
        raise BadInput(f"run = {str(run.path)!r}: it has no checkpoint yet; let it train on: ahp train")
    damaged = checkpoints[-1].damaged_file()
    if damaged is not None:
        raise BadInput(
            f"run = {str(run.path)!r}: its newest checkpoint is damaged ({checkpoints[-1].path.name}/{damaged}); "
            "let it train on, which takes the one before: ahp train"
        )
    _refuse_other_tokenizer(run, checkpoints[-1].meta().get("tokenizer_crc32"))
    return _convert(run, plan, checkpoints[-1].path, checkpoints[-1].step)


def _refuse_other_tokenizer(run: RunFolder, written: int | None) -> None:
    """Raises BadInput if the run's tokenizer is not the one of its checkpoint. ``written``: that one's checksum; None if an earlier version wrote it."""
    file = run.tokenizer_file
    if not file.is_file() or written not in (None, crc32(file)):
        raise BadInput(
            f"{file} is missing or has changed since it was written; let the run train on, which writes it again: ahp train"
        )


def load(folder: Path, plan: Plan) -> tuple[nn.Module, Tokenizer]:
    """The model with its weights in fp32, ready to run on this machine's best device, and its tokenizer."""
    from ahp.graph.models import build_model
    from ahp.runtime.weights.allocate import allocate_on, materialize_buffers
    from ahp.runtime.weights.hub_names import kept_buffers
    from ahp.runtime.weights.pretrained import Pretrained, fill_whole

    source = Pretrained(folder, "weights")
    module = build_model(plan.model, device="meta", attention=plan.engine.attention)
    device = _device_with_room(sum(p.numel() * p.element_size() for p in module.parameters()))
    materialize_buffers(module, {name for name, _ in kept_buffers(module)})
    allocate_on(module, device)  # uninitialized, since all values are read below
    fill_whole(module, source)
    return module.eval(), opened(folder / "tokenizer.json")


def _device_with_room(num_bytes: int) -> torch.device:
    """A GPU with room for the weights, else the host. Raises BadInput if neither has room, before the system kills a process."""
    if torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > num_bytes * ROOM:
        return torch.device("cuda")
    _refuse_without_room(num_bytes)
    return torch.device("cpu")


def _refuse_without_room(num_bytes: int) -> None:
    """Raises BadInput if the host lacks memory for ``num_bytes`` of weights."""
    free = memory_available_bytes()
    if free < num_bytes * ROOM:
        raise BadInput(
            f"weights: in fp32 they take {gib(num_bytes)}, and this machine has {gib(free)} free; "
            "generate on a larger one"
        )


def _convert(run: RunFolder, plan: Plan, checkpoint: Path, step: int) -> Path:
    """Read a checkpoint's weights, saved by any layout, in one process on the CPU. Raises BadInput if they do not fit."""
    from ahp.graph.models import build_model
    from ahp.runtime.parallel import parallelize

    # AdamW makes its states on first use, and they are never used here; Muon and an offloaded optimizer make theirs at once.
    job = plan.job.model_copy(update={"optimizer": plan.job.optimizer.model_copy(update={"name": "adamw"})})
    engine = plan.engine.model_copy(update={"offload_optimizer": False})
    alone = plan.model_copy(update={"parallelism": Parallelism(), "init_from": None, "job": job, "engine": engine})
    try:
        aside = Path(tempfile.mkdtemp(prefix="hf.tmp-", dir=run.path))
    except OSError as error:
        why = (
            f"it was stopped, so its weights are still to be written there, and it cannot be written ({error.strerror})"
        )
        raise BadInput(f"run = {str(run.path)!r}: {why}; give a copy of the folder") from None
    try:
        with _world_of_one():
            module = build_model(plan.model, device="meta", attention=plan.engine.attention)
            _refuse_without_room(sum(p.numel() * p.element_size() for p in module.parameters()))
            parallel = parallelize(module, alone, device="cpu", initialize=False)
            parallel.load(checkpoint, weights_alone=True)
            parallel.export_hf(aside)
        return publish(run, aside, plan, opened(run.tokenizer_file), step)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _world_of_one() -> Iterator[None]:
    if dist.is_initialized():
        raise RuntimeError("weights are converted by one process alone, outside of a training job")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
