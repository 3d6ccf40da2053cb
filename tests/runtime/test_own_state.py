"""What a model keeps beside its weights: modes of its parts, and tables that it makes once. Steps and evaluations are plain PyTorch's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ahp.graph.trace import analyze
from tests.marks import cases
from tests.runtime.models import BATCH, OPTIMIZER, SEQUENCE, VOCABULARY, Block, Custom, batch
from tests.runtime.test_equality import PIPELINE, SPLIT, TENSOR, ZERO, assert_same_curve, world_size
from tests.runtime.test_families import CALM, EPS
from tests.runtime.workers import Pool

STEPS, MICRO, WIDTH = 2, 4, 32
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "zero3": ZERO["zero3"],
    "tp": TENSOR["tp"],
    "sequence": {**TENSOR["tp"], "enable_sequence_parallel": True},
    "1f1b": PIPELINE["1f1b"],
    "zbv": SPLIT["zbv"],
    "context": {"context_parallel_degree": 2},
    "tp-full": {**TENSOR["tp"], "activation_checkpoint": "full"},
}


class Dropping(Block):
    """With dropout and a batch norm of one token's features at the end of its feed-forward part."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 4)
        self.average = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y + self.drop(self.average(y.flatten(0, 1)).view(x.shape))


class InAttribute(Block):
    def table(self, length: int) -> torch.Tensor:
        if not hasattr(self, "kept"):
            self.kept = slope(length)
        return self.kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.table(x.shape[1]))


