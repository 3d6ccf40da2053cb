"""Refuses modules whose parameters cannot be trained under any layout, before anything is changed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ahp.errors import bad_input
from ahp.graph.call import model_arguments
from ahp.graph.models import with_shapes

WRAPPERS = {
    "DistributedDataParallel": "its .module",
    "DataParallel": "its .module",
    "FullyShardedDataParallel": "its .module",
    "OptimizedModule": "the module that was compiled, with engine.compile true",
}
"""Modules around a module, by the names of their classes, and what to give instead. They split or compile it themselves, and change the names of
its parameters."""

TAKEN = "_ahp_parallelized"
"""The attribute of modules that ``Parallel`` has taken, with hooks and forwards that a second one would add to."""


def mark_taken(module: nn.Module, *, in_stages: bool) -> None:
    """Mark a module and its submodules, so that ``refuse_parameters`` knows them. ``in_stages``: stages of a pipeline were made of copies."""
    for part in _with_weights(module):
        setattr(part, TAKEN, True)
        if in_stages:
            part.register_state_dict_pre_hook(_refuse_state_dict)


def _with_weights(module: nn.Module) -> Iterator[nn.Module]:
    """The module and its submodules. Those without weights are left out: models may share them (the activation of transformers' FlauBERT)."""
    return (part for part in module.modules() if part is module or next(part.parameters(), None) is not None)


def _refuse_state_dict(part: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Raises BadInput: the state would have the weights of other stages, and under ZeRO all, as they were before ahp.parallelize."""
    rule = "its state_dict has weights as they were before ahp.parallelize: each rank trains a stage of its own"
    valid = [
        "parallel.save for a checkpoint",
        "parallel.export_hf for whole weights",
        "parallel.parameters for this rank's",
    ]
    raise bad_input("module", type(part).__name__, rule, valid)


_OURS: ContextVar[bool] = ContextVar("the runtime calls the module", default=False)


@contextmanager
def our_call() -> Iterator[None]:
    """Within, a module that ranks have parts of may be called."""
    token = _OURS.set(True)
    try:
        yield
    finally:
        _OURS.reset(token)


def refuse_calls(module: nn.Module) -> None:
    """Let the module, of which each rank has a part, raise BadInput if the program calls it: it would give a part of the logits, or compute with
    weights of other steps."""

    def refuse(module: nn.Module, args: Any) -> None:
        if not _OURS.get():
            rule = "is called outside of step, and each rank has a part of it, or holds its weights for step alone"
            valid = ["parallel.evaluate for a loss", "parallel.export_hf for a model of its own"]
            raise bad_input("module", type(module).__name__, rule, valid)

    module.register_forward_pre_hook(refuse)


def refuse_parameters(module: nn.Module) -> None:
    """Raises BadInput for a forward that takes no token ids, and for parameters that the optimizers cannot update, or that share memory without
    being one parameter."""
    _refuse_forward(module)
    if (again := next((path for path, part in module.named_modules() if hasattr(part, TAKEN)), None)) is not None:
        rule = "ahp.parallelize has changed it in place already"
        raise bad_input("module", again or type(module).__name__, rule, ["a module that is built anew, and load"])
    for path, part in module.named_modules():
        if (inside := WRAPPERS.get(type(part).__name__)) is not None:
            rule = f"{path or 'the module'} is wrapped, and ahp.parallelize splits the plain module"
            raise bad_input("module", type(part).__name__, rule, [inside])
    if (wide := next((n for n, p in module.named_parameters() if p.dtype is torch.float64), None)) is not None:
        rule = "is torch.float64, and weights are held and trained in fp32 at most"
        raise bad_input("module", wide, rule, ["module.float() before ahp.parallelize"])
    with_shapes(module, "module")
    end, before = 0, ""
    for name, p in sorted(module.named_parameters(), key=lambda named: _span(named[1])[0]):
        if isinstance(p, DTensor):
            raise bad_input(
                "module", name, "is a DTensor, and ahp.parallelize splits modules itself", ["a whole module"]
            )
        if p.is_complex():
            rule = f"is {p.dtype}, which neither FSDP2 nor a fused optimizer takes"
            raise bad_input("module", name, rule, ["pairs of real numbers, read by torch.view_as_complex"])
        first, last = _span(p)
        if first < end:
            rule = f"lies in the memory of {before}, which is another parameter"
            raise bad_input("module", name, rule, ["one nn.Parameter under both names", "memory of its own"])
        end, before = (last, name) if last > end else (end, before)
    for path, part in module.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse and part.weight.requires_grad:
            raise bad_input(f"module: {path}.sparse", True, "no optimizer here takes sparse gradients", [False])


def _refuse_forward(module: nn.Module) -> None:
    """Raises BadInput for a forward that cannot be called as the runtime calls it (``model_arguments``)."""
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):  # a forward that is no Python function
        return
    args, kwargs = model_arguments(module, torch.empty(0, dtype=torch.int64))
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        names = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
        rule = f"its forward{inspect.Signature(names)} is called with token ids [batch, sequence] alone: {error}"
        raise bad_input("module", type(module).__name__, rule, ["def forward(self, input_ids)"]) from None


def _span(parameter: nn.Parameter) -> tuple[int, int]:
    """Addresses of the first byte of a parameter and of that behind its last; zeros where it has no memory."""
    if isinstance(parameter, DTensor) or parameter.is_meta or parameter.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    return parameter.data_ptr(), parameter.data_ptr() + (last + 1) * parameter.element_size()
