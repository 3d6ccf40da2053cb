"""Operators of a traced segment that work on the experts' tokens: between the experts' products, and to order tokens before and after."""

from __future__ import annotations

from typing import NamedTuple

from ahp.forecast.division import is_weight_gradient
from ahp.forecast.kernels import Kernels
from ahp.forecast.split import GROUPED
from ahp.graph.operators import Operator, Segment


class ExpertOperators(NamedTuple):
    """Indexes of operators in the modules that hold stacked experts."""

    between: frozenset[int] = frozenset()
    """Operators between the first and the last expert product of a phase: activation functions."""
    permuting: frozenset[int] = frozenset()
    """Operators before the first or after the last product: copies of a token for each of its experts, their order, and the sum."""
    after_chains: frozenset[int] = frozenset()
    """Products that read the results of ``between``: all except for the first of each phase; weight gradients cast nothing and are left out."""

    stashed_bytes: float = 0.0
    """Bytes of these modules that wait for the backward pass, on a single device, with products' operands in 8 bits. Where experts run in buffers
    of a fixed size, they are copied into pages, and back (Megatron-LM pull request 4247, paged stashing)."""

    @classmethod
    def of(cls, segment: Segment, kernels: Kernels) -> ExpertOperators:
        modules = {op.module for op in segment.operators if op.name in GROUPED}
        between: set[int] = set()
        permuting: set[int] = set()
        after: set[int] = set()
        for phase in ("forward", "backward"):
            grouped = [op for op in segment.phase(phase) if op.name in GROUPED]
            products = [op.index for op in grouped]
            after.update([op.index for op in grouped if not is_weight_gradient(op)][1:])
            for op in segment.phase(phase):
                if op.flops == 0 and _is_in(op, modules):
                    inside = products[0] < op.index < products[-1]
                    (between if inside else permuting).add(op.index)
        forward = {op.index for op in segment.phase("forward") if _is_in(op, modules)}
        operands = {
            i for op in segment.operators if op.name in GROUPED and not is_weight_gradient(op) for i in op.depends_on
        }
        stashed = sum(kernels.saved_bytes.get(i, 0.0) * (0.5 if i in operands else 1.0) for i in forward)
        return cls(frozenset(between), frozenset(permuting), frozenset(after), stashed)


def _is_in(op: Operator, modules: set[str]) -> bool:
    return any(op.module == module or op.module.startswith(f"{module}.") for module in modules)
