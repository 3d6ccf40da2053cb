"""Megatron-LM's arguments, and the fields of a plan that they stand for.

As in Megatron-LM d98e8a6 (Megatron-Core 0.20): training/arguments.py and the configs that it turns into arguments. ``--nnodes`` and
``--nproc-per-node`` are torchrun's: the data-parallel degree is what the other degrees leave of these devices.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ahp.engines.megatron import SUPPORT, averages_in_collective, fuses_loss
from ahp.errors import NotExpressible
from ahp.export.launch_line import EACH, NODES
from ahp.export.megatron_job import RULES as OPTIMIZER_RULES
from ahp.export.megatron_model import GROUPED, LAYERS, NUM_EXPERTS, PERMUTED
from ahp.export.table import (
    STATES,
    Dialect,
    Fields,
    Rule,
    Settings,
    Subject,
    Unreadable,
    cut_of,
    refuse_what_has_no_key,
    same,
    size,
    whole,
)
from ahp.export.target import generation_of
from ahp.plan import DEGREE
from ahp.schedule.stages import layers_of_stages

P, J = "parallelism.", "job."
TENSOR, PIPE, CONTEXT, EXPERT = (
    f"--{kind}-parallel-size" for kind in ("tensor-model", "pipeline-model", "context", "expert-model")
)
OPTIMIZER, FSDP, STRATEGY = "--use-distributed-optimizer", "--use-megatron-fsdp", "--data-parallel-sharding-strategy"
INSTANCES, OVERLAP, GATHER = "--num-distributed-optimizer-instances", "--overlap-grad-reduce", "--overlap-param-gather"
AVERAGE = "--ddp-average-in-collective"
LAYOUT, VIRTUAL, PER_VIRTUAL = (
    "--pipeline-model-parallel-layout",
    "--num-virtual-stages-per-pipeline-rank",
    "--num-layers-per-virtual-pipeline-stage",
)
GRANULARITY, METHOD, NUMBER, MODULES = (
    f"--recompute-{kind}" for kind in ("granularity", "method", "num-layers", "modules")
)
OUTER, MAPPING = "--outer-dp-sharding-strategy", "--use-tp-pp-dp-mapping"
SHARDED = {2: "optim_grads", 3: "optim_grads_params"}


def number(settings: Settings, key: str, default: int = 1) -> int:
    return whole(settings.get(key, default), key)


def _write_data(s: Subject) -> Settings:
    p = s.p
    zero = p.zero_stage if p.weight_shards > 1 else 0
    overlaps = {OVERLAP: True} if zero or s.job.precision == "fp8" else {}
    if averages_in_collective(s.job, p):
        overlaps[AVERAGE] = True
    several: Settings = (
        {INSTANCES: p.data_parallel_replicate_degree} if zero and p.data_parallel_replicate_degree > 1 else {}
    )
    if zero == 1:
        return {OPTIMIZER: True, **overlaps, GATHER: True, **several}
    if zero:
        if p.data_parallel_replicate_degree > 1:
            several[OUTER] = "no_shard"
        meta = {"--init-model-with-meta-device": True} if zero == 3 else {}
        return {
            FSDP: True,
            STRATEGY: SHARDED[zero],
            **overlaps,
            GATHER: True,
            **several,
            "--ckpt-format": "fsdp_dtensor",
            **meta,
        }
    return overlaps


def _read_data(settings: Settings) -> Fields:
    others = number(settings, TENSOR) * number(settings, PIPE) * number(settings, CONTEXT)
    if NODES not in settings and EACH not in settings:
        raise Unreadable(f"{NODES}, {EACH}: missing, so the data-parallel degree is not known")
    world = number(settings, NODES) * number(settings, EACH)
    if world % others:
        raise Unreadable(f"{NODES} x {EACH} = {world}: {TENSOR} x {PIPE} x {CONTEXT} = {others} does not divide it")
    data, stage = world // others, 1 if settings.get(OPTIMIZER) else 0
    if settings.get(FSDP):
        strategies = {"no_shard": 0, "optim": 1, **{word: at for at, word in SHARDED.items()}}
        stage = strategies[settings.get(STRATEGY, "optim_grads_params")]
    copies = number(settings, INSTANCES) if stage else data
    if data % copies:
        raise Unreadable(f"{INSTANCES} = {copies}: does not divide the {data} data-parallel ranks")
    shards = data // copies if stage else 1
    stage = stage if shards * number(settings, CONTEXT) > 1 else 0
    return {
        P + "data_parallel_replicate_degree": copies,
        P + "data_parallel_shard_degree": shards,
        P + "zero_stage": stage,
    }


DATA = Rule(
    (
        NODES,
        EACH,
        OPTIMIZER,
        FSDP,
        STRATEGY,
        OVERLAP,
        AVERAGE,
        GATHER,
        INSTANCES,
        OUTER,
        "--ckpt-format",
        "--init-model-with-meta-device",
    ),
    STATES,
    _write_data,
    _read_data,
)


def _read_beside(settings: Settings) -> Fields:
    """Plain data parallelism is priced with Megatron's defaults (``ahp.engines.megatron``)."""
    given, fields = [key for key in (OVERLAP, AVERAGE) if settings.get(key)], _read_data(settings)
    several = fields[P + "data_parallel_replicate_degree"] * number(settings, CONTEXT) > 1
    if given and several and not fields[P + "zero_stage"] and FORMAT not in settings:
        raise Unreadable(
            f"{', '.join(given)}: without {OPTIMIZER} the forecast sums gradients after the backward pass, and divides them by itself"
        )
    return {}


