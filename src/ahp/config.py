"""What a user asks for: config.yaml, every key with a default, unknown keys refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, ValidationInfo, field_validator, model_validator

from ahp.errors import BadInput, bad_input
from ahp.job import Job, Record
from ahp.plan import (
    ActivationCheckpoint,
    Axis,
    ContextMethod,
    EngineChoice,
    Parallelism,
    Pattern,
    ScheduleName,
    StagePlace,
    validated,
)
from ahp.words import number_of
from ahp.yaml_text import read_mapping

Tracker = Literal["tensorboard", "wandb"]
OnNan = Literal["stop", "skip", "rollback"]
SECONDS_OF = {"min": 60.0, "h": 3600.0}


class Constraints(Record):
    """The part of a layout that the user has fixed; None = searched. The keys are those of ``Parallelism``."""

    data_parallel_replicate_degree: int | None = Field(default=None, ge=1)
    data_parallel_shard_degree: int | None = Field(default=None, ge=1)
    zero_stage: int | None = Field(default=None, ge=0, le=3)
    tensor_parallel_degree: int | None = Field(default=None, ge=1)
    enable_sequence_parallel: bool | None = None
    pipeline_parallel_degree: int | None = Field(default=None, ge=1)
    pipeline_parallel_schedule: ScheduleName | None = None
    pipeline_parallel_order: tuple[str, ...] | None = None
    virtual_stages_per_rank: int | None = Field(default=None, ge=1)
    layers_per_stage: tuple[int, ...] | None = None
    stages: tuple[StagePlace, ...] | None = None
    micro_batches_per_replica: tuple[int, ...] | None = None
    context_parallel_degree: int | None = Field(default=None, ge=1)
    context_parallel_method: ContextMethod | None = None
    expert_parallel_degree: int | None = Field(default=None, ge=1)
    expert_tensor_parallel_degree: int | None = Field(default=None, ge=1)
    micro_batch_size: int | None = Field(default=None, ge=1)
    activation_checkpoint: ActivationCheckpoint | None = None
    """``auto`` is the same as not given: the lightest that fits is the fastest that fits."""
    recomputed_layers_per_stage: tuple[int, ...] | None = None
    mesh_order: tuple[Axis, ...] | None = None
    """Fixes also which axes have a degree above 1."""

    @field_validator("activation_checkpoint", mode="after")
    @classmethod
    def _auto_is_searched(cls, value: str | None) -> str | None:
        return None if value == "auto" else value

    @classmethod
    def exactly(cls, parallelism: Parallelism) -> Constraints:
        """Constraints that leave only this layout."""
        keys: dict[str, Any] = {**parallelism.model_dump(), "mesh_order": parallelism.axes or None}
        return cls(**keys)

    @property
    def given(self) -> dict[str, Any]:
        """The keys that the user has fixed, with their values."""
        return {key: value for key, value in self if value is not None}

    def admits(self, parallelism: Parallelism) -> bool:
        """Whether a layout keeps to everything that is fixed."""
        given = self.given
        order = given.pop("mesh_order", parallelism.axes)
        if parallelism.pipeline_parallel_degree == 1:
            given.pop("pipeline_parallel_schedule", None)  # it orders the passes of a pipeline alone
        return order == parallelism.axes and all(getattr(parallelism, key) == value for key, value in given.items())


COLLECTIVE_TIMEOUT_S = 600.0
"""A collective that has not ended after this long ends the run, with the cause in status.json. Ranks wait the longest for another
rank's part of a checkpoint or of the export; ten minutes is torch's own limit for NCCL, gloo's is thirty."""


def checkpoint_interval(value: Any) -> tuple[int | None, float | None]:
    """``run.checkpoint_every`` as (steps, None), (None, seconds) for a time such as 30min or 2h, or (None, None) for auto. Raises BadInput."""
    if value == "auto":
        return None, None
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value, None
    if isinstance(value, str) and (found := re.fullmatch(r"(\d+(?:\.\d+)?) ?(min|h)", value)) and float(found[1]) > 0:
        return None, float(found[1]) * SECONDS_OF[found[2]]
    raise bad_input(
        "run.checkpoint_every", value, "must be 1 step or more, a time, or auto", ["auto", "50", "30min", "2h"]
    )


