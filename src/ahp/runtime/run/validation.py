"""The loss on held-out text: forward only, without dropout, the same under every plan."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist

from ahp.graph.host_numbers import Generators
from ahp.runtime.compute.loss import PendingCount, count_scored
from ahp.runtime.compute.random_numbers import numbers_of_step
from ahp.runtime.part import RowsOfRanks
from ahp.runtime.pipeline.schedules import Inputs, Runner, split_rows
from ahp.runtime.ranks.mesh import Mesh
from ahp.runtime.shard.fsdp import without_backward


def evaluate(
    runner: Runner, mesh: Mesh, of_ranks: RowsOfRanks, parts: Iterable[tuple[Inputs, torch.Tensor]], seed: int
) -> float:
    """Mean loss over the scored tokens of some global batches, nan without any; each rank gives its rows. Collective.

    ``parts``: the model's inputs and unshifted labels, int64 [rows, sequence] each. ``seed``: for models that draw random numbers in
    evaluation too, the same at each validation.
    """
    stages = runner.stages.values()
    generators = Generators(*stages)
    modes = {module: module.training for stage in stages for module in stage.modules()}
    for stage in stages:
        stage.eval()
    runner.loss.scale = 1.0
    total, tokens = 0.0, 0
    try:
        # FSDP2 would keep what inference mode, around this, makes of the weights.
        without_autocast = torch.autocast(mesh.device.type, enabled=False)  # the loss is the job's, in its precision
        with torch.inference_mode(False), without_autocast, torch.no_grad(), without_backward(stages):
            for number, part in enumerate(parts):
                with numbers_of_step(mesh, seed, number, generators):
                    mean, count = _batch(runner, mesh, of_ranks, *part)
                total, tokens = total + mean * count, tokens + count
    finally:
        for module, mode in modes.items():
            module.training = mode
    return total / tokens if tokens else math.nan


def _batch(
    runner: Runner, mesh: Mesh, of_ranks: RowsOfRanks, inputs: Inputs, labels: torch.Tensor
) -> tuple[float, int]:
    """Mean loss of one global batch, and its number of scored tokens; the same on every rank."""
    rows, group = len(labels), mesh.data.get_group()
    scored = PendingCount(count_scored(labels, causal=runner.loss.causal), group, of_ranks.share(rows))
    of_ranks.check(rows, scored, mesh.device)
    runner.loss.total = scored
    pairs = split_rows(inputs, labels, of_ranks.layout.micro_batch_size)
    share = sum((runner.evaluate(*pair) for pair in pairs), torch.zeros((), dtype=torch.float32, device=mesh.device))
    mean = (share / mesh.size("tp")).double()
    dist.all_reduce(mean)
    return mean.item(), int(scored.number())
