"""Runs a plan on workers of this machine without a run's folder or data, for ``ahp verify`` and ``ahp plan --measure``."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from ahp.errors import AhpError, BadInput, HardwareMismatch, NotExpressible
from ahp.graph.models import build_model
from ahp.plan import Plan
from ahp.runtime.ranks import launch
from ahp.runtime.ranks.device import DeviceType
from ahp.runtime.ranks.ranks import Ranks, joined
from ahp.runtime.run.stop_signal import Stopped
from ahp.runtime.weights.allocate import materialize

if TYPE_CHECKING:
    from ahp.runtime.parallel import Parallel

Batch = dict[str, torch.Tensor]

DOCUMENT_SHARE = 0.05
"""Share of a rehearsal's tokens that begin a document: short documents show soonest whether they are kept apart."""


def on_workers(module: str, plan: Plan, device: DeviceType, *arguments: str) -> str:
    """Run ``python -m module FOLDER DEVICE arguments`` as every rank of the plan. Returns what rank 0 left with ``answer``.

    The weights come from the job's seed; given weights (``init_from``) are not read.

    Raises AhpError with the cause if a worker fails, and Stopped if a signal ended the workers.
    """
    with tempfile.TemporaryDirectory(prefix="ahp-rehearsal-") as name:
        folder = Path(name)
        plan.model_copy(update={"init_from": None}).save(folder / "plan.yaml")
        try:
            stopped = launch.launch(
                module,
                [name, device, *arguments],
                num_workers=plan.parallelism.world_size,
                log_folder=folder / "log",
            )
        except launch.WorkersEnded as ended:
            # The first error is the cause; an empty file is from a worker that was ended while writing. The folder with the logs is about to go.
            left = sorted(folder.glob("error-*.txt"), key=lambda file: file.stat().st_mtime_ns)
            errors = [file for file in left if file.stat().st_size]
            last = f"workers ended with {ended.exit_codes}: {launch.last_words(folder / 'log')}"
            raise _as_left(errors[0].read_text()) if errors else AhpError(last) from None
        if stopped:
            raise Stopped(stopped)
        return (folder / "answer").read_text()


@contextmanager
def as_rank(argv: list[str]) -> Iterator[tuple[Plan, Ranks, Callable[[str], None]]]:
    """On a rank that ``on_workers`` started: the plan, the ranks, and a function to leave the answer. Errors are left too."""
    folder, device = Path(argv[0]), argv[1]
    plan = Plan.load(folder / "plan.yaml")

    def answer(text: str) -> None:
        if ranks.is_first:
            (folder / "answer").write_text(text)

    try:
        with joined("cuda" if device == "cuda" else "cpu", plan) as ranks:
            yield plan, ranks, answer
    except Exception as error:
        code = error.exit_code if isinstance(error, AhpError) else AhpError.exit_code
        said = f"{code}\n{str(error) or type(error).__name__}"
        (folder / f"error-{os.environ['RANK']}.txt").write_text(said)
        raise


def _as_left(said: str) -> AhpError:
    """The error that a worker left; a refusal of the plan with its exit code."""
    code, _, message = said.partition("\n")
    refusals = {str(one.exit_code): one for one in (BadInput, HardwareMismatch, NotExpressible)}
    return refusals.get(code, AhpError)(message)


def parallel_model(plan: Plan, device: torch.device, *, on_any_device: bool = False) -> tuple[Parallel, int]:
    """The plan's model, parallelized over the ranks, and the number of tokens it can embed. ``on_any_device``: processor cores may
    stand for devices with 8-bit products, to compute the same, not to be timed."""
    from ahp.runtime.parallel import parallelize, rehearse

    module = model(plan)
    tokens = vocabulary(module)
    parallel = rehearse(module, plan, device) if on_any_device else parallelize(module, plan, device=device)
    return parallel, tokens


def model(plan: Plan) -> nn.Module:
    """The plan's model with the weights of its seed, in fp32 on the CPU."""
    found = build_model(plan.model, device="meta", attention=plan.engine.attention)
    materialize(found, seed=plan.job.seed)
    return found.train()


def vocabulary(module: nn.Module) -> int:
    """Number of tokens that a model can embed."""
    return next(m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding))


def batch(plan: Plan, step: int, tokens: int) -> Batch:
    """Random tokens int64 [global batch, sequence], and labels with a different scored share in each sequence; if the job masks
    documents, positions too, in documents that begin at random tokens."""
    job = plan.job
    generator = torch.Generator().manual_seed(job.seed * 1_000_003 + step)
    input_ids = torch.randint(0, tokens, (job.global_batch_size, job.sequence_length), generator=generator)
    labels = input_ids.clone()
    unscored = torch.randint(0, job.sequence_length // 2 + 1, (job.global_batch_size, 1), generator=generator)
    labels[torch.arange(job.sequence_length) < unscored] = -100
    found = {"input_ids": input_ids, "labels": labels}
    if job.document_mask:
        starts = torch.rand(labels.shape, generator=generator) < DOCUMENT_SHARE
        labels[starts] = -100
        place = torch.arange(job.sequence_length)
        found["position_ids"] = place - (place * starts).cummax(1).values
    return found
