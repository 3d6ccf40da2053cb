"""A checkpoint saved under one plan continues the same curve under any other, and goes out to safetensors as it is."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from threading import Event, Timer
from typing import Any
from unittest import mock

import pytest
import torch

from ahp.runtime.files import crc32, flush
from ahp.runtime.torch_compat import local_tensor
from tests.marks import cases
from tests.runtime.models import JOB, MODELS, batch
from tests.runtime.test_equality import assert_same_curve, world_size
from tests.runtime.workers import Pool

BEFORE, AFTER = 2, 2
"""The last loss comes after two steps with the moments that were loaded."""

PLANS: dict[str, dict[str, Any]] = {
    "one": {"micro_batch_size": 4},
    "zero0": {"data_parallel_replicate_degree": 2, "micro_batch_size": 2},
    "zero1": {"data_parallel_shard_degree": 2, "zero_stage": 1, "micro_batch_size": 2},
    "zero3": {"data_parallel_shard_degree": 4},
    "tp": {"tensor_parallel_degree": 2, "micro_batch_size": 4},
    "1f1b": {"pipeline_parallel_degree": 2, "micro_batch_size": 2},
    "interleaved": {"pipeline_parallel_degree": 2, "virtual_stages_per_rank": 2, "micro_batch_size": 2},
    "zero3-x-tp": {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2, "micro_batch_size": 2},
    "zero3-x-tp-x-pp": {
        "data_parallel_shard_degree": 2,
        "tensor_parallel_degree": 2,
        "pipeline_parallel_degree": 2,
        "micro_batch_size": 2,
    },
}
"""Two micro-batches for each rank; four for a pipeline alone."""
MOVES = [
    ("one", "zero3-x-tp-x-pp"), ("zero0", "tp"), ("zero1", "1f1b"), ("zero3", "interleaved"), ("tp", "one"),
    ("tp", "zero3-x-tp"), ("1f1b", "zero3"), ("interleaved", "tp"), ("zero3-x-tp", "zero0"), ("zero3-x-tp-x-pp", "zero1"),
]  # fmt: skip
CASES = [(saved, loaded, tuple(MODELS)[number % len(MODELS)]) for number, (saved, loaded) in enumerate(MOVES)]
"""Every plan is saved and loaded; the models take turns."""
WIDE = [case for case in CASES if case[:2] in (("zero0", "tp"), ("zero3", "interleaved"), ("zero3-x-tp", "zero0"))]


def save_after(rank: int, world: int, model: str, layout: dict[str, Any], folder: str) -> dict[str, Any]:
    from ahp.runtime.parallel import parallelize

    parallel = parallelize(MODELS[model](), {"job": JOB, "parallelism": layout})
    results = [parallel.step(parallel.shard(batch(step))) for step in range(BEFORE)]
    written: dict[str, int] = {}
    done = parallel.saver.start(Path(folder), written.update)
    parallel.step(parallel.shard(batch(BEFORE)))  # what is being written is not what is being changed
    done.result()
    if rank == 0:
        assert written == {file.name: crc32(file) for file in Path(folder).iterdir()}
    return {"losses": [r.loss for r in results], "norms": [r.grad_norm for r in results]}


def continue_from(rank: int, world: int, model: str, layout: dict[str, Any], folder: str) -> dict[str, Any]:
    from ahp.runtime.parallel import parallelize

    torch.manual_seed(rank + 7)  # whatever the module was built with must not matter
    module = MODELS[model]()
    for parameter in module.parameters():
        parameter.data.normal_()
    parallel = parallelize(module, {"job": JOB, "parallelism": layout})
    parallel.load(folder)
    assert parallel.num_steps_done == BEFORE
    results = [parallel.step(parallel.shard(batch(step))) for step in range(BEFORE, BEFORE + AFTER)]
    return {"losses": [r.loss for r in results], "norms": [r.grad_norm for r in results]}


def flush_and_change(file: Path) -> None:
    """As of a disk that keeps other bytes of rank 1 than it was given."""
    flush(file)
    if file.name.startswith("__1_"):
        content = file.read_bytes()
        file.write_bytes(bytes([content[0] ^ 1]) + content[1:])


def save_onto_a_bad_disk(rank: int, world: int, folder: str) -> str:
    """Flushing rank 1's file changes a byte of it."""
    from ahp.runtime import files
    from ahp.runtime.parallel import parallelize

    parallel = parallelize(MODELS["llama"](), {"job": JOB, "parallelism": PLANS["zero1"]})
    counts: list[dict[str, int]] = []
    with mock.patch.object(files, "flush", flush_and_change):
        error = parallel.saver.start(Path(folder), counts.append).exception()
    assert not counts
    return f"{type(error).__name__}: {error}"


