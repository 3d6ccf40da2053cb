"""``ahp export deepspeed``: the JSON of ``deepspeed.initialize``.

Keys as in DeepSpeed 0.19.8: runtime/config.py, runtime/zero/config.py, runtime/tensor_parallel/config.py, module_inject/auto_ep_presets/base.py,
runtime/lr_schedules.py. Its pipeline is a class in the script (PipelineModule), which no key can make.
"""

from __future__ import annotations

import json

from ahp.errors import BadInput
from ahp.export.engine_target import EngineTarget, Format
from ahp.export.table import (
    NOTICE,
    STATES,
    Dialect,
    Fields,
    Rule,
    Settings,
    Subject,
    Unreadable,
    flat,
    nested,
    one_kind_of_replicas,
    refuse_what_has_no_key,
    same,
    switch,
    whole,
)
from ahp.export.target import Shape
from ahp.yaml_text import mapping

P, ADAM = "parallelism.", "job.optimizer."
BATCH, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
STAGE, RECOMPUTE = "zero_optimization.stage", "activation_checkpointing.partition_activations"
TENSOR, SEQUENCE = "tensor_parallel.autotp_size", "sequence_parallel_size"
EXPERT, EXPERTS = "expert_parallel.autoep_size", "expert_parallel.enabled"
CLIP, RATE = "gradient_clipping", "scheduler.params."
OFFLOADED = ("zero_optimization.offload_optimizer.", "zero_optimization.offload_param.")


def _write_data(s: Subject) -> Settings:
    refuse_what_has_no_key(s)
    p, number = s.p, s.p.num_micro_batches(s.job)
    stage = p.zero_stage if p.weight_shards > 1 else 0
    return {BATCH: s.job.global_batch_size, MICRO: p.micro_batch_size, ACCUMULATION: number, STAGE: stage}


def _read_data(settings: Settings) -> Fields:
    stage, micro = whole(settings.get(STAGE, 0), STAGE, 0), whole(settings.get(MICRO, "missing"), MICRO)
    number = whole(settings.get(ACCUMULATION, 1), ACCUMULATION)
    batch = whole(settings.get(BATCH, "missing"), BATCH)
    ranks = batch // (micro * number)
    if ranks * micro * number != batch:
        raise Unreadable(f"{BATCH} = {batch}: not {MICRO} {micro} x {ACCUMULATION} {number} x data-parallel ranks")
    return one_kind_of_replicas(ranks, stage, micro, batch)


def with_batch(settings: Settings, nodes: int, per_node: int) -> Settings:
    """Settings with the missing ones of the three batch keys computed from the others and the devices, as DeepSpeed does (runtime/config.py,
    _set_batch_related_parameters); 'auto' stays, for the Trainer to set. Raises Unreadable if they do not divide."""
    devices, three = nodes * per_node, (BATCH, MICRO, ACCUMULATION)
    if any(settings.get(key) == "auto" for key in three):
        return settings
    share = whole(settings.get(TENSOR, 1), TENSOR) * whole(settings.get(SEQUENCE, 1), SEQUENCE)
    known = {key: whole(settings[key], key) for key in three if key in settings}
    if devices % share or not known.keys() & {BATCH, MICRO} or len(known) == 3:
        return settings
    ranks = devices // share
    if not {BATCH, MICRO} <= known.keys():
        known.setdefault(ACCUMULATION, 1)
    if BATCH not in known:
        return {**settings, **known, BATCH: known[MICRO] * known[ACCUMULATION] * ranks}
    missing = ACCUMULATION if MICRO in known else MICRO
    number, rest = divmod(known[BATCH], ranks * known.get(MICRO, 1) * known.get(ACCUMULATION, 1))
    if rest or not number:
        raise Unreadable(f"{BATCH} = {known[BATCH]}: {ranks} data-parallel ranks leave no whole {missing} of it")
    return {**settings, **known, missing: number}


DATA = Rule(
    (BATCH, MICRO, ACCUMULATION, STAGE),
    (*STATES, P + "micro_batch_size", P + "pipeline_parallel_degree", "job.global_batch_size"),
    _write_data,
    _read_data,
)


def _write_experts(s: Subject) -> Settings:
    degree = s.p.expert_parallel_degree
    return {EXPERTS: True, EXPERT: degree} if degree > 1 else {}