BESIDE_RULE = Rule((OVERLAP, AVERAGE), (), lambda s: {}, _read_beside)


def _write_stages(s: Subject) -> Settings:
    p = s.p
    if p.num_stages == 1:
        return {}
    refuse_what_has_no_key(s)
    layers = layers_of_stages(p, s.layers, ends="may_be_empty")
    if len(set(layers)) > 1:
        return {LAYOUT: layout(layers)}
    return {VIRTUAL: p.virtual_stages_per_rank} if p.virtual_stages_per_rank > 1 else {}


def layout(layers: tuple[int, ...]) -> str:
    """Stages as core/transformer/pipeline_parallel_layer_layout.py reads them: ``Ettt|tttt|tttL``."""
    stages = ["t" * count for count in layers]
    return f"E{'|'.join(stages)}L"


def _read_stages(settings: Settings) -> Fields:
    ranks = number(settings, PIPE)
    if ranks == 1:
        return {}
    given, found = settings.get(LAYOUT), {}
    if given is not None:
        found = cut_of(_layers(str(given)), ranks, "may_be_empty", f"{LAYOUT} = {given!r}")
        virtual = found[P + "virtual_stages_per_rank"]
    elif PER_VIRTUAL in settings:
        each, total = number(settings, PER_VIRTUAL), number(settings, LAYERS)
        if total % (each * ranks):
            raise Unreadable(f"{PER_VIRTUAL} = {each}: {LAYERS} {total} does not divide among {ranks} ranks by it")
        virtual = total // (each * ranks)
    else:
        virtual = number(settings, VIRTUAL)
    schedule = "Interleaved1F1B" if virtual > 1 else "1F1B"
    return found | {P + "virtual_stages_per_rank": virtual, P + "pipeline_parallel_schedule": schedule}


def _layers(text: str) -> list[int]:
    """Blocks of each stage, with ``(t|)*3`` and ``t*3`` written out."""
    shorter = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        shorter = re.sub(pattern, lambda found: found[1] * min(int(found[2]), 10_000), shorter)
    if set(shorter) - set("EtL|"):
        raise Unreadable(f"{LAYOUT} = {text!r}: AHP knows E, t and L")
    return [stage.count("t") for stage in shorter.split("|")]


