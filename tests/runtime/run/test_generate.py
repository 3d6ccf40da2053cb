"""Text from weights: the same seed gives the same text, and only this model's weights are taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ahp.errors import BadInput
from ahp.graph.models import build_model
from ahp.plan import Plan
from ahp.runtime.data import tokenizer as tokenizers
from ahp.runtime.run import exported
from ahp.runtime.run.folder import RunFolder
from ahp.runtime.run.generate import Sampling, generate

MODEL = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16,
}  # fmt: skip


def finished_run(path: Path, tied: bool) -> RunFolder:
    """A run's folder as training leaves it, with random weights."""
    run = RunFolder(path)
    run.create()
    plan = Plan(model={**MODEL, "tie_word_embeddings": tied})
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
    with pytest.raises(BadInput, match=r"not of this model.*extra.*up_proj"):
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
