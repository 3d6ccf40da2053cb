"""Measured training runs from JSON files, each as one call of ``ahp.simulate``: what accuracy.py judges the forecast by.

A file is one source: a list of objects, one for each run. Anyone can write more. Keys (``null`` = not said):

id                     a name, unique in the file
source                 where the figures stand: paper and table, or repository, file and commit
verified               true: somebody has held the row against its source
gpu                    a device of the catalogue (or words that hold its name, or a mapping {base: ..., power_limit_w: ...})
gpus, gpus_per_node    how many
interconnect           words; "8x200Gb/s", "1600 Gb/s" or "400 Gb/s per GPU" in them is the network of a node
nvlink_switch          true or false: whether a switch joins the devices of a node; absent = what is known about the device
model                  layers, hidden, heads, vocab, seq; optional kv_heads, ffn, gated_mlp, tied_embeddings, and for
                       mixtures experts, topk, moe_ffn, shared_experts or shared_ffn, dense_layers, head_dim, attention ("MLA q_lora=1536 kv_lora=512");
                       mtp: true: one block more is trained, which predicts a further token (its second pass through the head is not priced);
                       hf: keys of the Hugging Face configuration that the others do not say, such as {model_type: olmo2}
precision              fp32, bf16, fp16 or fp8, with whatever words
dtype                  of weights, gradients and moments (``job.dtype``); absent = fp32
framework              words; absent = Megatron-LM
release                which release of the framework ran, a name or a day (docs/change/engines.md, engine.version); absent = the newest
differs                features of that release that the run's own script turns on or off (engines/releases.yaml): {fused_positions: false}
tp, pp, cp, ep         degrees; data ranks are what is left of gpus
etp                    tensor-parallel ranks that divide an expert: tp or 1 (``expert_tensor_parallel_degree``); absent = as the engine does by itself
vpp                    virtual stages of a pipeline rank, or "max" (one layer each)
schedule               1f1b, gpipe or zb-1p; absent = by vpp
zero_stage, zero_group, sequence_parallel, micro_batch (sequences), global_batch (sequences)
recompute              none, selective or full; absent = the lightest that fits
lora                   adapters that are trained instead of the weights, by the keys of ``job.lora``; priced as the engine ahp, which alone has them
loss_chunk_tokens      tokens whose logits and loss are computed at once (``engine.loss_chunk_tokens``)
document_mask          true: tokens attend only within their document (``job.document_mask``)
graphs                 parts of a block in CUDA graphs, by the source's recipe of that release (``engine.cuda_graph_modules``); absent = none
dispatcher, expert_overlap    moe_token_dispatcher_type (alltoall, flex; of Megatron and torchtitan) and Megatron's overlap_moe_expert_parallel_comm; absent = as the engine does by itself
flash_attention, torch_compile, async_tp    whether they were used; async_tp absent = as the engine does by itself
measured               step_time_s, or tokens_per_s_per_gpu (``derived`` may hold a step time reckoned from FLOP/s);
                       memory_gib (allocated, 2**30), memory_reserved_gib, memory_gb_reported (10**9 bytes, what the
                       source's tool showed: reserved), memory_device_gib (what nvidia-smi showed: with CUDA's context
                       and the communicators); oom or failed_or_oom: true where it ran out of memory
kind, quality          rows with any kind (a layer's time, memory by formula) and those of low quality are left out
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ahp.cluster import catalogue

GIB_BYTES, GB_BYTES = 2**30, 10**9

ENGINES = (
    ("megatron", "megatron"), ("torchtitan", "torchtitan"), ("kempner", "torchtitan"), ("nanotron", "torchtitan"),
    ("olmo-core", "torchtitan"), ("automodel", "torchtitan"), ("torchtune", "ahp"), ("composer", "accelerate"), ("pytorch fsdp", "accelerate"), ("accelerate", "accelerate"),
    ("internevo", "deepspeed"), ("deepspeed", "deepspeed"),
)  # fmt: skip
"""Engine by a word of a row's framework, first match. An engine that AHP does not know is forecast as the nearest one that it knows:
nanotron, OLMo-core and NeMo AutoModel as torchtitan, torchtune as AHP (blocks compiled one by one), Composer (FSDP1) as accelerate, InternEvo
(ZeRO) as DeepSpeed."""

REAL = {"complex_positions": False, "repeated_keys": False}
FUSED = {"fused_gate": True, "fused_positions": True}
DIFFERS: tuple[tuple[str, Mapping[str, bool]], ...] = (
    ("nanotron", REAL), ("olmo-core", REAL), ("automodel", REAL), ("kempner", {**REAL, "repeated_keys": True}),
    ("internevo", {**FUSED, "flash_attention_2": False}), ("fms-fsdp", {"cudnn_attention": False}),
)  # fmt: skip
"""Features of an engine (engines/releases.yaml) that a program which is priced as it has or does not have, by a word of a row's framework: nanotron
2411b022 and OLMo-core turn queries and keys in one kernel, and their FlashAttention needs no copies (OLMo-core, nn/rope.py, nn/attention/backend.py);
KempnerForge repeats keys and values (kempnerforge/model/attention.py); InternEvo c628a8c8 has flash-attn's rotary kernel and a scripted gate
(internlm/model/modules/embedding.py, internlm/model/utils.py), and its figures are InternLM's of 2023, which ran flash-attn 1.0.5
(InternLM/InternLM 0f5ee057, doc/en/install.md; 20fe5ac2, doc/en/train_performance.md has the same); fms-fsdp of 2024 has the "SDPA implementation of Flash attention v2" (README.md)."""

RELEASES = {"PyTorch 26.01": "2026-01", "Megatron-LM examples/llama/README.md @d98e8a64": "2025-06-14"}
"""Releases by words of the source, for rows without ``release``: the month of the container, and the day on which the figures were committed."""

NETWORKS = (
    ("infiniband", "infiniband"), ("ndr", "infiniband"), ("efa", "efa"), ("slingshot", "slingshot"),
    ("roce", "ethernet"), ("ethernet", "ethernet"), ("omni-path", "ethernet"),
)  # fmt: skip
"""Kind of network by a word of a row's interconnect, first match. AHP knows no Omni-Path: its cards leave collectives to the host, as sockets do."""

