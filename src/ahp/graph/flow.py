"""Tracks which parts of a model each activation was computed from, with or without gradients.

Autograd loses tensors that were detached, read under ``no_grad`` or turned into whole numbers. A pipeline stage that did not run the part which
made them would compute with other values.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import nn

from ahp.graph.torch_compat import Watching, memory_of, noting_checkpoints, pytree
from ahp.graph.weight_reads import Place, WeightReads

BEFORE = -1
"""The part of the model before the blocks. Block ``i`` is part ``i``."""

Recompute = Literal["reentrant", "reentrant around blocks", "not reentrant", "not reentrant, a whole block"]
"""How a model calls ``torch.utils.checkpoint`` itself."""

_SHAPES_ALONE = {
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "new_zeros", "new_ones", "new_full", "new_empty",
    "new_empty_strided",
}  # fmt: skip
"""Operators that read only the shape and type of a tensor."""


class Flow(Watching):
    """Within, notes for the memory of each tensor the parts that it was computed from. All that a block computes counts as that block's alone."""

    def __init__(self, weights: WeightReads, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.weights, self._blocks = weights, blocks
        self._place: Place = "before"
        self.block: int | None = None
        """The block that runs; None outside of the blocks."""
        self.given: frozenset[int] = frozenset()
        """The parts that its hidden states were computed from."""
        self.reads_before = False
        """Whether a block reads results from before the blocks, besides its hidden states."""
        self.reads_other: tuple[int, int] | None = None
        """A block, and an earlier one whose result it read other than through its arguments."""
        self.reads_unseen: int | None = None
        """A block that reads an activation from before it which is not among its arguments."""
        self._arguments: set[int] = set()
        self.reads_watched = False
        """Whether the model computes with a watched tensor."""
        self._watched: set[int] = set()
        self.recomputes: set[Recompute] = set()
        self._checkpoints: AbstractContextManager[None] = noting_checkpoints(self._note_checkpoint)
        self._parts: dict[int, frozenset[int]] = {}
        self._kept: list[Any] = []  # an address stands for the same memory only while that is alive

    def __enter__(self) -> Flow:
        self._checkpoints.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._checkpoints.__exit__(*raised)

    def _note_checkpoint(self, function: Any, reentrant: bool) -> None:
        while isinstance(function, functools.partial):
            function = function.func
        # A method is a block's own, as transformers' ``__call__``: a stand-in for the block has not got it.
        around = self.block is None and not isinstance(function, types.MethodType)
        if reentrant:
            self.recomputes.add("reentrant around blocks" if around else "reentrant")
            return
        called = getattr(function, "__self__", function)
        whole = self.block is None and any(called is block for block in self._blocks)
        self.recomputes.add("not reentrant, a whole block" if whole else "not reentrant")

    def enter(self, block: int, hidden: torch.Tensor, arguments: Iterable[torch.Tensor]) -> None:
        self.block = self._place = block
        self.given = self.of([hidden])
        self._arguments = {memory_of(x) for x in arguments}

    def leave(self, *, last: bool) -> None:
        """``last``: whether it was the last block."""
        self.block, self._place = None, "after" if last else "before"

    def of(self, tensors: Iterable[torch.Tensor]) -> frozenset[int]:
        """The parts that any of the tensors was computed from."""
        return frozenset().union(*(self._parts.get(memory_of(x), frozenset()) for x in tensors))

    def watch(self, tensors: Iterable[torch.Tensor], beside: torch.Tensor) -> None:
        """Note whether tensors are read outside of the blocks; not those that share memory with ``beside``."""
        for x in tensors:
            self._kept.append(x.untyped_storage())
            self._watched.add(memory_of(x))
        self._watched.discard(memory_of(beside))

    def mark(self, tensors: Iterable[torch.Tensor], parts: frozenset[int]) -> None:
        """Add ``parts`` to those that the tensors were computed from."""
        for x in tensors:
            self._parts[memory_of(x)] = self._parts.get(memory_of(x), frozenset()) | parts
            self._kept.append(x.untyped_storage())

    def note(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        given = _tensors((args, kwargs))
        for x in given:
            self.weights.note(memory_of(x), self._place, given=memory_of(x) in self._arguments)
        sources = self.of(given)
        if self.block is None and any(memory_of(x) in self._watched for x in given):
            self.reads_watched = True
        if not sources or func.__name__.partition(".")[0] in _SHAPES_ALONE:
            return
        if self.block is not None:
            if any(self.of([x]) - {self.block} for x in given if memory_of(x) not in self._arguments):
                self.reads_unseen = self.block if self.reads_unseen is None else self.reads_unseen
            others = sources - self.given - {self.block}
            self.reads_before = self.reads_before or BEFORE in others
            if earlier := others - {BEFORE}:
                self.reads_other = self.reads_other or (self.block, min(earlier))
            sources = frozenset({self.block})
        own = {memory_of(x) for x in given}
        self.mark((x for x in _tensors(out) if memory_of(x) not in own), sources)
        if func._schema.is_mutable:
            self.mark(_written(func, args, kwargs), sources)


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    names = [a.name for a in func._schema.arguments]
    marks = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    return _tensors([value for name, value in [*zip(names, args, strict=False), *kwargs.items()] if name in marks])


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