STAGES = Rule(
    (LAYOUT, VIRTUAL, PER_VIRTUAL),
    tuple(P + name for name in ("pipeline_parallel_schedule", "virtual_stages_per_rank", "layers_per_stage")),
    _write_stages,
    _read_stages,
)


def _write_recompute(s: Subject) -> Settings:
    mode, some = s.p.activation_checkpoint, s.p.recomputed_layers_per_stage
    if mode == "auto":
        raise NotExpressible(
            "activation_checkpoint = 'auto': Megatron-LM needs an explicit value (valid: none, selective, full)"
        )
    if mode == "none":
        return {}
    if mode == "selective":
        return {GRANULARITY: mode, MODULES: "core_attn"}
    return {GRANULARITY: mode, METHOD: "uniform" if some is None else "block", NUMBER: 1 if some is None else some[0]}


def _read_recompute(settings: Settings) -> Fields:
    mode, name = settings.get(GRANULARITY), P + "activation_checkpoint"
    if settings.get("--recompute-activations"):
        mode = "selective"
    if mode is None:
        return {name: "none"}
    if mode == "selective":
        modules = settings.get(MODULES, "core_attn")
        if modules != "core_attn":
            raise Unreadable(f"{MODULES} = {modules!r}: AHP knows core_attn")
        return {name: mode}
    if settings.get(METHOD) == "uniform" and number(settings, NUMBER) > 1:
        raise Unreadable(f"{METHOD} uniform with {NUMBER} {settings[NUMBER]}: AHP recomputes one block at a time")
    if settings.get(METHOD) != "block":
        return {name: "full"}
    stages = number(settings, PIPE) * int(_read_stages(settings).get(P + "virtual_stages_per_rank", 1))
    return {name: "full", P + "recomputed_layers_per_stage": [whole(settings.get(NUMBER, 1), NUMBER, 0)] * stages}


RECOMPUTE = Rule(
    (GRANULARITY, METHOD, NUMBER, MODULES, "--recompute-activations"),
    (P + "activation_checkpoint", P + "recomputed_layers_per_stage"),
    _write_recompute,
    _read_recompute,
)
FORMAT, RECIPE, REUSE = "--fp8-format", "--fp8-recipe", "--reuse-grad-buf-for-mxfp8-param-ag"
EIGHT = {"--bf16": True, FORMAT: "hybrid", "--grad-reduce-in-bf16": True}
BLACKWELLS = {FORMAT: "e4m3", RECIPE: "mxfp8"}
"""What NVIDIA's recipes set on Blackwell instead (Megatron-Bridge 067f987d, training/mixed_precision.py, bf16_with_mxfp8_mixed)."""


def _write_precision(s: Subject) -> Settings:
    kind, p = s.job.precision, s.p
    if kind != "fp8":
        return {} if kind == "fp32" else {f"--{kind}": True}
    found: Settings = dict(EIGHT)
    if p.weight_shards > 1 and p.zero_stage:
        found["--fp8-param-gather"] = True
    if generation_of(s.plan) == "blackwell":
        found |= BLACKWELLS
        # Without it weights in MXFP8 take much more memory (core/optimizer/optimizer_config.py); Megatron-FSDP has no such buffer.
        if p.weight_shards > 1 and p.zero_stage == 1:
            found[REUSE] = True
    return found


def _read_precision(settings: Settings) -> Fields:
    if "--fp8-format" in settings:
        return {J + "precision": "fp8"}
    return {J + "precision": next((kind for kind in ("bf16", "fp16") if settings.get(f"--{kind}")), "fp32")}


TYPES = Rule(("--fp16", "--fp8-param-gather", REUSE, *EIGHT), (J + "precision",), _write_precision, _read_precision)


def _read_recipe(settings: Settings) -> Fields:
    if (kind := settings.get(RECIPE, "delayed")) not in ("delayed", "mxfp8"):
        raise Unreadable(f"{RECIPE} = {kind!r}: the forecast is that of delayed, or of mxfp8 on Blackwell")
    return {}


