"""MaxText's YAML, and the line that starts it with ``key=value`` after the YAML, as ``ahp check`` reads them; no plan is written in this form.

Keys and defaults as in MaxText e591f30: configs/base.yml, configs/pyconfig.py. AHP has no engine for it: XLA's compiled blocks with weights
sharded over the fsdp axis are priced as compiled blocks of AHP's own runtime with ZeRO stage 3.
"""

from __future__ import annotations

from math import gcd
from pathlib import Path
from typing import Any

from ahp.errors import NotExpressible
from ahp.export.table import (
    Dialect,
    Fields,
    Rule,
    Settings,
    Subject,
    Unreadable,
    from_yaml,
    same,
    understood,
    value_of,
    whole,
    word_of,
)
from ahp.export.target import shape_of_plan
from ahp.graph.catalogue import CATALOGUE

P, J, ADAM = "parallelism.", "job.", "job.optimizer."
SHARDED = ("fsdp", "fsdp_transpose")
"""Axes over which weights are sharded and sequences divided."""
DEGREES = {"data": "data_parallel_replicate_degree", "tensor": "tensor_parallel_degree", "context": "context_parallel_degree",
           "expert": "expert_parallel_degree"}  # fmt: skip
STRANGE = (
    "diloco",
    "sequence",
    "context_usp_ulysses",
    "context_autoregressive",
    "tensor_sequence",
    "autoregressive",
    "pipeline",
)
"""Axes that no layout of AHP has; its pipeline is circular, with weights that move around."""
AXES = (*DEGREES, *SHARDED, *STRANGE)
DEFAULTS = {"dcn_data_parallelism": -1, "ici_fsdp_parallelism": -1}
"""Defaults of the axis keys; all others are 1."""
AXIS_KEYS = tuple(f"{net}_{axis}_parallelism" for net in ("ici", "dcn") for axis in AXES)
BATCH, ACCUMULATION, LENGTH = "per_device_batch_size", "gradient_accumulation_steps", "max_target_length"
POLICY, TYPE, QUANTIZED = "remat_policy", "dtype", "quantization"
POLICIES = {"full": "full", "minimal_with_context": "selective", "none": "none"}
"""minimal_with_context keeps the results of products and of attention (layers/decoders.py, minimal_policy), as AHP's selective recompute does."""
ALIKE = {"minimal_flash": "minimal_with_context", "minimal_with_context_and_quantization": "minimal_with_context"}
"""Other names of one policy: an older name, and a policy that also keeps what was quantized, which is nothing without quantization."""
BETWEEN = {
    "minimal": "the results of products, and recomputes attention",
    "minimal_with_quantization": "the results of products and what was quantized, and recomputes attention",
    "minimal_with_context_and_quantization": "what was quantized, too",
    "save_dot_with_context_except_mlp": "products and attention, and recomputes the MLP",
    "save_dot_except_mlpwi": "products but the first of the MLP, and recomputes attention",
    "save_dot_except_mlp": "the products of attention alone",
    "save_qkv_proj": "queries, keys and values alone",
    "save_out_proj": "the output of attention alone",
    "qkv_proj_offloaded": "queries, keys and values in host memory",
    "minimal_offloaded": "the results of products in host memory",
}
"""What the other policies keep (get_remat_policy); no engine of AHP has such a policy."""
WHOLE = (("context",), ("out_proj",), ("mlpwo",), ("qkv_proj", "query_proj"), ("qkv_proj", "key_proj", "kv_proj"), ("qkv_proj", "value_proj", "kv_proj"),
         ("mlpwi", "mlpwi_0"), ("mlpwi", "mlpwi_1"))  # fmt: skip
"""Results of a block that ``custom`` places; each group has the names that models' layers give to one result."""
PLACED = tuple(dict.fromkeys(name for group in WHOLE for name in group))
TYPES = {"bfloat16": "bf16", "float32": "fp32"}
OF_MODEL = {"base_emb_dim": "hidden_size", "base_mlp_dim": "intermediate_size", "base_num_decoder_layers": "num_hidden_layers",
            "base_num_query_heads": "num_attention_heads", "base_num_kv_heads": "num_key_value_heads", "head_dim": "head_dim", "vocab_size": "vocab_size"}  # fmt: skip
