"""A run goes on with the model that it was begun with: not only with its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ahp.errors import BadInput
from ahp.plan import Plan
from ahp.runtime.run.folder import OWN_CHECKSUM, RunFolder
from ahp.runtime.run.same_job import check_same_job
from ahp.runtime.run.same_model import described, model_differences

LLAMA = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
}  # fmt: skip


def begun(tmp_path: Path, model: str) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.open_checkpoint(5)
    plan = Plan(model=model).model_dump(mode="json", include={"model", "job"})
    folder.commit_checkpoint(5, {**plan, "model_described": described(model), "crc32": {}}, keep=1)
    return folder


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rms_norm_eps": 1e-5}, r"model\.rms_norm_eps = 1e-05 \(the run has 1e-06\)"),
        ({"rope_theta": 5e5}, r"rope_parameters.rope_theta = 500000\.0 \(the run has "),
        ({"hidden_act": "gelu"}, r"model\.hidden_act = 'gelu' \(the run has 'silu'\)"),
    ],
)
def test_a_changed_model_file_is_refused_with_what_changed(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    """The run went on under another model of the same path, and its loss was another."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    folder, plan = begun(tmp_path, str(file)), Plan(model=str(file))
    file.write_text(json.dumps({**LLAMA, "architectures": ["LlamaForCausalLM"], "use_cache": True}))
    assert check_same_job(folder, plan) is None
    file.write_text(json.dumps({**LLAMA, **changes}))
    with pytest.raises(BadInput, match=told):
        check_same_job(folder, plan)


def test_a_changed_factory_is_refused_with_what_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.runtime.run.test_same_model.EPS", 1e-6)
    model = "tests.runtime.run.test_same_model:factory"
    folder = begun(tmp_path, model)
    assert check_same_job(folder, Plan(model=model)) is None
    monkeypatch.setattr("tests.runtime.run.test_same_model.EPS", 1e-5)
    with pytest.raises(BadInput, match=r"its modules have .*eps=1e-05.*\(the run has .*eps=1e-06"):
        check_same_job(folder, Plan(model=model))


EPS = 1e-6


def factory() -> nn.Module:
    return nn.Sequential(nn.Embedding(300, 8), nn.LayerNorm(8, eps=EPS), nn.Linear(8, 300))


def test_parameters_that_modules_do_not_print_are_looked_at() -> None:
    class Scale(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(size))

    before, now = (described("any.mod:factory", Scale(size)) for size in (3, 4))
    assert list(model_differences(before, now)) == ["model: its parameters have other names or shapes"]


def test_another_version_of_a_library_may_write_the_same_model_in_other_keys() -> None:
    before = {"versions": {"transformers": "4"}, "config": {"rope_theta": 1e4, "eps": 1.0}, "modules": ["a"]}
    now = {"versions": {"transformers": "5"}, "config": {"rope_parameters": {"rope_theta": 1e4}, "eps": 1.0}}
    assert list(model_differences(before, now)) == []
    now["config"]["eps"] = 2.0  # type: ignore[index]
    assert list(model_differences(before, now)) == ["model.eps = 2.0 (the run has 1.0)"]


def test_a_run_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    folder = begun(tmp_path, "tiny")
    meta = folder.checkpoints()[0].path / "meta.json"
    written = json.loads(meta.read_text())
    del written["model_described"], written[OWN_CHECKSUM]
    meta.write_text(json.dumps(written))
    assert check_same_job(folder, Plan(model="tiny")) is None
