"""Unmodified families of transformers under each technique and their product: the curve of one process.

docs/runtime/models.md has the table of what was compared here; tests/runtime/conftest.py writes it.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from ahp.errors import AhpError
from ahp.plan import Plan, validated
from tests.marks import cases
from tests.runtime.compute import test_bf16, test_fp8
from tests.runtime.graphs import no_kernels
from tests.runtime.models import BUILDERS, JOB, batch
from tests.runtime.test_equality import FEWER_STEPS, assert_same_curve, assert_same_weights, world_size
from tests.runtime.workers import Pool
from tests.search.families import build

STEPS = 10 if "AHP_FAMILIES_PAGE" in os.environ else FEWER_STEPS
"""Of the table, and of the test."""
FAMILIES = (
    "bert", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "mixtral", "olmo2", "opt", "phi3",
    "qwen2", "qwen3", "qwen3_moe",
)  # fmt: skip


@dataclass(frozen=True)
class Technique:
    layout: dict[str, Any]
    compiled: bool = False
    precision: str = "fp32"


ZERO_3 = {"data_parallel_shard_degree": 2, "micro_batch_size": test_bf16.MICRO}
TENSOR = {"tensor_parallel_degree": 2, "micro_batch_size": 4}
ROUNDED = {
    "bf16": Technique(ZERO_3, precision="bf16"),
    "fp8": Technique(ZERO_3, precision="fp8"),
}
WITHIN = {"bf16": (test_bf16.FIRST, test_bf16.LAST, 20), "fp8": (test_fp8.FIRST, test_fp8.LAST, 10)}
"""Relative, at the first step and at the one of that number: a rounding that flips is carried on."""
TECHNIQUES: dict[str, Technique] = {
    "ZeRO-3": Technique(ZERO_3),
    "tensor": Technique(TENSOR),
    "sequence": Technique({**TENSOR, "enable_sequence_parallel": True}),
    "pipeline": Technique({"pipeline_parallel_degree": 2, "micro_batch_size": 2}),
    "context": Technique({"context_parallel_degree": 2, "micro_batch_size": 4}),
    "expert": Technique({**ZERO_3, "expert_parallel_degree": 2}),
    "ZeRO-1 x tensor x pipeline": Technique(
        {
            "data_parallel_shard_degree": 2, "zero_stage": 1, "tensor_parallel_degree": 2, "pipeline_parallel_degree": 2,
            "micro_batch_size": 2,
        }
    ),
    "full recompute": Technique({**ZERO_3, "activation_checkpoint": "full"}),
    "compile": Technique(ZERO_3, compiled=True),
    **ROUNDED,
}  # fmt: skip
EPS = 1e-6
"""Of AdamW, where it is 1e-8 elsewhere: a bias of the keys has no effect without rotary positions (OPT, BERT), and Adam would
make full steps of the rounding that is its gradient."""
CALM = {**JOB, "optimizer": {**JOB["optimizer"], "eps": EPS}}
WIDE = {
    *(
        (name, "ZeRO-1 x tensor x pipeline")
        for name in ("gemma2", "gpt2", "gpt_neox", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3")
    ),
    *((name, technique) for name in FAMILIES for technique in ("sequence", "full recompute", "compile", *ROUNDED)),
    *((name, "ZeRO-3") for name in FAMILIES if name not in ("bert", "gemma3_text", "gpt2", "opt", "qwen3_moe")),
    *((name, technique) for name in ("gpt2", "llama") for technique in ("tensor", "pipeline")),
    ("llama", "context"),
    ("mistral", "tensor"),
    *((name, "pipeline") for name in ("mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3")),
    *((name, "context") for name in ("mixtral", "qwen2")),
    *(
        (name, technique)
        for name in ("bert", "gemma3_text", "opt", "qwen3_moe")
        for technique in ("tensor", "pipeline")
    ),
}
"""Families whose blocks are split like those of others here, and which meet each technique alone (GPT-2's meets larger products in
tests/runtime/test_equality.py, Mixtral's is split as Qwen's mixture); techniques that have tests of their own, on a few models. ZeRO-3 shards
whatever modules hold, and nothing depends on what a block computes: those stay whose weights are tied, transposed, biased or of experts.
tests/runtime/test_equality.py has GPT-2 and LLaMA sliced and in two stages, sequence/test_context.py LLaMA with parts of the sequence. Mistral's
blocks are LLaMA's. A pipeline meets only what a model hands to its blocks, which Mistral, Mixtral, OLMo 2,
Phi-3 and Qwen do as LLaMA; beside LLaMA's, Qwen 2 has biases of single tokens, and Mixtral routes single tokens as Qwen's mixture does. The four families that meet the product are
sliced and cut there."""
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
BUILDERS.update({f"torchao {name}": lambda name=name: test_fp8.with_torchaos_layers(family(name)) for name in FAMILIES})


def train_family(rank: int, world: int, name: str, technique: str) -> dict[str, Any]:
    """Runs in each worker, which finds the families by importing this file. Processor cores stand for devices with products in 8
    bits."""
    from ahp.runtime.parallel import rehearse

    asked = TECHNIQUES[technique]
    plan = {"job": job_of(asked), "parallelism": asked.layout, "engine": {"compile": asked.compiled}}
    with no_kernels() if asked.compiled else nullcontext({}) as counted:
        parallel = rehearse(BUILDERS[name](), validated(Plan, plan, "plan"), torch.device("cpu"))
        steps = test_bf16.STEPS if technique in ROUNDED else STEPS
        results = [parallel.step(parallel.shard(batch(step))) for step in range(steps)]
        graphs = counted.get("unique_graphs", 0)
    return {
        "losses": [r.loss for r in results],
        "norms": [r.grad_norm for r in results],
        "weights": {
            name: parallel.state.layout.whole(name, p.detach()) for name, p in sorted(parallel.parameters.items())
        },
        "graphs": graphs,
    }


def job_of(asked: Technique) -> dict[str, Any]:
    if asked.precision == "fp32":
        return CALM
    slowly = {**CALM["optimizer"], "learning_rate": test_bf16.RATE}
    return {**CALM, "precision": asked.precision, "optimizer": slowly}


def worst(got: dict[str, Any], expected: dict[str, Any]) -> float:
    """Largest relative difference of loss and gradient norm over all steps."""
    pairs = [pair for key in ("losses", "norms") for pair in zip(got[key], expected[key], strict=True)]
    return max(abs(a - b) / abs(b) for a, b in pairs)


@pytest.mark.parametrize(
    ("model_type", "technique"),
    cases(CASES, wide=WIDE),
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
    if technique in ROUNDED:
        within_rounding(pool, record_property, model_type, technique)
        return
    asked = TECHNIQUES[technique]
    results = pool.run(train_family, world_size(asked.layout), name, technique)
    expected = plain_run(name, STEPS, EPS)
    record_property("worst", worst(results[0], expected))
    assert_same_curve(results[0], expected)
    assert_same_weights(results, expected)
    assert bool(results[0]["graphs"]) == asked.compiled


def within_rounding(
    pool: Pool, record_property: Callable[[str, object], None], model_type: str, technique: str
) -> None:
    """One process in the same micro-batches, fp8 by torchao's own layers; both with fp32 masters."""
    if technique == "fp8" and importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao (the extra fp8) is not installed")
    plain = "torchao" if technique == "fp8" else "family"
    steps = list(test_bf16.plain(f"{plain} {model_type}", eps=EPS))
    expected = {"losses": [loss for loss, _ in steps], "norms": [norm for _, norm in steps]}
    got = pool.run(train_family, 2, f"family {model_type}", technique)[0]
    record_property("worst", worst(got, expected))
    first, last, steps_to_last = WITHIN[technique]
    for key, values in expected.items():
        for step, value in enumerate(values):
            allowed = first + (last - first) * step / (steps_to_last - 1)
            assert got[key][step] == pytest.approx(value, rel=allowed), f"{key} of step {step}"


def refused(rank: int, world: int, name: str, technique: str) -> str:
    """Runs in each worker; why it cannot be."""
    from ahp.runtime.parallel import parallelize

    with pytest.raises(AhpError) as error:
        parallelize(BUILDERS[name](), {"job": CALM, "parallelism": TECHNIQUES[technique].layout})
    return str(error.value)


@pytest.mark.parametrize(("model_type", "technique"), list(REFUSED))
def test_what_a_family_cannot_do_is_refused(
    pool: Pool, record_property: Callable[[str, object], None], model_type: str, technique: str
) -> None:
    record_property("family", model_type)
    record_property("technique", technique)
    record_property("refused", True)
    message = pool.run(refused, world_size(TECHNIQUES[technique].layout), f"family {model_type}", technique)[0]
    assert all(word in message for word in REFUSED[model_type, technique]), message