RECIPE_RULE = Rule((RECIPE,), (), lambda s: {}, _read_recipe)


LOSS = "--cross-entropy-loss-fusion"
LOSS_RULE = Rule((LOSS,), (), lambda s: {LOSS: True} if fuses_loss(s.job) else {}, lambda settings: {})
"""Off by default; the forecast counts on it."""


DISPATCHER, BESIDE = "--moe-token-dispatcher-type", "--overlap-moe-expert-parallel-comm"
SENDS = ("engine.moe_token_dispatcher_type", "engine.overlap_moe_expert_parallel_comm")


def _write_experts(s: Subject) -> Settings:
    p = s.p
    if p.expert_parallel_degree == 1 and p.expert_tensor_parallel_degree is None:
        return {}
    asked = 1 if SUPPORT.folded(p) else p.expert_tensor_parallel_degree
    found: Settings = {
        EXPERT: p.expert_parallel_degree,
        DISPATCHER: s.plan.engine.moe_token_dispatcher_type or "alltoall",
    }
    if s.plan.engine.overlap_moe_expert_parallel_comm:
        found[BESIDE] = True
    return found | ({"--expert-tensor-parallel-size": asked} if asked is not None else {})


def _read_experts(settings: Settings) -> Fields:
    asked = settings.get("--expert-tensor-parallel-size")
    found: Fields = {P + "expert_parallel_degree": number(settings, EXPERT)}
    sends = settings.get(DISPATCHER)
    if sends in ("alltoall", "flex") and found[P + "expert_parallel_degree"] != 1:
        found |= dict(zip(SENDS, (sends, bool(settings.get(BESIDE))), strict=True))
    return found | (
        {} if asked is None else {P + "expert_tensor_parallel_degree": whole(asked, "--expert-tensor-parallel-size")}
    )


GRAPHS, GRAPHED, SCOPE = "--cuda-graph-impl", "--cuda-graph-modules", "--cuda-graph-scope"
PARTS = {"attn": "attn", "moe_router": "moe_router moe_preprocess"}
"""Megatron's own words for a part of a block; what follows the router is never captured without it."""


def _write_graphs(s: Subject) -> Settings:
    parts = s.plan.engine.cuda_graph_modules
    return {GRAPHS: "transformer_engine", GRAPHED: " ".join(PARTS[part] for part in parts)} if parts else {}


def _read_graphs(settings: Settings) -> Fields:
    if (kind := settings.get(GRAPHS, "none")) == "none":
        return {}
    asked = str(settings.get(GRAPHED, settings.get(SCOPE, "")))
    if kind == "full_iteration" or not set(asked.split()) <= set(" ".join(PARTS.values()).split()) or not asked:
        raise Unreadable(f"{GRAPHS} {kind} {GRAPHED} {asked}: AHP prices graphs of attn, moe_router and moe_preprocess")
    return {"engine.cuda_graph_modules": tuple(part for part in PARTS if part in asked.split())}


GRAPH_RULE = Rule((GRAPHS, GRAPHED, SCOPE), ("engine.cuda_graph_modules",), _write_graphs, _read_graphs)


EXPERTS = Rule(
    (
        EXPERT,
        "--expert-tensor-parallel-size",
        DISPATCHER,
        BESIDE,
    ),
    (P + "expert_parallel_degree", P + "expert_tensor_parallel_degree", *SENDS),
    _write_experts,
    _read_experts,
)


def _flag(key: str, name: str) -> Rule:
    return Rule(
        (key,),
        (P + name,),
        lambda s: {key: True} if getattr(s.p, name) else {},
        lambda settings: {P + name: bool(settings.get(key))},
    )


def _write_overlap(s: Subject) -> Settings:
    asked = s.plan.engine.enable_async_tensor_parallel
    on = s.job.precision == "fp8" if asked is None else asked
    return {"--tp-comm-overlap": True} if on and s.p.enable_sequence_parallel else {}


def _read_overlap(settings: Settings) -> Fields:
    return {"engine.enable_async_tensor_parallel": bool(settings.get("--tp-comm-overlap"))}


