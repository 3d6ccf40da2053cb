"""Every form of description leads to its model, with the published size; a wrong one is named by its own key."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ahp.errors import BadInput
from ahp.graph import trace
from ahp.graph.catalogue import CATALOGUE, GPT3
from ahp.graph.kept import analyze
from ahp.graph.models import MASKED, build_model, describe, is_factory, is_masked, load_config, plain
from tests.graph.small import CONFIGS, Custom

FACTORY = "tests.graph.small:custom"


def size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("name", [name for name, model in CATALOGUE.items() if model.source != GPT3])
def test_published_parameter_counts(name: str) -> None:
    assert size(build_model(name)) == CATALOGUE[name].parameters


@pytest.mark.parametrize("name", [name for name, model in CATALOGUE.items() if model.source == GPT3])
def test_gpt3_sizes_follow_its_table(name: str) -> None:
    """The paper gives two or three digits; the count itself is 12 l h^2 + 13 l h + (vocabulary + positions) h + 2 h."""
    config = CATALOGUE[name].config
    hidden, layers = config["n_embd"], config["n_layer"]
    counted = size(build_model(name))
    assert counted == 12 * layers * hidden**2 + 13 * layers * hidden + (50257 + 2048) * hidden + 2 * hidden
    assert counted == pytest.approx(CATALOGUE[name].parameters, rel=0.02)


def test_bert_with_its_other_heads_has_the_size_of_the_hubs_file() -> None:
    """bert-base-uncased holds 110,106,428 weights: ours, the pooler and the next-sentence head."""
    pooler, next_sentence = 768 * 768 + 768, 2 * 768 + 2
    assert size(build_model("bert-base")) + pooler + next_sentence == 110_106_428


def test_the_module_takes_no_memory_and_the_dtype_asked_for() -> None:
    module = build_model("llama3-8b", dtype=torch.bfloat16)
    assert {p.device.type for p in module.parameters()} == {"meta"}
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert module.config.use_cache is False


@pytest.mark.parametrize(("attention", "kernel"), [("flash", "sdpa"), ("math", "eager"), ("eager", "eager")])
def test_attention_by_either_name(attention: str, kernel: str) -> None:
    assert build_model(CONFIGS["llama"], attention=attention).config._attn_implementation == kernel


def test_weights_on_a_real_device_are_initialised() -> None:
    torch.manual_seed(0)
    first = build_model(CONFIGS["llama"], device="cpu").get_parameter("lm_head.weight")
    torch.manual_seed(0)
    again = build_model(CONFIGS["llama"], device="cpu").get_parameter("lm_head.weight")
    assert torch.equal(first, again)
    assert 0.01 < first.std().item() < 0.03  # initializer_range is 0.02


def test_bert_is_masked_and_the_others_are_not() -> None:
    assert [is_masked(build_model(CONFIGS[name])) for name in ("bert", "llama", "gpt2")] == [True, False, False]
    assert not is_masked(Custom())


def test_the_names_of_masked_models_end_as_is_known() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    assert [name for name in MODEL_FOR_MASKED_LM_MAPPING_NAMES.values() if not name.endswith(MASKED)] == []


@pytest.mark.parametrize("in_folder", [True, False])
def test_a_config_file_or_its_folder(tmp_path: Path, in_folder: bool) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS["llama"] | {"architectures": ["X"], "an_old_key": 1}))
    model = str(folder if in_folder else folder / "config.json")
    config = load_config(model)
    assert config is not None
    assert config.hidden_size == 64
    assert describe(model) == "my-model"
    assert plain(model) == model


@pytest.mark.slow
def test_a_folder_with_a_name_of_the_catalogue_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(CONFIGS["gpt2"]))
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match=r"model = 'gpt2': the catalogue's; of the folder here it is \./gpt2"):
        assert analyze("gpt2", {"sequence_length": 1024}).num_layers == 12
    assert analyze("./gpt2", {"sequence_length": 32}).num_layers == CONFIGS["gpt2"]["n_layer"]


def test_a_factory() -> None:
    assert is_factory(FACTORY)
    assert load_config(FACTORY) is None
    module = build_model(FACTORY, dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in module.parameters()} == {("meta", torch.bfloat16)}
    assert (describe(FACTORY), plain(FACTORY)) == ("custom", FACTORY)


def test_a_factory_that_fails_is_named_with_what_it_raised() -> None:
    with pytest.raises(BadInput, match=r"model = 'tests.graph.small:broken': the factory raised KeyError: 'width'"):
        build_model("tests.graph.small:broken")


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("def make(:", r"importing users_model raised SyntaxError: invalid syntax \(users_model.py, line 1\)"),
        ("1 / 0", "importing users_model raised ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "importing users_model raised SystemExit: 3"),
        ("def make(): exit(0)", "the factory raised SystemExit: 0"),
    ],
)
def test_a_users_file_that_fails_or_ends_the_program_is_named(
    code: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that ended the program ended the command too, without a word, and with the file's exit code."""
    (tmp_path / "users_model.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "users_model", raising=False)
    with pytest.raises(BadInput, match=f"model = 'users_model:make': {told}"):
        build_model("users_model:make")


def test_a_live_module_and_a_config_object() -> None:
    module = Custom()
    assert build_model(module) is module
    assert (load_config(module), plain(module), describe(module)) == (None, None, "Custom")
    config = load_config(CONFIGS["llama"])
    kept = plain(config)
    assert isinstance(kept, dict)
    assert load_config(kept).to_dict() == config.to_dict()  # type: ignore[union-attr]


def test_a_dict_is_described_by_type_and_shape() -> None:
    assert describe(CONFIGS["llama"]) == "llama-3x64"
    assert plain(CONFIGS["llama"]) == CONFIGS["llama"]


LLAMA, GPT2 = CONFIGS["llama"], CONFIGS["gpt2"]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("llama3-9b", ["llama3-9b", "llama3-8b"]),
        ({}, ["model_type"]),
        ({"model_type": "lama"}, ["model_type", "lama", "llama"]),
        (LLAMA | {"hiden_size": 3}, ["hiden_size", "hidden_size"]),
        (LLAMA | {"vocab_size": 0}, ["vocab_size = 0", "at least 1"]),
        (LLAMA | {"num_hidden_layers": True}, ["num_hidden_layers = True"]),
        (LLAMA | {"num_attention_heads": 5}, ["num_attention_heads = 5", "hidden_size = 64", "4"]),
        (LLAMA | {"num_key_value_heads": 3}, ["num_key_value_heads = 3", "num_attention_heads = 4"]),
        (GPT2 | {"n_head": 5}, ["n_head = 5", "n_embd = 64"]),
        (LLAMA | {"rms_norm_eps": math.nan}, ["rms_norm_eps = nan", "finite"]),
        (LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": math.inf}}, ["rope_parameters.rope_theta"]),
        (LLAMA | {"vocab_size": "many"}, ["vocab_size = 'many': expected int, got str"]),
        (LLAMA | {"hidden_act": "silo"}, ["hidden_act = 'silo'", "silu"]),
        (LLAMA | {"rope_theta": "x"}, ["rope_theta = 'x'", "a number"]),
        (
            {"model_type": "mixtral", "num_experts_per_tok": 9},
            ["num_experts_per_tok = 9", "8 experts"],
        ),
        (LLAMA | {"vocab_size": 10**30}, ["vocab_size = 1000", "at most 1,000,000,000"]),
        (LLAMA | {"num_hidden_layers": 10**9}, ["num_hidden_layers = 1000000000", "at most 10,000"]),
        (GPT2 | {"n_layer": 10**9}, ["n_layer = 1000000000", "at most 10,000"]),
        ("/", ["config.json"]),
        ("tests.graph.small:absent", ["absent"]),
        ("no_such_package:model", ["no_such_package"]),
        ("tests.graph.small:not_a_model", ["nn.Module"]),
        ("tests.graph.small:SEQUENCE", ["not a function that makes an nn.Module, but of type int"]),
        ("tests.graph.small.py:factory", ["a module is named without .py: tests.graph.small:factory"]),
        (__file__, ["name the function that makes the module, as in test_models:factory"]),
        (__file__.removesuffix(".py"), ["that makes the module, as in "]),
        ('{"model_type": "llama"}', ["write these keys into a config.json"]),
        ({"model_type": "t5"}, ["t5", "encoder-decoder"]),
        ({"model_type": "vit"}, ["vit", "language model"]),
        (3, ["3"]),
    ],
)
def test_what_is_wrong_is_named(model: Any, words: list[str]) -> None:
    with pytest.raises(BadInput) as caught:
        build_model(model)
    for word in words:
        assert word in str(caught.value)


