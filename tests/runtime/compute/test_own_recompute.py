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
from tests.runtime.models import JOB, Block, Custom


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


def model(kind: str) -> nn.Module:
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
        ("reentrant", ZERO_BUBBLE, None),
        ("reentrant", PIPE, None),
        ("not reentrant", PIPE, None),
    ],
)
def test_a_second_run_that_would_compute_something_else_is_refused(
    kind: str, layout: dict[str, Any], key: str | None
) -> None:
    module, plan = model(kind), validated(Plan, {"job": JOB, "parallelism": layout}, "plan")
    found = outline(module, batch_size=2, sequence_length=plan.job.sequence_length)
    said = ""
    try:
        refuse_model(module, blocks_of(module, plan.parallelism), found, plan)
    except BadInput as error:
        said = str(error)
    assert said.startswith(f"{key}: the model calls torch.utils.checkpoint itself") if key else not said