def _read_experts(settings: Settings) -> Fields:
    on = switch(settings.get(EXPERTS, False), EXPERTS)
    return {P + "expert_parallel_degree": whole(settings.get(EXPERT, 1), EXPERT) if on else 1}


def _write_precision(s: Subject) -> Settings:
    return {f"{kind}.enabled": s.job.precision == kind for kind in ("bf16", "fp16")}


def _read_precision(settings: Settings) -> Fields:
    given = {kind: settings.get(f"{kind}.enabled", False) for kind in ("bf16", "fp16")}
    if "auto" in given.values():
        raise Unreadable("bf16.enabled, fp16.enabled = 'auto': the Trainer sets it; AHP assumes fp32")
    on = [kind for kind, value in given.items() if switch(value, f"{kind}.enabled")]
    return {"job.precision": on[0] if on else "fp32"}


def _write_recompute(s: Subject) -> Settings:
    if s.p.activation_checkpoint == "none":
        return {}
    notice = "activation_checkpoint = 'full': your model must call it (model.gradient_checkpointing_enable(), or deepspeed.checkpointing)"
    return {RECOMPUTE: False, f"{NOTICE}recompute": notice}


def _read_recompute(settings: Settings) -> Fields:
    on = any(key.startswith("activation_checkpointing.") for key in settings)
    return {P + "activation_checkpoint": "full" if on else "none"}


def _write_adamw(s: Subject) -> Settings:
    o = s.job.optimizer
    rates = {"lr": o.learning_rate, "betas": list(o.betas), "eps": o.eps, "weight_decay": o.weight_decay}
    found: Settings = {"optimizer.type": "AdamW", **{f"optimizer.params.{key}": value for key, value in rates.items()}}
    if not o.decay_norms_and_biases:
        found[f"{NOTICE}decay"] = (
            "job.optimizer.decay_norms_and_biases = False: your script gives the norms and biases as a group of their own, with weight_decay 0"
        )
    return found


def _read_adamw(settings: Settings) -> Fields:
    kind = settings.get("optimizer.type")
    if kind is not None and kind.lower() not in ("adamw", "adam"):
        raise Unreadable(f"optimizer.type = {kind!r}: AHP knows AdamW")
    names = {"lr": "learning_rate", "betas": "betas", "eps": "eps", "weight_decay": "weight_decay"}
    given = {name: settings.get(f"optimizer.params.{key}", "auto") for key, name in names.items()}
    return {ADAM + name: value for name, value in given.items() if value != "auto"}


ADAMW_KEYS = (
    "optimizer.type",
    *(f"optimizer.params.{key}" for key in ("lr", "betas", "eps", "weight_decay", "adam_w_mode", "torch_adam")),
)
ADAMW_FIELDS = ("name", "learning_rate", "betas", "eps", "weight_decay", "decay_norms_and_biases")


def _write_rate(s: Subject) -> Settings:
    o, steps = s.job.optimizer, s.job.steps
    warm = {"warmup_num_steps": o.warmup_steps, "warmup_type": "linear"}
    if o.schedule == "cosine" and o.warmup_steps:
        shape = {"total_num_steps": steps, "warmup_min_ratio": 0.0, "cos_min_ratio": o.min_lr_factor, **warm}
        return {"scheduler.type": "WarmupCosineLR", **{RATE + key: value for key, value in shape.items()}}
    if o.schedule == "constant" and o.warmup_steps:
        shape = {"warmup_min_lr": 0.0, "warmup_max_lr": o.learning_rate, **warm}
        return {"scheduler.type": "WarmupLR", **{RATE + key: value for key, value in shape.items()}}
    of_schedule = {"constant": (), "wsd": ("decay_share", "min_lr_factor")}.get(o.schedule, ("min_lr_factor",))
    keys = ", ".join(f"{name} = {getattr(o, name)!r}" for name in ("schedule", "warmup_steps", *of_schedule))
    return {f"{NOTICE}rate": f"job.optimizer.{keys}: DeepSpeed has no such schedule; pass your script's lr_scheduler"}