DEFAULT_MODEL = {"base_emb_dim": 2048, "base_mlp_dim": 7168, "base_num_decoder_layers": 16, "base_num_query_heads": 16, "base_num_kv_heads": 16,
                 "head_dim": 128, "vocab_size": 32_000}  # fmt: skip


def _axis(settings: Settings, axis: str) -> int:
    """Ranks along an axis, within nodes and between them. Raises Unreadable for an axis that is left open."""
    found = 1
    for key in (f"ici_{axis}_parallelism", f"dcn_{axis}_parallelism"):
        size = whole(settings.get(key, DEFAULTS.get(key, 1)), key, -1)
        if size < 1:
            raise Unreadable(
                f"{key} = {size}: this means the remaining devices, and the number of devices is not known"
            )
        found *= size
    return found


def filled(settings: Settings, nodes: int, per_node: int) -> Settings:
    """Settings with each network's axis of -1 set to what its others leave (ici of a node, dcn of nodes). Raises Unreadable if they do not divide."""
    found = dict(settings)
    for net, devices in (("ici", per_node), ("dcn", nodes)):
        keys = [f"{net}_{axis}_parallelism" for axis in AXES]
        sizes = {key: whole(settings.get(key, DEFAULTS.get(key, 1)), key, -1) for key in keys}
        open_ones, others = [key for key, size in sizes.items() if size == -1], 1
        for size in sizes.values():
            others *= abs(size)
        if len(open_ones) > 1 or not open_ones:
            continue
        if not others or devices % others:
            raise Unreadable(
                f"{open_ones[0]} = -1: the other {net} axes make {others}, which does not divide {devices}"
            )
        found[open_ones[0]] = devices // others
    return found


def _read_layout(settings: Settings) -> Fields:
    for axis in STRANGE:
        if (size := _axis(settings, axis)) > 1:
            raise Unreadable(f"ici/dcn_{axis}_parallelism = {size}: no layout of AHP has this axis")
    found: Fields = {P + name: _axis(settings, axis) for axis, name in DEGREES.items()}
    # The expert axis has its own sequences, like the data axes, and weights outside of experts are sharded over it.
    shards = _axis(settings, "fsdp") * _axis(settings, "fsdp_transpose") * found[P + "expert_parallel_degree"]
    zero = 3 if shards * found[P + "context_parallel_degree"] > 1 else 0
    return found | {
        P + "data_parallel_shard_degree": shards,
        P + "zero_stage": zero,
        P + "enable_sequence_parallel": found[P + "tensor_parallel_degree"] > 1,
    }


