"""Models that call ``torch.utils.checkpoint`` themselves: a layout whose second run would compute something else is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ahp.errors import BadInput
from ahp.graph.outline import outline
from ahp.plan import Plan, validated
from ahp.runtime.inside import blocks_of
from ahp.runtime.limits import refuse_model
from ahp.runtime.parallel import parallelize
from tests.runtime.models import JOB, Block, Custom, batch
from tests.runtime.workers import Pool


class Within(Block):
    """A block that runs itself again, as those of transformers do."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(32, 4)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class Around(Custom):
    """A model that runs its blocks again."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(self.norm(x))


class AroundAgain(Custom):
    """The same, not reentrant."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


class Called(Block):
    """A block whose call is run again."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().__call__, x, use_reentrant=False)


def model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "whole blocks":
        return AroundAgain(layers=4)
    if kind == "whole calls":
        module = Custom(layers=0)
        module.blocks = nn.Sequential(*(Called(32, 4) for _ in range(4)))
        return module
    if kind == "around":
        return Around(layers=4)
    module = Custom(layers=0)
    module.blocks = nn.Sequential(*(Within(kind == "reentrant") for _ in range(4)))
    return module


PIPE = {"pipeline_parallel_degree": 2, "micro_batch_size": 2}
ZERO_BUBBLE = {**PIPE, "pipeline_parallel_schedule": "InterleavedZeroBubble", "virtual_stages_per_rank": 2}
CONTEXT = {"context_parallel_degree": 2, "micro_batch_size": 2}


@pytest.mark.parametrize(
    ("kind", "layout", "key"),
    [
        ("reentrant", CONTEXT, "context_parallel_degree = 2"),  # gave other gradients
        ("not reentrant", CONTEXT, "context_parallel_degree = 2"),
        ("not reentrant", ZERO_BUBBLE, "pipeline_parallel_schedule = 'InterleavedZeroBubble'"),
        ("around", PIPE, "pipeline_parallel_degree = 2"),  # gave the first stage no gradients
        ("whole blocks", ZERO_BUBBLE, "pipeline_parallel_schedule = 'InterleavedZeroBubble'"),
        ("whole blocks", CONTEXT, None),
        ("whole calls", CONTEXT, None),
        ("whole blocks", {**CONTEXT, "engine": {"compile": True}}, "context_parallel_degree = 2"),
        ("reentrant", ZERO_BUBBLE, None),
        ("reentrant", PIPE, None),
        ("not reentrant", PIPE, None),
    ],
)
def test_a_second_run_that_would_compute_something_else_is_refused(
    kind: str, layout: dict[str, Any], key: str | None
) -> None:
    keys = dict(layout)
    plain = {"job": JOB, "engine": keys.pop("engine", {}), "parallelism": keys}
    module, plan = model(kind), validated(Plan, plain, "plan")
    found = outline(module, batch_size=2, sequence_length=plan.job.sequence_length)
    said = ""
    try:
        refuse_model(module, blocks_of(module, plan.parallelism), found, plan)
    except BadInput as error:
        said = str(error)
    assert said.startswith(f"{key}: the model calls torch.utils.checkpoint itself") if key else not said


def trained(rank: int, world: int, kind: str, layout: dict[str, Any]) -> list[float]:
    """Losses and gradient norms of three steps, and a loss without training. Runs in each worker."""
    parallel = parallelize(model(kind), {"job": JOB, "parallelism": {"micro_batch_size": 2, **layout}})
    results = [parallel.step(parallel.shard(batch(step))) for step in range(3)]
    found = [figure for result in results for figure in (result.loss, result.grad_norm)]
    return [*found, parallel.evaluate([parallel.shard(batch(3))])]


@pytest.mark.parametrize("kind", ["whole blocks", "whole calls"])
@pytest.mark.parametrize(
    "layout",
    [
        {"context_parallel_method": "ring"},
        {"context_parallel_method": "all-to-all", "zero_stage": 3},
        {"context_parallel_method": "ring", "activation_checkpoint": "full"},
    ],
    ids=["ring", "all-to-all-zero3", "ring-full"],
)
def test_whole_blocks_run_again_as_context_ranks_ran_them(pool: Pool, kind: str, layout: dict[str, Any]) -> None:
    (expected,) = pool.run(trained, 1, kind, {})
    for found in pool.run(trained, 2, kind, {"context_parallel_degree": 2, **layout}):
        assert found == pytest.approx(expected, rel=1e-5)