def test_a_checkpoint_counts_when_it_reads_back_as_it_was_written(pool: Pool, tmp_path: Path) -> None:
    told = pool.run(save_onto_a_bad_disk, 2, str(tmp_path / "checkpoint"))
    assert told == ["OSError: [Errno 5] __1_0.distcp does not read back from the disk as it was written"] * 2


def save_over_onto_a_full_disk(rank: int, world: int, folder: str) -> str:
    """A second checkpoint into the folder of the first, which rank 1 cannot write."""
    from torch.distributed.checkpoint import CheckpointException, FileSystemWriter

    from ahp.errors import AhpError
    from ahp.runtime.parallel import parallelize

    parallel = parallelize(MODELS["llama"](), {"job": JOB, "parallelism": PLANS["zero1"]})
    parallel.save(folder)
    parallel.step(parallel.shard(batch(0)))
    full = mock.patch.object(FileSystemWriter, "write_data", side_effect=OSError("no space"))
    with full if rank == 1 else nullcontext(), pytest.raises(CheckpointException, match="no space"):
        parallel.save(folder)
    try:
        parallel.load(folder)
    except AhpError as error:
        return str(error)
    return "loaded"


def test_a_checkpoint_that_is_half_written_over_another_is_none(pool: Pool, tmp_path: Path) -> None:
    """It was read as one: rank 0's part of the second, and rank 1's of the first."""
    told = pool.run(save_over_onto_a_full_disk, 2, str(tmp_path / "checkpoint"))
    assert all("no checkpoint, it has no file .metadata" in each for each in told)


def save_again_onto_a_bad_disk(rank: int, world: int, folder: str) -> list[Any]:
    """Two checkpoints of which one is kept, and a third on a disk that changes a byte: which were there whenever a file was read back."""
    from ahp.plan import Plan, validated
    from ahp.runtime import files
    from ahp.runtime.parallel import parallelize
    from ahp.runtime.ranks.ranks import Ranks
    from ahp.runtime.run.cannot_write import CannotWrite
    from ahp.runtime.run.checkpoints import Checkpoints
    from ahp.runtime.run.folder import RunFolder
    from ahp.runtime.weights import saver

    plain = {"job": JOB, "parallelism": PLANS["zero1"]}
    parallel, place, ranks = (
        parallelize(MODELS["llama"](), plain),
        RunFolder(folder),
        Ranks(rank, world, torch.device("cpu")),
    )
    checkpoints = Checkpoints(validated(Plan, plain, "plan"), place, ranks, keep=1, same={})
    there: list[Any] = []

    def read_back(file: Path) -> int:
        there.append([checkpoint.step for checkpoint in place.checkpoints()])
        return files.read_back(file)

    with mock.patch.object(saver, "read_back", read_back):
        for step in (1, 2):
            checkpoints.start(step, parallel.saver)
            checkpoints.finish()
    ranks.barrier()
    with mock.patch.object(files, "flush", flush_and_change):
        checkpoints.start(3, parallel.saver)
        try:
            checkpoints.finish()
        except CannotWrite as error:
            there.append(str(error))
    ranks.barrier()
    return [*there, [(checkpoint.step, checkpoint.damaged_file()) for checkpoint in place.checkpoints()]]


@pytest.mark.slow
def test_an_old_checkpoint_goes_only_when_the_new_one_was_verified(pool: Pool, tmp_path: Path) -> None:
    for rank, (*there, error, left) in enumerate(pool.run(save_again_onto_a_bad_disk, 2, str(tmp_path / "run"))):
        files = 2 - rank  # the first rank has the list of tensors too
        assert there == [[]] * files + [[1]] * files
        assert "checkpoint of step 3 cannot be written, OSError: [Errno 5] __1_0.distcp does not read back" in error
        assert error.endswith("; the checkpoint of step 2 is kept")
        assert left == [(2, None)]


