"""Megatron-LM's arguments for a model, from its Hugging Face config."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

from ahp.errors import NotExpressible
from ahp.export.table import NOTICE, Settings

LAYERS = "--num-layers"
Keys = dict[str, Any]


def model_settings(keys: Keys) -> Settings:
    """Arguments of a model from its Hugging Face config. Raises NotExpressible for what they cannot say."""
    kind = keys.get("model_type")
    if kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise NotExpressible(
            f"model_type = {kind!r}: its arguments for Megatron-LM are not known here (valid: {known})"
        )
    try:
        return FAMILIES[kind](keys)
    except KeyError as missing:
        raise NotExpressible(
            f"model: its config has no {missing.args[0]}, which Megatron-LM's arguments need"
        ) from None


def _refuse_unless(keys: Keys, **only: Any) -> None:
    for key, value in only.items():
        if keys.get(key, value) != value:
            rule = "Megatron-LM's arguments cannot say so"
            raise NotExpressible(f"{key} = {keys[key]!r}: {rule} (valid: {'null' if value is None else value})")


def _gpt2(keys: Keys) -> Settings:
    _refuse_unless(keys, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    residual = keys.get("resid_pdrop", 0.1)
    _refuse_unless(keys, embd_pdrop=residual)
    activation = keys.get("activation_function", "gelu_new")
    if activation not in ("gelu", "gelu_new", "gelu_pytorch_tanh"):
        _refuse_unless(keys, activation_function="gelu_new")
    return {
        LAYERS: keys["n_layer"],
        "--hidden-size": keys["n_embd"],
        "--ffn-hidden-size": keys.get("n_inner") or 4 * keys["n_embd"],
        "--num-attention-heads": keys["n_head"],
        "--max-position-embeddings": keys["n_positions"],
        "--position-embedding-type": "learned_absolute",
        "--normalization": "LayerNorm",
        "--norm-epsilon": keys.get("layer_norm_epsilon", 1e-5),
        "--attention-dropout": keys.get("attn_pdrop", 0.1),
        "--hidden-dropout": residual,
        # The fused kernel computes gelu by tanh, as gelu_new (core/fusions/fused_bias_gelu.py).
        **({"--no-bias-gelu-fusion": True} if activation == "gelu" else {}),
        **({} if keys.get("tie_word_embeddings", True) else {UNTIED: True}),
    }


UNTIED = "--untie-embeddings-and-output-weights"


def _gated(keys: Keys, rope: Keys) -> Settings:
    """What all families with rotary positions and SwiGLU have."""
    _refuse_unless(keys, hidden_act="silu", attention_bias=False, mlp_bias=False)
    return {
        LAYERS: keys["num_hidden_layers"],
        "--hidden-size": keys["hidden_size"],
        "--ffn-hidden-size": keys["intermediate_size"],
        "--num-attention-heads": keys["num_attention_heads"],
        "--max-position-embeddings": keys["max_position_embeddings"],
        "--position-embedding-type": "rope",
        "--rotary-base": int(rope.get("rope_theta", keys.get("rope_theta", 10000))),
        "--normalization": "RMSNorm",
        "--norm-epsilon": keys.get("rms_norm_eps", 1e-6),
        "--swiglu": True,
        "--disable-bias-linear": True,
        "--attention-dropout": keys.get("attention_dropout", 0.0),
        "--hidden-dropout": 0.0,
        **({} if keys.get("tie_word_embeddings", False) else {UNTIED: True}),
    }


def _rope(keys: Keys, *known: str) -> tuple[Keys, str]:
    """The rotary positions and their kind. The hub's older files call them rope_scaling, and the kind type."""
    rope = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in known:
        raise NotExpressible(f"rope_type = {kind!r}: Megatron-LM's arguments here know {' and '.join(known)}")
    return rope, kind


def _llama(keys: Keys) -> Settings:
    kind, (rope, scaling) = keys["model_type"], _rope(keys, "default", "llama3")
    _refuse_unless(keys, use_sliding_window=False)
    heads = keys["num_attention_heads"]
    groups = keys.get("num_key_value_heads") or heads
    window = keys.get("sliding_window") if kind in ("mistral", "mixtral") else None
    return {
        **_gated(keys, rope),
        "--kv-channels": keys.get("head_dim") or keys["hidden_size"] // heads,
        **({"--group-query-attention": True, "--num-query-groups": groups} if groups != heads else {}),
        **({"--use-rope-scaling": True, "--rope-scaling-factor": rope["factor"]} if scaling == "llama3" else {}),
        **({"--add-qkv-bias": True} if kind == "qwen2" else {}),
        **({"--qk-layernorm": True} if kind.startswith("qwen3") else {}),
        # The tokens before a token that it sees; the window of transformers counts the token itself.
        **({} if window is None else {"--window-size": f"({window - 1},0)"}),
    }


def _mixtral(keys: Keys) -> Settings:
    return _llama(keys) | _experts(keys, keys["num_local_experts"]) | _balance(keys)