def _write_order(s: Subject) -> Settings:
    return {} if s.p.mesh_order is None else {MAPPING: True}


def _read_order(settings: Settings) -> Fields:
    if not settings.get(MAPPING):
        return {}
    degrees = {
        **_read_data(settings),
        P + DEGREE["tp"]: number(settings, TENSOR),
        P + DEGREE["pp"]: number(settings, PIPE),
        P + DEGREE["cp"]: number(settings, CONTEXT),
    }
    order = [axis for axis in SUPPORT.mesh_orders[1] if degrees[P + DEGREE[axis]] > 1]
    return {P + "mesh_order": order or None}


def _count(key: str, name: str, default: int | None = None) -> Rule:
    """A whole number that an argument has as it is."""
    plain = same(key, name, default)

    def read(settings: Settings) -> Fields:
        return {name: whole(value, key, 0) for name, value in plain.read(settings).items()}

    return Rule(plain.keys, plain.fields, plain.write, read)


def _counted(settings: Settings, fields: Fields) -> Iterator[str]:
    """Arguments that are off by default and on in the forecast, as in NVIDIA's recipes."""
    if NUM_EXPERTS in settings:
        yield from (GROUPED, PERMUTED)
    if (FORMAT in settings or "--bf16" in settings) and "--deterministic-mode" not in settings:
        yield LOSS
    stage, shares = fields.get(P + "zero_stage", 0), (DEGREE["dp_replicate"], DEGREE["dp_shard"], DEGREE["cp"])
    if all(fields.get(P + name, 1) == 1 for name in shares) or (stage == 0 and FORMAT not in settings):
        return
    yield from (OVERLAP, GATHER) if stage else (OVERLAP,)
    if stage < 2:
        yield AVERAGE


DIALECT = Dialect(
    engine="megatron",
    version="0.20",
    source="Megatron-LM d98e8a6, training/arguments.py",
    agrees=("26.08",),
    launcher=(NODES, EACH),
    rules=(
        DATA,
        BESIDE_RULE,
        size(TENSOR, "tensor_parallel_degree"),
        size(PIPE, "pipeline_parallel_degree"),
        size(CONTEXT, "context_parallel_degree"),
        _flag("--sequence-parallel", "enable_sequence_parallel"),
        STAGES,
        EXPERTS,
        RECOMPUTE,
        GRAPH_RULE,
        Rule((MAPPING,), (P + "mesh_order",), _write_order, _read_order),
        Rule(("--tp-comm-overlap",), ("engine.enable_async_tensor_parallel",), _write_overlap, _read_overlap),
        TYPES,
        RECIPE_RULE,
        LOSS_RULE,
        _count("--micro-batch-size", P + "micro_batch_size"),
        _count("--global-batch-size", J + "global_batch_size"),
        _count("--seq-length", J + "sequence_length"),
        _count("--train-iters", J + "steps"),
        _count("--seed", J + "seed", 1234),
        *OPTIMIZER_RULES,
        Rule(("--deterministic-mode",), (J + "deterministic",), lambda s: {"--deterministic-mode": True} if s.job.deterministic else {},
             lambda settings: {J + "deterministic": bool(settings.get("--deterministic-mode"))}),
    ),
    other=("--node-rank", "--master-", "--rdzv", "--save", "--load", "--log-", "--eval-", "--tensorboard", "--wandb", "--distributed-", "--data-path", "--split",
           "--tokenizer", "--vocab-file", "--merge-file", "--data-cache", "--mock-data", "--profile", "--num-workers", "--exit-", "--timing", "--manual-gc",
           "--use-mcore-models", "--transformer-impl", "--no-load", "--no-save", "--ckpt-", "--async-save", "--init-method-std", "--no-mmap", "--dist-ckpt",
           "--no-create-attention", "--cross-entropy-fusion-impl", "--local-ranks", "--role", "--tee"),
    counted=_counted,
)  # fmt: skip