class Profile(Record):
    """Which steps are profiled."""

    steps: tuple[int, int]
    """The first and the last one, counted from 1 as in metrics.jsonl."""

    @model_validator(mode="after")
    def _in_order(self) -> Profile:
        if not 1 <= self.steps[0] <= self.steps[1]:
            rule = "the first step must be 1 or later, and the last one no earlier than it"
            raise bad_input("run.profile.steps", list(self.steps), rule, ["[10, 12]"])
        return self

    def check(self, num_steps: int) -> None:
        """Raises BadInput if the job ends before the last of the steps."""
        if self.steps[1] > num_steps:
            rule = f"the job has {num_steps} steps (job.steps)"
            raise bad_input("run.profile.steps", list(self.steps), rule, [f"steps 1 to {num_steps}"])


class Elastic(Record):
    """How often failed workers are started again, and with how few the run continues."""

    min_workers: int = Field(default=1, ge=1)
    max_workers: int | None = Field(default=None, ge=1)
    """At the start, and when lost ones come back; None: as many as there are devices."""
    max_restarts: int = Field(default=10, ge=0)
    """Within ``restart_window_s``; 0: the run ends with the first failure."""
    restart_window_s: float = Field(default=3600.0, gt=0)

    @model_validator(mode="after")
    def _in_order(self) -> Elastic:
        if self.max_workers is not None and self.max_workers < self.min_workers:
            rule = f"must be at least run.elastic.min_workers = {self.min_workers}"
            raise bad_input("run.elastic.max_workers", self.max_workers, rule, [f"{self.min_workers} or more"])
        return self

    def refuse(self, workers: int, what: str) -> None:
        """Raises BadInput for a number of workers outside ``min_workers`` to ``max_workers``; ``what``: what makes that many."""
        self.refuse_fewer(workers, what)
        self.refuse_more(workers, what)

    def refuse_fewer(self, workers: int, what: str) -> None:
        """Raises BadInput if there would be fewer than ``min_workers``."""
        if workers < self.min_workers:
            raise bad_input("run.elastic.min_workers", self.min_workers, _make(what, workers), [f"1 to {workers}"])

    def refuse_more(self, workers: int, what: str) -> None:
        """Raises BadInput if there would be more than ``max_workers``."""
        if self.max_workers is not None and workers > self.max_workers:
            valid = [f"{workers} or more", "fewer workers"]
            raise bad_input("run.elastic.max_workers", self.max_workers, _make(what, workers), valid)


def _make(what: str, workers: int) -> str:
    return f"{what} make{'s' * (not what.endswith('s'))} {number_of(workers, 'worker')}"


class Run(Record):
    """Where a run leaves its files, and how often."""

    folder: str = "runs/demo"
    checkpoint_every: int | str = "auto"
    """Steps, or a time such as 30min or 2h; ``auto``: the time that loses the least."""
    keep: int = Field(default=3, ge=1)
    checkpoint_store: str | None = None
    validate_every: int = Field(default=50, ge=1)
    validation_batches: int = Field(default=4, ge=1)
    evaluation: str | None = None
    evaluate_every: int = Field(default=100, ge=1)
    collective_timeout_s: float = Field(default=COLLECTIVE_TIMEOUT_S, ge=1)
    track: tuple[Tracker, ...] = ()
    sample: bool = True
    extend: bool = False
    on_nan: OnNan = "stop"
    profile: Profile | None = None
    elastic: Elastic = Elastic()

    @field_validator("folder", mode="after")
    @classmethod
    def _has_a_name(cls, value: str) -> str:
        if not value.strip():  # as a path: the current folder
            raise ValueError(f"run.folder = {value!r}: must name a folder (valid: runs/demo)")
        return value

    @field_validator("checkpoint_every", mode="before")
    @classmethod
    def _steps_or_a_time(cls, value: Any) -> Any:
        checkpoint_interval(value)
        return value

    def check(self, job: Job) -> None:
        """Raises BadInput for a profile of steps that the job does not have, and for how often something is done that is not asked for."""
        if self.profile is not None:
            self.profile.check(job.steps)
        for key, needed, given in (
            ("validate_every", "job.validation", job.validation),
            ("validation_batches", "job.validation", job.validation),
            ("evaluate_every", "run.evaluation", self.evaluation),
        ):
            value, default = getattr(self, key), Run.model_fields[key].default
            if given is None and value != default:
                raise bad_input(f"run.{key}", value, f"has no effect without {needed}", [default, f"with {needed}"])


