"""Under which names, and in which parts, transformers keeps a model's parameters in its files.

Many files on the hub are older than the modules that read them: in the files each expert has its own matrices, and the module
has one stack of all. transformers converts when it loads and when it saves. Here it is asked to save tensors without memory:
the place of each tensor in a parameter's memory then shows which block of the parameter it is.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ahp.runtime.torch_compat import TorchDispatchMode, memory_of


@dataclass(frozen=True)
class Piece:
    """A tensor in a file, and the block of a parameter that it holds."""

    stored: str
    """Its name in the file."""
    shape: tuple[int, ...]
    starts: tuple[int, ...]
    """For each dim of the parameter, where the block begins."""
    sizes: tuple[int, ...]
    dims: tuple[int | None, ...]
    """For each dim of the parameter, the tensor's dim that it is; None if the tensor has none for it, and the block has one row."""


@dataclass(frozen=True)
class InFiles:
    """A parameter of this shape, as files hold it: pieces that together are all of it."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def as_it_is(name: str, shape: tuple[int, ...]) -> InFiles:
    """A tensor that files hold whole."""
    piece = Piece(name, shape, (0,) * len(shape), shape, tuple(range(len(shape))))
    return InFiles(shape, (piece,))


Shapes = dict[str, tuple[int, ...]]
"""The shape of each parameter and kept buffer of a whole module, keyed by the first of its names."""


def shapes_of(module: nn.Module) -> Shapes:
    """The shapes of a module that is whole."""
    return {name: tuple(tensor.shape) for name, tensor in (*module.named_parameters(), *kept_buffers(module))}


def in_files(module: nn.Module, shapes: Shapes | None = None) -> dict[str, InFiles]:
    """How ``save_pretrained`` would write each parameter and kept buffer, keyed by the first of its names.

    ``shapes``: of the whole module, if ``module`` is a part of it. transformers takes a while for this. A parameter that files do not hold as blocks
    of it (rows in another order, say), and every parameter of a module that is not from transformers, is as the module has it.
    """
    shapes = shapes_of(module) if shapes is None else shapes
    found = {name: as_it_is(name, shape) for name, shape in shapes.items()}
    pieces: dict[str, list[Piece]] = {}
    for stored, (name, view) in _written(module, shapes).items():
        if (piece := _piece(stored, view, shapes[name])) is not None:
            pieces.setdefault(name, []).append(piece)
    for name, parts in pieces.items():
        if sum(math.prod(piece.sizes) for piece in parts) == math.prod(shapes[name]):
            found[name] = InFiles(shapes[name], tuple(parts))
    return found


def kept_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Buffers that belong to a module's state; others (rotary tables, masks) are made when it is built."""
    state = module.state_dict(keep_vars=True)
    return [(name, buffer) for name, buffer in module.named_buffers() if name in state]


def piece_of(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """What a file holds of a parameter, in memory of its own."""
    block = tensor[tuple(slice(start, start + size) for start, size in zip(piece.starts, piece.sizes, strict=True))]
    there = [dim for dim, own in enumerate(piece.dims) if own is not None]
    order = sorted(there, key=lambda dim: piece.dims[dim] or 0)
    others = [dim for dim in range(tensor.dim()) if dim not in there]
    laid = block.permute((*order, *others)).reshape(piece.shape)
    return laid.clone(memory_format=torch.contiguous_format)  # files accept no shared memory


def _written(module: nn.Module, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[str, torch.Tensor]]:
    """What transformers would write, keyed by its name there: the parameter in whose memory it lies, and a view of its place."""
    revert = _revert() if hasattr(module, "config") else None
    if revert is None:
        return {}
    state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    names = {memory_of(tensor): name for name, tensor in state.items()}
    try:
        with _CopiesShareMemory():
            written = revert(module, dict(state))
    except (RuntimeError, ValueError):  # a conversion that cannot be followed: take the module's own names
        return {}
    return {
        stored: (names[memory_of(tensor)], tensor) for stored, tensor in written.items() if memory_of(tensor) in names
    }


def _revert() -> Any:
    """transformers' conversion of a module's state to that of the files; None where nobody has imported transformers."""
    if "transformers" not in sys.modules:
        return None
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return None
    return revert_weight_conversion


class _CopiesShareMemory(TorchDispatchMode):
    """Makes copies views instead, so that their places in memory are still known."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            return torch.ops.aten.alias.default(args[0])
        return func(*args, **(kwargs or {}))


def _piece(stored: str, view: torch.Tensor, shape: tuple[int, ...]) -> Piece | None:
    """A view of a contiguous parameter as a block of it, None if it is no block."""
    strides = [math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape))]
    starts, rest = [], int(view.storage_offset())
    for stride in strides:
        start, rest = divmod(rest, stride)
        starts.append(start)
    left = [dim for dim in range(view.dim()) if view.shape[dim] > 1]
    dims: list[int | None] = []
    for start, stride, size in zip(starts, strides, shape, strict=True):
        fits = (dim for dim in left if view.stride(dim) == stride and start + view.shape[dim] <= size)
        dims.append(found := next(fits, None))
        if found is not None:
            left.remove(found)
    if left:
        return None
    sizes = tuple(1 if dim is None else view.shape[dim] for dim in dims)
    return Piece(stored, tuple(view.shape), tuple(starts), sizes, tuple(dims))
