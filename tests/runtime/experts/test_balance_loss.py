"""The balance loss of a mixture: in the loss where the config asks for it, equal to transformers' own on one process."""

from __future__ import annotations

import shutil
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ahp.errors import BadInput
from ahp.runtime.device_limits import CPU_COMPILERS
from ahp.runtime.experts.balance_loss import balance_of
from tests.marks import cases
from tests.runtime.graphs import no_kernels
from tests.runtime.models import BUILDERS, JOB, OPTIMIZER, VOCABULARY, batch
from tests.runtime.test_equality import assert_same_curve, assert_same_weights, train, world_size
from tests.runtime.workers import Pool
from tests.search.families import build

STEPS, SIZE = 3, 2
"""Steps, and sequences of a micro-batch: each has its own balance loss."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "ep2": {"data_parallel_shard_degree": 2, "expert_parallel_degree": 2},
    "zero1": {"data_parallel_shard_degree": 2, "zero_stage": 1, "activation_checkpoint": "full"},
    "replicas": {"data_parallel_replicate_degree": 2, "activation_checkpoint": "selective"},
    "1f1b": {"pipeline_parallel_degree": 2},
    "ep2-zbv": {
        "pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZBVZeroBubble", "virtual_stages_per_rank": 2,
        "data_parallel_shard_degree": 2, "expert_parallel_degree": 2,
    },
    "uneven": {"data_parallel_replicate_degree": 2, "micro_batches_per_replica": [3, 1]},
    "sequence-selective": {
        "tensor_parallel_degree": 2, "enable_sequence_parallel": True, "activation_checkpoint": "selective",
    },
    "tensor-zero1-1f1b": {
        "tensor_parallel_degree": 2, "data_parallel_shard_degree": 2, "zero_stage": 1, "pipeline_parallel_degree": 2,
        "activation_checkpoint": "full",
    },
    "heads-zbv": {
        "context_parallel_degree": 2, "context_parallel_method": "all-to-all", "pipeline_parallel_degree": 2,
        "pipeline_parallel_schedule": "ZBVZeroBubble", "virtual_stages_per_rank": 2,
    },
    "ep2-sequence": {
        "data_parallel_shard_degree": 2, "expert_parallel_degree": 2, "tensor_parallel_degree": 2,
        "enable_sequence_parallel": True,
    },
    "ring-sequence": {
        "context_parallel_degree": 2, "context_parallel_method": "ring", "tensor_parallel_degree": 2,
        "enable_sequence_parallel": True, "activation_checkpoint": "full",
    },
}  # fmt: skip
CASES = [
    ("one", "mixtral"), ("ep2", "mixtral"), ("ep2", "qwen3_moe"), ("zero1", "qwen2_moe"), ("replicas", "mixtral"),
    ("1f1b", "qwen3_moe"), ("ep2-zbv", "mixtral"), ("uneven", "qwen3_moe"),
    ("sequence-selective", "qwen3_moe"), ("tensor-zero1-1f1b", "qwen2_moe"), ("heads-zbv", "mixtral"),
    ("ring-sequence", "qwen3_moe"), ("ep2-sequence", "qwen3_moe"),
]  # fmt: skip
WIDE = {
    ("ep2", "qwen3_moe"),
    ("zero1", "qwen2_moe"),
    ("1f1b", "qwen3_moe"),
    ("ep2-sequence", "qwen3_moe"),
    ("heads-zbv", "mixtral"),
    ("tensor-zero1-1f1b", "qwen2_moe"),
}


def balanced(name: str) -> nn.Module:
    """With a coefficient that cannot be overlooked; four layers, so that four stages go round."""
    torch.manual_seed(0)
    return build(name, device="cpu", output_router_logits=True, router_aux_loss_coef=0.5, num_hidden_layers=4)


def train_balanced(rank: int, world: int, name: str, layout: str) -> dict[str, Any]:
    BUILDERS["balanced"] = lambda: balanced(name)
    return train(rank, world, "balanced", {"micro_batch_size": SIZE, **LAYOUTS[layout]}, STEPS, JOB)


@cache
def plain(name: str) -> dict[str, Any]:
    """transformers' own loss of each micro-batch: cross-entropy by the step's scored tokens, balance loss by micro-batches."""
    model: Any = balanced(name)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=OPTIMIZER["learning_rate"], betas=OPTIMIZER["betas"], eps=OPTIMIZER["eps"],
        weight_decay=OPTIMIZER["weight_decay"],
    )  # fmt: skip
    losses, norms = [], []
    for step in range(STEPS):
        data = batch(step)
        scored = (data["labels"][:, 1:] != -100).sum()
        parts = list(zip(data["input_ids"].split(SIZE), data["labels"].split(SIZE), strict=True))
        total = 0.0
        for ids, labels in parts:
            output = model(input_ids=ids)
            entropy = F.cross_entropy(
                output.logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1), reduction="sum"
            )
            loss = entropy / scored + model.router_aux_loss_coef * output.aux_loss / len(parts)
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["grad_clip"]).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "weights": {n: p.detach() for n, p in model.named_parameters()}}


@pytest.mark.parametrize(("layout", "name"), cases(CASES, wide=WIDE))
def test_the_balance_loss_equals_one_process(pool: Pool, layout: str, name: str) -> None:
    results = pool.run(train_balanced, world_size(LAYOUTS[layout]), name, layout)
    assert_same_curve(results[0], plain(name))
    assert_same_weights(results, plain(name))


def train_compiled(rank: int, world: int, name: str, recompute: str) -> dict[str, Any]:
    """Traced and differentiated as torch.compile does it, and run without kernels of its own: those take minutes."""
    from ahp.runtime.parallel import parallelize

    layout = {"micro_batch_size": SIZE, "activation_checkpoint": recompute}
    plan = {"job": JOB, "parallelism": layout, "engine": {"compile": True}}
    with no_kernels():
        parallel = parallelize(balanced(name), plan, device="cpu")
        results = [parallel.step(parallel.shard(batch(step))) for step in range(STEPS)]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return {"losses": [r.loss for r in results], "norms": [r.grad_norm for r in results], "graphs": graphs}


@pytest.mark.skipif(not any(map(shutil.which, CPU_COMPILERS)), reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize("recompute", cases(["none", "selective"], wide=["none"]))
def test_compiled_blocks_tell_their_routers(pool: Pool, recompute: str) -> None:
    found = pool.run(train_compiled, 1, "mixtral", recompute)[0]
    assert found["graphs"] > 0, "nothing was compiled"
    assert_same_curve(found, plain("mixtral"))


def test_a_config_that_asks_for_none_has_none() -> None:
    assert balance_of(build("mixtral")) is None
    assert balance_of(build("mixtral", output_router_logits=True, router_aux_loss_coef=0.0)) is None
    assert balance_of(build("llama")) is None


def test_a_balance_loss_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.mixtral import modeling_mixtral

    module = build("mixtral", output_router_logits=True)
    assert balance_of(module) is not None
    own = modeling_mixtral.load_balancing_loss_func
    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", lambda *given: 2 * own(*given))
    with pytest.raises(BadInput, match=r"output_router_logits = True: .*MixtralForCausalLM is not known"):
        balance_of(module)
