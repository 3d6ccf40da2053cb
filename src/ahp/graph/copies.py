"""Copies of a model that take no memory."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from ahp.graph.host_numbers import Generators


def plain_tensors(module: nn.Module) -> dict[int, torch.Tensor]:
    """Tensors in plain attributes, neither parameters nor buffers, also inside lists, dicts and objects; keyed by their id."""
    waiting: list[Any] = [v for part in module.modules() for name, v in vars(part).items() if name not in _OF_MODULES]
    found, seen = {}, {id(each) for each in (*module.modules(), *module.parameters(), *module.buffers())}
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, _ATOMS):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found[id(value)] = value
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            waiting += value
        elif isinstance(value, MethodType):
            waiting.append(value.__self__)
        elif isinstance(value, partial):
            waiting += [value.args, value.keywords]
        else:
            waiting.append(getattr(value, "__dict__", None))
    return found


_OF_MODULES = frozenset(("_parameters", "_buffers", "_modules"))
_ATOMS = (type(None), bool, int, float, complex, str, bytes, type, FunctionType, ModuleType)
"""Values that a copy shares, or that hold no tensors besides those of the module."""


def _generators(module: nn.Module) -> dict[int, Any]:
    """torch's generators that modules hold, keyed by their id: copies share them, for under a FakeTensorMode torch cannot copy one."""
    return {id(each.value): each.value for each in Generators(module).own if each.of_torch}


def fake_copy(module: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy whose tensors are fake (call it under a FakeTensorMode): same shapes, on the CPU, nothing in memory.

    Frozen weights are trainable in the copy: hidden states between blocks then still have a gradient, and the origin of the logits is
    read from autograd's graph.
    """
    memo = _generators(module)
    held = plain_tensors(module)  # such as TrOCR's table of positions
    for tensor in [*module.parameters(), *module.buffers(), *held.values()]:
        to = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        fake = torch.empty(tensor.shape, dtype=to)
        trained = tensor.requires_grad if id(tensor) in held else fake.is_floating_point()
        memo[id(tensor)] = nn.Parameter(fake, trained) if isinstance(tensor, nn.Parameter) else fake
    return copy.deepcopy(module, memo)


def copy_without_memory(module: nn.Module) -> nn.Module:
    """A copy with the same structure and shapes, every parameter and buffer on the meta device.

    It shares tensors that are plain attributes: a traced graph holds their values, and one that autograd made (the old ``weight_norm``) cannot be
    copied.
    """
    memo: dict[int, Any] = {**plain_tensors(module), **_generators(module)}
    for tensor in [*module.parameters(), *module.buffers()]:
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(module, memo)


@contextmanager
def left_as_it_was(module: nn.Module) -> Iterator[None]:
    """Within, a call of the module may set attributes and buffers of its parts, and change lists and dicts among them: all is undone at the end."""
    before = {
        part: {name: copy.copy(value) if type(value) in (dict, list) else value for name, value in vars(part).items()}
        for part in module.modules()
    }
    try:
        yield
    finally:
        for part, held in before.items():
            vars(part).clear()
            vars(part).update(held)
