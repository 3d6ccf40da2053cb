"""Between two steps: keeps gradients of a step that raised, or of a backward pass of the user's own, out of the next step, and follows or
refuses what the program does to its module."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ahp.errors import BadInput, bad_input
from ahp.graph.blocks import BlockList
from ahp.graph.effects import PLAIN
from ahp.graph.likeness import own_attributes
from ahp.runtime.pipeline.schedules import Accumulation, Pipeline
from ahp.runtime.shard.fsdp import Sharding
from ahp.runtime.shard.ownership import LocalParameters, ParameterNames


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


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Where an ``nn.Module`` keeps the hooks around its forward and its backward."""


def _first_other(names: list[str], before: list[Any], now: list[Any]) -> str:
    """The name of the first fact that is another; of more or fewer facts, that of the first to come or go."""
    return next((name for name, one, other in zip(names, before, now, strict=False) if one != other), names[-1])


class ProgramsModule:
    """The module that the program has given. Pipeline stages run copies of its parts, and under tensor parallelism blocks run graphs that were made
    of them: where the program puts a part into evaluation or training mode, its copies follow. Other changes would be ignored, and are refused."""

    def __init__(
        self,
        module: nn.Module,
        stages: Iterable[nn.Module],
        names: ParameterNames,
        local: LocalParameters,
        sliced: BlockList | None,
    ) -> None:
        """``names``, ``local``: parameters of the module as it came, and of the stages; ``sliced``: blocks that run as graphs."""
        self._local, given = local, dict(module.named_modules())
        pairs = [(given[n], copied) for stage in stages for n, copied in stage.named_modules() if n in given]
        # Weak: a program that drops its module frees the weights of other ranks' stages.
        self._pairs = [(weakref.ref(own), copied) for own, copied in pairs if own is not copied]
        self._seen = [own.training for own, copied in pairs if own is not copied]
        self._copied = bool(self._pairs)
        ours = {id(p) for p in local}
        mine = ((name, ref, ref()) for name, ref in names.given if name in local.parameters)
        self._replaced = {id(p): (name, ref) for name, ref, p in mine if p is not None and id(p) not in ours}
        """By ``id``, the module's parameters that this rank's stages have in another form."""
        graphs = () if sliced is None else sliced.blocks
        inside = {part for block in graphs for part in block.modules()}
        self._with_own_hooks = weakref.WeakSet(() if self._copied else graphs)
        """Sliced blocks whose hooks run around their graphs."""
        watched = ((path, part) for path, part in given.items() if self._copied or part in inside)
        self._parts = [
            (path, weakref.ref(part), plain, self._facts(part, plain))
            for path, part in watched
            for plain in ([name for name, value in own_attributes(part) if isinstance(value, PLAIN)],)
        ]

    def follow(self) -> None:
        """Take over the modes and values that have changed since the last call. Raises BadInput for another change."""
        self._local.follow()
        for place, (reference, copied) in enumerate(self._pairs):
            own = reference()
            if own is not None and own.training != self._seen[place]:
                self._seen[place] = copied.training = own.training
        for path, reference, plain, before in self._parts:
            part = reference()
            if part is not None and (now := self._facts(part, plain)) != before:
                what = _first_other([*plain, *part._modules, *part._parameters, *_HOOKS], before, now)
                rule = "has changed since ahp.parallelize, and stages of a pipeline and blocks under tensor parallelism would not follow"
                valid = ["a change before ahp.parallelize", "parallel.parameters for weights"]
                raise bad_input("module", f"{path}.{what}".removeprefix("."), rule, valid)

    def _facts(self, part: nn.Module, names: list[str]) -> list[Any]:
        """What the program may change in a part: the attributes of these names, submodules, weights and hooks."""
        held, hooks = vars(part), () if part in self._with_own_hooks else _HOOKS
        return [
            *(held.get(name) for name in names),
            *map(id, part._modules.values()),
            *(
                (p._version, p.requires_grad) if p is not None and self._is_replaced(p) else self._copied and id(p)
                for p in part._parameters.values()
            ),
            *([*held[name]] for name in hooks),
        ]

    def _is_replaced(self, parameter: nn.Parameter) -> bool:
        """Whether this is one of ``_replaced``, and not one that has got the ``id`` of one that is gone: between the batches of an evaluation
        modules have weights that FSDP2 gathered."""
        _, ref = self._replaced.get(id(parameter), ("", None))
        return ref is not None and ref() is parameter

    def refuse_used(self) -> None:
        """After backward: raises BadInput if a parameter that the stages have in another form was computed with as it came. It would not be trained."""
        used = (name for name, ref in self._replaced.values() if (p := ref()) is not None and p.grad is not None)
        if (name := next(used, None)) is not None:
            rule = "is read through a closure, a default argument or a weak reference, which keep it as it was before ahp.parallelize"
            raise bad_input("module", name, rule, ["self of a method", "data_parallel_replicate_degree, in fp32"])