def _write_layout(s: Subject) -> Settings:
    p = s.p
    if p.weight_shards > 1 and p.zero_stage != 3:
        raise NotExpressible(f"zero_stage = {p.zero_stage}: MaxText's fsdp axis shards weights (valid: 3)")
    if p.pipeline_parallel_degree > 1:
        raise NotExpressible(
            f"pipeline_parallel_degree = {p.pipeline_parallel_degree}: MaxText's pipeline has another schedule (valid: 1)"
        )
    if p.tensor_parallel_degree > 1 and not p.enable_sequence_parallel:
        raise NotExpressible("enable_sequence_parallel = False: MaxText divides activations too (valid: True)")
    if p.data_parallel_shard_degree % p.expert_parallel_degree:
        key = f"expert_parallel_degree = {p.expert_parallel_degree}"
        raise NotExpressible(
            f"{key}: MaxText's expert axis is one of data (valid: divisors of {p.data_parallel_shard_degree})"
        )
    nodes, fsdp = shape_of_plan(s.plan, Path("plan")).most, p.data_parallel_shard_degree // p.expert_parallel_degree
    between = gcd(p.data_parallel_replicate_degree, nodes)
    sharded = gcd(fsdp, nodes // between)
    if nodes > between * sharded:
        raise NotExpressible(f"{p.short()}: {nodes} nodes do not divide among MaxText's dcn axes of data and fsdp")
    sizes = {
        "ici_data_parallelism": p.data_parallel_replicate_degree // between,
        "ici_tensor_parallelism": p.tensor_parallel_degree,
        "ici_context_parallelism": p.context_parallel_degree,
        "ici_expert_parallelism": p.expert_parallel_degree,
        "dcn_fsdp_parallelism": sharded,
    }
    always = {"ici_fsdp_parallelism": fsdp // sharded, "dcn_data_parallelism": between}
    return always | {key: size for key, size in sizes.items() if size > 1}


LAYOUT_FIELDS = tuple(
    P + name
    for name in (*DEGREES.values(), "data_parallel_shard_degree", "zero_stage", "enable_sequence_parallel", "pipeline_parallel_degree")
)  # fmt: skip


def _read_batch(settings: Settings) -> Fields:
    each, number = float(settings.get(BATCH, 12.0)), whole(settings.get(ACCUMULATION, 1), ACCUMULATION)
    layout = _read_layout(settings)
    ranks = layout[P + DEGREES["data"]] * layout[P + "data_parallel_shard_degree"]
    sharing = layout[P + DEGREES["tensor"]] * layout[P + DEGREES["context"]]
    micro = each * sharing
    if micro < 1 or micro != int(micro):
        raise Unreadable(
            f"{BATCH} = {each}: {micro:g} sequences for {sharing} ranks that share them; AHP gives them whole ones"
        )
    return {P + "micro_batch_size": int(micro), J + "global_batch_size": int(micro) * ranks * number}


def _write_batch(s: Subject) -> Settings:
    sharing = s.p.tensor_parallel_degree * s.p.context_parallel_degree
    return {BATCH: s.p.micro_batch_size / sharing, ACCUMULATION: s.p.num_micro_batches(s.job)}


def _write_policy(s: Subject) -> Settings:
    return {POLICY: word_of(s, P + "activation_checkpoint", POLICIES, "MaxText")}


def _read_policy(settings: Settings) -> Fields:
    given = settings.get(POLICY, "full")
    if given == "custom":
        return {P + "activation_checkpoint": _custom(settings)}
    plain = given if given in BETWEEN and settings.get(QUANTIZED) else ALIKE.get(given, given)
    if plain in BETWEEN:
        raise Unreadable(
            f"{POLICY} = {given!r}: it keeps {BETWEEN[plain]}; no engine of AHP does (valid: {', '.join(POLICIES)})"
        )
    if plain not in POLICIES:
        raise Unreadable(f"{POLICY} = {given!r}: MaxText has no such policy (valid: {', '.join(POLICIES)})")
    return {P + "activation_checkpoint": POLICIES[plain]}


def _custom(settings: Settings) -> str:
    """The recompute that ``custom`` means, which places each result by its name: all kept is selective, none is full."""
    places = {name: settings.get(name, "remat") for name in PLACED}
    if strange := [f"{name} = {place!r}" for name, place in places.items() if place not in ("remat", "device")]:
        raise Unreadable(f"{POLICY} = 'custom' with {', '.join(strange)}: AHP knows remat and device")
    kept = [name for name, place in places.items() if place == "device"]
    if kept and not all(any(name in kept for name in group) for group in WHOLE):
        rule = "it keeps a part of a block's results, and no engine of AHP does"
        raise Unreadable(f"{POLICY} = 'custom' with {', '.join(kept)} on the device: {rule} (valid: all, or none)")
    return "selective" if kept else "full"


def _read_type(settings: Settings) -> Fields:
    eight = str(settings.get(QUANTIZED) or "")
    if eight and "fp8" not in eight:
        raise Unreadable(f"{QUANTIZED} = {eight!r}: AHP knows fp8")
    plain = value_of(settings, TYPE, TYPES, "bfloat16")
    return {J + "precision": "fp8" if eight else plain}


def _write_type(s: Subject) -> Settings:
    if s.job.precision == "fp8":
        return {TYPE: "bfloat16", QUANTIZED: "fp8"}
    return {TYPE: word_of(s, J + "precision", TYPES, "MaxText")}


def _read_betas(settings: Settings) -> Fields:
    return {ADAM + "betas": [float(settings.get("adam_b1", 0.9)), float(settings.get("adam_b2", 0.95))]}


DIALECT = Dialect(
    engine="ahp",
    program="maxtext",
    version="e591f30",
    source="MaxText e591f30, configs/base.yml",
    rules=(
        Rule(AXIS_KEYS, LAYOUT_FIELDS, _write_layout, _read_layout),
        Rule((BATCH, ACCUMULATION), (P + "micro_batch_size", J + "global_batch_size"), _write_batch, _read_batch),
        Rule((POLICY, *PLACED), (P + "activation_checkpoint",), _write_policy, _read_policy),
        Rule((TYPE, QUANTIZED), (J + "precision",), _write_type, _read_type),
        Rule((), ("engine.compile",), lambda s: {}, lambda settings: {"engine.compile": True}),
        same(LENGTH, J + "sequence_length", 2048),
        same("steps", J + "steps"),
        same("init_weights_seed", J + "seed"),
        same("learning_rate", ADAM + "learning_rate", 3e-5),
        Rule(("adam_b1", "adam_b2"), (ADAM + "betas",), lambda s: dict(zip(("adam_b1", "adam_b2"), s.job.optimizer.betas, strict=True)), _read_betas),
        same("adam_eps", ADAM + "eps"),
        same("adam_weight_decay", ADAM + "weight_decay"),
        same("gradient_clipping_threshold", ADAM + "grad_clip", 1.0),
        understood("model_name", "decoder_block", "mlp_activations", "logits_via_embedding", "normalization_layer_epsilon", "rope_max_timescale",
                   "num_experts", "num_experts_per_tok", "base_moe_mlp_dim", *OF_MODEL),
    ),
    other=("run_name", "base_config", "base_output", "hardware", "enable_checkpointing", "async_checkpointing", "checkpoint_", "dataset_", "tokenizer", "log_",
           "profiler", "gcs_metrics", "metrics_file", "reuse_example_batch", "enable_goodput", "hf_", "grain_", "eval_", "train_split", "save_", "jax_",
           "compile_topology", "compiled_trainstep", "max_segments_per_seq", "attention", "use_iota_embed", "scan_layers", "enable_dropout", "dump_",
           "load_parameters", "upload_", "skip_first_n", "monitor_", "enable_tensorboard", "enable_data_shuffling", "data_shuffle", "packing"),
    spaces=tuple({"zero_stage": 3, "activation_checkpoint": kind, "pipeline_parallel_degree": 1} for kind in POLICIES.values()),
)  # fmt: skip


def parse(text: str) -> Settings:
    """Keys with a value. Raises BadInput for text that is no YAML mapping."""
    found = from_yaml(text, "MaxText's YAML")
    return {key: value for key, value in found.items() if value not in (None, "None", "")}


def model_of(settings: Settings) -> str | dict[str, Any] | None:
    """A name of the catalog, or the config that the keys describe, of a llama or of a catalog model; None for another or a scaled model."""
    named = settings.get("model_name", "default")
    own = {name: settings[key] for key, name in OF_MODEL.items() if key in settings}
    if settings.get("global_parameter_scale", 1) not in (1, "1"):
        return None
    if named in CATALOGUE:
        return {**CATALOGUE[named].config, **own} if own else named
    if named != "default" or settings.get("decoder_block", "llama2") != "llama2" or "num_experts" in settings:
        return None
    found = {name: settings.get(key, DEFAULT_MODEL[key]) for key, name in OF_MODEL.items()}
    tied = bool(settings.get("logits_via_embedding", False))
    length = settings.get(LENGTH, 2048)
    return {"model_type": "llama", "tie_word_embeddings": tied, "max_position_embeddings": length} | found