def _qwen3_moe(keys: Keys) -> Settings:
    every, dense = keys.get("decoder_sparse_step", 1), keys.get("mlp_only_layers") or ()
    sparse = [layer not in dense and (layer + 1) % every == 0 for layer in range(keys["num_hidden_layers"])]
    found = _llama(keys) | _experts(keys, keys["num_experts"]) | _balance(keys) | _layers_with_experts(sparse)
    found[EXPERT_SIZE] = keys["moe_intermediate_size"]
    return found if keys.get("norm_topk_prob", False) else found | {SOFTMAX_FIRST: True}


EXPERT_SIZE, SOFTMAX_FIRST = "--moe-ffn-hidden-size", "--moe-router-pre-softmax"


def _experts(keys: Keys, count: int) -> Settings:
    """The last two have Transformer Engine's grouped products and one kernel that orders tokens, as the forecast prices them; Megatron-LM's default
    is one expert after the other."""
    found = {NUM_EXPERTS: count, "--moe-router-topk": keys["num_experts_per_tok"]}
    return {**found, GROUPED: True, PERMUTED: True}


NUM_EXPERTS, GROUPED, PERMUTED = "--num-experts", "--moe-grouped-gemm", "--moe-permute-fusion"
BEFORE_AMPERE = ("volta", "turing")


def on_generation(settings: Settings, generation: str | None) -> Settings:
    """A model's arguments for a generation of GPUs, None = not known: products of experts are grouped from Ampere on (training/arguments.py)."""
    if GROUPED not in settings or generation not in BEFORE_AMPERE:
        return settings
    notice = f"Megatron-LM refuses it below compute capability 8.0 ({generation}), and the forecast counts on it: experts run one after another"
    return {key: value for key, value in settings.items() if key != GROUPED} | {
        f"{NOTICE}grouped": f"{GROUPED}: {notice}"
    }


def _balance(keys: Keys) -> Settings:
    loss = keys.get("router_aux_loss_coef", 0.001)
    return {"--moe-router-load-balancing-type": "aux_loss", "--moe-aux-loss-coeff": loss}


def _layers_with_experts(sparse: Iterable[bool]) -> Settings:
    runs = [(has, len([*same])) for has, same in groupby(sparse)]
    if runs == [(True, runs[0][1])]:
        return {}
    return {"--moe-layer-freq": f"({'+'.join(f'[{int(has)}]*{count}' for has, count in runs)})"}


def _deepseek(keys: Keys) -> Settings:
    v3 = keys["model_type"] == "deepseek_v3"
    layers, dense = keys["num_hidden_layers"], keys["first_k_dense_replace"]
    found = {
        **_gated(keys, _rope(keys, "default", "yarn")[0]),
        "--multi-latent-attention": True,
        **({} if keys["q_lora_rank"] is None else {"--q-lora-rank": keys["q_lora_rank"]}),
        "--kv-lora-rank": keys["kv_lora_rank"],
        "--qk-head-dim": keys["qk_nope_head_dim"],
        "--qk-pos-emb-head-dim": keys["qk_rope_head_dim"],
        "--v-head-dim": keys["v_head_dim"],
        "--qk-layernorm": True,
        **_yarn(keys),
        **_experts(keys, keys["n_routed_experts"]),
        **_layers_with_experts(layer >= dense for layer in range(layers)),
        EXPERT_SIZE: keys["moe_intermediate_size"],
        **({SHARED: keys["n_shared_experts"] * keys["moe_intermediate_size"]} if keys["n_shared_experts"] else {}),
        "--moe-router-load-balancing-type": "none",  # transformers' class has no balance loss
        "--moe-router-dtype": "fp32",
        "--moe-router-topk-scaling-factor": keys.get("routed_scaling_factor", 2.5 if v3 else 1.0),
        **_groups(keys, v3),
    }
    if keys.get("num_nextn_predict_layers"):
        notice = "AHP trains the model without these layers; --mtp-num-layers adds them"
        found[f"{NOTICE}mtp"] = f"num_nextn_predict_layers = {keys['num_nextn_predict_layers']}: {notice}"
    if not v3:
        return found | {SOFTMAX_FIRST: True}
    _refuse_unless(keys, norm_topk_prob=True)
    notice = "Megatron-LM adapts it as DeepSeek-V3's training did, AHP does not (--moe-router-bias-update-rate 0)"
    return found | {
        "--moe-router-score-function": "sigmoid",
        "--moe-router-enable-expert-bias": True,
        "--moe-router-bias-update-rate": 0.001,
        f"{NOTICE}bias": f"e_score_correction_bias: {notice}",
    }


SHARED = "--moe-shared-expert-intermediate-size"


def _yarn(keys: Keys) -> Settings:
    rope, kind = _rope(keys, "default", "yarn")
    if kind == "default":
        # Latent attention has a fused kernel for YaRN alone (core/transformer/transformer_config.py, MLATransformerConfig).
        return {"--rope-type": "rope", "--no-rope-fusion": True}
    notices = (
        f"{key} = {rope[key]:g}: Megatron-LM has no argument for it with latent attention, and takes {fixed:g}"
        for key, fixed in FIXED_IN_YARN.items()
        if rope.get(key, fixed) != fixed
    )
    both = "mscale" in rope and "mscale_all_dim" in rope
    return {
        "--rotary-scaling-factor": rope["factor"],
        "--mscale": rope["mscale"] if both else 1.0,
        "--mscale-all-dim": rope.get("mscale_all_dim", 0.0),
        **{f"{NOTICE}yarn{at}": line for at, line in enumerate(notices)},
    }