OTHER_NAMES = {"V100-SXM3-32GB": "V100-SXM-32GB"}
"""Parts that the catalogue has under another form factor."""

SENDS = (
    ("moe_token_dispatcher_type", "dispatcher"), ("overlap_moe_expert_parallel_comm", "expert_overlap"), ("cuda_graph_modules", "graphs"),
)  # fmt: skip
"""Keys of an engine by keys of a row: how tokens travel to experts, and what one CUDA graph launches."""

SCHEDULES = {"zb-1p": "InterleavedZeroBubble", "gpipe": "GPipe"}
NOT_PRICED_SCHEDULES = ("zb-2p",)
NEEDED = ("gpus", "gpus_per_node", "tp", "pp", "micro_batch", "global_batch")
NEEDED_OF_MODEL = ("layers", "hidden", "heads", "vocab", "seq")


@dataclass(frozen=True)
class Run:
    """One measured run."""

    id: str
    source: str
    """The stem of its file; mixtures of experts are a source of their own."""
    group: str
    """The same for runs that differ in their layout alone."""
    arguments: Mapping[str, Any]
    """Of ``ahp.simulate``."""
    measured_s: float | None
    allocated_bytes: float | None
    reserved_bytes: float | None
    device_bytes: float | None
    """With CUDA's context and the communicators."""
    ran: bool
    """False: it ran out of memory, or failed."""
    differs: Mapping[str, bool] = field(default_factory=dict)
    """Features in which its program, or its script, differs from the engine that prices it."""

    @property
    def engine(self) -> str:
        return self.arguments["engine"]["name"]

    @property
    def devices(self) -> int:
        cluster = self.arguments["cluster"]
        return cluster["nodes"] * cluster["devices_per_node"]


def read(paths: Iterable[Path]) -> tuple[list[Run], dict[str, str]]:
    """The runs of all files, and by id the reason why each of the other rows is not one."""
    runs, left_out = [], {}
    for path in paths:
        for row in json.loads(path.read_text(encoding="utf-8")):
            if reason := _unusable(row):
                left_out[row["id"]] = reason
            else:
                runs.append(_run(path.stem, row))
    return runs, left_out


def _unusable(row: Mapping[str, Any]) -> str | None:
    if "model" not in row:
        return "a kernel or a collective, not a training run (docs/forecast/kernels.md and collectives.md judge those)"
    missing = [key for key in NEEDED if not row.get(key)]
    missing += [f"model.{key}" for key in NEEDED_OF_MODEL if not row["model"].get(key)]
    rules = (
        (not row.get("verified"), "not verified"),
        (row.get("quality") == "low", "low quality by its own note"),
        (row.get("kind"), f"not a step of a run: {row.get('kind')}"),
        (missing, f"its source does not say: {', '.join(missing)}"),
        (_words(row, "schedule") in NOT_PRICED_SCHEDULES, f"schedule {row.get('schedule')}: no engine runs it"),
        ("fp4" in _words(row, "precision"), "fp4: no engine runs it"),
    )
    return next((reason for applies, reason in rules if applies), None)


