"""Megatron-LM's arguments for models, against the examples of its own repository (d98e8a6)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ahp.cli.following import refused_export
from ahp.cluster.model import Cluster
from ahp.errors import NotExpressible
from ahp.export.megatron_model import MODEL_KEYS, config_of, model_settings
from ahp.export.table import NOTICE
from ahp.graph.catalogue import CATALOGUE
from ahp.plan import EngineChoice, Plan


def of(name: str, **changes: Any) -> dict[str, Any]:
    found = model_settings(CATALOGUE[name].config | changes)
    assert {key for key in found if not key.startswith(NOTICE)} <= set(MODEL_KEYS), "an argument that is not read back"
    return found


EXAMPLES: dict[str, dict[str, Any]] = {
    # examples/post_training/modelopt/conf/Qwen/Qwen3-30B-A3B.sh
    "qwen3-30b-a3b": {
        "--num-layers": 48, "--hidden-size": 2048, "--ffn-hidden-size": 6144, "--num-attention-heads": 32, "--group-query-attention": True,
        "--num-query-groups": 4, "--kv-channels": 128, "--qk-layernorm": True, "--num-experts": 128, "--moe-ffn-hidden-size": 768,
        "--moe-router-topk": 8, "--moe-aux-loss-coeff": 0.001, "--moe-router-load-balancing-type": "aux_loss", "--rotary-base": 1000000,
    },
    # conf/deepseek-ai/DeepSeek-V2-Lite.sh
    "deepseek-v2-lite": {
        "--num-layers": 27, "--ffn-hidden-size": 10944, "--multi-latent-attention": True, "--kv-lora-rank": 512, "--v-head-dim": 128,
        "--qk-head-dim": 128, "--qk-pos-emb-head-dim": 64, "--qk-layernorm": True, "--num-experts": 64, "--moe-layer-freq": "([0]*1+[1]*26)",
        "--moe-ffn-hidden-size": 1408, "--moe-router-topk": 6, "--moe-router-topk-scaling-factor": 1.0, "--moe-router-pre-softmax": True,
        "--moe-shared-expert-intermediate-size": 2816, "--rotary-scaling-factor": 40.0, "--mscale": 0.707, "--mscale-all-dim": 0.707,
    },
    # conf/deepseek-ai/DeepSeek-R1.sh
    "deepseek-v3": {
        "--num-layers": 61, "--ffn-hidden-size": 18432, "--q-lora-rank": 1536, "--kv-lora-rank": 512, "--num-experts": 256,
        "--moe-layer-freq": "([0]*3+[1]*58)", "--moe-ffn-hidden-size": 2048, "--moe-router-dtype": "fp32",
        "--moe-router-score-function": "sigmoid", "--moe-router-enable-expert-bias": True, "--moe-router-num-groups": 8,
        "--moe-router-group-topk": 4, "--moe-router-topk-scaling-factor": 2.5, "--moe-shared-expert-intermediate-size": 2048,
        "--max-position-embeddings": 163840, "--mscale": 1.0, "--mscale-all-dim": 1.0,
    },
    "gpt2": {
        "--num-layers": 12, "--hidden-size": 768, "--ffn-hidden-size": 3072, "--num-attention-heads": 12, "--max-position-embeddings": 1024,
        "--position-embedding-type": "learned_absolute", "--normalization": "LayerNorm", "--norm-epsilon": 1e-5, "--hidden-dropout": 0.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_model_has_the_arguments_of_megatrons_own_example(name: str) -> None:
    assert of(name).items() >= EXAMPLES[name].items()


def test_experts_are_grouped_whether_ranks_share_them_or_not() -> None:
    grouped = {"--moe-grouped-gemm": True, "--moe-permute-fusion": True}
    assert of("qwen3-30b-a3b").items() >= grouped.items()
    assert not grouped.keys() & of("llama3-8b").keys()


def test_gpt2_has_biases_and_ties_its_embedding() -> None:
    assert not {"--disable-bias-linear", "--untie-embeddings-and-output-weights", "--swiglu"} & of("gpt2").keys()
    assert of("gpt2", activation_function="gelu")["--no-bias-gelu-fusion"] is True


def test_latent_attention_has_no_query_groups() -> None:
    assert "--group-query-attention" not in of("deepseek-v3")  # mutually exclusive, says validate_args


def test_what_megatron_computes_otherwise_is_told() -> None:
    def told(name: str, **changes: Any) -> str:
        return " | ".join(text for key, text in of(name, **changes).items() if key.startswith(NOTICE))

    assert "beta_fast = 1: Megatron-LM has no argument for it" in told("kimi-k2")
    assert "num_nextn_predict_layers = 1: AHP trains the model without" in told(
        "deepseek-v3", num_nextn_predict_layers=1
    )
    grouped = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}
    assert "topk_group = 3: Megatron-LM rates a group of experts by its best 2" in told("deepseek-v2-lite", **grouped)
    assert told("deepseek-v2-lite") == told("qwen3-30b-a3b") == ""


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("llama3-8b", {"attention_bias": True}, r"attention_bias = True: .*\(valid: False\)"),
        ("llama3-8b", {"hidden_act": "gelu"}, r"hidden_act = 'gelu': .*\(valid: silu\)"),
        ("deepseek-v3", {"norm_topk_prob": False}, r"norm_topk_prob = False: .*\(valid: True\)"),
        ("gpt2", {"activation_function": "relu"}, r"activation_function = 'relu': .*\(valid: gelu_new\)"),
        ("llama3-8b", {"rope_parameters": None, "rope_scaling": {"type": "linear"}}, r"rope_type = 'linear'"),
        ("bert-base", {}, r"model_type = 'bert': .*\(valid: llama, .*gpt2\)"),
    ],
)
def test_what_arguments_cannot_say_is_refused(name: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(NotExpressible, match=says):
        of(name, **changes)


def test_a_config_without_a_size_is_one_sentence() -> None:
    with pytest.raises(NotExpressible, match="its config has no num_attention_heads"):
        model_settings({"model_type": "llama", "hidden_size": 64})


def test_a_window_counts_the_tokens_before() -> None:
    mistral = next(name for name, model in CATALOGUE.items() if model.config["model_type"] == "mistral")
    assert of(mistral, sliding_window=4096)["--window-size"] == "(4095,0)"


def test_arguments_of_experts_are_read_back() -> None:
    keys = CATALOGUE["qwen3-30b-a3b"].config
    found = config_of(of("qwen3-30b-a3b") | {"--vocab-size": keys["vocab_size"]})
    assert found is not None
    assert {key: keys[key] for key in found} == found
    assert config_of(of("deepseek-v3") | {"--vocab-size": 129280}) is None, "it was read as a Mixtral"


@pytest.mark.parametrize(("model", "told"), [("bert-base", "model_type = 'bert'"), ("gpt2", None)])
def test_a_plan_says_that_its_export_is_refused(model: str, told: str | None, tmp_path: Path) -> None:
    plan = Plan(model=model, cluster=Cluster.parse("1x1xH100-SXM-80GB").plain(), engine=EngineChoice(name="megatron"))
    said = refused_export(plan, str(tmp_path / "plan.yaml"))
    assert said is None if told is None else f"ahp export megatron refuses the first plan: {told}" in (said or "")
