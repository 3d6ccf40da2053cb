"""What AHP reaches into transformers for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ahp.graph.call import model_arguments
from ahp.runtime.pipeline.cut import Stage
from ahp.runtime.transformers_compat import MASKING, consecutive_positions
from tests.runtime.looks import Looks
from tests.runtime.models import BUILDERS, batch


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_no_model_looks_at_positions_that_it_made_itself(model: str) -> None:
    module, ids = BUILDERS[model]().eval(), batch(0)["input_ids"]
    args, kwargs = model_arguments(module, ids)
    with torch.no_grad():
        with Looks() as plain:
            expected = module(*args, **kwargs).logits
        with Looks() as ours:
            got = Stage(module, None)(ids, input_ids=ids)
    assert plain.count > 0, "transformers no longer looks: consecutive_positions can go"
    assert ours.count == 0
    assert torch.equal(got, expected)


def test_what_was_there_is_put_back() -> None:
    BUILDERS["llama"]()
    module = sys.modules[MASKING]
    look = module.find_packed_sequence_indices

    def fail() -> None:
        with consecutive_positions():
            assert module.find_packed_sequence_indices(torch.zeros(1, 2)) is None
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert module.find_packed_sequence_indices is look


OWN = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = {"max_position_embeddings": 64}
        self.embed, self.out = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)
"""
RUN = """
import sys

import torch

import ahp
from ahp.graph.models import build_model

job = {"sequence_length": 16, "global_batch_size": 2, "precision": "fp32"}
assert ahp.analyze("own:Model", job).num_layers == 2
parallel = ahp.parallelize(build_model("own:Model"), {"job": job, "parallelism": {"micro_batch_size": 1}}, device="cpu")
ids = torch.arange(32).reshape(2, 16)
loss = parallel.step(parallel.shard({"input_ids": ids, "labels": ids})).loss
parallel.export_hf("exported")
print("loss", loss, "imported", {"transformers", "torchao", "scipy"}.intersection(sys.modules) or "none")
"""


@pytest.mark.slow
def test_a_model_of_ones_own_is_planned_and_trained_without_transformers(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    run = subprocess.run(
        [sys.executable, "-c", RUN], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.rstrip().endswith("imported none"), run.stdout
    assert list((tmp_path / "exported").glob("*.safetensors"))
