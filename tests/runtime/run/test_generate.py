"""Text from weights: the same seed gives the same text, and only this model's weights are taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ahp.errors import BadInput
from ahp.graph.models import build_model
from ahp.job import Job
from ahp.plan import Plan
from ahp.runtime.data import tokenizer as tokenizers
from ahp.runtime.run import export_mark, exported
from ahp.runtime.run.folder import RunFolder
from ahp.runtime.run.generate import Sampling, generate

MODEL = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16,
}  # fmt: skip


EXPERTS = {
    "mixtral": {**MODEL, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**MODEL, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8},
}  # fmt: skip
"""Whose files hold each expert apart, where the module has a stack of all."""


def finished_run(path: Path, tied: bool, model: dict[str, Any] = MODEL) -> RunFolder:
    """A run's folder as training leaves it, with random weights."""
    run = RunFolder(path)
    run.create()
    plan = Plan(model={**model, "tie_word_embeddings": tied})
    plan.save(run.plan_file)
    torch.manual_seed(0)
    aside = run.path / "hf.tmp"
    build_model(plan.model, device="cpu").save_pretrained(aside)
    exported.publish(run, aside, plan, tokenizers.train(["def call(x): return x + 1\n" * 9], 300), step=10)
    return run


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> RunFolder:
    return finished_run(tmp_path / "run", request.param)


def test_seed_decides_the_text(run: RunFolder) -> None:
    def text(**changes: float) -> str:
        return generate(run.path, "def ", Sampling(max_new_tokens=30, **changes))  # type: ignore[arg-type]

    assert text(seed=1) == text(seed=1) != text(seed=2)
    assert text(seed=1).startswith("def ")
    assert text(temperature=0, seed=1) == text(temperature=0, seed=2)


def test_no_weight_is_drawn_where_all_are_read(run: RunFolder) -> None:
    plan = Plan.load(run.plan_file)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    module, _ = exported.load(run.weights_folder, plan)
    assert torch.equal(torch.get_rng_state(), before)
    stored = load_file(run.weights_folder / "model.safetensors")
    assert all(torch.equal(p, stored[name]) for name, p in module.named_parameters())


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_give_text_as_transformers_does(tmp_path: Path, family: str) -> None:
    test_likeliest_tokens_agree_with_transformers(finished_run(tmp_path / "run", False, EXPERTS[family]))


def test_likeliest_tokens_agree_with_transformers(run: RunFolder) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(run.weights_folder)
    tokenizer = AutoTokenizer.from_pretrained(run.weights_folder)
    prompt = tokenizer.eos_token + "def "
    ids = tokenizer(prompt, return_tensors="pt")
    theirs = model.generate(**ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    expected = tokenizer.decode(theirs[0], skip_special_tokens=True)
    assert generate(run.path, "def ", Sampling(max_new_tokens=8, temperature=0)) == expected


def test_weights_of_another_model_are_refused(run: RunFolder) -> None:
    file = run.weights_folder / "model.safetensors"
    state = load_file(file)
    state["model.layers.0.extra"] = state.pop("model.layers.0.mlp.up_proj.weight")
    save_file(state, file)
    export_mark.write(run.weights_folder, 10, {})
    with pytest.raises(
        BadInput, match=r"weights = .*not the weights of this model; missing: .*up_proj.*unknown: .*extra"
    ):
        generate(run.path)


def test_a_plan_that_is_not_the_runs_is_refused(run: RunFolder) -> None:
    """With a digit changed, the weights computed something else."""
    plan = Plan.load(run.plan_file)
    aside = run.open_checkpoint(10)
    run.commit_checkpoint(10, {"job": plan.job.model_dump(mode="json"), "model": plan.model, "crc32": {}}, keep=1)
    assert not aside.exists()
    assert generate(run.path, "def ")
    assert isinstance(plan.model, dict)
    plan.model_copy(update={"model": {**plan.model, "rms_norm_eps": 0.1}}).save(run.plan_file)
    with pytest.raises(BadInput, match=r"plan\.yaml has changed since it was written: .*rms_norm_eps"):
        generate(run.path, "def ")


class Short(nn.Module):
    """A module of the user's own: transformers knows nothing of its 32 positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(300, 16), nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 300)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def own_module(path: Path, sequence_length: int) -> RunFolder:
    run = RunFolder(path)
    run.create()
    plan = Plan(model=f"{__name__}:Short", job=Job(sequence_length=sequence_length))
    plan.save(run.plan_file)
    torch.manual_seed(0)
    aside = run.path / "hf.tmp"
    aside.mkdir()
    save_file(Short().state_dict(), aside / "model.safetensors")
    exported.publish(run, aside, plan, tokenizers.train(["def call(x): return x + 1\n" * 9], 300), step=10)
    return run


def test_a_module_of_the_users_own_is_not_asked_beyond_what_it_was_trained_on(tmp_path: Path) -> None:
    run = own_module(tmp_path / "run", sequence_length=32)
    assert len(generate(run.path, "def ", Sampling(max_new_tokens=60))) > 40


def test_a_module_that_cannot_be_called_is_told(tmp_path: Path) -> None:
    run = own_module(tmp_path / "run", sequence_length=64)
    with pytest.raises(BadInput, match=r"its forward failed on 33 tokens .*IndexError"):
        generate(run.path, "def ", Sampling(max_new_tokens=60))


def test_weights_for_which_there_is_no_room_are_refused(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exported, "memory_available_bytes", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BadInput, match=r"in fp32 they take .*, and this machine has 0 MiB free"):
        generate(run.path)


def test_run_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.create()
    with pytest.raises(BadInput, match="no run's folder"):
        generate(run.path)
    Plan().save(run.plan_file)
    with pytest.raises(BadInput, match="no checkpoint yet"):
        generate(run.path)


@pytest.mark.parametrize(
    ("changes", "key"), [({"max_new_tokens": 0}, "max_new_tokens"), ({"temperature": -1}, "temperature")]
)
def test_sampling_out_of_range_is_refused(changes: dict[str, int], key: str) -> None:
    with pytest.raises(BadInput, match=key):
        Sampling(**changes)
