"""Between two steps: keeps gradients of a step that raised, or of a backward pass of the user's own, out of the next step, and follows the
modes of the user's module."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import nn

from ahp.errors import BadInput, bad_input
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


def refuse_modes(device: torch.device, precision: str) -> None:
    """Raises BadInput if gradients are disabled around a step, or if autocast is on, which would change the precision of the job."""
    if not torch.is_grad_enabled():
        raise BadInput(
            "step: gradients are disabled by torch.no_grad or torch.inference_mode (valid: call step outside of both, or call evaluate)"
        )
    if torch.is_autocast_enabled(device.type):
        rule = "torch.autocast is on around step, and would change what some layouts compute"
        raise bad_input(
            "job.precision", precision, rule, ["step outside of autocast, with job.precision bf16 for what it does"]
        )


def refuse_gradients(local: LocalParameters, sharding: Sharding) -> None:
    """Raises BadInput if a parameter has a gradient before a step begins, and drops all gradients; or if a parameter requires a gradient that
    the optimizer does not update, or has got a hook that only some layouts run."""
    if (name := local.trained_since()) is not None:
        raise BadInput(
            f"step: {name} has requires_grad now, but not when ahp.parallelize was called, so the optimizer does not update it (valid: set "
            "requires_grad before ahp.parallelize, and call requires_grad_(False) for the steps that must not train it)"
        )
    if (name := local.hooked_since()) is not None:
        raise BadInput(
            f"step: {name} has a gradient hook that was registered after ahp.parallelize. Under ZeRO or in 16 bits the hook would not run, or would "
            "get only a shard of the gradient (valid: register it before ahp.parallelize, which refuses layouts that cannot run it)"
        )
    if (name := local.with_gradient()) is not None:
        local.forget_gradients()
        sharding.forget()
        raise BadInput(
            f"step: {name} had a gradient already, from a backward pass outside of step, which this step would have added to its own (valid: "
            "none; it is dropped now). A step adds up the gradients of its own loss alone"
        )


class Modes:
    """Pipeline stages run copies of a module's parts: where the program puts a part into evaluation or training mode, its copies follow."""

    def __init__(self, module: nn.Module, stages: Iterable[nn.Module]) -> None:
        given = dict(module.named_modules())
        pairs = [(given[n], copied) for stage in stages for n, copied in stage.named_modules() if n in given]
        # Weak: a program that drops its module frees the weights of other ranks' stages.
        self._pairs = [(weakref.ref(own), copied) for own, copied in pairs if own is not copied]
        self._seen = [own.training for own, copied in pairs if own is not copied]

    def follow(self) -> None:
        """Take over the modes that have changed since the last call."""
        for place, (reference, copied) in enumerate(self._pairs):
            own = reference()
            if own is not None and own.training != self._seen[place]:
                self._seen[place] = copied.training = own.training
