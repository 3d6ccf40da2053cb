"""Adapters in the graph: what is trained, what that costs, and what is refused."""

from __future__ import annotations

import importlib.util
import json
from importlib import metadata
from typing import Any

import pytest
import torch

import ahp
from ahp.errors import BadInput
from ahp.graph.export import from_plain, to_json
from ahp.graph.lora import adapted_weights, base_alone, layers_of, with_adapters
from ahp.graph.models import build_model
from ahp.graph.operators import ModelGraph
from ahp.graph.trace import analyze
from ahp.job import Lora
from tests.search.small import MODELS

needs_peft = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="peft (the extra lora) is not installed"
)
R = 4
LORA = {"r": R}
ATTENTION = r"\[q_proj, k_proj, v_proj, o_proj\]"
QWEN3_MOE = {
    "model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_experts": 4,
    "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


def llama(**lora: Any) -> ModelGraph:
    return analyze(MODELS["llama"], {"sequence_length": 64, "lora": lora or None})


@pytest.mark.slow
@needs_peft
def test_the_graph_has_the_adapters_and_no_gradient_of_the_rest() -> None:
    plain, adapted = llama(), llama(**LORA)
    assert plain.trained_share == 1.0
    block = {p.name: p for p in adapted.blocks[0].parameters}
    trained = {name for name, p in block.items() if p.trainable}
    assert trained == {name for name in block if ".lora_" in name}
    shapes = {p.name: p.shape for p in plain.blocks[0].parameters}
    linear = {name: shape for name, shape in shapes.items() if len(shape) == 2}
    per_block = sum(R * sum(shape) for shape in linear.values())
    assert sum(block[name].numel for name in trained) == per_block
    assert adapted.num_parameters == plain.num_parameters + 4 * per_block
    assert adapted.trained_share == pytest.approx(4 * per_block / adapted.num_parameters)
    assert not any(p.trainable for p in (*adapted.embedding.parameters, *adapted.head.parameters))
    added = adapted.flops("forward") - plain.flops("forward")
    assert added == 2 * 64 * 4 * per_block
    # Backward: the input gradient of each layer and both of each adapter; of the first block's layers only what adapters read.
    assert adapted.flops("backward") < 0.6 * plain.flops("backward") + 2 * added
    assert from_plain(json.loads(to_json(adapted))) == adapted


@pytest.mark.slow
@needs_peft
def test_a_live_module_is_left_as_it_was() -> None:
    module = build_model(MODELS["llama"])
    graph = ahp.analyze(module, {"sequence_length": 64, "lora": LORA})
    assert graph.trained_share < 0.2
    assert not layers_of(module)
    assert all(p.requires_grad for p in module.parameters())


@needs_peft
def test_without_its_adapters_a_model_has_its_own_names() -> None:
    module: Any = build_model(MODELS["tied gpt2"])
    names = [name for name, _ in module.named_parameters()]
    with_adapters(module, Lora(r=R))
    assert {one.transposed for one in adapted_weights(module)} == {True}
    before = dict(module.named_parameters())
    with base_alone(module):
        assert [name for name, _ in module.named_parameters()] == names
    assert dict(module.named_parameters()) == before


@needs_peft
def test_the_job_says_how_adapters_begin() -> None:
    """Of real tensors; the program's own random numbers stay as they are."""

    def begun(seed: int) -> torch.Tensor:
        module = with_adapters(build_model(MODELS["llama"], device="cpu"), Lora(r=R), seed=seed)
        return module.get_parameter(adapted_weights(module)[0].a)

    state = torch.get_rng_state()
    with torch.random.fork_rng():
        assert torch.equal(begun(0), begun(0))
        assert not torch.equal(begun(0), begun(1))
    assert torch.equal(torch.get_rng_state(), state)


@needs_peft
@pytest.mark.parametrize(
    ("model", "targets", "told"),
    [
        ("llama", ("q_pro",), r"target_modules = \['q_pro'\].*valid: q_proj"),
        (
            "llama",
            ("q_proj", "v_pro"),
            r"target_modules = \['q_proj', 'v_pro'\]: no layer is called v_pro \(valid: v_proj",
        ),
        ("llama", ("embed_tokens",), r"embed_tokens is of Embedding, and AHP adapts linear layers alone"),
        ("tied gpt2", ("lm_head",), r"the weight of lm_head is tied"),
        (
            "llama",
            ("layers.0.self_attn.q_proj",),
            r"block 1 of model.layers has no such layer.*valid: \[q_proj, k_proj,",
        ),
        ("experts", "all-linear", rf"MixtralTopKRouter, and AHP adapts linear layers alone \(valid: {ATTENTION}\)"),
        ("experts", ("lm_head",), rf"every block must have an adapter \(valid: {ATTENTION}\)"),
        ("experts", ("experts",), r"Target module MixtralExperts is not supported\."),
        (
            "qwen3_moe",
            "all-linear",
            rf"is of Qwen3MoeExperts, and AHP adapts linear layers alone \(valid: {ATTENTION}\)",
        ),
    ],
)
def test_what_is_refused(model: str, targets: Any, told: str) -> None:
    with pytest.raises(BadInput, match=told):
        with_adapters(build_model(QWEN3_MOE if model == "qwen3_moe" else MODELS[model]), Lora(target_modules=targets))


@needs_peft
@pytest.mark.parametrize("model", [MODELS["experts"], QWEN3_MOE])
def test_the_names_that_a_refusal_lists_can_be_used(model: dict[str, Any]) -> None:
    with pytest.raises(BadInput) as refused:
        with_adapters(build_model(model), Lora())
    names = str(refused.value).partition("(valid: [")[2].removesuffix("])").split(", ")
    assert len(layers_of(with_adapters(build_model(model), Lora(target_modules=tuple(names))))) >= 2 * len(names)


@needs_peft
def test_a_rank_above_that_of_every_weight_is_refused_before_its_memory_is_taken() -> None:
    with pytest.raises(BadInput, match=r"job\.lora\.r = 1000000000000: .*\(valid: 1 to \d+\)"):
        with_adapters(build_model(MODELS["llama"]), Lora(r=10**12))


@needs_peft
def test_a_weight_that_is_computed_from_others_is_refused() -> None:
    module = build_model(MODELS["llama"])
    torch.nn.utils.parametrizations.weight_norm(module.get_submodule("model.layers.1.mlp.up_proj"))
    with pytest.raises(
        BadInput, match=r"'all-linear': the weight of model.layers.1.mlp.up_proj is computed from others"
    ):
        with_adapters(module, Lora())


@needs_peft
def test_adapters_are_not_put_in_twice() -> None:
    module = with_adapters(build_model(MODELS["llama"]), Lora())
    with pytest.raises(BadInput, match=r"job\.lora: the module has adapters already"):
        with_adapters(module, Lora())


def test_peft_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(
        BadInput,
        match=r"job\.lora: peft is not installed; install the extra: pip install 'adaptive-hybrid-parallelism\[lora\]'",
    ):
        with_adapters(torch.nn.Linear(2, 2), Lora())


@pytest.mark.parametrize("targets", ["q_proj", [], [1], None])
def test_names_are_a_list(targets: Any) -> None:
    from ahp.job import Job
    from ahp.plan import validated

    with pytest.raises(BadInput, match=r"job\.lora\.target_modules = .*valid: all-linear, \[q_proj, v_proj\]"):
        validated(Job, {"lora": {"target_modules": targets}}, "job")
