"""nanotron's YAML, as ``ahp check`` reads it; no plan is written in this form.

Keys as in nanotron 2411b022: config/config.py, config/parallelism_config.py, parallel/context.py. AHP has no engine for it:
its steps are priced as torchtitan's without compiled blocks, as its published runs are (benchmarks/accuracy_rows.py).
"""

from __future__ import annotations

from typing import Any

from ahp.errors import NotExpressible
from ahp.export.table import (
    STATES,
    Dialect,
    Fields,
    Rule,
    Settings,
    Subject,
    Unreadable,
    from_yaml,
    one_kind_of_replicas,
    same,
    size,
    understood,
    value_of,
    whole,
    word_of,
)

P, J, ADAM = "parallelism.", "job.", "job.optimizer."
DATA, PIPE, TENSOR = (f"parallelism.{name}" for name in ("dp", "pp", "tp"))
CONTEXT, EXPERT = "parallelism.context_parallel_size", "parallelism.expert_parallel_size"
MODE, ORDER, RECOMPUTE = "parallelism.tp_mode", "parallelism.pp_engine", "parallelism.recompute_layer"
STAGE, MICRO, ACCUMULATION = "optimizer.zero_stage", "tokens.micro_batch_size", "tokens.batch_accumulation_per_replica"
TYPE, RATE = "model.dtype", "optimizer.learning_rate_scheduler."
MODEL = "model.model_config."
ORDERS = {"1f1b": "1F1B", "afab": "GPipe"}
TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
OF_MODEL = ("hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers",
            "num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "vocab_size")  # fmt: skip
"""Keys of its model that Hugging Face's config has under the same name."""
BESIDE_CONTEXT = "nanotron shards states over data-parallel ranks alone, AHP over context ranks too"


def _write_data(s: Subject) -> Settings:
    p, sharded = s.p, s.p.weight_shards > 1
    if sharded and p.zero_stage > 1:
        raise NotExpressible(f"zero_stage = {p.zero_stage}: nanotron shards optimizer states alone (valid: 0, 1)")
    if sharded and p.data_parallel_replicate_degree > 1:
        key = f"data_parallel_replicate_degree = {p.data_parallel_replicate_degree}"
        raise NotExpressible(f"{key}: nanotron shards states over all data-parallel ranks (valid: 1)")
    if sharded and p.context_parallel_degree > 1:
        raise NotExpressible(f"context_parallel_degree = {p.context_parallel_degree}: {BESIDE_CONTEXT} (valid: 1)")
    return {
        DATA: p.data_parallel_degree,
        STAGE: int(sharded),
        MICRO: p.micro_batch_size,
        ACCUMULATION: p.num_micro_batches(s.job),
    }


def _read_data(settings: Settings) -> Fields:
    ranks, stage = whole(settings.get(DATA, "missing"), DATA), whole(settings.get(STAGE, 0), STAGE, 0)
    if stage > 1:
        raise Unreadable(f"{STAGE} = {stage}: nanotron shards optimizer states alone (valid: 0, 1)")
    micro, number = (whole(settings.get(key, "missing"), key) for key in (MICRO, ACCUMULATION))
    stage = stage if ranks > 1 else 0
    if stage and whole(settings.get(CONTEXT, 1), CONTEXT) > 1:
        raise Unreadable(f"{STAGE} = {stage}, {CONTEXT} = {settings[CONTEXT]}: {BESIDE_CONTEXT}")
    return one_kind_of_replicas(ranks, stage, micro, ranks * micro * number)


def _write_mode(s: Subject) -> Settings:
    if s.p.tensor_parallel_degree == 1:
        return {}
    return {MODE: "REDUCE_SCATTER" if s.p.enable_sequence_parallel else "ALL_REDUCE"}


def _read_mode(settings: Settings) -> Fields:
    mode = str(settings.get(MODE, "ALL_REDUCE")).upper()
    if mode not in ("REDUCE_SCATTER", "ALL_REDUCE"):
        raise Unreadable(f"{MODE} = {mode!r}: nanotron has ALL_REDUCE and REDUCE_SCATTER")
    on = mode == "REDUCE_SCATTER" and whole(settings.get(TENSOR, 1), TENSOR) > 1
    return {P + "enable_sequence_parallel": on}


def _write_order(s: Subject) -> Settings:
    if s.p.pipeline_parallel_degree == 1:
        return {}
    return {ORDER: word_of(s, P + "pipeline_parallel_schedule", ORDERS, "nanotron")}


def _read_order(settings: Settings) -> Fields:
    if whole(settings.get(PIPE, 1), PIPE) == 1:
        return {}
    return {P + "pipeline_parallel_schedule": value_of(settings, ORDER, ORDERS, "afab")}


def _read_experts(settings: Settings) -> Fields:
    degree = whole(settings.get(EXPERT, 1), EXPERT)
    if degree > 1:
        why = "its expert ranks are a dim of their own beside the data-parallel ones, which no layout of AHP has"
        raise Unreadable(f"{EXPERT} = {degree}: {why}")
    return {P + "expert_parallel_degree": 1}


def _write_recompute(s: Subject) -> Settings:
    kind = s.p.activation_checkpoint
    if kind not in ("none", "full"):
        raise NotExpressible(f"activation_checkpoint = {kind!r}: nanotron recomputes whole layers (valid: none, full)")
    return {RECOMPUTE: kind == "full"}


def _write_rate(s: Subject) -> Settings:
    return {RATE + "lr_decay_style": s.job.optimizer.schedule}


def _read_rate(settings: Settings) -> Fields:
    style = settings.get(RATE + "lr_decay_style", "linear")
    if style not in ("linear", "cosine"):
        raise Unreadable(f"{RATE}lr_decay_style = {style!r}: AHP has linear and cosine")
    return {ADAM + "schedule": style}


BETAS = tuple(f"optimizer.optimizer_factory.adam_beta{at}" for at in (1, 2))


def _read_betas(settings: Settings) -> Fields:
    return {ADAM + "betas": [settings[key] for key in BETAS]} if all(key in settings for key in BETAS) else {}


DIALECT = Dialect(
    engine="torchtitan",
    program="nanotron",
    version="0.5",
    source="nanotron 2411b022, config/config.py",
    rules=(
        Rule((DATA, STAGE, MICRO, ACCUMULATION), (*STATES, P + "micro_batch_size", J + "global_batch_size"), _write_data, _read_data),
        size(TENSOR, "tensor_parallel_degree"),
        size(PIPE, "pipeline_parallel_degree"),
        size(CONTEXT, "context_parallel_degree"),
        Rule((MODE,), (P + "enable_sequence_parallel",), _write_mode, _read_mode),
        Rule((ORDER,), (P + "pipeline_parallel_schedule",), _write_order, _read_order),
        Rule((EXPERT,), (P + "expert_parallel_degree",), lambda s: {EXPERT: s.p.expert_parallel_degree}, _read_experts),
        Rule((RECOMPUTE,), (P + "activation_checkpoint",), _write_recompute,
             lambda settings: {P + "activation_checkpoint": "full" if settings.get(RECOMPUTE) else "none"}),
        Rule((), ("engine.compile",), lambda s: {}, lambda settings: {"engine.compile": False}),
        Rule((TYPE,), (J + "precision",), lambda s: {TYPE: word_of(s, J + "precision", TYPES, "nanotron")},
             lambda settings: {J + "precision": value_of(settings, TYPE, TYPES, "bfloat16")}),
        same("tokens.sequence_length", J + "sequence_length"),
        same("tokens.train_steps", J + "steps"),
        same("general.seed", J + "seed", 42),
        same(RATE + "learning_rate", ADAM + "learning_rate"),
        same(RATE + "lr_warmup_steps", ADAM + "warmup_steps", 0),
        Rule((RATE + "lr_decay_style",), (ADAM + "schedule",), _write_rate, _read_rate),
        Rule(BETAS, (ADAM + "betas",), lambda s: dict(zip(BETAS, s.job.optimizer.betas, strict=True)), _read_betas),
        same("optimizer.optimizer_factory.adam_eps", ADAM + "eps"),
        same("optimizer.weight_decay", ADAM + "weight_decay"),
        same("optimizer.clip_grad", ADAM + "grad_clip"),
        understood(*(MODEL + name for name in OF_MODEL)),
    ),
    other=("checkpoints", "data_stages", "general.", "lighteval", "logging", "metrics_logging", "profiler", "s3_upload", "tokenizer", "tokens.limit_", "tokens.val_",
           "model.init_method", "model.ddp_bucket", "model.make_vocab", MODEL + "is_", MODEL + "bos", MODEL + "eos", MODEL + "pad", MODEL + "initializer",
           MODEL + "pretraining_tp", MODEL + "use_cache", "optimizer.optimizer_factory.name", "optimizer.optimizer_factory.torch_adam", RATE + "lr_", RATE + "min_",
           "parallelism.tp_recompute_allgather"),
    spaces=tuple({"zero_stage": stage, "activation_checkpoint": kind, "pipeline_parallel_schedule": "1F1B", "virtual_stages_per_rank": 1}
                 for stage in (1, 0) for kind in ("none", "full")),
)  # fmt: skip


def parse(text: str) -> Settings:
    """Keys with a value: null counts as missing. Raises BadInput for text that is no YAML mapping."""
    found = from_yaml(text, "nanotron's YAML")
    return {key: value for key, value in found.items() if value is not None and value != {} and value != []}


def config_of(settings: Settings) -> dict[str, Any] | None:
    """The Hugging Face config that the settings describe; None for families other than its llama and qwen2, and for experts."""
    kinds = {kind for kind in ("llama", "qwen2") if settings.get(f"{MODEL}is_{kind}_config")}
    if not kinds or any(key.startswith(f"{MODEL}moe_config") for key in settings):
        return None
    # Its Qwen2Config without biases has llama's blocks (models/qwen.py).
    kind = "qwen2" if kinds == {"qwen2"} and settings.get(MODEL + "attention_bias") else "llama"
    found = {name: settings[MODEL + name] for name in OF_MODEL if MODEL + name in settings}
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    if any(not isinstance(found.get(name), int) for name in needed):
        return None
    return {
        "model_type": kind,
        "num_key_value_heads": found["num_attention_heads"],
        "tie_word_embeddings": False,
    } | found
