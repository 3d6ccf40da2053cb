"""Weights on a GPU: drawn there, staged through pinned memory, and exported from there."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from ahp.runtime.torch_compat import local_tensor
from ahp.runtime.weights import hf_export
from ahp.runtime.weights.allocate import initial_weights
from tests.runtime.models import JOB, VOCABULARY, batch
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


def test_checkpoints_go_through_the_same_pinned_memory_and_hold_the_moment_of_their_start(
    alone: torch.device, tmp_path: Path
) -> None:
    from ahp.runtime.parallel import parallelize

    class Wide(torch.nn.Module):
        """Its matrices are large enough to be locked where they lie, its bias is not."""

        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = torch.nn.Embedding(VOCABULARY, 4096), torch.nn.Linear(4096, VOCABULARY)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.tokens(input_ids))

    parallel = parallelize(Wide(), {"job": JOB})
    parallel.step(parallel.shard(batch(0)))
    weights = {name: p.detach().clone() for name, p in parallel.parameters.items()}
    first = parallel.saver.start(tmp_path / "first", lambda checksums: None)
    memory = dict(parallel.saver.copies.memory)
    assert all(copy.is_pinned() for copy in memory.values() if copy.dtype == torch.float32)
    for step in range(1, 4):
        parallel.step(parallel.shard(batch(step)))
    parallel.saver.start(tmp_path / "second", lambda checksums: None).result()
    assert first.done()
    assert all(parallel.saver.copies.memory[name] is copy for name, copy in memory.items())
    parallel.load(tmp_path / "first")
    assert parallel.num_steps_done == 1
    for name, parameter in parallel.parameters.items():
        assert torch.equal(parameter, weights[name]), name
    parallel.load(tmp_path / "second")
    assert parallel.num_steps_done == 4


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_on_the_gpu_goes_out_and_comes_back(precision: str, alone: torch.device, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from ahp.runtime.parallel import parallelize

    job = {**JOB, "precision": precision}
    trained = parallelize(on_meta("llama"), {"job": job})
    for step in range(2):
        trained.step(trained.shard(batch(step)))
    with mock.patch.object(hf_export, "FILE_BYTES", 20_000):
        trained.export_hf(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    again = parallelize(on_meta("llama"), {"job": job, "init_from": str(tmp_path)})
    for name, parameter in trained.parameters.items():
        rounded = local_tensor(parameter.detach()).to(dtype)
        assert torch.equal(loaded[name].detach(), rounded.cpu()), name
        assert torch.equal(local_tensor(again.parameters[name].detach()), rounded.float()), name
