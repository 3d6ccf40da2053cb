"""Tells which weights a forward reads elsewhere than in the module that holds them, with or without gradients: a mean of the embeddings,
``x @ embedding.weight.T``, another block's matrix. There a layout that gives each rank a part of a module, or none of it, must leave it whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from ahp.graph.torch_compat import memory_of

Place = int | Literal["before", "after"]
"""Where a model runs: in the block of this number; outside of blocks, before the last one has run or after it."""


@dataclass
class _Weight:
    name: str
    modules: set[nn.Module] = field(default_factory=set)
    """Those outside of the blocks that hold it."""
    blocks: set[int] = field(default_factory=set)
    """Numbers of the blocks that hold it."""


class WeightReads:
    """Hooks on the modules outside of the blocks say which of them run; ``note`` is to be called with each tensor that an operator takes."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        numbers: dict[nn.Module, set[int]] = {}
        for number, block in enumerate(blocks):
            for part in block.modules():
                numbers.setdefault(part, set()).add(number)
        self._weights: dict[int, _Weight] = {}
        self._running: list[nn.Module] = []
        self._elsewhere: dict[int, set[Place]] = {}
        self.unseen: tuple[int, str] | None = None
        """A block, and a weight of another module that it reads although it is not among its arguments."""
        self._originals: dict[int, str] = {}
        self._kept: dict[bool, str] = {}
        """Weights of the original model that its copy reads, outside of blocks and in them: the first of each."""
        for path, part in model.named_modules():
            for name, weight in part.named_parameters(recurse=False):
                held = self._weights.setdefault(memory_of(weight), _Weight(f"{path}.{name}" if path else name))
                if part in numbers:
                    held.blocks |= numbers[part]
                else:
                    held.modules.add(part)
            if part not in numbers and next(part.parameters(recurse=False), None) is not None:
                part.register_forward_pre_hook(self._begin)
                part.register_forward_hook(self._end)

    def watch_kept(self, original: nn.Module) -> None:
        """``original``: the module that ``model`` is a copy of."""
        self._originals = {memory_of(weight): name for name, weight in original.named_parameters()}

    def keeps(self, *, in_blocks: bool = False) -> str | None:
        """A weight that code keeps apart from ``self``, in words; None without one. ``in_blocks``: only one that a block computes with."""
        name = self._kept.get(True) or (None if in_blocks else self._kept.get(False))
        how = "is read through a closure, a default argument or a weak reference, which keep it as it came"
        return None if name is None else f"{name} {how}"

    def note(self, memory: int, place: Place, *, given: bool) -> None:
        """An operator reads this memory. ``given``: whether it is an argument of the block that runs."""
        held = self._weights.get(memory)
        if (original := self._originals.get(memory)) is not None:
            self._kept.setdefault(isinstance(place, int), original)
        if held is None:
            return
        if isinstance(place, int):
            own = place in held.blocks
            if not own and not given and self.unseen is None:
                self.unseen = (place, held.name)
        else:
            own = any(part in held.modules for part in self._running)
        if not own:
            self._elsewhere.setdefault(memory, set()).add(place)

    def of(self, module: nn.Module) -> set[Place]:
        """Where else the module's own weights are read."""
        own = module.parameters(recurse=False)
        return set().union(*(self._elsewhere.get(memory_of(weight), ()) for weight in own))

    def of_blocks(self) -> str | None:
        """A weight of a block that is read outside of the blocks that hold it, in words; else None."""
        name = next((self._weights[key].name for key in self._elsewhere if self._weights[key].blocks), None)
        return name and f"the model reads {name} outside of the block that holds it"

    def _begin(self, module: nn.Module, given: Any) -> None:
        self._running.append(module)

    def _end(self, module: nn.Module, given: Any, output: Any) -> None:
        self._running.remove(module)
