"""An expert that the data send no token to has no gradient: on one rank, in one micro-batch, or in the whole batch. The curve is that of one process."""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.marks import cases
from tests.runtime.models import JOB, OPTIMIZER, VOCABULARY, Block, batch
from tests.runtime.optimizer.test_optimizer import in_fp32
from tests.runtime.test_equality import FEWER_STEPS, assert_same_curve, assert_same_weights, world_size
from tests.runtime.workers import Pool

EXPERTS, BEST = 40, 2
"""So many that some get no token of a rank, and some of no rank; each token goes to the best ones."""
REPLICAS = {"data_parallel_replicate_degree": 2, "micro_batch_size": 2}
SHARDS = {"data_parallel_shard_degree": 2, "micro_batch_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero0": REPLICAS,
    "zero1": {**SHARDS, "zero_stage": 1},
    "zero2": {**SHARDS, "zero_stage": 2},
    "zero3": {**SHARDS, "zero_stage": 3},
    "replicate-x-zero3": {**REPLICAS, **SHARDS},
    "zero3-recompute": {**SHARDS, "activation_checkpoint": "full"},
}
OPTIMIZERS = {"adamw": {**OPTIMIZER, "weight_decay": 1.0}, "muon": {**OPTIMIZER, "name": "muon", "weight_decay": 1.0}}


class Mixture(nn.Module):
    """Experts in a list, as programs write them that know no stacked weights: each is called where it has tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.norm = Block(width, 4), nn.LayerNorm(width)
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention(x)
        tokens = self.norm(x).flatten(0, 1)
        shares, chosen = self.router(tokens).softmax(-1).topk(BEST, -1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                out = out.index_add(0, rows, expert(tokens[rows]) * shares[rows, places, None])
        return x + out.view_as(x)


class Model(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Mixture(width) for _ in range(2))
        self.unused = nn.Linear(width, width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model() -> Model:
    torch.manual_seed(0)
    return Model()


@cache
def plain(name: str) -> dict[str, Any]:
    module = model()
    named, settings = dict(module.named_parameters()), OPTIMIZERS[name]
    matrices = {n for n, p in named.items() if name == "muon" and n.startswith("blocks.") and p.ndim == 2}
    rate, decay = settings["learning_rate"], settings["weight_decay"]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW([p for n, p in named.items() if n not in matrices], lr=rate, betas=settings["betas"], weight_decay=decay)
    ]  # fmt: skip
    if matrices:
        chosen = [named[n] for n in sorted(matrices)]
        optimizers.append(torch.optim.Muon(chosen, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"))
    found: dict[str, Any] = {"losses": [], "norms": [], "without": []}
    with in_fp32():
        for step in range(FEWER_STEPS):
            data = batch(step)
            logits = module(data["input_ids"])[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1), data["labels"][:, 1:].flatten())
            loss.backward()
            found["losses"].append(loss.item())
            found["norms"].append(nn.utils.clip_grad_norm_(module.parameters(), settings["grad_clip"]).item())
            found["without"].append({n for n, p in named.items() if p.grad is None})
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return found | {"weights": {n: p.detach() for n, p in named.items()}}


def train(rank: int, world: int, name: str, layout: dict[str, Any]) -> dict[str, Any]:
    """Runs in each worker. Buckets so small that a rank may be ready with a later one first."""
    from ahp.runtime.parallel import parallelize

    with in_fp32(), mock.patch("ahp.runtime.shard.replicas.REPLICA_BUCKET_BYTES", 5000):
        parallel = parallelize(model(), {"job": {**JOB, "optimizer": OPTIMIZERS[name]}, "parallelism": layout})
        results = [parallel.step(parallel.shard(batch(step))) for step in range(FEWER_STEPS)]
    whole = parallel.state.layout.whole
    return {
        "losses": [r.loss for r in results],
        "norms": [r.grad_norm for r in results],
        "weights": {n: whole(n, p.detach()) for n, p in sorted(parallel.parameters.items())},
    }


CASES = [("adamw", layout) for layout in LAYOUTS] + [("muon", "zero0"), ("muon", "zero3")]
FAST = {("adamw", "zero0"), ("adamw", "zero3")}


@pytest.mark.parametrize(("optimizer", "layout"), cases(CASES, fast=FAST))
def test_experts_without_tokens_change_no_curve(pool: Pool, optimizer: str, layout: str) -> None:
    expected = plain(optimizer)
    results = pool.run(train, world_size(LAYOUTS[layout]), optimizer, LAYOUTS[layout])
    assert_same_curve(results[0], expected)
    assert_same_weights(results, expected)


def test_the_model_has_experts_that_get_no_token() -> None:
    """Else nothing was tried: in the whole batch, or in some of its steps alone."""
    without = [{name for name in names if "experts" in name} for names in plain("adamw")["without"]]
    assert any(without)
    assert all("unused.weight" in names for names in plain("adamw")["without"])
