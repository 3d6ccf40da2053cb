"""What a block's forward does that a graph of its operators lacks. A layout that runs or reads the graph refuses such a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ahp.graph.host_numbers import Generators

HOOKS = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)
PLAIN = (bool, int, float, str, type(None))


class NotInGraph(Exception):
    """A block does what its graph would not do; the message says what."""


class PlainAttributes:
    """The attributes of a block's modules that are numbers or text, such as a count of calls."""

    def __init__(self, block: nn.Module) -> None:
        named = ((path, vars(module)) for path, module in block.named_modules())
        self.places = [
            (f"{path}.{name}".removeprefix("."), held, name)
            for path, held in named
            for name, value in held.items()
            if name != "training" and isinstance(value, PLAIN)
        ]

    def values(self) -> list[Any]:
        return [held.get(name) for _, held, name in self.places]

    def as_now(self) -> AbstractContextManager[None]:
        """A context in which they have the values of now; afterwards they have those from before it."""
        return self._put(self.values())

    @contextmanager
    def _put(self, values: list[Any]) -> Iterator[None]:
        later = self.values()
        self._set(values)
        try:
            yield
        finally:
            self._set(later)

    def _set(self, values: list[Any]) -> None:
        for (_, held, name), value in zip(self.places, values, strict=True):
            held[name] = value

    def changed(self, before: list[Any]) -> str | None:
        """The first that has another value now, None = none has."""
        changes = (
            path for (path, held, name), value in zip(self.places, before, strict=True) if held.get(name) != value
        )
        return next(changes, None)


@contextmanager
def in_graph_alone(block: nn.Module) -> Iterator[None]:
    """Raises NotInGraph at the end if a call of the block within changes what a second call would read: a generator or an attribute."""
    generators, attributes = Generators(block), PlainAttributes(block)
    numbers, before = generators.state(), attributes.values()
    yield
    if (drawn := generators.drawn_since(numbers)) is not None:
        raise NotInGraph(f"draws numbers from {drawn}, of which its graph would hold those of one call")
    if (path := attributes.changed(before)) is not None:
        raise NotInGraph(
            f"changes its attribute {path}, of which its graph would hold the value of one call (a buffer may change)"
        )


class Draws:
    """Whether a model draws from generators other than torch's default outside of its blocks."""

    def __init__(self, module: nn.Module) -> None:
        self._generators = Generators(module)
        self.source: str | None = None
        """The generator that it draws from."""
        self.enter()

    def enter(self) -> None:
        """To be called where a part outside of the blocks begins."""
        self.before = self._generators.state()

    def leave(self) -> None:
        """To be called where one ends."""
        self.source = self.source or self._generators.drawn_since(self.before)

    def why_uncuttable(self) -> str | None:
        """A reason if the model could leave out blocks by what it draws, else None. Another call, or another stage, draws other numbers."""
        return (
            self.source
            and f"the model draws numbers from {self.source} outside of its blocks, and may leave out blocks by them"
        )


class AsInGraph(TorchFunctionMode):
    """Within, what a module does to tensors past torch's operators becomes one (``x.data``), or raises NotInGraph."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.data.__get__:  # type: ignore[attr-defined]  # each access makes another wrapper
            return args[0].detach()
        if any(isinstance(value, torch.Generator) for value in (*args, *(kwargs or {}).values())):
            raise NotInGraph("draws numbers from a generator of its own, of which ranks would not get theirs")
        if func in HOOKS:
            raise NotInGraph("registers a hook on the gradient of a tensor, which its graph would not run")
        return func(*args, **(kwargs or {}))
