"""Models of the user's own whose hidden states or lists of blocks are unusual: every layout computes what one process does, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.marks import cases
from tests.runtime.models import BUILDERS, JOB, batch
from tests.runtime.test_equality import assert_same_curve, assert_same_weights, world_size
from tests.runtime.test_families import EPS
from tests.runtime.test_own_models import MORE, STEPS, Numbered, Own, built, train_own, why_refused
from tests.runtime.workers import Pool


class MixesStreams(Numbered):
    """Hyper-connections: two residual streams side by side, which leave a block in another order in memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x.mean(2)) - x.mean(2)
        return (x.transpose(2, 3) @ x.new_tensor([[0.9, 0.2], [0.1, 0.8]])).transpose(2, 3) + y[:, :, None]


class HasStreams(Own):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)[:, :, None].expand(-1, -1, 2, -1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(2)))


class SequenceFirst(Numbered):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


class PutsSequenceFirst(Own):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids).transpose(0, 1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.transpose(0, 1)))


class Flat(Numbered):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.view(-1, 16, x.shape[-1])).flatten(0, 1)


class Flattens(Own):
    """All tokens in one row, as engines of inference have them."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids).flatten(0, 1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).view(*input_ids.shape, -1)


class Scaled(Numbered):
    """The last one differs from the others."""

    def prepare(self, number: int) -> None:
        self.scale = 0.5 if number == 3 else 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale)


class RunsOneTwice(Own):
    def __init__(self, kind: Callable[[int], nn.Module]) -> None:
        super().__init__(kind)
        self.blocks[2] = self.blocks[0]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "streams": built(HasStreams, MixesStreams),
    "sequence first": built(PutsSequenceFirst, SequenceFirst),
    "flat": built(Flattens, Flat),
    "one twice": built(RunsOneTwice, Scaled),
}
BUILDERS.update({f"hidden states: {name}": build for name, build in MODELS.items()})

EQUAL = [
    *(("streams", layout) for layout in ("1f1b", "zbv", "context", "sequence")),
    *((name, "tp") for name in ("sequence first", "one twice")),
    ("sequence first", "1f1b"),
    ("flat", "zbv"),
]
FAST = [("streams", "1f1b"), ("streams", "context"), ("one twice", "tp")]
"""What has been found."""
OTHER_DIMS = "hidden states between blocks are [16, 4, 32] for token ids [4, 16], not [batch, sequence, ..]"
TWICE = "the model runs block 0 of blocks 2 times"
REFUSED = {
    ("sequence first", "context"): OTHER_DIMS,
    ("sequence first", "sequence"): OTHER_DIMS,
    ("flat", "context"): OTHER_DIMS.replace("[16, 4, 32]", "[64, 32]"),
    ("one twice", "1f1b"): TWICE,
    ("one twice", "sequence"): TWICE,
}


def train(rank: int, world: int, name: str, layout: str) -> dict[str, Any]:
    """Runs in each worker, which finds the models by importing this file."""
    return train_own(rank, world, f"hidden states: {name}", layout)


def refuse(rank: int, world: int, name: str, layout: str) -> str:
    return why_refused(rank, world, f"hidden states: {name}", layout)


@pytest.mark.parametrize(
    ("name", "layout"), cases(EQUAL, fast=FAST, wide=[("streams", "zbv"), ("streams", "sequence")])
)
def test_a_layout_computes_what_one_process_does(
    pool: Pool, plain_run: Callable[..., dict[str, Any]], name: str, layout: str
) -> None:
    results = pool.run(train, world_size(MORE[layout]), name, layout)
    expected = plain_run(f"hidden states: {name}", STEPS, EPS)
    assert_same_curve(results[0], expected)
    assert_same_weights(results, expected)


@pytest.mark.parametrize(("name", "layout"), REFUSED)
def test_what_would_be_cut_along_another_dim_is_refused(pool: Pool, name: str, layout: str) -> None:
    for message in pool.run(refuse, world_size(MORE[layout]), name, layout):
        assert REFUSED[name, layout] in message


def in_16_bits(rank: int, world: int, layout: dict[str, Any]) -> list[tuple[float, float]]:
    from ahp.runtime.parallel import parallelize

    job = {**JOB, "precision": "bf16"}
    parallel = parallelize(MODELS["one twice"](), {"job": job, "parallelism": {**layout, "micro_batch_size": 2}})
    results = [parallel.step(parallel.shard(batch(step))) for step in range(STEPS)]
    return [(result.loss, result.grad_norm) for result in results]


@pytest.mark.parametrize(
    "key",
    cases(("data_parallel_replicate_degree", "data_parallel_shard_degree"), fast=("data_parallel_replicate_degree",)),
)
def test_a_block_that_runs_twice_has_its_whole_gradient_in_16_bits(pool: Pool, key: str) -> None:
    """FSDP2 reduces the gradient of each call, and adds the second to the first."""
    (expected,) = pool.run(in_16_bits, 1, {})
    for found in pool.run(in_16_bits, 2, {key: 2}):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-3, atol=0.0)