@pytest.fixture(scope="module")
def saved_run(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[str, dict[str, Any]]]:
    """(plan, model) -> the folder of its checkpoint, and the curve up to there; run once for each."""

    @cache
    def run(plan: str, model: str) -> tuple[str, dict[str, Any]]:
        folder = str(tmp_path_factory.mktemp("saved") / "checkpoint")
        return folder, pool.run(save_after, world_size(PLANS[plan]), model, PLANS[plan], folder)[0]

    return run


@pytest.mark.parametrize(
    ("saved", "loaded", "model"),
    cases(CASES, wide=WIDE),
)
def test_continues_under_another_plan(
    pool: Pool,
    plain_run: Callable[..., dict[str, Any]],
    saved_run: Callable[[str, str], tuple[str, dict[str, Any]]],
    saved: str,
    loaded: str,
    model: str,
) -> None:
    folder, before = saved_run(saved, model)
    after = pool.run(continue_from, world_size(PLANS[loaded]), model, PLANS[loaded], folder)[0]
    expected = plain_run(model, BEFORE + AFTER)
    assert_same_curve({key: before[key] + after[key] for key in before}, expected)


def save_twice(rank: int, world: int, layout: dict[str, Any], folder: str) -> None:
    """Two checkpoints in a row, the second asked for while the first waits to be written."""
    from ahp.runtime.parallel import parallelize

    parallel = parallelize(MODELS["gpt2"](), {"job": JOB, "parallelism": layout})
    may_write = Event()
    first_write = parallel.saver._write

    def waiting(*order: Any) -> None:
        assert may_write.wait(120)
        first_write(*order)

    wait([parallel.saver._busy])  # the memory is there before any checkpoint
    made = {name: copy.data_ptr() for name, copy in parallel.saver.copies.memory.items()}
    parallel.step(parallel.shard(batch(0)))
    with mock.patch.object(parallel.saver, "_write", waiting):
        first = parallel.saver.start(Path(folder, "first"), lambda checksums: None)
    memory = {name: copy.data_ptr() for name, copy in parallel.saver.copies.memory.items()}
    assert memory == made
    wanted = {name: local_tensor(p).clone() for name, p in parallel.parameters.items()}
    parallel.step(parallel.shard(batch(1)))
    Timer(0.5, may_write.set).start()
    second = parallel.saver.start(Path(folder, "second"), lambda checksums: None)
    assert first.done(), "its memory was taken while it was being written"
    second.result()
    assert {name: copy.data_ptr() for name, copy in parallel.saver.copies.memory.items()} == memory
    parallel.load(Path(folder, "first"))
    for name, parameter in parallel.parameters.items():
        assert torch.equal(local_tensor(parameter), wanted[name]), name
    assert parallel.num_steps_done == 1
    parallel.load(Path(folder, "second"))
    assert parallel.num_steps_done == 2
    assert not all(torch.equal(local_tensor(p), wanted[name]) for name, p in parallel.parameters.items())


@pytest.mark.parametrize("plan", ["zero1", pytest.param("zero3-x-tp", marks=pytest.mark.wide)])
def test_a_second_checkpoint_takes_the_memory_of_the_first_once_that_is_written(
    pool: Pool, tmp_path: Path, plan: str
) -> None:
    pool.run(save_twice, world_size(PLANS[plan]), PLANS[plan], str(tmp_path))


def dropped(rank: int, world: int, folder: str, first: int, layout: dict[str, Any]) -> list[float]:
    """Losses of a model with dropout from step ``first`` on; a checkpoint after two steps, or from one."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from ahp.runtime.parallel import parallelize

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_implementation="sdpa")
    parallel = parallelize(GPT2LMHeadModel(config), {"job": JOB, "parallelism": layout})
    if first:
        parallel.load(folder)
    losses = []
    for step in range(first, 4):
        losses.append(parallel.step(parallel.shard(batch(step))).loss)
        if step == 1:
            parallel.save(folder)
    return losses


@pytest.mark.parametrize("plan", ["zero0", "zero3-x-tp"])
def test_dropout_goes_on_where_it_was(pool: Pool, tmp_path: Path, plan: str) -> None:
    size, layout = world_size(PLANS[plan]), PLANS[plan]
    whole = pool.run(dropped, size, str(tmp_path / "checkpoint"), 0, layout)[0]
    again = pool.run(dropped, size, str(tmp_path / "checkpoint"), 2, layout)[0]
    assert again == whole[2:]
    assert len(set(whole)) == 4