class Config(Record):
    """One training job as a user describes it; ``load_config`` reads it."""

    model: str | dict[str, Any] = "tiny"
    init_from: str | None = None
    cluster: str | dict[str, Any] = "local"
    job: Job = Job()
    parallelism: Constraints = Constraints()
    engine: EngineChoice = EngineChoice()
    run: Run = Run()

    @field_validator("model", "cluster", mode="before")
    @classmethod
    def _name_or_mapping(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, (str, dict)):
            raise ValueError(f"{info.field_name} = {value!r}: must be a name, a path or a mapping")
        return value

    @model_validator(mode="before")
    @classmethod
    def _model_of_the_weights(cls, data: Any) -> Any:
        """If no model is named, given weights bring their own config.json."""
        if isinstance(data, dict) and isinstance(data.get("init_from"), str) and "model" not in data:
            return {**data, "model": data["init_from"]}
        return data

    @model_validator(mode="after")
    def _run_fits_the_job(self) -> Config:
        self.run.check(self.job)
        return self

    @field_validator("parallelism", mode="before")
    @classmethod
    def _auto(cls, value: Any) -> Any:
        return {} if value == "auto" or value is None else value

    @field_validator("engine", mode="after")
    @classmethod
    def _own_runtime(cls, value: EngineChoice) -> EngineChoice:
        if value.name != "ahp":
            raise ValueError(
                f"engine.name = {value.name!r}: training runs on AHP's own runtime (valid: ahp); a plan for {value.name} is made by: "
                f"ahp plan MODEL CLUSTER --engine.name {value.name}"
            )
        return value


