"""Give a model built on the meta device its initial weights: the same ones whatever the plan."""

from __future__ import annotations

import torch
from torch import nn

from ahp.errors import BadInput
from ahp.runtime.torch_compat import allocate


def is_meta(module: nn.Module) -> bool:
    return any(p.is_meta for p in module.parameters())


def materialize(module: nn.Module, *, seed: int) -> None:
    """Allocate a meta module on the CPU in fp32 and initialise it, in place, from ``seed`` alone.

    Every rank makes the whole model and then keeps its part, so each draws the same numbers. A transformers model is
    initialised by its own rules, another by ``reset_parameters`` of its modules. Raises BadInput when some module has
    parameters and no way to initialise them.
    """
    tied = _tied(module)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if hasattr(module, "_init_weights") and hasattr(module, "config"):
            module.to_empty(device="cpu")
            _retie(module, tied)
            _initialize_hub_model(module)
        else:
            _refuse_without_rule(module)
            module.to_empty(device="cpu")
            _retie(module, tied)
            for child in module.modules():
                if callable(getattr(child, "reset_parameters", None)):
                    child.reset_parameters()  # type: ignore[operator]


def materialize_buffers(module: nn.Module) -> None:
    """Give a meta module its buffers (rotary tables, masks), in place; its parameters stay without memory.

    They are made by the same rules as in ``materialize``, which write nothing to parameters that have no memory.
    """
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.is_meta:
                child._buffers[name] = torch.empty_like(buffer, device="cpu")
    if hasattr(module, "_init_weights") and hasattr(module, "config"):
        _initialize_hub_model(module)
        return
    for child in module.modules():
        if callable(getattr(child, "reset_parameters", None)):
            child.reset_parameters()  # type: ignore[operator]


def allocate_on(module: nn.Module, device: torch.device) -> None:
    """Memory without values for what is on the meta device; tied parameters stay tied."""
    tied = _tied(module)
    allocate(module, device)
    _retie(module, tied)


def _initialize_hub_model(module: nn.Module) -> None:
    """transformers' own initialisation; it skips what it believes to be loaded already, so that mark is taken off."""
    for child in module.modules():
        if hasattr(child, "_is_hf_initialized"):
            del child._is_hf_initialized
    for tensor in [*module.parameters(), *module.buffers()]:
        if hasattr(tensor, "_is_hf_initialized"):
            del tensor._is_hf_initialized
    with torch.no_grad():
        module.apply(module._init_weights)  # type: ignore[arg-type]


def _tied(module: nn.Module) -> list[list[str]]:
    """Groups of names that share one parameter; ``to_empty`` would part them."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(name)
    return [names for names in by_id.values() if len(names) > 1]


def _retie(module: nn.Module, groups: list[list[str]]) -> None:
    for first, *others in groups:
        shared = module.get_parameter(first)
        for name in others:
            path, _, leaf = name.rpartition(".")
            module.get_submodule(path)._parameters[leaf] = shared


def _refuse_without_rule(module: nn.Module) -> None:
    for name, child in module.named_modules():
        if next(child.parameters(recurse=False), None) is not None and not callable(
            getattr(child, "reset_parameters", None)
        ):
            raise BadInput(
                f"module: {name or type(module).__name__} ({type(child).__name__}) holds parameters on the meta device and has no "
                "reset_parameters(); add one, or build the module with real weights, alike on every rank"
            )
