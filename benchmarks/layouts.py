"""What is measured: every technique as a layout, with what runs it on the other side and with AHP's words for it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from task import Task

NUM_WORKERS = 2


@dataclass(frozen=True)
class Layout:
    """A layout by its name, for both sides."""

    name: str
    rival: str
    """What runs it on the other side, an entry of RIVALS."""
    degrees: dict[str, Any]
    """AHP's words for it, without the micro-batch."""
    micro_batches: int = 1
    precision: str = "fp32"
    engine: dict[str, Any] = field(default_factory=dict)
    """AHP's words for what is no degree."""
    experts: int = 0
    """Of the model's blocks; 0 = no mixture."""
    optimizer: str = "adamw"
    model: str | None = None
    """Where it is not the task's: a smaller one, where a step of that would take seconds."""

    def of(self, task: Task) -> Task:
        """The task with what belongs to the layout."""
        optimizer = replace(task.optimizer, name=self.optimizer)
        model = self.model or task.model
        return replace(task, model=model, precision=self.precision, experts=self.experts, optimizer=optimizer)


RIVALS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ddp": ("plain.ddp", "PlainDDP", {}),
    "zero1": ("plain.fsdp", "PlainFSDP", {"zero_stage": 1}),
    "zero2": ("plain.fsdp", "PlainFSDP", {"zero_stage": 2}),
    "zero3": ("plain.fsdp", "PlainFSDP", {"zero_stage": 3}),
    "tp": ("plain.tensor", "PlainTensorParallel", {}),
    "tp-sequence": ("plain.sequence", "PlainSequenceParallel", {}),
    "GPipe": ("plain.pipeline", "PlainPipeline", {"schedule": "GPipe"}),
    "1F1B": ("plain.pipeline", "PlainPipeline", {"schedule": "1F1B"}),
    "Interleaved1F1B": ("plain.pipeline", "PlainPipeline", {"schedule": "Interleaved1F1B"}),
    "InterleavedZeroBubble": ("plain.pipeline", "PlainPipeline", {"schedule": "InterleavedZeroBubble"}),
    "ZBVZeroBubble": ("plain.pipeline", "PlainPipeline", {"schedule": "ZBVZeroBubble"}),
    "DualPipeV": ("plain.pipeline", "PlainPipeline", {"schedule": "DualPipeV"}),
    "ring": ("plain.context", "PlainContextParallel", {"method": "ring"}),
    "all-to-all": ("plain.context", "PlainContextParallel", {"method": "all-to-all"}),
    "experts": ("plain.experts", "PlainExpertParallel", {}),
    "recompute-full": ("plain.recompute", "recompute", {"selective": False}),
    "recompute-selective": ("plain.recompute", "recompute", {"selective": True}),
    "compile": ("plain.compiled", "compiled", {}),
    "chunked-loss": ("plain.chunked_loss", "chunked_loss", {"chunk_tokens": 64}),
    "muon": ("plain.muon", "muon", {}),
    **{f"deepspeed-{stage}": ("rivals.zero", "DeepSpeedZero", {"zero_stage": stage}) for stage in (1, 2, 3)},
    "accelerate": ("rivals.accelerated", "AccelerateDDP", {}),
    "torchtitan-never": ("rivals.titan", "Titan", {"tensor": False, "reshard": "never"}),
    "torchtitan-always": ("rivals.titan", "Titan", {"tensor": False, "reshard": "always"}),
    "torchtitan-tp": ("rivals.titan", "Titan", {"tensor": True, "reshard": "default"}),
}
"""Module, class or function, and keywords. Called with the task and the number of micro-batches, each gives what has
``step``. Imported where it is used: the engines need not be installed."""

DDP = {"data_parallel_replicate_degree": 2}
ZERO1, ZERO2, ZERO3 = ({"data_parallel_shard_degree": 2, "zero_stage": stage} for stage in (1, 2, 3))
TP = {"tensor_parallel_degree": 2}
SEQUENCE = {**TP, "enable_sequence_parallel": True}
CP = {"context_parallel_degree": 2}


