"""The checks that engines share before they accept a layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ahp.engines import releases
from ahp.errors import listed
from ahp.job import Job
from ahp.plan import AXES, Axis, EngineChoice, Parallelism
from ahp.schedule.registry import PLAIN


def refuses_schedule_without_stages(p: Parallelism) -> str | None:
    """The reason against a pipeline schedule where there is no pipeline, which would not be used; else None."""
    if p.num_stages > 1 or p.pipeline_parallel_schedule == PLAIN:
        return None
    rule = f"needs a pipeline_parallel_degree above 1 (valid: {PLAIN}, the default)"
    return f"pipeline_parallel_schedule = {p.pipeline_parallel_schedule!r}: {rule}"


@dataclass(frozen=True)
class Support:
    """What an engine can express, as sets of valid values."""

    precisions: tuple[str, ...]
    schedules: tuple[str, ...]
    """Pipeline schedules; empty = the engine has no pipeline."""
    dtypes: tuple[str, ...] = ("fp32",)
    """Types of weights, gradients and optimizer states."""
    activation_checkpoints: tuple[str, ...] = ("none", "selective", "full")
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    async_tensor: Literal["never", "compiled", "always"] = "never"
    """Whether collectives of sequence parallelism can run in pieces overlapped with products: never, with ``compile``, or always."""
    zero_stages_in_pipeline: tuple[int, ...] | None = None
    """None = the same as without a pipeline."""
    hybrid: bool = True
    """Whether states can be sharded over some of the ranks that hold the same weights; else over all of these ranks or not at all."""
    tensor: bool = True
    sequence: bool = True
    context: bool = True
    expert: bool = True
    folds_experts: Literal["never", "where needed", "always"] = "never"
    """Whether tensor-parallel ranks that share experts hold whole ones, instead of a part of each, if the layout does not say: never, if the
    ranks of the data and context axes alone cannot share the experts, or always."""
    compile: bool = True
    mesh_orders: tuple[tuple[Axis, ...], ...] = (AXES,)
    """Orders in which the engine can number ranks; axes with a degree of 1 do not count."""
    recomputed_layers: Literal["none", "the same"] = "none"
    """Whether a stage can recompute only some of its blocks: no, or the same number of blocks in every stage, in full."""
    dispatch: tuple[str, ...] = ()
    """Which keys of ``DISPATCH`` can be chosen."""

    def refuses(self, engine: str, job: Job, parallelism: Parallelism, choice: EngineChoice) -> str | None:
        """The first thing that the engine cannot express, as ``key = value: rule (valid: ...)``."""
        p = parallelism
        if reason := releases.refuses(engine, choice.version) or self._refuses_order(engine, p):
            return reason
        degrees = (
            ("tensor_parallel_degree", p.tensor_parallel_degree, self.tensor),
            ("context_parallel_degree", p.context_parallel_degree, self.context),
            ("expert_parallel_degree", p.expert_parallel_degree, self.expert),
            ("pipeline_parallel_degree", p.pipeline_parallel_degree, bool(self.schedules)),
        )
        for key, degree, has in degrees:
            if degree > 1 and not has:
                return _cannot(engine, key, degree, [1])
        if reason := self._refuses_expert_tensor(engine, p) or _refuses_placement(engine, p):
            return reason
        if p.context_parallel_method is not None:
            return _cannot(engine, "context_parallel_method", p.context_parallel_method, [None])
        if p.enable_sequence_parallel and not self.sequence:
            return _cannot(engine, "enable_sequence_parallel", True, [False])
        if p.pipeline_parallel_degree > 1 and p.pipeline_parallel_schedule not in self.schedules:
            return _cannot(engine, "pipeline_parallel_schedule", p.pipeline_parallel_schedule, self.schedules)
        if reason := refuses_schedule_without_stages(p):
            return reason
        if p.weight_shards > 1 and p.zero_stage not in self.zero_stages:
            return _cannot(engine, "zero_stage", p.zero_stage, self.zero_stages)
        piped = self.zero_stages_in_pipeline if p.pipeline_parallel_degree > 1 else None
        if p.weight_shards > 1 and piped is not None and p.zero_stage not in piped:
            valid = f"{listed(piped)}; or pipeline_parallel_degree 1"
            return f"zero_stage = {p.zero_stage}: {engine} cannot run this in a pipeline (valid: {valid})"
        if not self.hybrid and p.data_parallel_replicate_degree > 1 and p.weight_shards > 1:
            return _cannot(engine, "data_parallel_replicate_degree", p.data_parallel_replicate_degree, [1])
        if p.activation_checkpoint not in (*self.activation_checkpoints, "auto"):
            return _cannot(engine, "activation_checkpoint", p.activation_checkpoint, self.activation_checkpoints)
        if reason := self._refuses_recomputed(engine, p):
            return reason
        if job.precision not in self.precisions:
            return _cannot(engine, "job.precision", job.precision, self.precisions)
        if job.dtype not in self.dtypes:
            valid = f"{listed(self.dtypes)}; or engine.name ahp or torchtitan"
            return f"job.dtype = {job.dtype!r}: states in 16 bits are not priced for {engine} (valid: {valid})"
        if job.document_mask:
            return _cannot(engine, "job.document_mask", True, ["False; or engine.name ahp"])
        if job.lora is not None:
            return _cannot(engine, "job.lora", job.lora.model_dump(exclude_defaults=True), ["null; or engine.name ahp"])
        if job.optimizer.name != "adamw":
            return _cannot(engine, "job.optimizer.name", job.optimizer.name, ["adamw"])
        if choice.compile and not self.compile:
            return _cannot(engine, "engine.compile", True, [False])
        if reason := self._refuses_async(engine, choice):
            return reason
        if reason := refuses_dispatch(engine, choice, self.dispatch):
            return reason
        if (
            choice.cuda_graph_modules and p.activation_checkpoint == "full"
        ):  # as in core/transformer/transformer_config.py
            valid = "null; or activation_checkpoint none or selective"
            return _cannot(engine, "engine.cuda_graph_modules", list(choice.cuda_graph_modules), [valid])
        if choice.offload_optimizer:
            return _cannot(engine, "engine.offload_optimizer", True, ["False; or engine.name ahp"])
        if choice.loss_chunk_tokens is not None:
            return _cannot(engine, "engine.loss_chunk_tokens", choice.loss_chunk_tokens, ["null; or engine.name ahp"])
        return None

    def _refuses_expert_tensor(self, engine: str, p: Parallelism) -> str | None:
        degree, tensor = p.expert_tensor_parallel_degree, p.tensor_parallel_degree
        if degree in (None, tensor):
            return None
        words = f"expert_tensor_parallel_degree = {degree}"
        if self.folds_experts == "never":
            rule = f"{engine} divides every expert over all {tensor} tensor-parallel ranks"
            return f"{words}: {rule} (valid: null, {tensor}; or engine.name megatron or torchtitan)"
        if degree != 1:
            return f"{words}: is priced as 1 or as tensor_parallel_degree alone (valid: 1, {tensor})"
        if not p.enable_sequence_parallel:
            rule = "each tensor-parallel rank sends its own part of the sequence to the experts"
            return f"{words}: needs enable_sequence_parallel, because {rule} (valid: {tensor}; or enable_sequence_parallel true)"
        return None

    def folded(self, p: Parallelism) -> bool:
        """Whether tensor-parallel ranks hold whole experts, as the layout says or else by the engine's default."""
        asked, expert = p.expert_tensor_parallel_degree, p.expert_parallel_degree
        if self.folds_experts == "never" or p.tensor_parallel_degree == 1 or not p.enable_sequence_parallel:
            return False
        if asked is not None or self.folds_experts == "always":
            return asked == 1 if asked is not None else expert > 1
        return p.data_parallel_degree * p.context_parallel_degree % expert > 0

    def _refuses_async(self, engine: str, choice: EngineChoice) -> str | None:
        key = "engine.enable_async_tensor_parallel"
        if not choice.enable_async_tensor_parallel:
            return None
        if self.async_tensor == "never":
            return _cannot(engine, key, True, ["null; or engine.name torchtitan or megatron"])
        if self.async_tensor == "compiled" and not choice.compile:
            return _cannot(engine, key, True, ["null; or engine.compile true"])
        return None

    def _refuses_order(self, engine: str, p: Parallelism) -> str | None:
        if p.mesh_order is None:
            return None
        orders = [[axis for axis in order if axis in p.axes] for order in self.mesh_orders]
        if list(p.axes) in orders:
            return None
        valid = ", or ".join(map(str, dict.fromkeys(map(tuple, orders))))
        valid = valid.replace("(", "[").replace(",)", "]").replace(")", "]")
        return f"mesh_order = {list(p.mesh_order)}: {engine} numbers ranks in a fixed order (valid: {valid}; or engine.name ahp)"

    def _refuses_recomputed(self, engine: str, p: Parallelism) -> str | None:
        some = p.recomputed_layers_per_stage
        if some is None or (
            self.recomputed_layers == "the same" and p.activation_checkpoint == "full" and len(set(some)) == 1
        ):
            return None
        valid = "null"
        if self.recomputed_layers == "the same":
            valid = "null; or the same number for every stage, with activation_checkpoint full"
        return (
            f"recomputed_layers_per_stage = {list(some)}: {engine} cannot run this (valid: {valid}; or engine.name ahp)"
        )