def test_a_misspelt_key_of_a_config_file_is_told(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_sizes": 64, "pretraining_tp": 1}))
    load_config(str(tmp_path))
    told = "hidden_sizes: unknown key for model_type llama (did you mean: hidden_size?); hidden_size has its default"
    assert [str(one.message) for one in recwarn] == [told]


def test_a_broken_config_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadInput, match="not a JSON file"):
        load_config(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(BadInput, match="object"):
        load_config(str(tmp_path))
    (tmp_path / "config.yaml").write_text("model: tiny")
    with pytest.raises(BadInput, match=r"of a config.yaml ahp plan takes the job, as --job .*config.yaml"):
        load_config(str(tmp_path / "config.yaml"))


def test_a_key_that_the_family_reads_though_its_config_has_no_such_field() -> None:
    # Qwen/Qwen3-30B-A3B's config.json says it: heads of 128 beside a hidden size of 2048 and 32 heads.
    keys = {"model_type": "qwen3_moe", "hidden_size": 64, "num_attention_heads": 4}
    config = load_config({**keys, "head_dim": 32})
    assert config is not None
    assert config.head_dim == 32
    with pytest.raises(BadInput, match=r"head_dims: unknown key for model_type qwen3_moe"):
        load_config({**keys, "head_dims": 32})


def test_unknown_attention() -> None:
    with pytest.raises(BadInput, match="attention = 'fast'"):
        build_model("tiny", attention="fast")


def test_nothing_asks_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    for name in ("mistral-7b", "qwen2.5-7b"):
        build_model(name)
    with pytest.raises(BadInput):
        build_model("someone/some-model")


@pytest.mark.slow
def test_a_model_of_images_is_told_to_be_planned_as_its_text_part(recwarn: pytest.WarningsRecorder) -> None:
    text: dict[str, Any] = {
        "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64,
    }  # fmt: skip
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
    }
    job = {"sequence_length": 16}
    trace.analyze({"model_type": "gemma3", "text_config": text, "vision_config": vision}, job)
    told = [str(one.message) for one in recwarn]
    assert [one for one in told if "only its text part is planned and trained" in one and "vision_config" in one], told
    recwarn.clear()
    trace.analyze({"model_type": "gemma3_text", **text}, job)
    assert not [str(one.message) for one in recwarn]
