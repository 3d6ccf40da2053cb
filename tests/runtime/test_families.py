"""Unmodified families of transformers under each technique and their product: the curve of one process.

docs/runtime.md has the table of what was compared here; tests/runtime/conftest.py writes it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from ahp.errors import AhpError
from tests.marks import cases
from tests.runtime.models import BUILDERS, JOB
from tests.runtime.test_equality import assert_same_curve, assert_same_weights, train, world_size
from tests.runtime.workers import Pool
from tests.search.families import build

STEPS = 10
FAMILIES = (
    "bert", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "mixtral", "olmo2", "opt", "phi3",
    "qwen2", "qwen3", "qwen3_moe",
)  # fmt: skip
TECHNIQUES: dict[str, dict[str, Any]] = {
    "ZeRO-3": {"data_parallel_shard_degree": 2, "micro_batch_size": 2},
    "tensor": {"tensor_parallel_degree": 2, "micro_batch_size": 4},
    "pipeline": {"pipeline_parallel_degree": 2, "micro_batch_size": 2},
    "context": {"context_parallel_degree": 2, "micro_batch_size": 4},
    "expert": {"data_parallel_shard_degree": 2, "expert_parallel_degree": 2, "micro_batch_size": 2},
    "ZeRO-1 x tensor x pipeline": {
        "data_parallel_shard_degree": 2, "zero_stage": 1, "tensor_parallel_degree": 2, "pipeline_parallel_degree": 2,
        "micro_batch_size": 2,
    },
}  # fmt: skip
EPS = 1e-6
"""Of AdamW, where it is 1e-8 elsewhere: a bias of the keys has no effect without rotary positions (OPT, BERT), and Adam would
make full steps of the rounding that is its gradient."""
CALM = {**JOB, "optimizer": {**JOB["optimizer"], "eps": EPS}}
FAST = {("bert", "tensor")}
WIDE = {(name, "ZeRO-1 x tensor x pipeline") for name in ("gemma2", "llama", "mistral", "olmo2", "qwen2", "qwen3")}
"""Families whose blocks are split like those of others here, and which meet each technique alone."""
REFUSED = {("gemma2", "context"): ("context_parallel_degree", "aten.matmul", "scaled_dot_product_attention")}
"""What a family cannot do, and words of the reason."""
WITH_EXPERTS = ("mixtral", "qwen3_moe")
CASES = [
    (name, technique)
    for name in FAMILIES
    for technique in TECHNIQUES
    if (name, technique) not in REFUSED and (technique != "expert" or name in WITH_EXPERTS)
]


def family(model_type: str) -> nn.Module:
    """A small model of the family, the same weights on every rank."""
    torch.manual_seed(0)
    return build(model_type, device="cpu")


BUILDERS.update({f"family {name}": partial(family, name) for name in FAMILIES})


def train_family(rank: int, world: int, name: str, technique: str) -> dict[str, Any]:
    """Runs in each worker, which finds the families by importing this file."""
    return train(rank, world, name, TECHNIQUES[technique], STEPS, CALM)


def worst(got: dict[str, Any], expected: dict[str, Any]) -> float:
    """Largest relative difference of loss and gradient norm over all steps."""
    pairs = [pair for key in ("losses", "norms") for pair in zip(got[key], expected[key], strict=True)]
    return max(abs(a - b) / abs(b) for a, b in pairs)


@pytest.mark.parametrize(
    ("model_type", "technique"),
    cases(CASES, fast=FAST, wide=WIDE),
)
def test_a_family_under_a_technique_equals_one_process(
    pool: Pool,
    plain_run: Callable[..., dict[str, Any]],
    record_property: Callable[[str, object], None],
    model_type: str,
    technique: str,
) -> None:
    record_property("family", model_type)
    record_property("technique", technique)
    name = f"family {model_type}"
    results = pool.run(train_family, world_size(TECHNIQUES[technique]), name, technique)
    expected = plain_run(name, STEPS, EPS)
    record_property("worst", worst(results[0], expected))
    assert_same_curve(results[0], expected)
    assert_same_weights(results, expected)


def refused(rank: int, world: int, name: str, technique: str) -> str:
    """Runs in each worker; why it cannot be."""
    from ahp.runtime.parallelize import parallelize

    with pytest.raises(AhpError) as error:
        parallelize(BUILDERS[name](), {"job": CALM, "parallelism": TECHNIQUES[technique]})
    return str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "technique"), list(REFUSED))
def test_what_a_family_cannot_do_is_refused(
    pool: Pool, record_property: Callable[[str, object], None], model_type: str, technique: str
) -> None:
    record_property("family", model_type)
    record_property("technique", technique)
    record_property("refused", True)
    message = pool.run(refused, world_size(TECHNIQUES[technique]), f"family {model_type}", technique)[0]
    assert all(word in message for word in REFUSED[model_type, technique]), message