HELP: dict[str, str] = {
    "model": "catalogue name, folder or file of a Hugging Face config.json, mapping of its keys, or pkg.mod:factory",
    "init_from": "folder of Hugging Face weights and tokenizer.json to start from; without model, its config.json too",
    "cluster": "local, a cluster.yaml, a short form such as 8x8xH100-SXM-80GB or 8xH100+8xA100, slurm, kubernetes, or a mapping",
    "job.data": "python-stdlib, a file or folder of .txt, .jsonl or .parquet, or hub:owner/name; or a mixture, [{path: a.jsonl, weight: 0.7}, ...] (docs/data.md)",
    "job.data_field": "key of a row that has its text or messages; null = text, or prompt and completion, or messages, whichever the row has",
    "job.packing": "packed: documents one after another, cut into sequences; padded: one document in a sequence",
    "job.document_mask": "whether tokens attend only within their document, and positions start again at each (docs/data.md)",
    "job.validation": "held-out text: data as job.data, or a share of its documents such as 0.05 (of its tokens where it has too few documents); null = none",
    "job.sequence_length": "tokens of one sequence",
    "job.global_batch_size": "sequences of one optimizer step, over all devices",
    "job.steps": "optimizer steps of the whole job",
    "job.precision": "precision of computation: fp32, bf16, fp16, fp8; ahp train and ahp plan choose one if none is given",
    "job.dtype": "type of weights, gradients and optimizer states: fp32, or bf16 for half the memory; small updates are lost (docs/training.md)",
    "job.optimizer.name": "adamw, adamw8bit (its moments in 8 bits, by torchao), or muon for the matrices of the blocks and adamw for the rest",
    "job.optimizer.learning_rate": "highest rate, reached after the warm-up",
    "job.optimizer.betas": "decay of the running means of the gradient and of its square",
    "job.optimizer.eps": "added to the denominator",
    "job.optimizer.weight_decay": "decoupled decay",
    "job.optimizer.decay_norms_and_biases": "whether weight decay applies to parameters of one dim too, as in torch without parameter groups",
    "job.optimizer.momentum": "muon only: decay of the running mean of the gradient",
    "job.optimizer.warmup_steps": "steps over which the rate rises linearly",
    "job.optimizer.schedule": "constant, linear, cosine or wsd (constant, then linear), down to min_lr_factor of the rate",
    "job.optimizer.min_lr_factor": "share of the rate that a step after the last one would have; not for constant",
    "job.optimizer.decay_share": "wsd only: share of the steps, at the end, over which the rate falls",
    "job.optimizer.grad_clip": "largest global gradient norm; null = no clipping",
    "job.lora": "{r: 16, lora_alpha: 32} trains adapters of low rank instead of the weights, by peft's keys (docs/train/fine-tuning.md)",
    "job.seed": "seed of the weights, of the data order and of dropout",
    "job.deterministic": "bitwise equal results on the same GPUs, with slower kernels; on CPUs they are always equal (docs/train/checkpoints.md)",
    "parallelism.data_parallel_replicate_degree": "replicas that hold the same weights",
    "parallelism.data_parallel_shard_degree": "devices over which one replica's states are sharded",
    "parallelism.zero_stage": "what is sharded: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too",
    "parallelism.tensor_parallel_degree": "devices that share every matrix product",
    "parallelism.enable_sequence_parallel": "whether the operators between the products of tensor parallelism are split along the sequence",
    "parallelism.pipeline_parallel_degree": "pipeline ranks",
    "parallelism.pipeline_parallel_schedule": f"{', '.join(get_args(Pattern))} (torch's names), Synthesized",
    "parallelism.pipeline_parallel_order": 'the order that Synthesized runs: one line for each pipeline rank, such as ["0F0,0B0", "1F0,1B0"]; or the lines of one replica after those of another',
    "parallelism.virtual_stages_per_rank": "stages that one pipeline rank holds; more than 1 needs a schedule with several, such as Interleaved1F1B",
    "parallelism.layers_per_stage": "blocks of each stage in pipeline order, such as [3, 3, 2]",
    "parallelism.stages": "on a mixed cluster, group and blocks of each stage in pipeline order, such as [{group: a, layers: 5}]. Stages of one rank have the "
    "same group; group may be a list with one for each replica. recomputed_layers is how many of the blocks recompute. "
    "tensor_parallel_degree and data_parallel_shard_degree give a stage its own width",
    "parallelism.micro_batches_per_replica": "micro-batches of one step for each replica of the pipeline, such as [3, 1]",
    "parallelism.context_parallel_degree": "devices that share one sequence",
    "parallelism.context_parallel_method": "attention over all tokens by a ring (keys and values go round) or all-to-all (each device has some heads)",
    "parallelism.expert_parallel_degree": "devices that share the experts",
    "parallelism.expert_tensor_parallel_degree": "tensor-parallel degree of every expert: that of the layout, or 1",
    "parallelism.micro_batch_size": "sequences that one data-parallel rank computes at a time",
    "parallelism.activation_checkpoint": "what is recomputed in backward: none, selective, full, auto",
    "parallelism.recomputed_layers_per_stage": "blocks of each stage that are recomputed, such as [2, 1, 0]",
    "parallelism.mesh_order": "mesh axes with a degree above 1, outermost first, such as [dp_shard, pp, tp]; neighbouring ranks differ in the last",
    "engine.name": "what runs the job: ahp train runs only ahp, AHP's own runtime; the others are for forecasts and exports",
    "engine.attention": "flash: the fastest fused kernel that torch has for the device; math: plain products and a softmax",
    "engine.compile": "whether blocks are compiled with torch.compile",
    "engine.loss_chunk_tokens": "tokens whose logits and loss are in memory at a time; null = all of a micro-batch",
    "engine.offload_optimizer": "whether AdamW's moments are in host memory, and are copied to the GPU for each update",
    "engine.enable_async_tensor_parallel": "whether collectives of sequence parallelism overlap with products, piece by piece; AHP's own runtime does not",
    "engine.moe_token_dispatcher_type": "alltoall: NCCL sends a token once for each of its experts; flex: once to each node (Megatron; torchtitan's standard and deepep)",
    "engine.overlap_moe_expert_parallel_comm": "whether tokens travel to experts beside the opposite pass of another micro-batch (Megatron)",
    "engine.cuda_graph_modules": "parts of a block that are launched as one CUDA graph (Megatron): attn, moe_router",
    "engine.version": "the release of the engine that is priced; AHP's own runtime is the installed one",
    "run.folder": "where the run leaves its files; the same folder again continues the run",
    "run.checkpoint_every": "steps between checkpoints, or the time between them (30min, 2h); auto: from the time of a checkpoint and the failure rate of the cluster (docs/train/checkpoints.md)",
    "run.keep": "number of newest checkpoints that are kept",
    "run.checkpoint_store": "URL of a folder in an object store to which each checkpoint is copied, such as s3://bucket/run (extra [object-store], "
    "docs/train/checkpoints.md)",
    "run.validate_every": "steps between evaluations of the held-out text, where job.validation gives some",
    "run.validation_batches": "global batches of one evaluation; the same ones each time",
    "run.evaluation": "pkg.mod:function, called with the parallel model and the step on every rank; its numbers go to metrics.jsonl (docs/training.md)",
    "run.evaluate_every": "steps between two calls of run.evaluation",
    "run.collective_timeout_s": "time limit of a collective: a rank for which the others wait longer ends the run",
    "run.track": "trackers beside metrics.jsonl: tensorboard, wandb (extra [track])",
    "run.sample": "whether a finished run ends with a sample of text, for which the whole model is loaded once more",
    "run.extend": "allows a run to continue with more job.steps under a schedule that looks ahead (linear, cosine, wsd in its decay), with other "
    "job.optimizer keys except its name, or with job.precision fp32 or bf16. The change is for the steps to come",
    "run.on_nan": "when a loss or gradient is not a number: stop, skip its update, or rollback to the last checkpoint (docs/train/when-it-fails.md)",
    "run.profile": "{steps: [10, 12]} profiles these steps, and on a GPU their memory, into profile/ of the run's folder",
    "run.elastic.min_workers": "fewest workers with which the run continues when devices are lost; the layout is then searched again",
    "run.elastic.max_workers": "most workers, at the start and when lost ones come back; null: as many as there are devices",
    "run.elastic.max_restarts": "restarts of failed workers within run.elastic.restart_window_s; 0: none",
    "run.elastic.restart_window_s": "seconds in which run.elastic.max_restarts is counted, and after which a lost device is tried again; twice as long each time that it is "
    "lost again",
}
"""Every key of config.yaml in words; docs/reference/config.md and ``ahp train --help`` show these."""


