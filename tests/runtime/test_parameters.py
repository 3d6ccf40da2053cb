"""Parameters that plain PyTorch takes and FSDP2 or a fused optimizer does not: laid out anew, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from ahp.errors import BadInput
from ahp.runtime.parameters import refuse_parameters
from ahp.runtime.weights.allocate import hold_in
from tests.runtime.models import BUILDERS, Block, Custom
from tests.runtime.test_equality import FEWER_STEPS, ZERO, assert_same_curve, assert_same_weights, train, world_size
from tests.runtime.test_families import CALM, EPS
from tests.runtime.workers import Pool


def complex_one() -> nn.Module:
    return nn.ParameterList([torch.randn(3, dtype=torch.complex64)])


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(4))


def sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(4, 2, sparse=True))


def transposed_of_another() -> nn.Module:
    first = nn.Linear(3, 4, bias=False)
    return nn.ParameterList([first.weight, nn.Parameter(first.weight.data.t())])


def compiled() -> nn.Module:
    return torch.compile(nn.Linear(3, 4))  # pyright: ignore[reportReturnType]  # compiled at its first call


def in_data_parallel() -> nn.Module:
    return nn.Sequential(nn.DataParallel(nn.Linear(3, 4)))


def double() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())


class ByKeyword(nn.Linear):
    def forward(self, *, input_ids: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(input_ids)


class AsksForMask(nn.Linear):
    def forward(self, input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(input_ids * mask)


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (
            double,
            "module = '1.weight': is torch.float64, and weights are held and trained in fp32 at most (valid: module.float() before",
        ),
        (
            lambda: ByKeyword(2, 2),
            "module = 'ByKeyword': its forward(*, input_ids) is called with token ids [batch,",
        ),
        (lambda: AsksForMask(2, 2), "alone: missing a required argument: 'mask' (valid: def forward(self, input_ids))"),
        (complex_one, "module = '0': is torch.complex64, which neither FSDP2 nor a fused optimizer takes"),
        (lazy, "module = '0.weight': has no shape before its lazy module ran"),
        (sparse, "module: 0.sparse = True: no optimizer here takes sparse gradients (valid: False)"),
        (transposed_of_another, "module = '1': lies in the memory of 0, which is another parameter"),
        (compiled, "module = 'OptimizedModule': the module is wrapped, and ahp.parallelize splits the plain module"),
        (
            in_data_parallel,
            "module = 'DataParallel': 0 is wrapped, and ahp.parallelize splits the plain module (valid: its .module)",
        ),
    ],
)
def test_what_no_layout_can_train_is_refused(build: Callable[[], nn.Module], told: str) -> None:
    with pytest.raises(BadInput) as refused:
        refuse_parameters(build())
    assert told in str(refused.value)


def parts_of_one_memory() -> nn.Module:
    whole = torch.randn(8, 3)
    return nn.ParameterList([nn.Parameter(whole[:5]), nn.Parameter(whole[5:])])


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def tied() -> nn.Module:
    one, other = nn.Linear(3, 3), nn.Linear(3, 3)
    other.weight = one.weight
    return nn.Sequential(one, other)


def frozen_sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(4, 2, sparse=True).requires_grad_(False))


@pytest.mark.parametrize("build", [parts_of_one_memory, on_meta, tied, frozen_sparse])
def test_what_trains_is_not_refused(build: Callable[[], nn.Module]) -> None:
    refuse_parameters(build())


def test_transposed_parameters_are_laid_out_anew() -> None:
    value = torch.randn(3, 5)
    module = nn.ParameterList([nn.Parameter(value.t())])
    hold_in(module, torch.float32)
    assert module[0].is_contiguous()
    assert torch.equal(module[0], value.t())


class Odd(Block):
    """Transposed in memory; and its norm's weight is made of two parameters, a list of modules that is no stack of blocks."""

    def __init__(self) -> None:
        super().__init__(32, 4)
        self.down.weight = nn.Parameter(self.down.weight.detach().t().contiguous().t())
        parametrizations.weight_norm(self.up)


class OneBlock(Custom):
    """No list of blocks, so that parametrized weights are the only lists."""

    def __init__(self) -> None:
        super().__init__(layers=0)
        self.blocks = Odd()  # type: ignore[assignment]


def build() -> nn.Module:
    torch.manual_seed(0)
    return OneBlock()


BUILDERS["transposed and parametrized"] = build


def train_odd(rank: int, world: int, layout: str) -> dict[str, Any]:
    """Runs in each worker, which finds the model by importing this file."""
    return train(rank, world, "transposed and parametrized", ZERO[layout], FEWER_STEPS, CALM)


@pytest.mark.parametrize("layout", ["zero0", "zero3"])
def test_the_curve_is_that_of_one_process(pool: Pool, plain_run: Callable[..., dict[str, Any]], layout: str) -> None:
    expected = plain_run("transposed and parametrized", FEWER_STEPS, EPS)
    results = pool.run(train_odd, world_size(ZERO[layout]), layout)
    assert_same_curve(results[0], expected)
    assert_same_weights(results, expected)
