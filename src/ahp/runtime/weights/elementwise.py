"""Parameters whose initialization treats each element by itself: any part of one can be made alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ahp.runtime.shard.parameter_layout import Ranges
from ahp.runtime.torch_compat import memory_of, pytree
from ahp.runtime.weights import counter_random


@dataclass(frozen=True)
class Call:
    """A call of an operator that read, made or wrote tensors without memory."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    tensors: tuple[torch.Tensor, ...]
    """All tensors without memory among arguments and output."""


CHUNK_ELEMENTS = {"cpu": 1 << 15, "cuda": 1 << 22}
"""How many elements are made at once. [Empirical] On a CPU the few tensors of 8 bytes per element then stay in its cache, which is fastest; on a
GPU a kernel must be long compared to its launch, and 32 MB per tensor are little."""

aten = torch.ops.aten
DRAWN: dict[Any, Callable[..., torch.Tensor]] = {
    aten.normal_.default: counter_random.normal,
    aten.uniform_.default: counter_random.uniform,
}
FILLED = {aten.fill_.Scalar, aten.zero_.default}


@dataclass(frozen=True)
class _Step:
    """One operator on elements ``first`` to ``end`` of a flat parameter, each by itself."""

    number: int
    """The call's number on its tape, from which the key of its random numbers is made."""
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    first: int
    end: int

    def __call__(self, value: torch.Tensor, index: torch.Tensor, keys: dict[int, int]) -> torch.Tensor:
        if (draw := DRAWN.get(self.func)) is not None:
            return draw(index, keys[self.number], *self.args)
        return self.func(value, *self.args, **self.kwargs)


@dataclass(frozen=True)
class Fill:
    """All steps that fill one parameter."""

    shape: tuple[int, ...]
    steps: list[_Step]

    def write(self, part: torch.Tensor, ranges: dict[int, Ranges], key: Callable[[int], int]) -> None:
        """Fill a part, in place. ``ranges``: what it holds of each dim that it does not hold whole; ``key``: call number -> random key.

        Computed in float64 and rounded once.
        """
        keys = {step.number: key(step.number) for step in self.steps if step.func in DRAWN}
        flat = part.view(-1) if part.is_contiguous() else part.new_empty(part.numel())
        for place, index, (lowest, highest) in _chunks(self.shape, ranges, part.device):
            value = torch.zeros(index.shape, dtype=torch.float64, device=part.device)
            for step in self.steps:
                if step.first <= lowest and highest < step.end:
                    value = step(value, index, keys)
                elif step.first <= highest and lowest < step.end:
                    some = (index >= step.first) & (index < step.end)
                    value[some] = step(value[some], index[some], keys)
            flat[place].copy_(value)
        if not part.is_contiguous():
            part.copy_(flat.view(part.shape))


def elementwise(parameter: torch.Tensor, calls: Sequence[Call]) -> Fill | None:
    """What the calls do to a parameter, None if some element depends on another or a call cannot run on a part."""
    if not (parameter.is_contiguous() and parameter.is_floating_point()):
        return None
    steps = []
    for number, call in enumerate(calls):
        if call.func.is_view and all(_is_run_of(parameter, t) for t in call.tensors):
            continue
        if not _is_alike(call) or not _is_run_of(parameter, call.tensors[0]):
            return None
        target = call.args[0]
        first = int(target.storage_offset() - parameter.storage_offset())
        steps.append(_Step(number, call.func, call.args[1:], call.kwargs, first, first + target.numel()))
    return Fill(tuple(parameter.shape), steps)


def _is_alike(call: Call) -> bool:
    """Whether a call changes its first argument in place, each element by itself, without other tensors."""
    others = pytree.tree_leaves((call.args[1:], call.kwargs))
    changes = call.func._schema.name.endswith("_") and not any(isinstance(other, torch.Tensor) for other in others)
    tags = call.func.tags
    by_numbers = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    return changes and (call.func in DRAWN or call.func in FILLED or by_numbers)


def _is_run_of(parameter: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view of consecutive elements of a parameter."""
    return tensor.dtype == parameter.dtype and memory_of(tensor) == memory_of(parameter) and tensor.is_contiguous()


def _chunks(
    shape: tuple[int, ...], ranges: dict[int, Ranges], device: torch.device
) -> Iterator[tuple[slice, torch.Tensor, tuple[int, int]]]:
    """A part, some elements at a time: their place in the flat part, the index of each in the flat whole, and the lowest and highest index."""
    sizes = [
        sum(end - first for first, end in ranges[dim]) if dim in ranges else size for dim, size in enumerate(shape)
    ]
    offsets = [
        np.concatenate([np.arange(first, end) for first, end in ranges.get(dim, [(0, size)])])
        * math.prod(shape[dim + 1 :])
        for dim, size in enumerate(shape)
    ]
    most = CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS["cpu"])
    split = max(len(shape) - 1, 0)
    while split > 0 and math.prod(sizes[split - 1 :]) <= most:
        split -= 1
    rows, columns = _sums(offsets[:split]), _sums(offsets[split:])
    rows_there, columns_there = (torch.from_numpy(found).to(device) for found in (rows, columns))
    width = len(columns)
    for top in range(0, len(rows), tall := max(1, most // width)):
        for left in range(0, width, most):
            some_rows, some_columns = slice(top, top + tall), slice(left, left + most)
            index = (rows_there[some_rows, None] + columns_there[some_columns]).view(-1)
            bounds = [int(limit(rows[some_rows]) + limit(columns[some_columns])) for limit in (np.min, np.max)]
            start = top * width + left
            yield slice(start, start + len(index)), index, (bounds[0], bounds[1])


def _sums(offsets: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """All sums of one number from each array; the last array varies fastest."""
    found = np.zeros(1, dtype=np.int64)
    for one in offsets:
        found = np.add.outer(found, one).reshape(-1)
    return found
