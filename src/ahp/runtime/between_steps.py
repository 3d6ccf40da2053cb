"""Between two steps: keeps gradients of a step that raised, or of a backward pass of the user's own, out of the next step."""

from __future__ import annotations

from ahp.errors import BadInput
from ahp.runtime.pipeline.schedules import Accumulation, Pipeline
from ahp.runtime.shard.fsdp import Sharding
from ahp.runtime.shard.ownership import LocalParameters


def forget_step(runner: Accumulation | Pipeline, local: LocalParameters, sharding: Sharding) -> None:
    """Drop what a step left behind when it raised. Raises BadInput if that is impossible."""
    if isinstance(runner, Pipeline):
        raise BadInput(
            "step: the step before raised in the middle of a pipeline, whose other ranks wait for it; start the workers anew, and load a checkpoint"
        )
    local.forget_gradients()
    sharding.forget()


def refuse_gradients(local: LocalParameters, sharding: Sharding) -> None:
    """Raises BadInput if a parameter has a gradient before a step begins, and drops all gradients."""
    if (name := local.with_gradient()) is not None:
        local.forget_gradients()
        sharding.forget()
        raise BadInput(
            f"step: {name} had a gradient already, from a backward pass outside of step, which this step would have added to its own (valid: "
            "none; it is dropped now). A step adds up the gradients of its own loss alone"
        )
