"""Tells whether a model computes each sequence of a micro-batch apart from the others: if not, its loss depends on ``micro_batch_size``.

The forward runs once on tensors without data, with a prime number of sequences that is a factor of no size of the model: so a dim that
holds the sequences shows by its size. A reshape that puts parts of several sequences at one index, and an operator that reduces or
normalizes over such a dim, mix them, and so does an embedding whose gradients are divided by how often a token occurs
(``scale_grad_by_freq``); what is computed from that is mixed too, and it matters if the logits are. Which tokens an index operator takes is
not followed: routers sort the tokens of all sequences to their experts.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from ahp.graph.fake_run import Subject, forward_run
from ahp.graph.record import Where
from ahp.graph.torch_compat import Watching, memory_of, pytree

MIXING = {
    "mean", "sum", "prod", "std", "var", "std_mean", "var_mean", "norm", "linalg_vector_norm", "amax", "amin", "max", "min", "logsumexp",
    "softmax", "log_softmax", "cumsum", "cumprod", "flip", "roll", "sort", "argsort",
}  # fmt: skip
"""Operators that reduce, normalize or move along the dims in their argument ``dim`` or ``dims``."""
RESHAPES = {"view", "_unsafe_view", "reshape", "_reshape_alias"}
PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)


class Held(NamedTuple):
    """Where a tensor holds the sequences: index ``i`` of ``dim`` is of sequence ``i // inner % batch``."""

    dim: int
    inner: int


def warn_of_mixed(subjects: Iterable[Subject], sequence: int) -> None:
    """A warning that names the operator and its module if the logits of one sequence are computed from others of its micro-batch.

    ``subjects``: the model as it is to run, and how else if it does not run that way. Nothing is said of one that runs in no way.
    """
    found = None
    for subject in subjects:
        with suppress(Exception):  # what the model's own code raises for so many sequences
            found = mixing_operator(subject, sequence)
            break
    if found is not None:
        message = f"{found} mixes the sequences of a micro-batch, so the loss depends on micro_batch_size, as in plain PyTorch"
        warnings.warn(f"{message}; to keep the curve under other plans, fix parallelism.micro_batch_size", stacklevel=4)


def mixing_operator(subject: Subject, sequence: int) -> str | None:
    """The first operator that mixes the sequences of a micro-batch, if that reaches the logits, with the module that runs it; else None."""
    sizes = {sequence, *(size for p in subject.module.parameters() for size in p.shape)}
    batch = next((prime for prime in PRIMES if all(size % prime for size in sizes)), PRIMES[-1])
    where = Where("")
    with forward_run(subject, batch, sequence, where) as call, Sequences(batch, where) as seen:
        return seen.mixed_by(call())


class Sequences(Watching):
    """Within, notes for each tensor where it holds the sequences, and for each memory what mixed them there."""

    def __init__(self, batch: int, where: Where) -> None:
        super().__init__()
        self._batch, self._where = batch, where
        self._held: dict[Any, Held] = {}
        self._mixed: dict[int, str] = {}
        self._kept: list[Any] = []  # an address stands for the same memory only while that is alive

    def mixed_by(self, tensor: torch.Tensor) -> str | None:
        return self._mixed.get(memory_of(tensor))

    def note(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        inputs, outputs = _tensors((args, kwargs)), _tensors(out)
        mixed = next(filter(None, map(self.mixed_by, inputs)), None)
        name = func.__name__.partition(".")[0]
        if mixed is None and self._mixes(name, func, args, kwargs, outputs):
            mixed = f"{name} of {self._where.module or 'the model'}"
        for tensor in outputs:
            self._kept.append(tensor.untyped_storage())
            if mixed is not None:
                self._mixed[memory_of(tensor)] = mixed
            elif (held := self._place(name, inputs, tensor)) is not None:
                self._held[_geometry(tensor)] = held

    def _mixes(self, name: str, func: Any, args: Any, kwargs: dict[str, Any], outputs: list[torch.Tensor]) -> bool:
        if _named(func, args, kwargs).get("scale_grad_by_freq"):
            return True
        source = args[0] if args and isinstance(args[0], torch.Tensor) else None
        held = None if source is None else self._of(source)
        if source is None or held is None or not source.is_floating_point():
            return False
        if name in RESHAPES:
            return source.dim() > 0 and self._reshaped(source, outputs[0], held) is None
        return mixes_along(held.dim, source, func, args, kwargs)

    def _place(self, name: str, inputs: list[torch.Tensor], output: torch.Tensor) -> Held | None:
        """Where the output holds the sequences, None if that does not show."""
        if name in RESHAPES and (held := self._of(inputs[0])) is not None:
            return self._reshaped(inputs[0], output, held)
        dims = [dim for dim, size in enumerate(output.shape) if size % self._batch == 0 and size]
        if len(dims) != 1:
            return None
        size = output.shape[dims[0]]
        if size == self._batch:
            return Held(dims[0], 1)
        alike = {held.inner for x in inputs if (held := self._of(x)) is not None and x.shape[held.dim] == size}
        return Held(dims[0], alike.pop()) if len(alike) == 1 else None

    def _reshaped(self, source: torch.Tensor, output: torch.Tensor, held: Held) -> Held | None:
        """Where the sequences are after a reshape; None if some index of every dim has parts of several."""
        inner = held.inner * math.prod(source.shape[held.dim + 1 :])
        whole = inner * self._batch  # elements after which the sequences begin again
        after = 1
        for dim in reversed(range(output.dim())):
            size = output.shape[dim] * after
            if inner % after == 0 and size % whole == 0:
                return Held(dim, inner // after)
            after = size
        return None

    def _of(self, tensor: torch.Tensor) -> Held | None:
        return self._held.get(_geometry(tensor))


def mixes_along(dim: int, source: torch.Tensor, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operator combines the values along a dim of ``source``, its first tensor."""
    name = func.__name__.partition(".")[0].removeprefix("_")
    if name.endswith("batch_norm"):
        return True
    if name not in MIXING:
        return False
    named = _named(func, args, kwargs)
    dims = named.get("dim", -1 if "sort" in name else named.get("dims"))
    dims = [dims] if isinstance(dims, int) else dims or range(source.dim())
    return dim in {each % source.dim() for each in dims}


def _named(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (memory_of(tensor), tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
