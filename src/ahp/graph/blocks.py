"""Finds the list of repeated blocks in any model, and which of these blocks are equal."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ahp.errors import BadInput
from ahp.graph.likeness import Values, own_attributes

MAX_CLASSES = 4
"""A stack mixes at most this many block classes (hybrids have two: attention and state space); a list with more is no stack."""


class NoBlocks(BadInput):
    """The module holds no list of repeated blocks, so it cannot be cut into layers."""


Stack = nn.ModuleList | nn.Sequential
"""A Sequential counts when all its children are of one class: one of mixed classes may well be a whole model."""


@dataclass(frozen=True)
class BlockList:
    """The stack of blocks of a model: ``module.get_submodule(path) is blocks``."""

    path: str
    blocks: Stack

    def kinds(self, counts_that_matter: Collection[str] = ()) -> tuple[int, ...]:
        """The kind of each block; see ``block_kinds``."""
        return block_kinds(self.blocks, counts_that_matter)

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
            f"keep the blocks in one nn.ModuleList or nn.Sequential{_in_a_dict(module)}"
        )
    return BlockList(best[1], best[2])


def _in_a_dict(module: nn.Module) -> str:
    """What to change if the blocks are in an ``nn.ModuleDict``; the names of the parameters stay if its keys are "0", "1" and so on."""
    for path, one in module.named_modules():
        if isinstance(one, nn.ModuleDict) and len({type(child) for child in one.values()}) == 1 < len(one):
            return f" ({path} is an nn.ModuleDict: make it nn.ModuleList({path}.values()))"
    return ""


def _is_stack(candidate: Stack) -> bool:
    classes = {type(child) for child in candidate}
    if isinstance(candidate, nn.Sequential):
        return len(classes) == 1
    return len(candidate) == 1 or (0 < len(classes) <= MAX_CLASSES and len(classes) < len(candidate))


def block_kinds(blocks: Stack, counts_that_matter: Collection[str] = ()) -> tuple[int, ...]:
    """``kinds[i]`` is the kind of block ``i``; kinds are numbered from 0 in order of first appearance.

    Two blocks are of one kind when they have the same classes, the same shapes of parameters and buffers, the same hooks inside, and
    equal attributes, in themselves and in all their submodules. An attribute that merely counts the blocks (``layer_idx``) is
    ignored, so Gemma's sliding and full layers differ and LLaMA's layers do not, unless the forward was seen to read it
    (``counts_that_matter``, named as ``counting_keys`` does).
    """
    facts = _facts_of_each(blocks)
    ignored = _counting_keys(facts) - set(counts_that_matter)
    numbers: dict[frozenset[tuple[str, Any]], int] = {}
    return tuple(
        numbers.setdefault(frozenset((k, v) for k, v in fact.items() if k not in ignored), len(numbers))
        for fact in facts
    )


def counting_keys(blocks: Stack) -> set[str]:
    """The attributes that count the blocks, as ``path.name`` within a block."""
    return _counting_keys(_facts_of_each(blocks))


def _facts_of_each(blocks: Stack) -> list[dict[str, Any]]:
    values = Values()
    return [dict(_facts(block, values.of_block(number))) for number, block in enumerate(blocks)]


def _facts(block: nn.Module, values: Values) -> Iterator[tuple[str, Any]]:
    """Everything in which blocks can differ, as hashable values under dotted keys."""
    for path, module in block.named_modules():
        yield f"{path}:class", type(module)
        for name, value in own_attributes(module):
            yield f"{path}.{name}", values.of(value)
        if path:  # those of the block itself run around it
            yield f"{path}:hooks", values.of([[*module._forward_pre_hooks.values()], [*module._forward_hooks.values()]])
        for name, parameter in module.named_parameters(recurse=False):
            yield f"{path}.{name}:parameter", (tuple(parameter.shape), parameter.dtype)
        for name, buffer in module.named_buffers(recurse=False):
            yield f"{path}.{name}:buffer", (tuple(buffer.shape), buffer.dtype)


def _counting_keys(facts: list[dict[str, Any]]) -> set[str]:
    """Keys whose integer value is the block's position plus a constant, the same for all blocks (counts from 0, 1, ...)."""
    offsets: dict[str, list[int | None]] = {}
    for position, fact in enumerate(facts):
        for key, value in fact.items():
            is_integer = isinstance(value, tuple) and len(value) == 2 and value[0] is int
            offsets.setdefault(key, []).append(value[1] - position if is_integer else None)
    return {key for key, seen in offsets.items() if len(seen) > 1 and len(set(seen)) == 1 and seen[0] is not None}
