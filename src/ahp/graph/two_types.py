"""Whether a model computes with weights in 16 bits beside buffers in their own type: ``ahp``'s runtime holds a model in fp32 and casts its
weights for each use, and no buffer. A model that is built in 16 bits, for a trace, has its buffers in 16 bits too."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ahp.graph.fake_run import EMBEDDING, Subject, forward_run
from ahp.graph.record import Where
from ahp.graph.torch_compat import pytree


def is_of_two_types(error: RuntimeError) -> bool:
    """Whether torch refused to compute with fp32 and 16 bits at once."""
    says = str(error)
    if "mixed dtype" in says:  # of norms on a CPU, which name one type alone
        return True
    return bool(re.search("same d?type|scalar type", says) and re.search("bfloat16|half|float16", says, re.IGNORECASE))


def why_two_types(subject: Subject, sequence_length: int) -> str | None:
    """Which module computes with fp32 and 16 bits at once, in words; None if none does. ``subject``: a module in fp32, to run with its weights
    in ``subject.dtype``."""
    where, blocks = Where(EMBEDDING), () if subject.blocks is None else subject.blocks.blocks
    heads = (part for part in subject.module.modules() if isinstance(part, nn.Linear))
    with _cast_inputs([*blocks, *heads], subject.dtype), forward_run(subject, 1, sequence_length, where) as forward:
        try:
            forward()
        except RuntimeError as error:
            if not is_of_two_types(error):
                raise
            return f"{where.module or 'the model'} mixes an fp32 buffer with weights in 16 bits"
    return None


@contextmanager
def _cast_inputs(modules: list[nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """Within, these modules get their floating inputs in ``dtype``, as from FSDP2 (``MixedPrecisionPolicy.cast_forward_inputs``)."""

    def cast(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return pytree.tree_map(
            lambda leaf: leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf,
            (args, kwargs),
        )

    handles = [module.register_forward_pre_hook(cast, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
