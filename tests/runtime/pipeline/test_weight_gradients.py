"""Weight gradients that wait: nothing before they are asked for, then the same as autograd's."""

from __future__ import annotations

from typing import Any

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
