"""accelerate's YAML with its Megatron-LM plugin: Megatron-LM's arguments under other names. ``ahp check`` reads it; no plan is written in this form.

Keys and defaults as in accelerate 1.15.0: utils/launch.py and MegatronLMPlugin in utils/dataclasses.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ahp.errors import NotExpressible
from ahp.export import megatron_keys as m
from ahp.export.accelerate import DIALECT as ACCELERATE
from ahp.export.accelerate import KIND, MACHINES, PRECISION, PROCESSES
from ahp.export.megatron_model import LAYERS
from ahp.export.nemo import IMPLIED, Names
from ahp.export.table import Fields, Rule, Settings, Subject, Unreadable, understood, whole

PLUGIN = "megatron_lm_config.megatron_lm_"
OF = {PLUGIN + name: argument for name, argument in {
    "tp_degree": m.TENSOR, "pp_degree": m.PIPE, "context_parallel_size": m.CONTEXT, "expert_model_parallel_size": m.EXPERT,
    "expert_tensor_parallel_size": "--expert-tensor-parallel-size", "sequence_parallelism": "--sequence-parallel",
    "use_distributed_optimizer": m.OPTIMIZER, "gradient_clipping": "--clip-grad", "recompute_granularity": m.GRANULARITY,
    "recompute_method": m.METHOD, "recompute_num_layers": m.NUMBER,
}.items()}  # fmt: skip
DEFAULTS = {m.CONTEXT: 2, m.GRANULARITY: "full", m.METHOD: "uniform", m.NUMBER: 1, "--clip-grad": 1.0}
"""The plugin's own defaults: two context ranks and full recompute, unlike Megatron-LM's."""
RECOMPUTE = "parallelism.activation_checkpoint"
MICRO_BATCHES, ACTIVATIONS = PLUGIN + "num_micro_batches", PLUGIN + "recompute_activations"
SCRIPTS = ("--micro-batch-size", "--global-batch-size", "--seq-length", "--train-iters", "--seed", "--lr", "--min-lr", "--lr-warmup-iters", "--weight-decay",
           "--deterministic-mode", LAYERS)  # fmt: skip
"""Arguments that the plugin takes from the script's model, DataLoader and optimizer."""


def _extra(settings: Settings) -> Settings:
    found: Settings = dict(DEFAULTS)
    kind = settings.get(PRECISION)
    if kind in ("bf16", "fp16", "fp8"):
        found["--fp8-format" if kind == "fp8" else f"--{kind}"] = "hybrid" if kind == "fp8" else True
    machines = whole(settings.get(MACHINES, 1), MACHINES)
    ranks = whole(settings.get(PROCESSES, machines), PROCESSES)
    if ranks % machines:
        raise Unreadable(f"{PROCESSES} = {ranks}: {MACHINES} {machines} does not divide it")
    return found | {m.NODES: machines, m.EACH: ranks // machines}


def _back(argument: str, value: Any) -> Settings | None:
    kinds = {"--bf16": "bf16", "--fp16": "fp16"}
    if argument in kinds:
        return {PRECISION: kinds[argument]}
    return {} if argument in (*IMPLIED, *SCRIPTS) else None


def _read_micro_batches(settings: Settings) -> Fields:
    if MICRO_BATCHES in settings:
        rule = "their size is your DataLoader's; give --parallelism.micro-batch-size and --job.global-batch-size"
        raise Unreadable(f"{MICRO_BATCHES} = {settings[MICRO_BATCHES]}: {rule}")
    return {}


def _write_full(s: Subject) -> Settings:
    if s.p.activation_checkpoint != "full":
        rule = "the plugin always gives a method of recompute, which Megatron-LM has for full alone"
        raise NotExpressible(f"activation_checkpoint = {s.p.activation_checkpoint!r}: {rule} (valid: full)")
    return {}


def _read_full(settings: Settings) -> Fields:
    mode = settings.get(PLUGIN + "recompute_granularity", "full")
    if mode != "full":
        raise Unreadable(
            f"{PLUGIN}recompute_granularity = {mode!r}: the plugin gives a method beside it, which Megatron-LM refuses (valid: full)"
        )
    return {}


def _read_activations(settings: Settings) -> Fields:
    if settings.get(ACTIVATIONS):
        raise Unreadable(f"{ACTIVATIONS} = True: accelerate hands Megatron-LM recompute_granularity instead")
    return {}


NAMES = Names("accelerate-megatron", OF, _extra, _back, {m.NODES: MACHINES, m.EACH: PROCESSES, "--bf16": PRECISION})
_PLAIN = NAMES.dialect(ACCELERATE.version, "accelerate 1.15.0, MegatronLMPlugin", ())
DIALECT = replace(
    _PLAIN,
    rules=(
        *_PLAIN.rules,
        Rule((MICRO_BATCHES,), ("job.global_batch_size",), lambda s: {MICRO_BATCHES: s.p.num_micro_batches(s.job)}, _read_micro_batches),
        Rule((), (RECOMPUTE,), _write_full, _read_full),
        Rule((ACTIVATIONS,), (), lambda s: {}, _read_activations),
        understood(KIND),
    ),
    other=(*ACCELERATE.other, *(PLUGIN + name for name in ("attention_", "hidden_dropout", "calculate_per", "use_rotary", "no_load", "no_save", "eod_mask"))),
    spaces=tuple({**space, "activation_checkpoint": "full"} for space in _PLAIN.spaces),
    launcher=(MACHINES, PROCESSES, PRECISION),
)  # fmt: skip


def filled(settings: Settings, nodes: int, per_node: int) -> Settings:
    """Settings with the cluster's processes, if the file has none."""
    return settings if PROCESSES in settings else {**settings, MACHINES: nodes, PROCESSES: nodes * per_node}
