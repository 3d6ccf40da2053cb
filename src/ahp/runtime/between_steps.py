"""What lies between two steps: no step adds to its own gradients what one that raised has left, or a backward pass of the user's own."""

from __future__ import annotations

from ahp.errors import BadInput
from ahp.runtime.pipeline.schedules import Accumulation, Pipeline
from ahp.runtime.shard.fsdp import Sharding
from ahp.runtime.shard.ownership import LocalParameters


def forget_step(runner: Accumulation | Pipeline, local: LocalParameters, sharding: Sharding) -> None:
    """Drop what a step that raised before its end has left. Raises BadInput where that cannot be."""
    if isinstance(runner, Pipeline):
        raise BadInput(
            "step: the step before raised in the middle of a pipeline, whose other ranks wait for it; start the workers anew, and load a checkpoint"
        )
    local.forget_gradients()
    sharding.forget()


def refuse_gradients(local: LocalParameters) -> None:
    """Raises BadInput where a parameter has a gradient before a step begins."""
    if (name := local.with_gradient()) is not None:
        raise BadInput(
            f"step: {name} has a gradient already, from a backward pass outside of step, which this step would add to its own; the next call "
            "of step drops it. Gradients of your own are not added: put what they are of into the loss, or into the batch"
        )
