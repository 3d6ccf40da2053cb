"""Finds the list of repeated blocks in any model, and which of these blocks are equal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ahp.errors import BadInput

MAX_CLASSES = 4
"""A stack mixes at most this many block classes (hybrids have two: attention and state space); a list with more is no stack."""

NOT_PLAIN = object()


class NoBlocks(BadInput):
    """The module holds no list of repeated blocks, so it cannot be cut into layers."""


Stack = nn.ModuleList | nn.Sequential
"""A Sequential counts when all its children are of one class: one of mixed classes may well be a whole model."""


@dataclass(frozen=True)
class BlockList:
    """The stack of blocks of a model: ``module.get_submodule(path) is blocks``."""

    path: str
    blocks: Stack

    def kinds(self) -> tuple[int, ...]:
        """The kind of each block; see ``block_kinds``."""
        return block_kinds(self.blocks)

    def __len__(self) -> int:
        return len(self.blocks)


def find_blocks(module: nn.Module) -> BlockList:
    """The list or sequence of modules with the most parameters whose children are of one or a few classes.

    If a list is inside another list's child (experts inside a block), the outer one wins, because it holds more. Raises NoBlocks.
    """
    best: tuple[int, str, Stack] | None = None
    for path, candidate in module.named_modules():
        if not isinstance(candidate, Stack) or not _is_stack(candidate):
            continue
        size = sum(p.numel() for p in candidate.parameters())
        if size > 0 and (best is None or size > best[0]):
            best = (size, path, candidate)
    if best is None:
        raise NoBlocks(
            f"model = {type(module).__name__}: no list of repeated blocks with parameters was found; "
            "keep the blocks in one nn.ModuleList or nn.Sequential"
        )
    return BlockList(best[1], best[2])


def _is_stack(candidate: Stack) -> bool:
    classes = {type(child) for child in candidate}
    if isinstance(candidate, nn.Sequential):
        return len(classes) == 1
    return len(candidate) == 1 or (0 < len(classes) <= MAX_CLASSES and len(classes) < len(candidate))


def block_kinds(blocks: Stack) -> tuple[int, ...]:
    """``kinds[i]`` is the kind of block ``i``; kinds are numbered from 0 in order of first appearance.

    Two blocks are of one kind when they have the same classes, the same shapes of parameters and buffers, and the same
    plain attributes, in themselves and in all their submodules. An attribute that merely counts the blocks
    (``layer_idx``) is ignored, so Gemma's sliding and full layers differ and LLaMA's layers do not.
    """
    facts = [dict(_facts(block)) for block in blocks]
    counting = _counting_keys(facts)
    numbers: dict[frozenset[tuple[str, Any]], int] = {}
    return tuple(
        numbers.setdefault(frozenset((k, v) for k, v in fact.items() if k not in counting), len(numbers))
        for fact in facts
    )


def _facts(block: nn.Module) -> Iterator[tuple[str, Any]]:
    """Everything in which blocks can differ, as hashable values under dotted keys."""
    for path, module in block.named_modules():
        yield f"{path}:class", type(module)
        for name, value in vars(module).items():
            plain = _plain(value)
            if not name.startswith("_") and plain is not NOT_PLAIN:
                yield f"{path}.{name}", plain
        for name, parameter in module.named_parameters(recurse=False):
            yield f"{path}.{name}:parameter", (tuple(parameter.shape), parameter.dtype)
        for name, buffer in module.named_buffers(recurse=False):
            yield f"{path}.{name}:buffer", (tuple(buffer.shape), buffer.dtype)


def _plain(value: Any) -> Any:
    """A hashable stand-in for a plain value, with its type because ``True == 1``; NOT_PLAIN for anything else."""
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return (type(value), value)
    if isinstance(value, (tuple, list)):
        items = tuple(_plain(item) for item in value)
        return NOT_PLAIN if NOT_PLAIN in items else items
    if callable(value) and hasattr(value, "__qualname__"):
        return value.__qualname__
    return NOT_PLAIN


def _counting_keys(facts: list[dict[str, Any]]) -> set[str]:
    """Keys whose integer value is the block's position plus a constant, the same for all blocks (counts from 0, 1, ...)."""
    offsets: dict[str, list[int | None]] = {}
    for position, fact in enumerate(facts):
        for key, value in fact.items():
            is_integer = isinstance(value, tuple) and len(value) == 2 and value[0] is int
            offsets.setdefault(key, []).append(value[1] - position if is_integer else None)
    return {key for key, seen in offsets.items() if len(seen) > 1 and len(set(seen)) == 1 and seen[0] is not None}
