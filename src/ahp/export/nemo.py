"""NeMo's YAML and Megatron-Bridge's: Megatron-LM's arguments under other names. ``ahp check`` reads them; no plan is written in this form.

Keys as in NeMo 8cfedd7 (examples/nlp/language_modeling/conf) and Megatron-Bridge 067f987 (recipes/common.py, whose defaults a recipe leaves out).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ahp.errors import NotExpressible
from ahp.export import megatron_keys as m
from ahp.export.table import NOTICE, Dialect, Fields, Rule, Settings, Subject, from_yaml, understood

AMP, EIGHT, OPTIMIZER = "trainer.precision", "model.fp8", "model.optim.name"
BETAS = "model.optim.betas"
SHARDING = ("distributed_fused_adam", "mcore_distributed_optim")
"""NeMo's optimizers that shard their states over the data-parallel ranks."""
SAME = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size", "sequence_parallel",
        "num_layers")  # fmt: skip
"""Keys of the model that have the same names as the arguments."""
NEMO = {f"model.{name}": f"--{name.replace('_', '-')}" for name in (*SAME, "micro_batch_size", "global_batch_size", "seed")} | {
    "trainer.devices": m.EACH, "trainer.num_nodes": m.NODES, "trainer.max_steps": "--train-iters", "trainer.gradient_clip_val": "--clip-grad",
    "model.virtual_pipeline_model_parallel_size": m.VIRTUAL, "model.encoder_seq_length": "--seq-length",
    "model.activations_checkpoint_granularity": m.GRANULARITY, "model.activations_checkpoint_method": m.METHOD,
    "model.activations_checkpoint_num_layers": m.NUMBER, "model.optim.lr": "--lr", "model.optim.weight_decay": "--weight-decay",
    "model.optim.sched.warmup_steps": "--lr-warmup-iters", "model.optim.sched.min_lr": "--min-lr",
    "model.ub_tp_comm_overlap": "--tp-comm-overlap",
}  # fmt: skip
BRIDGE = {m.NODES: m.NODES, m.EACH: m.EACH} | {f"model.{name}": f"--{name.replace('_', '-')}" for name in (*SAME, m.GRANULARITY[2:].replace("-", "_"), m.METHOD[2:].replace("-", "_"),
                                                                     "recompute_num_layers", "recompute_modules")} | {
    "train.train_iters": "--train-iters", "train.global_batch_size": "--global-batch-size", "train.micro_batch_size": "--micro-batch-size",
    "model.seq_length": "--seq-length", "model.virtual_pipeline_model_parallel_size": m.VIRTUAL, "model.expert_tensor_parallel_size": "--expert-tensor-parallel-size",
    "model.pipeline_model_parallel_layout": m.LAYOUT,
    "optimizer.lr": "--lr", "optimizer.min_lr": "--min-lr", "optimizer.weight_decay": "--weight-decay", "optimizer.adam_beta1": "--adam-beta1",
    "optimizer.adam_beta2": "--adam-beta2", "optimizer.adam_eps": "--adam-eps", "optimizer.clip_grad": "--clip-grad",
    "scheduler.lr_warmup_iters": "--lr-warmup-iters", "scheduler.lr_decay_style": "--lr-decay-style", "scheduler.lr_decay_iters": "--lr-decay-iters",
    "ddp.use_distributed_optimizer": m.OPTIMIZER, "ddp.use_megatron_fsdp": m.FSDP, "ddp.data_parallel_sharding_strategy": m.STRATEGY,
    "ddp.overlap_grad_reduce": m.OVERLAP, "ddp.overlap_param_gather": m.GATHER, "ddp.num_distributed_optimizer_instances": m.INSTANCES, "rng.seed": "--seed",
    "ddp.average_in_collective": m.AVERAGE,
    "comm_overlap.tp_comm_overlap": "--tp-comm-overlap",
}  # fmt: skip
BRIDGE_DEFAULTS = {m.OPTIMIZER: True, m.OVERLAP: True, m.GATHER: True, "--bf16": True, "--train-iters": 300_000, "--global-batch-size": 32,
                   "--micro-batch-size": 2, "--seq-length": 4096, "--lr": 3e-4, "--lr-decay-style": "cosine"}  # fmt: skip


@dataclass(frozen=True)
class Names:
    """Megatron-LM's arguments under another program's keys."""

    program: str
    of: Mapping[str, str]
    """The argument of each key."""
    extra: Callable[[Settings], Settings]
    """Arguments that the file has in another form, or that are the program's defaults."""
    back: Callable[[str, Any], Settings | None]
    """Keys for an argument that has none in ``of``; None if the program cannot express it."""
    also: Mapping[str, str]
    """The key of each argument that ``extra`` reads and ``back`` writes."""

    def arguments(self, settings: Settings) -> Settings:
        """The file's settings as Megatron-LM's arguments."""
        plain = {self.of[key]: value for key, value in settings.items() if key in self.of and value is not False}
        return self.extra(settings) | plain

    def rule(self, rule: Rule) -> Rule:
        """A rule of Megatron-LM's under these names."""
        names = {argument: key for key, argument in self.of.items()}
        keys = tuple(names.get(key, self.also.get(key)) for key in rule.keys)

        def write(s: Subject) -> Settings:
            found: Settings = {}
            for argument, value in rule.write(s).items():
                if argument.startswith(NOTICE):
                    found[argument] = value
                elif argument in names:
                    found[names[argument]] = value
                elif (said := self.back(argument, value)) is not None:
                    found.update(said)
                else:
                    raise NotExpressible(f"{argument} {value}: {self.program}'s YAML has no key for it")
            return found

        def read(settings: Settings) -> Fields:
            return rule.read(self.arguments(settings))

        return Rule(tuple(key for key in keys if key), rule.fields, write, read)

    def dialect(self, version: str, source: str, other: tuple[str, ...]) -> Dialect:
        """Megatron-LM's dialect under these names."""
        rules = tuple(self.rule(rule) for rule in m.DIALECT.rules)
        read = {key for rule in rules for key in rule.keys}
        launcher = tuple(key for key, argument in self.of.items() if argument in m.DIALECT.launcher)
        return replace(
            m.DIALECT,
            program=self.program,
            why_priced="it runs Megatron-Core",
            version=version,
            source=source,
            agrees=(),
            rules=(*rules, understood(*(key for key in self.of if key not in read))),
            other=other,
            launcher=launcher,
            counted=lambda settings, fields: (),  # the program's own defaults hold
        )


