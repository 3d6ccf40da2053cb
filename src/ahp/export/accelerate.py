"""``ahp export accelerate``: the YAML that ``accelerate launch --config_file`` reads: FSDP2 with a parallelism_config.

Keys as in accelerate 1.15.0: commands/config/config_args.py, commands/launch.py, parallelism_config.py.
"""

from __future__ import annotations

import yaml

from ahp.errors import NotExpressible
from ahp.export.engine_target import EngineTarget, Format, commented
from ahp.export.table import (
    NOTICE,
    Dialect,
    Fields,
    Rule,
    Settings,
    Subject,
    Unreadable,
    from_yaml,
    nested,
    refuse_what_has_no_key,
    whole,
)
from ahp.export.target import Shape
from ahp.plan import Parallelism

P = "parallelism."
SIZES = {
    "parallelism_config.parallelism_config_dp_replicate_size": "data_parallel_replicate_degree",
    "parallelism_config.parallelism_config_dp_shard_size": "data_parallel_shard_degree",
    "parallelism_config.parallelism_config_tp_size": "tensor_parallel_degree",
    "parallelism_config.parallelism_config_cp_size": "context_parallel_degree",
}
KIND, PROCESSES, MACHINES, PRECISION = "distributed_type", "num_processes", "num_machines", "mixed_precision"
VERSION, RESHARD, STRATEGY, RECOMPUTE = (
    f"fsdp_config.fsdp_{key}"
    for key in ("version", "reshard_after_forward", "sharding_strategy", "activation_checkpointing")
)
BACKEND, REGIONS = "dynamo_config.dynamo_backend", "dynamo_config.dynamo_use_regional_compilation"
STRATEGIES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}
"""ZeRO stages of the strategies of FSDP's first version; files have their name, or their number from 1 on."""


def _write_layout(s: Subject) -> Settings:
    refuse_what_has_no_key(s)
    p = s.p
    if p.weight_shards == 1:
        return {KIND: "MULTI_GPU" if p.world_size > 1 else "NO", PROCESSES: p.world_size, **_recompute_unsharded(p)}
    return {
        KIND: "FSDP",
        PROCESSES: p.world_size,
        VERSION: 2,
        RESHARD: p.zero_stage == 3,
        RECOMPUTE: p.activation_checkpoint == "full",
        "fsdp_config.fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_config.fsdp_state_dict_type": "SHARDED_STATE_DICT",
        **{key: getattr(p, name) for key, name in SIZES.items()},
    }


def _recompute_unsharded(p: Parallelism) -> Settings:
    """The launcher passes FSDP's switch to FSDP only; it is written anyway, so that the file has the whole layout."""
    if p.activation_checkpoint == "none":
        return {}
    notice = f"activation_checkpoint = {p.activation_checkpoint!r}: nothing is sharded, so your model must call it (model.gradient_checkpointing_enable())"
    return {RECOMPUTE: True, f"{NOTICE}recompute": notice}


def _read_layout(settings: Settings) -> Fields:
    kind, ranks = settings.get(KIND, "NO"), whole(settings.get(PROCESSES, 1), PROCESSES)
    found: Fields = {P + name: 1 for name in SIZES.values()}
    if kind != "FSDP":
        if kind not in ("NO", "MULTI_GPU", "MULTI_CPU"):
            raise Unreadable(f"{KIND} = {kind!r}: AHP reads FSDP, MULTI_GPU and NO")
        return found | {P + "data_parallel_replicate_degree": ranks, P + "zero_stage": 0, **_read_recompute(settings)}
    if any(key in settings for key in SIZES):
        found |= {P + name: whole(settings.get(key, 1), key) for key, name in SIZES.items()}
    else:
        found[P + "data_parallel_shard_degree"] = ranks
    return found | _sharding(settings, ranks) | _read_recompute(settings)


def _read_recompute(settings: Settings) -> Fields:
    return {P + "activation_checkpoint": "full" if settings.get(RECOMPUTE) else "none"}


def _sharding(settings: Settings, ranks: int) -> Fields:
    """How states are sharded: version 2 has a switch, version 1 a strategy; the hybrid strategies shard within a machine."""
    if str(settings.get(VERSION, 1)) == "2":
        return {P + "zero_stage": 3 if settings.get(RESHARD, True) else 2}
    named = settings.get(STRATEGY, settings.get(RESHARD, "FULL_SHARD"))
    name = list(STRATEGIES)[named - 1] if isinstance(named, int) and not isinstance(named, bool) else str(named)
    if name not in STRATEGIES:
        raise Unreadable(f"{STRATEGY} = {named!r}: AHP knows {', '.join(STRATEGIES)}")
    stage = STRATEGIES[name]
    if stage == 0:
        return {P + "data_parallel_replicate_degree": ranks, P + "data_parallel_shard_degree": 1, P + "zero_stage": 0}
    hosts = whole(settings.get(MACHINES, 1), MACHINES) if name.startswith("HYBRID") else 1
    return {
        P + "data_parallel_replicate_degree": hosts,
        P + "data_parallel_shard_degree": ranks // hosts,
        P + "zero_stage": stage,
    }