def config_help() -> str:
    """Every key of config.yaml, its default and what it means, as text for ``--help``."""
    lines = ["Keys of config.yaml, and dotted overrides (--job.steps 20, --parallelism.tensor-parallel-degree=4):"]
    for key, words in HELP.items():
        lines += [f"  {key} = {_default(key)}", f"      {words}"]
    return "\n".join(lines)


def load_config(path: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """Read config.yaml, or the defaults when ``path`` is None, and apply overrides.

    Args:
        path: the file.
        overrides: dotted keys to values, ``{"job.steps": 20}``.

    Raises:
        BadInput: a missing file, an unknown key, a value out of its range; names the user's key.
    """
    data = read_yaml(path) if path is not None else {}
    for key, value in (overrides or {}).items():
        set_dotted(data, key, value)
    try:
        return validated(Config, data, str(path) if path is not None else "config")
    except BadInput:
        if path is None or not overrides:
            raise
        validated(Config, read_yaml(path), str(path))  # if the file is right by itself, the overrides are wrong
        return validated(Config, data, "command line")


def set_dotted(data: dict[str, Any], key: str, value: Any) -> None:
    """Set ``data["a"]["b"] = value`` for the key ``a.b``; shorthands on the way become the mappings they stand for."""
    *parents, last = key.split(".")
    place = data
    for depth, part in enumerate(parents):
        path = ".".join(parents[: depth + 1])
        inner: Any = place.get(part)
        if inner is None or (path == "parallelism" and inner == "auto"):
            inner = {}
        elif path in ("job.optimizer", "engine") and isinstance(inner, str):
            inner = {"name": inner}
        elif not isinstance(inner, dict):
            raise bad_input(key, value, f"{path} = {inner!r} is not a mapping, so it has no key {last!r}")
        below: dict[str, Any] = dict(inner)
        place[part] = below
        place = below
    place[last] = value


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The keys in a config's file, none if it is empty. Raises BadInput when it is missing, not YAML, or not a mapping."""
    return read_mapping(Path(path), "config", may_be_empty=True)


def _default(key: str) -> str:
    value: Any = Config()
    for part in key.split("."):
        value = getattr(value, part)
    if key.startswith("parallelism.") or key == "engine.compile":
        return "searched"
    if value is None:
        return "null"
    return str(list(value)) if isinstance(value, tuple) else str(value)
