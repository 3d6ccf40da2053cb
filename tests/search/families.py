"""Small models of every family of transformers that has a hand-written tensor-parallel plan, made without code for any."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
from torch import nn

from ahp.graph.outline import Outline, outline

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 0,
    "eos_token_id": 0, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2, "n_group": 1,
    "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "qk_head_dim": 16, "first_k_dense_replace": 1,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
"""By the names of config keys that families share; what a family calls otherwise keeps its default."""


def families() -> list[str]:
    """Model types of causal and masked language models that have a plan, by name."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    types = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_MASKED_LM_MAPPING_NAMES})
    return [t for t in types if t in CONFIG_MAPPING and getattr(CONFIG_MAPPING[t], "base_model_tp_plan", None)]


def one_of_each_plan() -> list[str]:
    """The first family of each plan: two dozen have llama's."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found: dict[str, str] = {}
    for model_type in families():
        found.setdefault(repr(sorted(_of_blocks(CONFIG_MAPPING[model_type].base_model_tp_plan).items())), model_type)
    return sorted(found.values())


def small_config(model_type: str, **more: Any) -> Any:
    """A config of the type with the small sizes, no dropout, and ``more``."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    known = {field.name for field in dataclasses.fields(kind)}
    sizes = {kind.attribute_map.get(name, name): value for name, value in SIZES.items()}
    keys = {name: value for name, value in sizes.items() if name in known}
    keys |= {name: 0.0 for name in known if name.endswith(("dropout", "dropout_prob", "pdrop", "dropout_rate"))}
    return kind(**{**keys, **more})


def build(model_type: str, device: str = "meta", **more: Any) -> nn.Module:
    """A small model of the type; raises whatever transformers raises."""
    from ahp.graph.models import build_model

    return build_model(small_config(model_type, **more), device=torch.device(device))


TRIES: tuple[dict[str, Any], ...] = ({}, {"num_key_value_heads": 4}, {"layer_types": ["full_attention"] * 2})
"""What the rules of some families ask for beside the small sizes: a key head for each head, or a type for each layer."""


def traced(model_type: str) -> tuple[nn.Module, Outline]:
    """A small model of the type and its outline, by the first of the tries that works; raises what the first raised."""
    first: Exception | None = None
    for more in TRIES:
        try:
            module = build(model_type, **more)
            return module, outline(module, batch_size=2, sequence_length=16)
        except Exception as error:
            first = first or error
    assert first is not None
    raise first


def written_plan(config: Any) -> dict[str, str]:
    """The hand-written plan of a block, by the path within it: ``self_attn.q_proj`` -> ``colwise``."""
    return _of_blocks((config.get_text_config() if hasattr(config, "get_text_config") else config).base_model_tp_plan)


def _of_blocks(plan: dict[str, str] | None) -> dict[str, str]:
    return {key.partition(".*.")[2]: style for key, style in (plan or {}).items() if key.startswith("layers.*.")}


def generic(name: str) -> str:
    """A name of a weight with its numbers as ``*``."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