FIXED_IN_YARN = {"original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
"""Keys of YaRN without an argument, with their values in MLATransformerConfig."""


def _groups(keys: Keys, v3: bool) -> Settings:
    """Groups of experts of which each token chooses some. Megatron-LM rates a group by its best ``topk // chosen groups`` experts."""
    groups, chosen = keys.get("n_group") or 1, keys.get("topk_group") or 1
    if groups == 1 or (not v3 and keys.get("topk_method") != "group_limited_greedy"):
        return {}
    found: Settings = {"--moe-router-num-groups": groups, "--moe-router-group-topk": chosen}
    rated, own = keys["num_experts_per_tok"] // chosen, 2 if v3 else 1
    if rated != own:
        notice = f"Megatron-LM rates a group of experts by its best {rated}, this model by its best {own}"
        found[f"{NOTICE}groups"] = f"topk_group = {chosen}: {notice}"
    return found


FAMILIES: dict[str, Callable[[Keys], Settings]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _llama),
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _deepseek),
    "gpt2": _gpt2,
}
"""Keyed by model_type. Arguments of Megatron-LM d98e8a6: training/arguments.py and core/transformer/transformer_config.py."""

MODEL_KEYS = (LAYERS, "--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--kv-channels", "--group-query-attention", "--num-query-groups",
              "--max-position-embeddings", "--position-embedding-type", "--rotary-base", "--rotary-percent", "--use-rope-scaling", "--rope-scaling-factor",
              "--normalization", "--norm-epsilon", "--swiglu", "--disable-bias-linear", "--attention-dropout", "--hidden-dropout", "--add-qkv-bias",
              "--qk-layernorm", UNTIED, NUM_EXPERTS, "--moe-router-topk", GROUPED, PERMUTED, "--moe-router-load-balancing-type",
              "--window-size", "--no-bias-gelu-fusion",
              "--moe-aux-loss-coeff", "--vocab-size", "--make-vocab-size-divisible-by", "--use-rotary-position-embeddings", "--attention-backend",
              "--multi-latent-attention", "--q-lora-rank", "--kv-lora-rank", "--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim", "--rope-type",
              "--no-rope-fusion", "--rotary-scaling-factor", "--mscale", "--mscale-all-dim", EXPERT_SIZE, SHARED, "--moe-layer-freq", SOFTMAX_FIRST,
              "--moe-router-dtype", "--moe-router-score-function", "--moe-router-topk-scaling-factor", "--moe-router-num-groups",
              "--moe-router-group-topk", "--moe-router-enable-expert-bias", "--moe-router-bias-update-rate")  # fmt: skip
"""Arguments that describe the model, not the layout."""

UNREAD = ("--multi-latent-attention", "--moe-layer-freq", SHARED)
"""Arguments of a model that ``config_of`` does not read."""


def config_of(settings: Settings) -> dict[str, Any] | None:
    """The Hugging Face config that a script's arguments describe; None if some are missing, or for a family that is not known here."""
    if (
        settings.get("--normalization") != "RMSNorm"
        or not settings.get("--swiglu")
        or any(key in settings for key in UNREAD)
    ):
        return None
    try:
        heads, experts = int(settings["--num-attention-heads"]), settings.get("--num-experts")
        found: dict[str, Any] = {
            "model_type": "qwen3"
            if settings.get("--qk-layernorm")
            else "qwen2"
            if settings.get("--add-qkv-bias")
            else "llama",
            "num_hidden_layers": int(settings[LAYERS]),
            "hidden_size": int(settings["--hidden-size"]),
            "intermediate_size": int(settings["--ffn-hidden-size"]),
            "num_attention_heads": heads,
            "num_key_value_heads": int(settings.get("--num-query-groups", heads)),
            "vocab_size": int(settings["--vocab-size"]),
            "max_position_embeddings": int(
                settings.get("--max-position-embeddings", settings.get("--seq-length", 4096))
            ),
            "tie_word_embeddings": UNTIED not in settings,
        }
        if experts is not None:
            found["num_experts_per_tok"] = int(settings["--moe-router-topk"])
            size = int(settings.get(EXPERT_SIZE, found["intermediate_size"]))
            if found["model_type"] == "qwen3":
                found |= {"model_type": "qwen3_moe", "num_experts": int(experts), "moe_intermediate_size": size}
                found["norm_topk_prob"] = SOFTMAX_FIRST not in settings
            else:
                found |= {"model_type": "mixtral", "num_local_experts": int(experts), "intermediate_size": size}
        if "--kv-channels" in settings and found["model_type"] not in ("qwen2", "mixtral"):
            found["head_dim"] = int(settings["--kv-channels"])
    except (KeyError, ValueError, TypeError):
        return None
    return found