def _read_rate(settings: Settings) -> Fields:
    kind, warm = settings.get("scheduler.type"), settings.get(RATE + "warmup_num_steps")
    found: Fields = {ADAM + "warmup_steps": warm} if isinstance(warm, int) else {}
    steps = settings.get(RATE + "total_num_steps")
    if isinstance(steps, int):
        found["job.steps"] = steps
    if isinstance(least := settings.get(RATE + "cos_min_ratio"), (int, float)):
        found[ADAM + "min_lr_factor"] = least
    known = {"WarmupCosineLR": "cosine", "WarmupLR": "constant", "WarmupDecayLR": "linear"}
    return found | ({ADAM + "schedule": known[kind]} if kind in known else {})


RATE_KEYS = ("type", *(f"params.{key}" for key in ("total_num_steps", "warmup_min_ratio", "cos_min_ratio", "warmup_num_steps", "warmup_type",
             "warmup_min_lr", "warmup_max_lr")))  # fmt: skip


def _read_offload(settings: Settings) -> Fields:
    for device in (f"{part}device" for part in OFFLOADED):
        if settings.get(device, "none") != "none":
            rule = "in host memory; AHP prices DeepSpeed without, with more memory and less time than the file's"
            raise Unreadable(f"{device} = {settings[device]!r}: {rule}")
    return {}


OFFLOAD = Rule(tuple(f"{part}device" for part in OFFLOADED), ("engine.offload_optimizer",), lambda s: {}, _read_offload)


def _write_clip(s: Subject) -> Settings:
    return {CLIP: s.job.optimizer.grad_clip or 0.0}  # 0: no clipping (runtime/constants.py)


def _read_clip(settings: Settings) -> Fields:
    value = settings.get(CLIP, 0.0)
    return {} if value == "auto" else {ADAM + "grad_clip": float(value) or None}


DIALECT = Dialect(
    engine="deepspeed",
    version="0.19.8",
    source="DeepSpeed 0.19.8, runtime/config.py",
    rules=(
        DATA,
        same(TENSOR, P + "tensor_parallel_degree", 1, skip=1),
        same(SEQUENCE, P + "context_parallel_degree", 1, skip=1),
        Rule((EXPERTS, EXPERT), (P + "expert_parallel_degree",), _write_experts, _read_experts),
        Rule((RECOMPUTE,), (P + "activation_checkpoint",), _write_recompute, _read_recompute),
        Rule(("bf16.enabled", "fp16.enabled"), ("job.precision",), _write_precision, _read_precision),
        OFFLOAD,
        Rule((CLIP,), (ADAM + "grad_clip",), _write_clip, _read_clip),
        Rule(ADAMW_KEYS, tuple(ADAM + name for name in ADAMW_FIELDS), _write_adamw, _read_adamw),
        Rule(tuple(f"scheduler.{key}" for key in RATE_KEYS), tuple(ADAM + name for name in ("schedule", "warmup_steps", "decay_share", "min_lr_factor")), _write_rate, _read_rate),
    ),
    other=("steps_per_print", "wall_clock_breakdown", "activation_checkpointing.", "tensorboard.", "wandb.", "csv_monitor.", "comms_logger.",
           "flops_profiler.", "zero_allow_untested_optimizer", "checkpoint.", "memory_breakdown", "dump_state", "fp16.", "zero_optimization.stage3_gather_16bit", *OFFLOADED),
)  # fmt: skip


def _render(settings: Settings, subject: Subject, shape: Shape, head: list[str]) -> str:
    return json.dumps(nested(settings), indent=2) + "\n"


def _parse(text: str) -> Settings:
    try:
        return flat(mapping(json.loads(text), "DeepSpeed's JSON"))
    except BadInput:  # a ValueError too
        raise
    except (ValueError, RecursionError) as error:
        raise BadInput(f"not JSON: {error}") from None


def _next(shape: Shape) -> tuple[str, ...]:
    nodes = f" --num_nodes {shape.most} --hostfile HOSTFILE" if shape.most > 1 else ""
    return (f"deepspeed{nodes} --num_gpus {shape.workers} YOUR_SCRIPT.py --deepspeed --deepspeed_config {{file}}",)


FORMATS: dict[str, Format] = {DIALECT.version: Format(DIALECT, _render, _parse, _next)}

TARGET = EngineTarget(
    "deepspeed",
    "DeepSpeed's JSON: ZeRO, Ulysses, AutoTP and AutoEP; its pipeline is code of the script",
    ".deepspeed.json",
    FORMATS,
)
