"""Weight gradients that wait: nothing before they are asked for, then the same as autograd's."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ahp.runtime.compute.compile import (
    FullRecomputeCompiler,
    compile_block,
    selective_recompute_compiler,
    split_backward_compiler,
)
from ahp.runtime.compute.recompute import recompute
from ahp.runtime.pipeline.weight_gradients import Deferring, WeightGradients
from ahp.runtime.shard.replicas import accumulation_of
from tests.runtime.graphs import no_kernels


class Mixed(nn.Module):
    """A linear layer, a product as GPT-2 writes it, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(4, 6), nn.LayerNorm(6)
        self.weight, self.bias = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.gelu(self.norm(self.linear(x)))
        return torch.addmm(self.bias, y.flatten(0, 1), self.weight).view(x.shape)


def gradients(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**found, "x": x.grad} if x.grad is not None else found


def test_weights_wait_and_are_the_same() -> None:
    x = torch.randn(2, 3, 4, requires_grad=True)
    plain = Mixed()
    plain(x).square().sum().backward()
    expected = {name: g.clone() for name, g in gradients(plain, x).items()}
    for again in (False, True):
        later, model = WeightGradients(), Mixed()
        x.grad = None
        if again:
            recompute(model, "full", lambda later=later: Deferring(later))
        with Deferring(later):
            loss = model(x).square().sum()
        loss.backward()
        assert set(gradients(model, x)) == set(expected) - {"linear.weight", "weight"}
        finish = later.take()
        assert not later.pending
        finish()
        found = gradients(model, x)
        assert set(found) == set(expected)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient)


@pytest.mark.parametrize(
    ("dtype", "in_place"), [(torch.float32, True), (torch.float64, False), (torch.bfloat16, False)], ids=str
)
def test_weights_of_later_micro_batches_are_added_in_place(dtype: torch.dtype, in_place: bool) -> None:
    """In fp32: whoever holds ``grad`` keeps its memory, no graph hangs on it, and the engine is asked once for each weight."""
    parts = [torch.randn(2, 3, 4, dtype=dtype) for _ in range(3)]
    plain, model, later = Mixed().to(dtype), Mixed().to(dtype), WeightGradients()
    asked: list[None] = []
    accumulation = accumulation_of(cast(nn.Parameter, model.linear.weight))
    accumulation.register_prehook(lambda given: None if given[0] is None else asked.append(None))
    places = set()
    for part in parts:
        plain(part).square().sum().backward()
        x = part.clone().requires_grad_()  # what a stage gets from the one before it
        with Deferring(later):
            loss = model(x).square().sum()
        loss.backward()
        later.take()()
        assert model.weight.grad is not None
        assert not model.weight.grad.requires_grad
        places.add(model.weight.grad.data_ptr())
    assert len(places) == 1
    assert len(asked) == (1 if in_place else len(parts))
    expected = gradients(plain, parts[0])
    for name, gradient in gradients(model, parts[0]).items():
        torch.testing.assert_close(gradient, expected[name])


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [split_backward_compiler, selective_recompute_compiler, FullRecomputeCompiler])
def test_weights_of_compiled_blocks_wait_and_are_the_same(compiler: Any) -> None:
    x = torch.randn(2, 3, 4, requires_grad=True)
    plain = Mixed()
    plain(x).square().sum().backward()
    expected = {name: g.clone() for name, g in gradients(plain, x).items()}
    later, model = WeightGradients(), Mixed()
    with no_kernels():
        compile_block(model, compiler(later))
        for _ in range(2):  # the second step finds what the first one compiled
            model.zero_grad()
            x.grad = None
            with Deferring(later):
                loss = model(x).square().sum()
            loss.backward()
            assert set(gradients(model, x)) == set(expected) - {"linear.weight", "weight"}
            later.take()()
    found = gradients(model, x)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


class InPlace(nn.Module):
    """Writes into what its layer returns, as DeBERTa's positions and every ``nn.ReLU(inplace=True)`` do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu_()


def test_what_a_product_returns_may_be_written_into() -> None:
    x = torch.randn(2, 3, 4, requires_grad=True)
    plain, model, later = InPlace(), InPlace(), WeightGradients()
    plain(x).square().sum().backward()
    with Deferring(later):
        model(x).square().sum().backward()
    later.take()()
    assert torch.equal(model.linear.weight.grad, plain.linear.weight.grad)
