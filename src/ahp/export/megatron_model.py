"""Megatron-LM's arguments for a model, from its Hugging Face config."""

from __future__ import annotations

from typing import Any

from ahp.errors import NotExpressible
from ahp.export.table import Settings

LAYERS = "--num-layers"


def model_settings(keys: dict[str, Any]) -> Settings:
    """Arguments of a model from its Hugging Face config. Raises NotExpressible for a family that is not known here."""
    kind = keys.get("model_type")
    if kind not in ("llama", "mistral", "qwen2", "qwen3", "mixtral"):
        raise NotExpressible(
            f"model_type = {kind!r}: its arguments for Megatron-LM are not known here (valid: llama, mistral, qwen2, qwen3, mixtral)"
        )
    rope = keys.get("rope_parameters") or {}
    if (scaling := rope.get("rope_type", "default")) not in ("default", "llama3"):
        raise NotExpressible(f"rope_type = {scaling!r}: Megatron-LM's arguments here know default and llama3")
    heads, hidden = keys["num_attention_heads"], keys["hidden_size"]
    groups = keys.get("num_key_value_heads", heads)
    flags = {
        "--group-query-attention": groups != heads,
        "--untie-embeddings-and-output-weights": not keys.get("tie_word_embeddings", False),
        "--add-qkv-bias": kind == "qwen2",
        "--qk-layernorm": kind == "qwen3",
        "--use-rope-scaling": scaling == "llama3",
    }
    return {
        LAYERS: keys["num_hidden_layers"],
        "--hidden-size": hidden,
        "--ffn-hidden-size": keys.get("moe_intermediate_size", keys["intermediate_size"]),
        "--num-attention-heads": heads,
        "--kv-channels": keys.get("head_dim") or hidden // heads,
        **({"--num-query-groups": groups} if groups != heads else {}),
        "--max-position-embeddings": keys["max_position_embeddings"],
        "--position-embedding-type": "rope",
        "--rotary-base": int(rope.get("rope_theta", keys.get("rope_theta", 10000))),
        **({"--rope-scaling-factor": rope["factor"]} if scaling == "llama3" else {}),
        "--normalization": "RMSNorm",
        "--norm-epsilon": keys.get("rms_norm_eps", 1e-6),
        "--swiglu": True,
        "--disable-bias-linear": True,
        "--attention-dropout": 0.0,
        "--hidden-dropout": 0.0,
        **{flag: True for flag, on in flags.items() if on},
        **_experts(keys),
    }


def _experts(keys: dict[str, Any]) -> Settings:
    number_of = keys.get("num_local_experts")
    if not number_of:
        return {}
    loss = keys.get("router_aux_loss_coef", 0.001)
    return {
        "--num-experts": number_of,
        "--moe-router-topk": keys["num_experts_per_tok"],
        "--moe-router-load-balancing-type": "aux_loss",
        "--moe-aux-loss-coeff": loss,
    }


MODEL_KEYS = (LAYERS, "--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--kv-channels", "--group-query-attention", "--num-query-groups",
              "--max-position-embeddings", "--position-embedding-type", "--rotary-base", "--rotary-percent", "--use-rope-scaling", "--rope-scaling-factor",
              "--normalization", "--norm-epsilon", "--swiglu", "--disable-bias-linear", "--attention-dropout", "--hidden-dropout", "--add-qkv-bias",
              "--qk-layernorm", "--untie-embeddings-and-output-weights", "--num-experts", "--moe-router-topk", "--moe-router-load-balancing-type",
              "--moe-aux-loss-coeff", "--vocab-size", "--make-vocab-size-divisible-by", "--use-rotary-position-embeddings", "--attention-backend")  # fmt: skip
"""Arguments that describe the model, not the layout."""


def config_of(settings: Settings) -> dict[str, Any] | None:
    """The Hugging Face config that a script's arguments describe; None if some are missing, or for a family that is not known here."""
    if settings.get("--normalization") != "RMSNorm" or not settings.get("--swiglu"):
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
            "tie_word_embeddings": "--untie-embeddings-and-output-weights" not in settings,
        }
        if experts is not None:
            found |= {
                "model_type": "mixtral",
                "num_local_experts": int(experts),
                "num_experts_per_tok": int(settings["--moe-router-topk"]),
            }
        elif "--kv-channels" in settings and found["model_type"] != "qwen2":
            found["head_dim"] = int(settings["--kv-channels"])
    except (KeyError, ValueError, TypeError):
        return None
    return found
