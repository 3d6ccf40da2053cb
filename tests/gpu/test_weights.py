"""Weights on a GPU: drawn there, staged through pinned memory, and exported from there."""

from __future__ import annotations

import pytest
import torch

from ahp.runtime.weights.allocate import initial_weights
from tests.runtime.models import JOB
from tests.runtime.weights.test_initial import Cut, Drawing, on_meta

SEED = 5


def filled(model: str, device: torch.device) -> dict[str, torch.Tensor]:
    module = Cut().to("meta") if model == "cut" else on_meta(model)
    parts = {name: torch.empty_like(p, device=device) for name, p in module.named_parameters()}
    with Drawing() as drawing:
        initial_weights(module, seed=SEED).fill(parts, lambda name: {})
    assert drawing.numbers > 0
    assert not drawing.whole
    return parts


@pytest.mark.parametrize("model", ["gpt2", "llama", "cut"])
def test_a_gpu_draws_what_a_cpu_draws(model: str, device: torch.device) -> None:
    here, there = filled(model, torch.device("cpu")), filled(model, device)
    differing = 0
    for name, expected in here.items():
        torch.testing.assert_close(there[name].cpu(), expected, rtol=2**-22, atol=0)
        differing += int((there[name].cpu() != expected).sum())
    assert differing <= 1e-4 * sum(t.numel() for t in here.values())


def test_a_large_parameter_is_drawn_on_the_gpu_in_chunks(device: torch.device) -> None:
    """Three chunks and a bit; a part of it has the values that it has in the whole."""
    with torch.device("meta"):
        module = torch.nn.Linear(5000, 3000, bias=False)
    found = initial_weights(module, seed=SEED)
    whole, part = torch.empty(3000, 5000, device=device), torch.empty(3000, 100, device=device)
    found.fill({"weight": whole}, lambda name: {})
    found.fill({"weight": part}, lambda name: {1: [(4000, 4100)]})
    assert torch.equal(part, whole[:, 4000:4100])
    assert whole.std().item() == pytest.approx(whole.abs().max().item() / 3**0.5, rel=1e-3)  # uniform


def test_a_model_starts_on_the_gpu_where_it_is_drawn(alone: torch.device) -> None:
    from ahp.runtime.parallel import parallelize

    parallel = parallelize(on_meta("llama"), {"job": {**JOB, "seed": SEED}})
    expected = filled("llama", alone)
    for name, parameter in parallel.parameters.items():
        assert parameter.device == alone
        assert torch.equal(parameter, expected[name]), name