class InBuffer(InAttribute):
    """A rotary table is often kept so."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("kept", None, persistent=False)

    def table(self, length: int) -> torch.Tensor:
        if self.kept is None:
            self.kept = slope(length)
        return self.kept


class InDict(InAttribute):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.by_length: dict[int, torch.Tensor] = {}

    def table(self, length: int) -> torch.Tensor:
        if length not in self.by_length:
            self.by_length[length] = slope(length)
        return self.by_length[length]


class InCache(InAttribute):
    def table(self, length: int) -> torch.Tensor:
        return cached_slope(length)


class InCacheOfMethod(InAttribute):
    @functools.lru_cache(maxsize=8)  # noqa: B019  # as in many models
    def cached(self, length: int) -> torch.Tensor:
        return slope(length)

    def table(self, length: int) -> torch.Tensor:
        return self.cached(length)


class OfFile(InAttribute):
    def table(self, length: int) -> torch.Tensor:
        return SLOPE


def slope(length: int) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, length)[:, None]


@functools.lru_cache(maxsize=8)
def cached_slope(length: int) -> torch.Tensor:
    return slope(length)


SLOPE = slope(SEQUENCE)


def with_blocks(block: Callable[[], nn.Module]) -> Custom:
    torch.manual_seed(0)
    module = Custom(WIDTH, layers=0)
    module.blocks = nn.Sequential(*(block() for _ in range(4)))
    for parameter in module.parameters():  # else a norm that is forgotten would not show
        parameter.data += 0.05 * torch.randn_like(parameter)
    return module


def resting() -> nn.Module:
    """A frozen batch norm, and blocks whose dropout is off."""
    module = with_blocks(Dropping)
    for block in module.blocks:
        assert isinstance(block, Dropping)
        block.average.eval()
        block.average.get_buffer("running_mean").uniform_(-0.1, 0.1)
        block.drop.eval()
    return module


def all_resting() -> nn.Module:
    """As ``from_pretrained`` leaves it: training puts all of it into training mode."""
    return with_blocks(functools.partial(Block, WIDTH, 4)).eval()


KEPT = (InAttribute, InBuffer, InDict, InCache, InCacheOfMethod, OfFile)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "resting": resting,
    "all resting": all_resting,
    **{kind.__name__: functools.partial(with_blocks, functools.partial(kind, WIDTH, 4)) for kind in KEPT},
}


@cache
def plain(name: str) -> dict[str, Any]:
    """One process. Between the steps it evaluates, and goes back to the modes of before."""
    model = MODELS[name]()
    if not model.training:
        model.train()
    modes = {part: part.training for part in model.modules()}
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=OPTIMIZER["learning_rate"], betas=OPTIMIZER["betas"], eps=EPS, weight_decay=OPTIMIZER["weight_decay"]
    )  # fmt: skip
    found: dict[str, Any] = {"losses": [], "norms": [], "held out": []}
    for step in range(STEPS):
        loss = loss_of(model, batch(step))
        loss.backward()
        found["losses"].append(loss.item())
        found["norms"].append(nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["grad_clip"]).item())
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            found["held out"].append(loss_of(model, batch(step)).item())
        for part, mode in modes.items():
            part.training = mode
    return found


def loss_of(model: nn.Module, data: dict[str, torch.Tensor]) -> torch.Tensor:
    scores = model(data["input_ids"])[:, :-1].reshape(-1, VOCABULARY)
    return F.cross_entropy(scores, data["labels"][:, 1:].reshape(-1), ignore_index=-100)


def train(rank: int, world: int, name: str, layout: dict[str, Any]) -> dict[str, Any]:
    """Runs in each worker."""
    from ahp.runtime.parallel import parallelize

    parallel = parallelize(MODELS[name](), {"job": CALM, "parallelism": {**layout, "micro_batch_size": MICRO}})
    found: dict[str, Any] = {"losses": [], "norms": [], "held out": []}
    for step in range(STEPS):
        result = parallel.step(parallel.shard(batch(step)))
        found["losses"].append(result.loss)
        found["norms"].append(result.grad_norm)
        found["held out"].append(parallel.evaluate([parallel.shard(batch(step))]))
    return found


BY_ANOTHER_NAME = [cached_slope]


class InCacheByAnotherName(InAttribute):
    def table(self, length: int) -> torch.Tensor:
        return BY_ANOTHER_NAME[0](length)


@pytest.mark.parametrize(("kind", "kept"), [(InCache, True), (InCacheOfMethod, True), (InCacheByAnotherName, False)])
def test_a_look_at_a_model_leaves_its_caches_as_they_were(kind: type[InAttribute], kept: bool) -> None:
    """They were emptied; and no tensor without data stays in one."""
    module = with_blocks(functools.partial(kind, WIDTH, 4))
    tables = [block.table(SEQUENCE) for block in module.blocks if isinstance(block, InAttribute)]
    analyze(module, {"sequence_length": SEQUENCE, "precision": "fp32"})
    again = [block.table(SEQUENCE) for block in module.blocks if isinstance(block, InAttribute)]
    assert all((one is other) == kept for one, other in zip(tables, again, strict=True))
    assert all(type(other) is torch.Tensor for other in again)
    cached_slope.cache_clear()


CASES = [
    *(
        ("resting", layout) for layout in LAYOUTS if layout != "context"
    ),  # no rule of batch norm says what a token reads
    *(("all resting", layout) for layout in ("one", "tp")),
    *((kind.__name__, "tp") for kind in KEPT),
    *((kind.__name__, "1f1b") for kind in (InCache, InCacheOfMethod, OfFile)),
]
FAST = {("resting", "tp"), ("InBuffer", "tp"), ("InCache", "1f1b")}


@pytest.mark.parametrize(("name", "layout"), cases(CASES, fast=FAST))
def test_steps_and_evaluations_are_those_of_one_process(pool: Pool, name: str, layout: str) -> None:
    found, *_ = pool.run(train, world_size(LAYOUTS[layout]), name, LAYOUTS[layout])
    assert_same_curve(found, plain(name))
    assert found["held out"] == pytest.approx(plain(name)["held out"], rel=1e-5)


class ByMode(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1.0 if self.training else 0.5)


def switched(rank: int, world: int, layout: dict[str, Any], *, whole: bool) -> list[tuple[float, float]]:
    """Three steps, the second after the program has put the module, or one of its blocks, into evaluation mode."""
    from ahp.runtime.parallel import parallelize

    module = with_blocks(functools.partial(ByMode, WIDTH, 4))
    part = module if whole else module.blocks[3]
    parallel = parallelize(module, {"job": CALM, "parallelism": {**layout, "micro_batch_size": MICRO}})
    found = []
    for step in range(3):
        part.train(step != 1)
        result = parallel.step(parallel.shard(batch(0)))
        found.append((result.loss, result.grad_norm))
    return found


@pytest.mark.parametrize(
    ("layout", "whole"), cases([("1f1b", True), ("zbv", False), ("tp", True)], fast=[("1f1b", True)])
)
def test_a_step_follows_the_mode_that_the_program_sets(pool: Pool, layout: str, whole: bool) -> None:
    (expected,) = pool.run(functools.partial(switched, whole=whole), 1, {})
    assert expected[1][1] != pytest.approx(expected[2][1], rel=0.02)
    for found in pool.run(functools.partial(switched, whole=whole), world_size(LAYOUTS[layout]), LAYOUTS[layout]):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-5, atol=0.0)


def test_a_batch_is_several_micro_batches() -> None:
    assert BATCH > MICRO
