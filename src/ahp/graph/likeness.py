"""The attributes of modules that can change what a forward computes, as values that can be compared."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

DEEPEST = 8
"""How deep into nested objects values are compared; deeper ones are equal only if they are the same object."""

OF_TORCH = {*vars(nn.Module()), "_is_hf_initialized"}
"""Attributes that every module has, and transformers' mark of initialized weights."""


def own_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in vars(module).items() if name not in OF_TORCH)


class Values:
    """Hashable stand-ins for values: two stand-ins are equal only if the values are, as far as can be seen. Each object is looked at once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}
        self._own_number: re.Pattern[str] | None = None

    def of_block(self, number: int) -> Values:
        """From now on the values are those of this block: its number counts for nothing in names of modules (peft's adapters know where they are)."""
        self._own_number = re.compile(rf"(?<=[A-Za-z_]\.){number}(?=\.|$)")
        return self

    def of(self, value: Any, depth: int = 0) -> Any:
        if isinstance(value, str) and self._own_number is not None:
            value = self._own_number.sub("*", value)
        if value is None or isinstance(
            value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type, types.GenericAlias)
        ):
            return (type(value), value)  # with its type because ``True == 1``
        if isinstance(value, (nn.Module, types.ModuleType)) or depth == DEEPEST:
            return (type(value), id(value))
        known = self._known.get(id(value))
        if known is None:
            self._known[id(value)] = value, (type(value), id(value))  # for an object that refers to itself
            known = self._known[id(value)] = value, (type(value), self._inside(value, depth + 1))
        return known[1]

    def _inside(self, value: Any, depth: int) -> Any:
        if isinstance(value, torch.Tensor):
            return (tuple(value.shape), value.dtype, _digest(value))
        if isinstance(value, (tuple, list)):
            return tuple(self.of(item, depth) for item in value)
        if isinstance(value, dict):
            return tuple((self.of(key, depth), self.of(item, depth)) for key, item in value.items())
        if isinstance(value, (set, frozenset)):
            return frozenset(self.of(item, depth) for item in value)
        if isinstance(value, functools.partial):
            return tuple(self.of(part, depth) for part in (value.func, value.args, value.keywords))
        if isinstance(value, types.MethodType):
            return (self.of(value.__func__, depth), self.of(value.__self__, depth))
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
            return (value.__code__, self.of([cells, value.__defaults__, value.__kwdefaults__], depth))
        if hasattr(value, "__dict__") and not hasattr(value, "__array__"):
            return self.of(vars(value), depth)
        return id(value)


def _digest(tensor: torch.Tensor) -> Any:
    """Stands for a tensor's values, which a traced block holds as constants."""
    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu":
        return id(tensor)
    return hash(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


@contextmanager
def watched(hidden: dict[nn.Module, dict[str, Any]]) -> Iterator[set[tuple[nn.Module, str]]]:
    """Within, notes which of the ``hidden`` attributes, {module: {name: value}}, are read. Yields the set of those that were."""
    read: set[tuple[nn.Module, str]] = set()
    usual: Callable[[nn.Module, str], Any] = nn.Module.__getattr__

    def noting(module: nn.Module, name: str) -> Any:
        values = hidden.get(module)
        if values is None or name not in values:
            return usual(module, name)
        read.add((module, name))
        return values[name]

    for module, values in hidden.items():
        for name in values:
            del module.__dict__[name]
    try:
        with mock.patch.object(nn.Module, "__getattr__", noting):
            yield read
    finally:
        for module, values in hidden.items():
            module.__dict__.update({name: value for name, value in values.items() if name not in module.__dict__})


class ModulesUsed:
    """Which modules with weights each block's call runs: blocks that are alike may use other ones by a number that the model gives them (Zamba2
    calls one shared block several times, each time with another adapter)."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        self.blocks = blocks
        self.block = 0
        """The number of the block that runs."""
        self._used: list[set[nn.Module]] = [set() for _ in blocks]
        inside = {module for block in blocks for module in block.modules()}
        self._hooks = [
            m.register_forward_hook(self._note) for m in inside if next(m.parameters(recurse=False), None) is not None
        ]

    def _note(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._used[self.block].add(module)

    def apart(self, kinds: tuple[int, ...]) -> tuple[int, ...]:
        """``kinds``, numbered anew, with blocks of one kind apart that used other modules. To be called once all have run: a block that did not
        (layer dropout; it stands at an earlier place too) is like the first of its kind."""
        for hook in self._hooks:
            hook.remove()
        names = [
            frozenset(name for name, module in block.named_modules(remove_duplicate=False) if module in used)
            for block, used in zip(self.blocks, self._used, strict=True)
        ]
        first = {kind: own for kind, own in reversed(list(zip(kinds, names, strict=True))) if own}
        found: dict[Any, int] = {}
        keys = ((kind, own or first.get(kind)) for kind, own in zip(kinds, names, strict=True))
        return tuple(found.setdefault(key, len(found)) for key in keys)
