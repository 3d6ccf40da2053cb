"""The gradient norm of tensors as large as those of real models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ahp.runtime.check import verify
from ahp.runtime.optimizer.norm import weighted_square_sum

LARGE = 2**23 + 5
"""Elements of a weight; torch's kernel for CPUs adds so many up in fp32 2.6e-4 short."""


@pytest.fixture(scope="module")
def gradient() -> torch.Tensor:
    return torch.randn(LARGE, generator=torch.Generator().manual_seed(0))


def norm(*parts: torch.Tensor) -> float:
    found = weighted_square_sum(
        {str(number): part for number, part in enumerate(parts)},
        {str(number): 1 for number in range(len(parts))},
        torch.device("cpu"),
    )
    assert [names for names, _ in found.norms] == [[str(number) for number in range(len(parts))]]
    return found.total.sqrt().item()


def test_the_norm_does_not_depend_on_how_large_the_parts_are(gradient: torch.Tensor) -> None:
    expected = gradient.double().norm().item()
    for parts in ([gradient], [gradient[:7], gradient[7:]], gradient.chunk(3)):
        assert norm(*parts) == pytest.approx(expected, rel=1e-7)
    assert norm(gradient[:-5].view(2**13, -1).T) == pytest.approx(gradient[:-5].double().norm().item(), rel=1e-7)


def test_a_large_gradient_that_is_not_finite_is_seen(gradient: torch.Tensor) -> None:
    for value in (torch.inf, torch.nan):
        bad = gradient.clone()
        bad[123] = value
        found = weighted_square_sum({"a": gradient, "b": bad}, {"a": 1, "b": 1}, bad.device)
        assert found.not_finite() == ("b",)


def test_the_one_process_of_verify_has_the_true_norm(gradient: torch.Tensor) -> None:
    model = nn.Embedding(LARGE, 1)
    model.weight.grad = gradient[:, None]
    assert verify._norm(model).item() == pytest.approx(gradient.double().norm().item(), rel=1e-7)
