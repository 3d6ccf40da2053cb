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


def refuse_gradients(local: LocalParameters, sharding: Sharding) -> None:
    """Raises BadInput where a parameter has a gradient before a step begins, and drops all of them."""
    if (name := local.with_gradient()) is not None:
        local.forget_gradients()
        sharding.forget()
        raise BadInput(
            f"step: {name} had a gradient already, from a backward pass outside of step, which this step would have added to its own (valid: "
            "none; it is dropped now). A step adds up the gradients of its own loss alone"
        )