def _nemo(settings: Settings) -> Settings:
    found: Settings = {"--lr-decay-style": "cosine"}
    kind = str(settings.get(AMP, 32))
    if kind.startswith("bf16"):
        found["--bf16"] = True
    elif kind.startswith("16"):
        found["--fp16"] = True
    if settings.get(EIGHT):
        found["--fp8-format"] = "hybrid" if settings.get("model.fp8_hybrid") else "e4m3"
    if settings.get(OPTIMIZER) in SHARDING:
        found[m.OPTIMIZER] = True
    betas = settings.get(BETAS)
    if isinstance(betas, list) and len(betas) == 2:
        found |= {"--adam-beta1": betas[0], "--adam-beta2": betas[1]}
    return found


IMPLIED = ("--overlap-grad-reduce", "--overlap-param-gather", "--lr-decay-iters", "--lr-decay-style", "--optimizer", "--adam-beta1", "--adam-beta2",
           "--adam-eps", m.LOSS, "--moe-token-dispatcher-type", "--grad-reduce-in-bf16", "--ckpt-format", "--init-model-with-meta-device", "--fp8-param-gather",
           m.AVERAGE, m.RECIPE, m.REUSE)  # fmt: skip
"""Arguments that a program sets by itself, or that do not concern a layout."""


def _nemo_back(argument: str, value: Any) -> Settings | None:
    said = {
        m.OPTIMIZER: {OPTIMIZER: SHARDING[1]},
        "--bf16": {AMP: "bf16"},
        "--fp16": {AMP: "16"},
        "--fp8-format": {EIGHT: True},
    }
    return said.get(argument, {} if argument in IMPLIED else None)


def _bridge_back(argument: str, value: Any) -> Settings | None:
    return {} if argument in (*IMPLIED, "--bf16") else None


ALSO = {m.OPTIMIZER: OPTIMIZER, "--bf16": AMP, "--fp16": AMP, "--fp8-format": EIGHT, "--adam-beta1": BETAS}
NAMES = Names("nemo", NEMO, _nemo, _nemo_back, ALSO)
BRIDGE_NAMES = Names("bridge", BRIDGE, lambda settings: dict(BRIDGE_DEFAULTS), _bridge_back, {})
DIALECT = NAMES.dialect(
    "2.x",
    "NeMo 8cfedd7, examples/nlp/language_modeling/conf",
    ("name", "exp_manager", "trainer.", "model.tokenizer", "model.data", "model.nsys", "model.restore", "model.mcore_gpt", "model.native_amp", "model.hysteresis",
     "model.init_method", "model.use_scaled_init", "model.hidden_dropout", "model.attention_dropout", "model.ffn_dropout", "model.resume", "model.apex",
     "model.onnx", "model.optim.sched.constant_steps", "model.transformer_engine", "model.megatron_amp_O2", "defaults", "hydra", "model.fp8_",
     "model.max_position_embeddings", "model.hidden_size", "model.ffn_hidden_size", "model.num_attention_heads", "model.num_query_groups", "model.kv_channels",
     "model.normalization", "model.layernorm", "model.activation", "model.bias", "model.position_embedding", "model.rotary", "model.share_embeddings",
     "model.make_vocab", "model.pre_process", "model.post_process", "model.persist", "model.headscale", "model.transformer_block", "model.openai_gelu",
     "model.normalize_attention", "model.attention_type", "model.masked_softmax", "model.get_attention", "model.use_cpu_init"),
)  # fmt: skip
BRIDGE_DIALECT = BRIDGE_NAMES.dialect(
    "067f987",
    "Megatron-Bridge 067f987, recipes/common.py",
    ("checkpoint.", "logger.", "validation.", "tokenizer.", "profiling.", "train.eval_", "train.manual_gc", "dataset.", "rng.", "dist.", "train.exit_"),
)  # fmt: skip


def parse(text: str) -> Settings:
    """Keys with a value, with ``${a.b}`` and ``${.b}`` replaced where the file has them. Raises BadInput for text that is no YAML mapping."""
    found = from_yaml(text, "the YAML")

    def said(key: str, value: Any) -> Any:
        named = re.fullmatch(r"\$\{(\.?)([\w.]+)\}", value) if isinstance(value, str) else None
        if named is None:
            return value
        parent = key.rpartition(".")[0]
        return found.get(f"{parent}.{named[2]}" if named[1] else named[2], value)

    return {key: said(key, value) for key, value in found.items() if value is not None}


def filled(settings: Settings, nodes: int, per_node: int) -> Settings:
    """Settings of a recipe, which has no devices, with those of the cluster."""
    return {**settings, m.NODES: nodes, m.EACH: per_node}
