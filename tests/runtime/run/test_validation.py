"""The loss on held-out text is that of one process under every plan, and looking at it changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.marks import cases
from tests.runtime.models import JOB, MODELS, OPTIMIZER, VOCABULARY, batch
from tests.runtime.test_equality import assert_same_curve, world_size
from tests.runtime.weights.test_checkpoint import PLANS
from tests.runtime.workers import Pool

HELD_OUT = (100, 101, 102, 103)
"""Steps that are not trained on; their batches score different numbers of tokens, the last one's none (prompts longer than a sequence)."""
LAYOUTS = {
    **PLANS,
    "v-shaped": {"pipeline_parallel_degree": 2, "virtual_stages_per_rank": 2, "pipeline_parallel_schedule": "ZBVZeroBubble"},
    "zero2-bubbles": {"data_parallel_shard_degree": 2, "zero_stage": 2, "pipeline_parallel_degree": 2},
}  # fmt: skip
CASES = [(plan, tuple(MODELS)[number % len(MODELS)]) for number, plan in enumerate(LAYOUTS)]
WIDE = [
    case for case in CASES if case[0] in ("one", "zero0", "zero1", "tp", "zero3-x-tp", "interleaved", "zero2-bubbles")
]


def looked_at(step: int) -> dict[str, torch.Tensor]:
    data = batch(step)
    return data if step != HELD_OUT[-1] else {**data, "labels": torch.full_like(data["labels"], -100)}


def train(rank: int, world: int, model: str, layout: dict[str, Any]) -> dict[str, Any]:
    """A step, a look, a step."""
    from ahp.runtime.parallel import parallelize

    parallel = parallelize(MODELS[model](), {"job": JOB, "parallelism": layout})
    first = parallel.step(parallel.shard(batch(0)))
    held_out = parallel.evaluate(parallel.shard(looked_at(step)) for step in HELD_OUT)
    second = parallel.step(parallel.shard(batch(1)))
    return {"losses": [first.loss, second.loss], "norms": [first.grad_norm, second.grad_norm], "held_out": held_out}


@cache
def plain(name: str) -> float:
    """Mean over all scored tokens of the held-out batches after one step of plain PyTorch."""
    model = MODELS[name]()
    settings = {key: OPTIMIZER[key] for key in ("betas", "eps", "weight_decay")}
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIMIZER["learning_rate"], **settings)

    def loss(step: int, reduction: str) -> torch.Tensor:
        data = looked_at(step)
        output = model(data["input_ids"]) if name == "custom" else model(input_ids=data["input_ids"]).logits
        targets = data["labels"][:, 1:].reshape(-1)
        return F.cross_entropy(output[:, :-1].reshape(-1, VOCABULARY), targets, reduction=reduction)

    loss(0, "mean").backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["grad_clip"])
    optimizer.step()
    model.eval()
    tokens = sum(int((looked_at(step)["labels"][:, 1:] != -100).sum()) for step in HELD_OUT)
    with torch.no_grad():
        return sum(loss(step, "sum").item() for step in HELD_OUT) / tokens


@pytest.mark.parametrize(
    ("plan", "model"),
    cases(CASES, wide=WIDE),
)
def test_held_out_loss_is_that_of_one_process(
    pool: Pool, plain_run: Callable[..., dict[str, Any]], plan: str, model: str
) -> None:
    results = pool.run(train, world_size(LAYOUTS[plan]), model, LAYOUTS[plan])
    expected = plain_run(model, 2)
    for result in results:
        assert result["held_out"] == pytest.approx(plain(model), rel=1e-5)
        assert_same_curve(result, {key: expected[key] for key in ("losses", "norms")})


def look_at_nothing(rank: int, world: int, layout: dict[str, Any]) -> float:
    from ahp.runtime.parallel import parallelize

    parallel = parallelize(MODELS["llama"](), {"job": JOB, "parallelism": layout})
    return parallel.evaluate([parallel.shard(looked_at(HELD_OUT[-1]))])


@pytest.mark.parametrize("plan", ["one", "zero3"])
def test_a_mean_over_no_token_is_no_number(pool: Pool, plan: str) -> None:
    """It was 0, as if everything had been foreseen."""
    assert all(math.isnan(found) for found in pool.run(look_at_nothing, world_size(LAYOUTS[plan]), LAYOUTS[plan]))