def layouts() -> list[Layout]:
    """Every technique that two CPU workers can show, alone."""
    return [
        Layout("ddp", "ddp", DDP),
        Layout("ddp-accumulate4", "ddp", DDP, micro_batches=4),
        Layout("zero1-accumulate4", "zero1", ZERO1, micro_batches=4),
        Layout("zero2", "zero2", ZERO2),
        Layout("zero2-accumulate4", "zero2", ZERO2, micro_batches=4),
        Layout("zero3", "zero3", ZERO3),
        Layout("zero3-accumulate4", "zero3", ZERO3, micro_batches=4),
        Layout("zero2-bf16", "zero2", ZERO2, precision="bf16"),
        Layout("zero3-bf16", "zero3", ZERO3, precision="bf16"),
        Layout("zero2-fp16", "zero2", ZERO2, precision="fp16", model="small"),
        Layout("tp", "tp", TP),
        Layout("tp-accumulate4", "tp", TP, micro_batches=4),
        Layout("tp-sequence", "tp-sequence", SEQUENCE),
        *(
            Layout(name, schedule, {**_pipeline(virtual), "pipeline_parallel_schedule": schedule}, micro_batches=4)
            for name, schedule, virtual in (
                ("pp-gpipe", "GPipe", 1),
                ("pp-1f1b", "1F1B", 1),
                ("pp-interleaved", "Interleaved1F1B", 2),
                ("pp-interleaved-zero-bubble", "InterleavedZeroBubble", 2),
                ("pp-zbv", "ZBVZeroBubble", 2),
                ("pp-dualpipev", "DualPipeV", 2),
            )
        ),
        Layout("cp-ring", "ring", {**CP, "context_parallel_method": "ring"}),
        Layout("cp-all-to-all", "all-to-all", {**CP, "context_parallel_method": "all-to-all"}),
        Layout("ep", "experts", {**ZERO2, "expert_parallel_degree": 2}, experts=4),
        Layout("recompute-full", "recompute-full", {**DDP, "activation_checkpoint": "full"}),
        Layout("recompute-selective", "recompute-selective", {**DDP, "activation_checkpoint": "selective"}),
        Layout("compile", "compile", DDP, engine={"compile": True}),
        Layout("chunked-loss", "chunked-loss", DDP, engine={"loss_chunk_tokens": 64}),
        Layout("muon", "muon", DDP, optimizer="muon", model="small"),
    ]


def _pipeline(virtual: int) -> dict[str, Any]:
    return {"pipeline_parallel_degree": 2, "virtual_stages_per_rank": virtual}


def engine_layouts() -> list[Layout]:
    """What other engines run on CPU workers: DeepSpeed's ZeRO stages, Accelerate's replicas, torchtitan's FSDP2 and tensor
    parallelism. It has replicas too, but divides their gradients once more than the tokens ask for."""
    found = [
        Layout(f"deepspeed-zero{stage}{suffix}", f"deepspeed-{stage}", degrees, micro_batches=count)
        for stage, degrees in enumerate((ZERO1, ZERO2, ZERO3), start=1)
        for suffix, count in (("", 1), ("-accumulate4", 4))
    ]
    return [
        *found,
        Layout("accelerate-ddp", "accelerate", DDP),
        Layout("accelerate-ddp-accumulate4", "accelerate", DDP, micro_batches=4),
        Layout("torchtitan-zero2", "torchtitan-never", ZERO2),
        Layout("torchtitan-zero3", "torchtitan-always", ZERO3),
        Layout("torchtitan-zero3-accumulate4", "torchtitan-always", ZERO3, micro_batches=4),
        Layout("torchtitan-zero3-bf16", "torchtitan-always", ZERO3, precision="bf16"),
        Layout("torchtitan-tp", "torchtitan-tp", SEQUENCE),
        Layout("torchtitan-tp-accumulate4", "torchtitan-tp", SEQUENCE, micro_batches=4),
    ]


Side = Callable[[Any], tuple[float, float]]
"""One step on the global batch: mean loss, gradient norm."""


def rival(layout: Layout, task: Task) -> Side:
    """The hand-written side, or another engine's."""
    module, name, keywords = RIVALS[layout.rival]
    return getattr(importlib.import_module(module), name)(task, layout.micro_batches, **keywords).step


def plan(layout: Layout, task: Task, num_steps: int) -> dict[str, Any]:
    """The same layout in AHP's words."""
    replicas = layout.degrees.get("data_parallel_replicate_degree", 1) * layout.degrees.get(
        "data_parallel_shard_degree", 1
    )
    rows = task.global_batch_size // (replicas * layout.micro_batches)
    return {
        "job": task.job(num_steps),
        "parallelism": {**layout.degrees, "micro_batch_size": rows},
        "engine": layout.engine,
    }


def ours(layout: Layout, task: Task, num_steps: int) -> Side:
    """The same layout through AHP."""
    import ahp

    model = task.build_mixture() if task.experts else task.build()
    parallel = ahp.parallelize(model, plan(layout, task, num_steps))

    def step(input_ids: Any) -> tuple[float, float]:
        result = parallel.step(parallel.shard({"input_ids": input_ids, "labels": input_ids}))
        return result.loss, result.grad_norm

    return step
