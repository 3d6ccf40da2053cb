"""Models by name: plain Hugging Face config keys, each with its source and its published parameter count.

Dropout is 0 everywhere, even where the first papers used 0.1 (GPT-2, BERT): pre-training on more text than one epoch
does without it, and it must be off for the same loss under every plan. A user's own config keeps its dropout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """``parameters`` is the published count (a tied weight counts once); ``source`` says where config and count come from."""

    config: dict[str, Any]
    parameters: int
    source: str


LLAMA1 = "arXiv:2302.13971 table 2 (6.7B, 13.0B, 32.5B, 65.2B); config.json and safetensors count of the hub's copies"
LLAMA2 = "hub: meta-llama/Llama-2-*-hf, config.json and safetensors count"
LLAMA3 = (
    "hub: meta-llama/Llama-3*, Llama-3.1-* and Llama-3.2-*, config.json and safetensors count; arXiv:2407.21783 table 3"
)
QWEN3 = "hub: Qwen/Qwen3-*, config.json and safetensors count, in which a tied head counts once; arXiv:2505.09388 tables 1, 2"
DEEPSEEK = (
    "hub: deepseek-ai/{}, config.json; {}, without the layers that predict further tokens; count of transformers' class"
)
KIMI = "hub: moonshotai/Kimi-K2-Base, config.json; 1 T published; count of transformers' class"
GPT_OSS = "hub: openai/gpt-oss-*, config.json; arXiv:2508.10925 table 1 (116.83B, 20.91B)"
GPT2 = "hub: openai-community/gpt2*, config.json; count of GPT2LMHeadModel"
GPT3 = "arXiv:2005.14165 table 2.1, which rounds the count (1.3B: 16 heads x 128; 13B: d_model read as 40 x 128 = 5120)"
BERT = "hub: google-bert/bert-*-uncased, config.json; count of the masked LM, without pooler and next-sentence head"


def _llama(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int | None = None, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    } | more


def _llama1(hidden: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    return _llama(hidden, inner, layers, heads, max_position_embeddings=2048, rms_norm_eps=1e-6)


def _llama3(
    hidden: int, inner: int, layers: int, heads: int, factor: float | None = None, **more: Any
) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 500000.0}
    if factor is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    tokens = {"bos_token_id": 128000, "eos_token_id": 128001, "vocab_size": 128256}
    length = {"max_position_embeddings": 8192 if factor is None else 131072}
    return _llama(hidden, inner, layers, heads, 8, rope_parameters=rope) | tokens | length | more


def _gpt(hidden: int, layers: int, heads: int, positions: int = 1024) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": positions,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


def _bert(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "bert",
        "vocab_size": 30522,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "attention_probs_dropout_prob": 0.0,
        "hidden_dropout_prob": 0.0,
    }


def _with_type(model_type: str, config: dict[str, Any], **more: Any) -> dict[str, Any]:
    return config | {"model_type": model_type} | more


def _qwen3(hidden: int, inner: int, layers: int, heads: int, kv_heads: int = 8, **more: Any) -> dict[str, Any]:
    shape = {"vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}
    return _with_type("qwen3", _llama(hidden, inner, layers, heads, kv_heads), **shape, **rope) | more


def _qwen3_moe(hidden: int, inner: int, layers: int, heads: int, expert: int) -> dict[str, Any]:
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert, "norm_topk_prob": True}
    return _qwen3(hidden, inner, layers, heads, 4, model_type="qwen3_moe") | experts


def _yarn(theta: float, factor: float, beta: tuple[float, float] = (32.0, 1.0), **more: Any) -> dict[str, Any]:
    fast, slow = beta
    rope = {"rope_type": "yarn", "rope_theta": theta, "factor": factor, "beta_fast": fast, "beta_slow": slow}
    return rope | {"original_max_position_embeddings": 4096} | more


def _deepseek(
    hidden: int, inner: int, layers: int, heads: int, experts: int, expert: int, rope: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """Latent attention, a shared expert, and some layers without experts at the start."""
    latent = {
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    }
    routed = {
        "n_routed_experts": experts,
        "moe_intermediate_size": expert,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
    }
    groups = {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "first_k_dense_replace": 1}
    length = {"max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_parameters": rope}
    plain = _llama(hidden, inner, layers, heads, model_type="deepseek_v3")
    return plain | latent | routed | groups | length | more


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    """Attention to a learned sink, which transformers computes in parts; every second layer sees 128 tokens."""
    shape = {"vocab_size": 201088, "head_dim": 64, "max_position_embeddings": 131072, "sliding_window": 128}
    routed = {"num_local_experts": experts, "num_experts_per_tok": 4}
    rope = {"rope_parameters": _yarn(150000.0, 32.0, truncate=False)}
    return _llama(2880, 2880, layers, 64, 8, model_type="gpt_oss") | shape | routed | rope


CATALOGUE: dict[str, CatalogueModel] = {
    "tiny": CatalogueModel(
        _llama(256, 704, 4, 8, 4, vocab_size=2048, max_position_embeddings=1024),
        4_000_000,
        "made for AHP: a LLaMA that two CPU cores train in minutes; counted, not published",
    ),
    "llama-7b": CatalogueModel(_llama1(4096, 11008, 32, 32), 6_738_415_616, LLAMA1),
    "llama-13b": CatalogueModel(_llama1(5120, 13824, 40, 40), 13_015_864_320, LLAMA1),
    "llama-30b": CatalogueModel(_llama1(6656, 17920, 60, 52), 32_528_943_616, LLAMA1),
    "llama-65b": CatalogueModel(_llama1(8192, 22016, 80, 64), 65_285_660_672, LLAMA1),
    "llama2-7b": CatalogueModel(_llama(4096, 11008, 32, 32), 6_738_415_616, LLAMA2),
    "llama2-13b": CatalogueModel(_llama(5120, 13824, 40, 40), 13_015_864_320, LLAMA2),
    "llama2-70b": CatalogueModel(_llama(8192, 28672, 80, 64, 8), 68_976_648_192, LLAMA2),
    "llama3-8b": CatalogueModel(_llama3(4096, 14336, 32, 32), 8_030_261_248, LLAMA3),
    "llama3-70b": CatalogueModel(_llama3(8192, 28672, 80, 64), 70_553_706_496, LLAMA3),
    "llama3-405b": CatalogueModel(_llama3(16384, 53248, 126, 128, 8.0), 405_853_388_800, LLAMA3),
    "llama3.1-8b": CatalogueModel(_llama3(4096, 14336, 32, 32, 8.0), 8_030_261_248, LLAMA3),
    "llama3.1-70b": CatalogueModel(_llama3(8192, 28672, 80, 64, 8.0), 70_553_706_496, LLAMA3),
    "llama3.1-405b": CatalogueModel(_llama3(16384, 53248, 126, 128, 8.0), 405_853_388_800, LLAMA3),
    "llama3.2-1b": CatalogueModel(
        _llama3(2048, 8192, 16, 32, 32.0, tie_word_embeddings=True, head_dim=64), 1_235_814_400, LLAMA3
    ),
    "llama3.2-3b": CatalogueModel(
        _llama3(3072, 8192, 28, 24, 32.0, tie_word_embeddings=True, head_dim=128), 3_212_749_824, LLAMA3
    ),
    "gpt2": CatalogueModel(_gpt(768, 12, 12), 124_439_808, GPT2),
    "gpt2-medium": CatalogueModel(_gpt(1024, 24, 16), 354_823_168, GPT2),
    "gpt2-large": CatalogueModel(_gpt(1280, 36, 20), 774_030_080, GPT2),
    "gpt2-xl": CatalogueModel(_gpt(1600, 48, 25), 1_557_611_200, GPT2),
    "gpt3-1.3b": CatalogueModel(_gpt(2048, 24, 16, 2048), 1_300_000_000, GPT3),
    "gpt3-2.7b": CatalogueModel(_gpt(2560, 32, 32, 2048), 2_700_000_000, GPT3),
    "gpt3-6.7b": CatalogueModel(_gpt(4096, 32, 32, 2048), 6_700_000_000, GPT3),
    "gpt3-13b": CatalogueModel(_gpt(5120, 40, 40, 2048), 13_000_000_000, GPT3),
    "gpt3-175b": CatalogueModel(_gpt(12288, 96, 96, 2048), 175_000_000_000, GPT3),
    "bert-base": CatalogueModel(_bert(768, 12, 12), 109_514_298, BERT),
    "bert-large": CatalogueModel(_bert(1024, 24, 16), 335_174_458, BERT),
    "mistral-7b": CatalogueModel(
        _with_type("mistral", _llama(4096, 14336, 32, 32, 8), sliding_window=4096, max_position_embeddings=32768),
        7_241_732_096,
        "hub: mistralai/Mistral-7B-v0.1, config.json and safetensors count",
    ),
    "qwen2.5-7b": CatalogueModel(
        _with_type(
            "qwen2",
            _llama(3584, 18944, 28, 28, 4),
            vocab_size=152064,
            max_position_embeddings=131072,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        ),
        7_615_616_512,
        "hub: Qwen/Qwen2.5-7B, config.json and safetensors count",
    ),
    "qwen3-0.6b": CatalogueModel(_qwen3(1024, 3072, 28, 16, tie_word_embeddings=True), 596_049_920, QWEN3),
    "qwen3-1.7b": CatalogueModel(_qwen3(2048, 6144, 28, 16, tie_word_embeddings=True), 1_720_574_976, QWEN3),
    "qwen3-4b": CatalogueModel(_qwen3(2560, 9728, 36, 32, tie_word_embeddings=True), 4_022_468_096, QWEN3),
    "qwen3-8b": CatalogueModel(_qwen3(4096, 12288, 36, 32), 8_190_735_360, QWEN3),
    "qwen3-14b": CatalogueModel(_qwen3(5120, 17408, 40, 40), 14_768_307_200, QWEN3),
    "qwen3-32b": CatalogueModel(_qwen3(5120, 25600, 64, 64), 32_762_123_264, QWEN3),
    "qwen3-30b-a3b": CatalogueModel(_qwen3_moe(2048, 6144, 48, 32, 768), 30_532_122_624, QWEN3),
    "qwen3-235b-a22b": CatalogueModel(_qwen3_moe(4096, 12288, 94, 64, 1536), 235_093_634_560, QWEN3),
    "mixtral-8x7b": CatalogueModel(
        _with_type(
            "mixtral",
            _llama(4096, 14336, 32, 32, 8),
            num_local_experts=8,
            num_experts_per_tok=2,
            max_position_embeddings=32768,
            sliding_window=None,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        ),
        46_702_792_704,
        "hub: mistralai/Mixtral-8x7B-v0.1, config.json and safetensors count",
    ),
    "mixtral-8x22b": CatalogueModel(
        _with_type(
            "mixtral",
            _llama(6144, 16384, 56, 48, 8),
            num_local_experts=8,
            num_experts_per_tok=2,
            max_position_embeddings=65536,
            sliding_window=None,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        ),
        140_620_634_112,
        "hub: mistralai/Mixtral-8x22B-v0.1, config.json and safetensors count",
    ),
    "deepseek-v2-lite": CatalogueModel(
        _deepseek(
            2048,
            10944,
            27,
            16,
            64,
            1408,
            _yarn(10000.0, 40.0, mscale=0.707, mscale_all_dim=0.707),
            model_type="deepseek_v2",
            vocab_size=102400,
            q_lora_rank=None,
            n_shared_experts=2,
            num_experts_per_tok=6,
            norm_topk_prob=False,
            routed_scaling_factor=1.0,
            topk_method="greedy",
        ),
        15_706_484_224,
        DEEPSEEK.format("DeepSeek-V2-Lite", "15.7 B published"),
    ),
    "deepseek-v3": CatalogueModel(
        _deepseek(
            7168,
            18432,
            61,
            128,
            256,
            2048,
            _yarn(10000.0, 40.0, mscale=1.0, mscale_all_dim=1.0),
            vocab_size=129280,
            n_group=8,
            topk_group=4,
            first_k_dense_replace=3,
            routed_scaling_factor=2.5,
        ),
        671_026_404_352,
        DEEPSEEK.format("DeepSeek-V3", "671 B published (arXiv:2412.19437)"),
    ),
    "kimi-k2": CatalogueModel(
        _deepseek(
            7168,
            18432,
            61,
            64,
            384,
            2048,
            _yarn(50000.0, 32.0, (1.0, 1.0), mscale=1.0, mscale_all_dim=1.0),
            vocab_size=163840,
            max_position_embeddings=131072,
            routed_scaling_factor=2.827,
        ),
        1_026_408_209_408,
        KIMI,
    ),
    "gpt-oss-20b": CatalogueModel(_gpt_oss(24, 32), 20_914_757_184, GPT_OSS),
    "gpt-oss-120b": CatalogueModel(_gpt_oss(36, 128), 116_829_156_672, GPT_OSS),
}


SIZES = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "num_local_experts", "num_experts_per_tok", "tie_word_embeddings",
)  # fmt: skip
"""Keys that decide what a step of a model costs."""


def with_sizes(keys: dict[str, Any]) -> str | None:
    """The name of a model with the sizes of a config and no shorter context; None if there is none."""
    if "hidden_size" not in keys:  # GPT-2 has other names for its sizes
        return None
    sizes, length = _sizes(keys), keys.get("max_position_embeddings", 0)
    alike = (name for name, model in CATALOGUE.items() if _sizes(model.config) == sizes)
    return next((name for name in alike if CATALOGUE[name].config["max_position_embeddings"] >= length), None)


def _sizes(keys: dict[str, Any]) -> dict[str, Any]:
    head_dim = keys.get("hidden_size", 0) // keys.get("num_attention_heads", 1)
    return {"head_dim": head_dim} | {key: keys[key] for key in SIZES if keys.get(key) is not None}
