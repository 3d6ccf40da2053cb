"""A step whose loss or gradient is no number changes nothing, and the host need not look at it to leave it out."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ahp.job import Optimizer
from ahp.runtime.optimizer.adamw import ShardedOptimizer
from ahp.runtime.optimizer.norm import SquareSum, unscale_and_clip_
from ahp.runtime.parallel import Parallel, parallelize
from ahp.runtime.torch_compat import local_tensor
from tests.runtime.looks import Looks
from tests.runtime.models import BUILDERS, JOB, OPTIMIZER, batch


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


KINDS: dict[str, dict[str, Any]] = {
    "adamw": {}, "muon": {"name": "muon"}, "two groups": {"decay_norms_and_biases": False}, "offload": {},
}  # fmt: skip


def optimizer(kind: str) -> ShardedOptimizer:
    torch.manual_seed(0)
    weights = {name: nn.Parameter(torch.randn(shape)) for name, shape in {"a": (8, 4), "b": (4,), "c": (4, 8)}.items()}
    matrices = {"a"} if kind == "muon" else set()
    return ShardedOptimizer(weights, Optimizer(**KINDS[kind]), matrices=matrices, offload=kind == "offload")


def gradients(ours: ShardedOptimizer, number: int, bad: float | None = None) -> dict[str, torch.Tensor]:
    torch.manual_seed(number)
    found = {name: torch.randn_like(shard) for name, shard in ours.shards.items()}
    if bad is not None:
        for gradient in found.values():
            gradient.view(-1)[0] = bad
    return found


def content(ours: ShardedOptimizer) -> dict[str, torch.Tensor]:
    found = {name: shard.detach().clone() for name, shard in ours.shards.items()}
    for name in ours.shards:
        found |= {f"{key}.{name}": value.clone() for key, value in ours.moments(name).items()}
    return found


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_an_update_that_is_left_out_is_as_if_it_had_not_been_called(kind: str, bad: float) -> None:
    """Weights, moments and the step count to the last bit, and so every step after it."""
    ours, other = optimizer(kind), optimizer(kind)
    for number in range(4):
        spoiled = number in (0, 2)
        before = content(ours)
        ours.step(0.1, gradients(ours, number, bad if spoiled else None), leave_out=torch.tensor(spoiled))
        if spoiled:
            now = content(ours)
            assert all(torch.equal(now[name], before[name]) for name in before)
        else:
            other.step(0.1, gradients(other, number))
    mine, theirs = content(ours), content(other)
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert torch.equal(mine[name], theirs[name]), name
    assert mine["step.b"] == 2


@pytest.mark.parametrize("limit", [None, 0.5, 1e9])
@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_clipping_by_a_tensor_has_the_digits_of_clip_grad_norm(limit: float | None, scale: float) -> None:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.zeros(5, 3)), nn.Parameter(torch.zeros(7))]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    ours = {str(i): weight.grad * scale for i, weight in enumerate(weights) if weight.grad is not None}
    norm = torch.nn.utils.get_total_norm([w.grad for w in weights if w.grad is not None])
    if limit is not None:
        torch.nn.utils.clip_grad_norm_(weights, limit)
    unscale_and_clip_(ours, norm.double(), limit, torch.tensor(scale))
    for one, weight in zip(ours.values(), weights, strict=True):
        assert weight.grad is not None
        torch.testing.assert_close(one, weight.grad, rtol=2e-7, atol=0)


def test_gradients_whose_norm_is_no_number_are_named() -> None:
    norms = [(["a", "b"], torch.tensor([1.0, math.nan])), (["c"], torch.tensor([math.inf]))]
    assert SquareSum(torch.tensor(0.0), norms).not_finite() == ("b", "c")


def poisoned(step: int) -> Callable[[Parallel], Parallel]:
    """Let the gradients of one step be no numbers."""

    def spoil(parallel: Parallel) -> Parallel:
        whole = parallel.state.local.gradients

        def gradients() -> dict[str, torch.Tensor]:
            found = whole()
            if parallel.num_steps_done == step:
                for gradient in found.values():
                    gradient.fill_(math.nan)
            return found

        parallel.state.local.gradients = gradients  # type: ignore[method-assign]
        return parallel

    return spoil


def weights(parallel: Parallel) -> list[torch.Tensor]:
    return [local_tensor(p.detach()).clone() for p in parallel.parameters.values()]


def made(optimizer: dict[str, Any]) -> Parallel:
    return parallelize(
        BUILDERS["llama"](), {"job": {**JOB, "optimizer": {**OPTIMIZER, **optimizer}}, "parallelism": {}}
    )


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [{}, {"name": "muon"}], ids=["adamw", "muon"])
def test_steps_after_a_bad_one_go_on_unless_the_loop_halts(alone: None, optimizer: dict[str, Any]) -> None:
    going, halting = (poisoned(1)(made(optimizer)) for _ in range(2))
    halting.halts_at_fault = True
    results = [[parallel.step(parallel.shard(batch(step))) for step in range(2)] for parallel in (going, halting)]
    held = weights(halting)
    assert all(torch.equal(a, b) for a, b in zip(weights(going), held, strict=True))
    assert [result.failed for result in results[0]] == [result.failed for result in results[1]] == [False, True]
    assert set(results[0][1].bad_gradients) == set(going.parameters)
    for parallel in (going, halting):
        assert not parallel.step(parallel.shard(batch(2))).failed
    assert not any(torch.equal(a, b) for a, b in zip(weights(going), held, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(weights(halting), held, strict=True))


def test_a_loss_that_is_no_number_changes_no_weight_though_the_gradient_is_one(alone: None) -> None:
    parallel = made({})
    run = parallel.runner.run
    parallel.runner.run = lambda *args: run(*args) * math.inf  # type: ignore[method-assign]
    before = weights(parallel)
    result = parallel.step(parallel.shard(batch(0)))
    assert (result.loss, math.isfinite(result.grad_norm), result.failed) == (math.inf, True, True)
    assert all(torch.equal(a, b) for a, b in zip(weights(parallel), before, strict=True))


def test_a_result_goes_to_another_process_and_says_its_numbers(alone: None) -> None:
    parallel = made({})
    result = parallel.step(parallel.shard(batch(0)))
    again = pickle.loads(pickle.dumps(result))
    assert str(again) == str(result)
    assert f"loss={result.loss}" in str(result)
    assert (again.loss, again.grad_norm, again.skipped) == (result.loss, result.grad_norm, False)


@pytest.mark.parametrize("optimizer", [{}, {"name": "muon"}], ids=["adamw", "muon"])
def test_a_step_looks_at_no_value(alone: None, optimizer: dict[str, Any]) -> None:
    """But for one on a CPU, where looking is free: whether there is anything to clip."""
    parallel = made(optimizer)
    for step in range(2):
        part = parallel.shard(batch(step))
        with Looks() as looks:
            result = parallel.step(part)
        assert looks.count == 1
        with Looks() as looks:
            assert math.isfinite(result.loss)
        assert looks.count > 0