LAYOUT = Rule(
    (KIND, PROCESSES, VERSION, RESHARD, STRATEGY, RECOMPUTE, *SIZES),
    (*(P + name for name in SIZES.values()), P + "zero_stage", P + "activation_checkpoint"),
    _write_layout,
    _read_layout,
)
OFFLOAD = "fsdp_config.fsdp_offload_params"


def _read_offload(settings: Settings) -> Fields:
    if settings.get(OFFLOAD):
        raise Unreadable(f"{OFFLOAD} = True: weights and states in host memory; AHP prices accelerate without")
    return {}


HOST = Rule(
    (OFFLOAD,),
    ("engine.offload_optimizer",),
    lambda s: {OFFLOAD: False} if s.p.weight_shards > 1 else {},
    _read_offload,
)
NAMES = {"fp32": "no", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}


def _read_precision(settings: Settings) -> Fields:
    named = settings.get(PRECISION, "no")
    return {"job.precision": {word: name for name, word in NAMES.items()}["no" if named is False else named]}


TYPE = Rule((PRECISION,), ("job.precision",), lambda s: {PRECISION: NAMES[s.job.precision]}, _read_precision)


def _write_compile(s: Subject) -> Settings:
    return {BACKEND: "INDUCTOR", REGIONS: True} if s.plan.engine.compile else {}


COMPILE = Rule(
    (BACKEND, REGIONS),
    ("engine.compile",),
    _write_compile,
    lambda settings: {"engine.compile": str(settings.get(BACKEND, "NO")).upper() == "INDUCTOR"},
)

DIALECT = Dialect(
    engine="accelerate",
    version="1.15.0",
    source="accelerate 1.15.0, commands/launch.py and parallelism_config.py",
    rules=(LAYOUT, HOST, TYPE, COMPILE),
    beside={"parallelism.micro_batch_size": "the batch size of your DataLoader"},
    other=("compute_environment", MACHINES, "machine_rank", "main_process", "main_training", "rdzv_", "same_network", "use_cpu", "debug", "tpu_",
           "downcast_bf16", "enable_cpu_affinity", "fsdp_config.fsdp_auto_wrap", "fsdp_config.fsdp_state_dict", "fsdp_config.fsdp_cpu_ram",
           "fsdp_config.fsdp_use_orig", "fsdp_config.fsdp_sync_module", "fsdp_config.fsdp_backward_prefetch", "fsdp_config.fsdp_forward_prefetch",
           "fsdp_config.fsdp_transformer_layer", "parallelism_config.parallelism_config_cp_comm", "gpu_ids"),
)  # fmt: skip


def _render(settings: Settings, subject: Subject, shape: Shape, head: list[str]) -> str:
    if shape.gpus == 0 and subject.p.world_size > 1:
        rule = (
            "accelerate launch starts one process on processor cores, whatever the file says (several by mpirun alone)"
        )
        raise NotExpressible(f"cluster: {subject.p.world_size} workers on cores: {rule} (valid: GPUs, or one worker)")
    accumulation = subject.p.num_micro_batches(subject.job)
    first = {
        "compute_environment": "LOCAL_MACHINE",
        MACHINES: shape.most,
        "machine_rank": 0,
        "rdzv_backend": "static",
        "use_cpu": shape.gpus == 0,
    }
    line = f"Your script: Accelerator(gradient_accumulation_steps={accumulation}), batches of {subject.p.micro_batch_size}."
    return commented([*head, line]) + yaml.safe_dump(nested({**first, **settings}), sort_keys=False)


def parse(text: str) -> Settings:
    """The settings of accelerate's YAML. Raises BadInput for text that is no YAML mapping."""
    return from_yaml(text, "accelerate's YAML")


def _next(shape: Shape) -> tuple[str, ...]:
    nodes = (
        ' --machine_rank "$NODE_RANK" --main_process_ip "$MASTER_ADDR" --main_process_port 29500'
        if shape.most > 1
        else ""
    )
    return (f"accelerate launch --config_file {{file}}{nodes} YOUR_SCRIPT.py",)


FORMATS: dict[str, Format] = {DIALECT.version: Format(DIALECT, _render, parse, _next)}

TARGET = EngineTarget(
    "accelerate", "the YAML of accelerate launch: FSDP2 with a parallelism_config", ".accelerate.yaml", FORMATS
)