def _refuses_placement(engine: str, p: Parallelism) -> str | None:
    """Engines other than AHP's own give every replica the same work, and stages to ranks in order."""
    if p.micro_batches_per_replica is not None and len(set(p.micro_batches_per_replica)) > 1:
        return (
            f"micro_batches_per_replica = {list(p.micro_batches_per_replica)}: {engine} gives every replica the same number "
            "(valid: null; or engine.name ahp)"
        )
    if p.stages is not None:
        return (
            f"stages = {[stage.group for stage in p.stages]}: {engine} assigns stages to ranks in order, on "
            "any device (valid: null, with the cluster's groups in the pipeline's order and layers_per_stage; or engine.name ahp)"
        )
    return None


def _cannot(engine: str, key: str, value: object, valid: Sequence[object]) -> str:
    return f"{key} = {value!r}: {engine} cannot run this (valid: {listed(valid)})"


DISPATCH = {
    "moe_token_dispatcher_type": "megatron or torchtitan",
    "overlap_moe_expert_parallel_comm": "megatron",
    "cuda_graph_modules": "megatron",
}
"""Keys for how tokens reach experts and what one CUDA graph launches, with the engines that have them."""


def refuses_dispatch(engine: str, choice: EngineChoice, keys: tuple[str, ...] = ()) -> str | None:
    """Why an engine that has only ``keys`` of ``DISPATCH`` cannot run what was asked, or None."""
    for key, engines in DISPATCH.items():
        if key not in keys and (value := getattr(choice, key)) is not None:
            return _cannot(engine, f"engine.{key}", value, [f"null; or engine.name {engines}"])
    return None
