"""Layers that Python's or NumPy's own generator drops: the same on ranks that share tokens; generators that modules hold. The program's own numbers stay as they
were."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer

from benchmarks.workers import WorkerFailed
from tests.runtime.models import JOB, VOCABULARY, Block, Custom, batch
from tests.runtime.workers import Pool
from tests.search.families import build

STEPS = 3


class DropsLayers(Custom):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids) + self.positions[: input_ids.shape[1]]
        for block in self.blocks:
            if not self.training or (random.random() + np.random.random()) > 1:
                x = block(x)
        return self.head(self.norm(x))


def train(rank: int, world: int, layout: dict[str, Any]) -> list[tuple[float, float]]:
    """Runs in each worker."""
    from ahp.runtime.parallel import parallelize

    torch.manual_seed(0)
    model: nn.Module = DropsLayers(32, layers=4)
    parallel = parallelize(model, {"job": JOB, "parallelism": layout})
    random.seed(rank)
    np.random.seed(rank)
    results = [parallel.step(parallel.shard(batch(step))) for step in range(STEPS)]
    assert (random.random(), np.random.random()) == (random.Random(rank).random(), np.random.RandomState(rank).random())
    return [(r.loss, r.grad_norm) for r in results]


def test_ranks_that_share_tokens_drop_the_same_layers(pool: Pool) -> None:
    (one,) = pool.run(train, 1, {})
    for each in pool.run(train, 2, {"tensor_parallel_degree": 2}):
        assert np.array(each) == pytest.approx(np.array(one), rel=1e-4)


class DropsItself(MixtralDecoderLayer):
    """Leaves itself out, with its experts, so that ranks which share experts would wait for each other."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.training and random.random() < 0.5:
            return hidden_states
        return super().forward(hidden_states, *args, **kwargs)


def train_experts(rank: int, world: int, layout: dict[str, Any]) -> list[tuple[float, float]]:
    """Runs in each worker."""
    from ahp.runtime.parallel import parallelize

    torch.manual_seed(0)
    model = build(
        "mixtral", device="cpu", vocab_size=VOCABULARY, num_hidden_layers=4, num_local_experts=4, hidden_size=32,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    for block in model.model.layers:
        block.__class__ = DropsItself
    parallel = parallelize(model, {"job": JOB, "parallelism": layout})
    results = [parallel.step(parallel.shard(batch(step))) for step in range(STEPS)]
    return [(r.loss, r.grad_norm) for r in results]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_ranks_that_share_experts_drop_the_same_layers(pool: Pool, recompute: str) -> None:
    (one,) = pool.run(train_experts, 1, {"micro_batch_size": 8})  # as many draws as a rank with half of the rows makes
    shared = {"data_parallel_shard_degree": 2, "expert_parallel_degree": 2, "micro_batch_size": 4}
    for each in pool.run(train_experts, 2, {**shared, "activation_checkpoint": recompute}):
        assert np.array(each) == pytest.approx(np.array(one), rel=1e-4)


GENERATORS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.Generator().manual_seed(1),
    "python": lambda: random.Random(1),
    "numpy": lambda: np.random.default_rng(1),
    "legacy numpy": lambda: np.random.RandomState(1),
}


class DropsByItsOwn(Block):
    """Drops a share of its output by a generator that it has made."""

    def __init__(self, kind: str) -> None:
        super().__init__(32, 4)
        self.numbers = GENERATORS[kind]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if isinstance(self.numbers, torch.Generator):
            return x * (torch.rand(x.shape, generator=self.numbers) > 0.3)
        return x * float(0.5 + self.numbers.random())


def train_own(rank: int, world: int, kind: str, layout: dict[str, Any], stop: int, folder: str) -> Any:
    """Runs in each worker: the figures of each step, with a restart before step ``stop``."""
    from ahp.runtime.parallel import Parallel, parallelize

    def begun() -> Parallel:
        torch.manual_seed(0)
        model = Custom(32, layers=2)
        model.blocks = nn.Sequential(DropsByItsOwn(kind), DropsByItsOwn(kind))
        return parallelize(model, {"job": JOB, "parallelism": layout})

    parallel, found = begun(), []
    for step in range(STEPS):
        if step == stop:
            parallel.save(folder)
            parallel = begun()
            parallel.load(folder)
        result = parallel.step(parallel.shard(batch(step)))
        found.append((result.loss, result.grad_norm))
    return found


@pytest.mark.parametrize("kind", GENERATORS)
def test_generators_of_modules_draw_the_same_after_a_restart_and_when_a_block_runs_again(
    pool: Pool, kind: str, tmp_path: Path
) -> None:
    """They began anew after a restart, and a recomputed block dropped other elements than its forward had: its gradients were wrong."""
    (once,) = pool.run(train_own, 1, kind, {}, STEPS, str(tmp_path / "none"))
    assert len({loss for loss, _ in once}) == STEPS
    for number, recompute in enumerate(("none", "full", "selective")):
        (again,) = pool.run(train_own, 1, kind, {"activation_checkpoint": recompute}, 2, str(tmp_path / str(number)))
        assert np.array(again) == pytest.approx(np.array(once), rel=1e-5)
    stages = {"pipeline_parallel_degree": 2, "micro_batch_size": 4}
    runs = [pool.run(train_own, 2, kind, stages, stop, str(tmp_path / f"stages-{stop}")) for stop in (STEPS, 1)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("kind", GENERATORS)
def test_blocks_with_generators_of_their_own_are_not_sliced(pool: Pool, kind: str, tmp_path: Path) -> None:
    """Their graph held the numbers of one call, or torch failed at the copy of its generator."""
    with pytest.raises(WorkerFailed, match="tensor_parallel_degree = 2: block DropsByItsOwn draws numbers from"):
        pool.run(train_own, 2, kind, {"tensor_parallel_degree": 2}, STEPS, str(tmp_path))
