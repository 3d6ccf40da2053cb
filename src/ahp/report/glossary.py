"""The parts of a forecast in plain words, for whoever reads its bars."""

from __future__ import annotations

from collections.abc import Iterable

STEP: dict[str, str] = {
    "forward": "the model computes the loss of its tokens",
    "backward": "gradients of the loss, by activations and by weights",
    "recompute": "forward work done again in backward, to keep fewer activations",
    "tensor_parallel": "devices that share a matrix product exchange its pieces",
    "context_parallel": "devices that share a sequence exchange keys and values",
    "expert_parallel": "tokens travel to the devices of their experts and back",
    "weight_gather": "sharded weights are gathered: the part that does not overlap with computation",
    "gradient_reduce": "gradients are summed over replicas: the part that does not overlap with computation",
    "casts": "weights into the type that computes, gradients into theirs, added up",
    "host": "the device waits for Python to launch its kernels; on a CPU, for the engine's own work",
    "bubble": "the rank waits for other ranks of the pipeline",
    "slowest_rank": "equal devices are not equally fast, and all ranks wait for the slowest",
    "optimizer": "norm and clipping of the gradients, update of the weights",
    "offload": "the optimizer's states come from host memory for their update, and go back",
}
"""Parts of ``Forecast.step``."""

MEMORY: dict[str, str] = {
    "parameters": "weights, as the optimizer holds them",
    "optimizer_states": "running means of the gradients and of their squares",
    "gathered_weights": "copies of the weights to compute with: cast, or gathered",
    "gradients": "kept until the optimizer has used them",
    "reduce_buffers": "gradients on their way to other ranks",
    "flat_copies": "permanent memory of flat copies of weights and gradients",
    "activations": "kept from forward to backward, for each micro-batch in flight",
    "temporaries": "at the peak of one backward pass; often the logits",
    "pipeline_buffers": "tensors that stages send and receive",
    "allocator_slack": "held by torch's allocator, not in use",
    "communicators": "buffers of the communication library",
    "context": "memory that the driver takes before anything runs",
}
"""Parts of ``Forecast.memory``."""


def lines(parts: Iterable[str]) -> list[tuple[str, str]]:
    """(part, its meaning) of the parts that have one, in the order given."""
    words = STEP | MEMORY
    return [(part, words[part]) for part in parts if part in words]
