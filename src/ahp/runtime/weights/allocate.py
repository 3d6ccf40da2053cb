"""Memory for a model built on the meta device, and its initial weights, which are the same under every plan."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import nn

from ahp.errors import BadInput
from ahp.graph.initialize import initialize, is_hub_model
from ahp.graph.models import names_of_parameters
from ahp.runtime.torch_compat import allocate
from ahp.runtime.weights.initial import InitialWeights


def is_meta(module: nn.Module) -> bool:
    return any(p.is_meta for p in module.parameters())


def materialize(module: nn.Module, *, seed: int) -> None:
    """Allocate a meta module on the CPU and initialize it whole, in place, from ``seed`` alone. See ``initial_weights``."""
    initial = initial_weights(module, seed=seed)
    allocate_on(module, torch.device("cpu"))
    initial.fill({name: p.detach() for name, p in module.named_parameters()}, lambda name: {})


def initial_weights(module: nn.Module, *, seed: int) -> InitialWeights:
    """The initial values of a meta module's parameters; the module itself gets only its buffers (rotary tables, masks), in place.

    A transformers model is initialized by its own rules, another by ``reset_parameters`` of its modules. Raises BadInput when
    some module has parameters or buffers and no way to initialize them.
    """
    empty = _allocate_buffers(module)
    names: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)
    without = [p for p in module.parameters() if p.is_meta]
    if not is_hub_model(module):
        _refuse_without_rule(module)
    found = InitialWeights(names, without, seed, lambda: initialize(module))
    _refuse_unwritten(module, empty)
    return found


def materialize_buffers(module: nn.Module, given: Container[str]) -> None:
    """Give a meta module its buffers, in place, by the same rules; its parameters stay without memory.

    ``given``: names of buffers that get values from elsewhere. Raises BadInput when any other buffer is left without values.
    """
    empty = _allocate_buffers(module)
    initialize(module)
    _refuse_unwritten(module, {name: mark for name, mark in empty.items() if name not in given})


Mark = tuple[torch.Tensor, int]
"""A tensor, and the number of times it had been written."""


def _allocate_buffers(module: nn.Module) -> dict[str, Mark]:
    """Allocate the buffers on the meta device. Returns them by name. A tensor that several modules share stays one tensor."""
    made: dict[int, torch.Tensor] = {}
    found: dict[str, Mark] = {}
    for path, child in module.named_modules():
        for leaf, buffer in child._buffers.items():
            if buffer is not None and buffer.is_meta:
                empty = made.setdefault(id(buffer), torch.empty_like(buffer, device="cpu"))
                child._buffers[leaf] = empty
                found[f"{path}.{leaf}" if path else leaf] = empty, empty._version
    return found


def _refuse_unwritten(module: nn.Module, empty: dict[str, Mark]) -> None:
    left = [name for name, (t, version) in empty.items() if module.get_buffer(name) is t and t._version == version]
    if left:
        raise BadInput(
            f"module: its initialisation leaves out the buffers {', '.join(left[:3])} ({len(left)} in all), so that they would have no "
            "values on the meta device; set them in reset_parameters() of their modules, or build the module with real weights, "
            "alike on every rank"
        )


def allocate_on(module: nn.Module, device: torch.device) -> None:
    """Give meta tensors memory without values, and move real ones to the device; tied parameters stay tied."""
    tied = [names for names in names_of_parameters(module) if len(names) > 1]
    allocate(module, device)
    _retie(module, tied)


def hold_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert parameters of other floating-point types to ``dtype``, in place. Tied parameters stay tied, and buffers as they are. Transposed ones
    are laid out anew: FSDP2 takes contiguous ones alone."""
    for parameter in module.parameters():
        if parameter.is_floating_point() and not (parameter.dtype is dtype and parameter.is_contiguous()):
            parameter.data = parameter.data.to(dtype).contiguous()


def store_frozen(module: nn.Module, dtype: torch.dtype) -> None:
    """Store weights that are not trained in ``dtype``, in which they compute, in place: only updates need fp32. Tied parameters stay tied, and
    those of that type the program's own: another one in their memory would look as if the program had changed what a checkpoint is read into."""
    stored: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for leaf, parameter in part._parameters.items():
            if parameter is None or parameter.dtype is dtype:
                continue
            if not parameter.requires_grad and parameter.is_floating_point():
                if id(parameter) not in stored:
                    stored[id(parameter)] = nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
                part._parameters[leaf] = stored[id(parameter)]


def _retie(module: nn.Module, groups: list[list[str]]) -> None:
    """Make the names of each group share one parameter again, after ``allocate`` separated them."""
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
