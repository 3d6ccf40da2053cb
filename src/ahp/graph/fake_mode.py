"""Makes models take the same decisions on tensors without data as in training."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from ahp.errors import BadInput

UNALIGNED = "multiple of 16 bytes"
"""Part of the error that torch's grouped product raises for matrices with other row sizes."""

DEPENDS_ON_VALUES = ("DataDependentOutputException", "DynamicOutputShapeException")
"""Names of errors, which torch does not export, for code that depends on data: a tensor in an ``if``, as many rows as a mask has ones."""


class NeedsValues(BadInput):
    """A forward whose control flow depends on data."""

    def __init__(self, model: str, operator: str) -> None:
        self.rule = f"what the model's forward does next depends on the values of a tensor ({operator}), and it is looked at without values"
        super().__init__(f"model = {model}: {self.rule}")


def _has_whole_rows(matrices: torch.Tensor) -> bool:
    return max(matrices.stride()[-2:]) * matrices.itemsize % 16 == 0


@contextmanager
def _own_caches(module: nn.Module) -> Iterator[None]:
    """Within, functions beside a module's classes, and their methods, have new caches (``functools.lru_cache``): what the program has cached is
    kept, unless a call reaches it by another name."""
    kinds = {type(part) for part in module.modules()}
    files = [sys.modules[kind.__module__] for kind in kinds if kind.__module__ in sys.modules]  # exec leaves none
    found = [
        (place, name, value, value.cache_info())
        for place in {*kinds, *files}
        for name, value in list(vars(place).items())
        if isinstance(value, functools._lru_cache_wrapper)
    ]
    for place, name, value, _ in found:
        setattr(place, name, functools.lru_cache(**value.cache_parameters())(value.__wrapped__))
    try:
        yield
    finally:
        for place, name, value, before in found:
            setattr(place, name, value)
            if value.cache_info() != before:
                value.cache_clear()


@contextmanager
def as_on_data(module: nn.Module, *, document_mask: bool = False) -> Iterator[None]:
    """Lets a module run on fake tensors as it will on data: the two decisions of ``_decides_as_on_data``, if anybody has imported transformers;
    no log of every operator that fails on fake tensors, because the error itself is enough; and no call of the module leaves a tensor without
    data in a cache, or finds one with data there."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    decisions = _decides_as_on_data(document_mask) if "transformers" in sys.modules else nullcontext()
    try:
        with decisions, _own_caches(module):
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _decides_as_on_data(document_mask: bool) -> Iterator[None]:
    """Makes two decisions of transformers, which depend on data or on kernels, come out as in real training.

    transformers finds out from the positions whether a row packs several documents; without data it cannot, and builds a
    mask: right for a job with a ``document_mask``, but training on plain batches has none. And the shape rule of torch's
    grouped product takes only bf16, though the kernel takes fp32; transformers' own operator replaces it (it saves the
    same tensors, except for the offsets of the groups, 4 bytes per expert), and the kernel's own rule is checked here.
    """
    from transformers import masking_utils
    from transformers.integrations import moe

    find_packed, can_use = masking_utils.find_packed_sequence_indices, moe._can_use_grouped_mm

    def can_use_grouped_mm(values: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> bool:
        if not can_use(values, weight, offs):
            return False
        if weight.dtype != torch.bfloat16 and not all(map(_has_whole_rows, (values, weight))):
            raise RuntimeError(f"strides should be {UNALIGNED}")  # as the kernel will say
        return weight.dtype == torch.bfloat16

    if not document_mask:
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
    moe._can_use_grouped_mm = can_use_grouped_mm
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices, moe._can_use_grouped_mm = find_packed, can_use
