"""The loss on held-out text: forward alone, without dropout, the same under every plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from ahp.runtime.loss import PendingCount, count_scored
from ahp.runtime.pipeline import Inputs, Pipeline, split_rows
from ahp.schedule.patterns import stage_ranks

if TYPE_CHECKING:
    from ahp.runtime.parallelize import Parallel


def evaluate(parallel: Parallel, parts: Iterable[tuple[Inputs, torch.Tensor]]) -> float:
    """Mean loss over the scored tokens of some global batches, of which each rank gives its rows. Collective.

    ``parts``: what the model is called with and unshifted labels, int64 [rows, sequence] each.
    """
    for stage in parallel.stages.values():
        stage.eval()
    parallel.loss.scale = 1.0
    total, tokens = 0.0, 0
    try:
        with torch.no_grad():
            for part in parts:
                mean, count = _batch(parallel, *part)
                total, tokens = total + mean * count, tokens + count
    finally:
        for stage in parallel.stages.values():
            stage.train()
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # backward would have freed the gathered weights
    return total / max(1, tokens)


def _batch(parallel: Parallel, inputs: Inputs, labels: torch.Tensor) -> tuple[float, int]:
    """Mean loss of one global batch, and how many tokens it scores; the same on every rank."""
    mesh = parallel.mesh
    scored = PendingCount(count_scored(labels, causal=parallel.loss.causal), mesh.data.get_group())
    parallel.loss.total = scored
    size = parallel.plan.parallelism.micro_batch_size
    pairs = split_rows(inputs, labels, size)
    share = sum((micro_batch_loss(parallel, *pair) for pair in pairs), torch.zeros((), device=mesh.device))
    mean = (share / mesh.size("tp")).double()
    dist.all_reduce(mean)
    return mean.item(), int(scored.value())


def micro_batch_loss(parallel: Parallel, inputs: Inputs, labels: torch.Tensor) -> torch.Tensor:
    """This rank's share of the loss: 0 where the last stage is elsewhere. Stages run one after the other.

    Every rank goes through them in the same order, so that whoever sends is waited for; nothing waits in a circle.
    """
    p, mesh = parallel.plan.parallelism, parallel.mesh
    if p.num_stages == 1:
        return parallel.loss(parallel.stages[0](inputs["input_ids"], **inputs), labels)
    ranks = stage_ranks(p.pipeline_parallel_schedule, p.pipeline_parallel_degree, p.virtual_stages_per_rank)
    group, me, last = mesh.group("pp"), mesh.rank("pp"), p.num_stages - 1
    assert isinstance(parallel.runner, Pipeline)
    like, hidden = parallel.runner.hidden, inputs["input_ids"]
    for index in sorted(parallel.stages):
        stage = parallel.stages[index]
        if index > 0 and ranks[index - 1] != me:
            hidden = torch.empty(like.shape, dtype=like.dtype, device=mesh.device)
            dist.recv(hidden, group=group, group_src=ranks[index - 1])
        hidden = stage(hidden, **inputs)
        if index == last:
            return parallel.loss(hidden, labels)
        if ranks[index + 1] != me:
            dist.send(hidden.contiguous(), group=group, group_dst=ranks[index + 1])
    return torch.zeros((), device=mesh.device)
