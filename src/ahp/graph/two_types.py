"""Whether a model computes with weights in 16 bits beside tensors in fp32: ``ahp``'s runtime holds a model in fp32 and casts its weights for
each use, and no buffer. A model that is built in 16 bits, for a trace, has its buffers in 16 bits too, and tensors without data have no kernel
that would refuse the two types."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ahp.graph.capture import tensor_leaves
from ahp.graph.fake_run import EMBEDDING, Subject, forward_run
from ahp.graph.operators import ModelGraph
from ahp.graph.record import Where
from ahp.graph.torch_compat import TorchDispatchMode, pytree

OF_ONE_TYPE = {
    f"aten.{name}"
    for name in ("mm", "addmm", "bmm", "baddbmm", "convolution", "native_layer_norm", "native_group_norm")
}
"""Operators whose kernels take one floating type alone. A norm's input in 16 bits may meet weights in fp32, but weights are cast; averages of
a batch norm may be in fp32."""


def may_be_of_two_types(graph: ModelGraph) -> bool:
    """Whether a traced forward gives such an operator two floating types; what it is given may be cast where it is trained."""
    forward = (op for part in graph.segments() for op in part.operators if op.phase == "forward")
    return any(op.name in OF_ONE_TYPE and len({x.dtype for x in op.inputs if "float" in x.dtype}) > 1 for op in forward)


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
    inside = {part for block in blocks for part in block.modules()}
    heads = (part for part in subject.module.modules() if isinstance(part, nn.Linear) and part not in inside)
    with _cast_inputs([*blocks, *heads], subject.dtype), forward_run(subject, 1, sequence_length, where) as forward:
        try:
            with _AsKernels():
                forward()
        except RuntimeError as error:
            if not is_of_two_types(error):
                raise
            return f"{where.module or 'the model'} mixes an fp32 tensor with weights in 16 bits"
    return None


class _AsKernels(TorchDispatchMode):
    """Refuses two floating types where torch's kernels do, which tensors without data do not run."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func.overloadpacket) in OF_ONE_TYPE:
            given = {leaf.dtype for leaf in tensor_leaves(args, kwargs or {}) if leaf.is_floating_point()}
            if len(given) > 1:
                raise RuntimeError(f"{func} wants the same dtype, and is given {', '.join(sorted(map(str, given)))}")
        return func(*args, **(kwargs or {}))


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