def _run(source: str, row: Mapping[str, Any]) -> Run:
    derived = row.get("derived")  # figures, or words on how they were reckoned
    measured = {**(derived if isinstance(derived, Mapping) else {}), **(row.get("measured") or {})}
    seconds, rate = measured.get("step_time_s"), measured.get("tokens_per_s_per_gpu")
    if not seconds and rate:
        seconds = row["global_batch"] * row["model"]["seq"] / (rate * row["gpus"])
    reserved = _scaled(measured, "memory_gb_reported", GB_BYTES) or _scaled(measured, "memory_reserved_gib", GIB_BYTES)
    model = row["model"]
    alike = (
        model.get("name"),
        model["seq"],
        row["gpu"],
        row["gpus"],
        row["global_batch"],
        _precision(row),
        row.get("date"),
    )
    of_program = next((features for word, features in DIFFERS if word in _words(row, "framework")), {})
    source += " (experts)" if model.get("experts") else ""
    return Run(
        id=row["id"],
        source=source,
        group="|".join(map(str, (source, *alike))),
        arguments=arguments(row),
        measured_s=seconds or None,
        allocated_bytes=_scaled(measured, "memory_gib", GIB_BYTES),
        reserved_bytes=reserved,
        device_bytes=_scaled(measured, "memory_device_gib", GIB_BYTES),
        ran=not (measured.get("oom") or measured.get("failed_or_oom")),
        differs={**of_program, **(row.get("differs") or {})},
    )


def _scaled(measured: Mapping[str, Any], key: str, unit: int) -> float | None:
    return measured[key] * unit if measured.get(key) else None


def _words(row: Mapping[str, Any], key: str) -> str:
    return (row.get(key) or "").lower()


def arguments(row: Mapping[str, Any]) -> dict[str, Any]:
    """What ``ahp.simulate`` is called with for one row."""
    gpus, per_node = row["gpus"], row["gpus_per_node"]
    flash, compiled = bool(row.get("flash_attention")), bool(row.get("torch_compile"))
    said = (day for words, day in RELEASES.items() if words in row["source"])
    release = {"version": version} if (version := row.get("release") or next(said, None)) else {}
    chunks = {"loss_chunk_tokens": row["loss_chunk_tokens"]} if row.get("loss_chunk_tokens") else {}
    pieces = {"enable_async_tensor_parallel": row["async_tp"]} if "async_tp" in row else {}
    sends = {key: row[name] for key, name in SENDS if name in row}
    return {
        "model": model_config(row["model"]),
        "cluster": {
            "nodes": max(1, gpus // per_node),
            "devices_per_node": min(gpus, per_node),
            "device": _device(row["gpu"]),
            "inter_node_gbps": _node_gbps(row),
            "inter_node_network": _network(row),
            "nvlink_switch": row.get("nvlink_switch"),
        },
        "job": {
            "sequence_length": row["model"]["seq"],
            "global_batch_size": row["global_batch"],
            "precision": _precision(row),
            "dtype": row.get("dtype") or "fp32",
            "optimizer": "adamw",
            "document_mask": bool(row.get("document_mask")),
            "lora": row.get("lora"),
        },
        "parallelism": _parallelism(row),
        "engine": {"name": _engine(row), "attention": "flash" if flash else "math", "compile": compiled}
        | pieces
        | sends
        | chunks
        | release,
    }


def _parallelism(row: Mapping[str, Any]) -> dict[str, Any]:
    tensor, stages, context, expert = (row.get(key) or 1 for key in ("tp", "pp", "cp", "ep"))
    data = row["gpus"] // (tensor * stages * context)
    zero = row.get("zero_stage") or 0
    shard = (row.get("zero_group") or data) if zero else 1
    virtual = row.get("vpp") or 1
    if not isinstance(virtual, int):
        virtual = -(-row["model"]["layers"] // stages)
    usual = "Interleaved1F1B" if virtual > 1 else "1F1B"
    recompute = ((_words(row, "recompute")) or "auto").split()[0]
    return {
        "data_parallel_replicate_degree": data // shard,
        "data_parallel_shard_degree": shard,
        "zero_stage": zero,
        "tensor_parallel_degree": tensor,
        "enable_sequence_parallel": bool(row.get("sequence_parallel")),
        "pipeline_parallel_degree": stages,
        "pipeline_parallel_schedule": SCHEDULES.get(_words(row, "schedule"), usual),
        "virtual_stages_per_rank": virtual,
        "context_parallel_degree": context,
        "expert_parallel_degree": expert,
        "expert_tensor_parallel_degree": row.get("etp"),
        "micro_batch_size": row["micro_batch"],
        "activation_checkpoint": recompute if recompute in ("none", "selective", "full") else "auto",
    }


def model_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """A Hugging Face configuration of the family that the sizes belong to."""
    return _of_family(model) | (model.get("hf") or {})


def _of_family(model: Mapping[str, Any]) -> dict[str, Any]:
    hidden, heads = model["hidden"], model["heads"]
    ffn, key_heads = model.get("ffn") or 4 * hidden, model.get("kv_heads") or heads
    shared = {"vocab_size": model["vocab"], "tie_word_embeddings": bool(model.get("tied_embeddings"))}
    usual = {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": model["layers"] + bool(model.get("mtp")),
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "max_position_embeddings": model["seq"],
    }
    if model.get("experts"):
        latent = "MLA" in str(model.get("attention"))
        return shared | usual | (_latent_experts(model) if latent else _experts(model))
    if model.get("gated_mlp"):
        return {"model_type": "llama"} | shared | usual
    if key_heads != heads:  # plain MLP, grouped queries
        return {"model_type": "nemotron"} | shared | usual
    sizes = {"n_embd": hidden, "n_inner": ffn, "n_layer": model["layers"], "n_head": heads, "n_positions": model["seq"]}
    return {"model_type": "gpt2"} | shared | sizes


def _experts(model: Mapping[str, Any]) -> dict[str, Any]:
    if model.get("head_dim"):
        return {
            "model_type": "qwen3_moe",
            "head_dim": model["head_dim"],
            "moe_intermediate_size": model["moe_ffn"],
            "num_experts": model["experts"],
            "num_experts_per_tok": model["topk"],
        }
    return {
        "model_type": "mixtral",
        "num_local_experts": model["experts"],
        "num_experts_per_tok": model.get("topk") or 2,
    }


def _latent_experts(model: Mapping[str, Any]) -> dict[str, Any]:
    named = dict(re.findall(r"(q_lora|kv_lora)\D*(\d+)", model["attention"]))
    ranks = named or {"q_lora": 1536, "kv_lora": 512}  # DeepSeek-V3's
    return {
        "model_type": "deepseek_v3",
        "moe_intermediate_size": model["moe_ffn"],
        "n_routed_experts": model["experts"],
        "num_experts_per_tok": model["topk"],
        "n_shared_experts": model.get("shared_experts") or (model.get("shared_ffn") or 0) // model["moe_ffn"],
        "first_k_dense_replace": model.get("dense_layers") or 0,
        "q_lora_rank": int(ranks["q_lora"]) if "q_lora" in ranks else None,
        "kv_lora_rank": int(ranks.get("kv_lora", 512)),  # 512: DeepSeek-V2 and -V3
    }


def _device(given: str | Mapping[str, Any]) -> str | dict[str, Any]:
    """A name of the catalogue; words without one are passed on, and refused by name when they are priced."""
    if not isinstance(given, str):
        return dict(given)
    words = next((to for name, to in OTHER_NAMES.items() if name in given), given)
    return max((name for name in catalogue.names() if name in words), key=len, default=words)


def _node_gbps(row: Mapping[str, Any]) -> int | None:
    """What one node sends to the others, Gb/s in one direction; None = what is usual for the device."""
    words = row.get("interconnect") or ""
    if found := re.search(r"(\d+)\s*x\s*(\d+)\s*Gb/s", words):
        return int(found[1]) * int(found[2])
    if found := re.search(r"(\d+)\s*Gb/s (?:RDMA )?per GPU", words):
        return int(found[1]) * row["gpus_per_node"]
    found = re.search(r"(\d+)\s*Gb/s", words)
    return int(found[1]) if found else None


def _network(row: Mapping[str, Any]) -> str | None:
    """What the network between nodes is, where the row says it; None = what is usual for the device."""
    if row["gpus"] <= row["gpus_per_node"]:
        return None
    return next((kind for word, kind in NETWORKS if word in _words(row, "interconnect")), None)


def _engine(row: Mapping[str, Any]) -> str:
    if row.get("lora"):
        return "ahp"
    words = _words(row, "framework") or _words(row, "source")
    return next((engine for word, engine in ENGINES if word in words), "megatron")


def _precision(row: Mapping[str, Any]) -> str:
    words = _words(row, "precision")
    if "fp8" in words or "float8" in words:
        return "fp8"
    if words.startswith("fp16") and "bf16" not in words:
        return "fp16"
    return "fp32" if words.startswith("fp32") else "bf16"
