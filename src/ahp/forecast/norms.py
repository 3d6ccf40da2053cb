"""Norms in a traced segment: which operators one kernel of the backward pass holds, and what the gradient of a norm's weight reads."""

from __future__ import annotations

from collections.abc import Sequence

from ahp.graph.operators import Operator, Segment

NORMS = ("layer_norm", "rms_norm", "rsqrt")
"""Parts of the names of operators that norms have; a module with one of them and without products is a norm."""

BOTH_GRADIENTS = ("native_layer_norm_backward", "rms_norm_backward")
"""Operators that give the gradient of a norm's input first, and then that of its weight."""


def in_norms(segment: Segment) -> frozenset[int]:
    """Backward operators of norms; the sum with a gradient that goes past the norm, that of a residual, is none of them."""
    norms, ops = _norms(segment), segment.operators
    inside = (op for op in segment.phase("backward") if op.module in norms)
    return frozenset(op.index for op in inside if not _adds_from_outside(op, ops))


def reads_besides(op: Operator, made: Operator) -> bool:
    """Whether an operator of the backward pass reads all results of a norm but the first, its output: mean and deviation."""
    return any(name in op.name for name in BOTH_GRADIENTS) and made.phase == "forward" and made.module == op.module


def read_for_weights(segment: Segment) -> dict[int, float]:
    """What a kernel for the gradient of a norm's weight alone reads, in bytes, by the operator that makes this gradient: the norm's input
    and the gradient of its output, which have the same number of elements, of the type that goes through memory."""
    norms, found = _norms(segment), dict[int, float]()
    for op in segment.phase("backward"):
        if op.module not in norms:
            continue
        both = any(name in op.name for name in BOTH_GRADIENTS) and len(op.outputs) > 1
        if both or (op.name == "aten.sum" and _sums_over_rows(op)):
            found[op.index] = 2.0 * _narrowest(segment, op.module, op.inputs[0].numel)
    return found


def _narrowest(segment: Segment, module: str, numel: int) -> int:
    """Bytes of the smallest tensor of so many elements that a module makes or reads: norms compute in fp32 what they read and write in 16 bits."""
    ops = (op for op in segment.operators if op.module == module)
    return min(spec.bytes for op in ops for spec in (*op.inputs, *op.outputs) if spec.numel == numel)


def _norms(segment: Segment) -> set[str]:
    modules = {op.module for op in segment.phase("forward") if any(name in op.name for name in NORMS)}
    return modules - {op.module for op in segment.operators if op.flops > 0}


def _adds_from_outside(op: Operator, ops: Sequence[Operator]) -> bool:
    own = [i for i in op.depends_on if ops[i].phase == op.phase and ops[i].module == op.module]
    return op.name in ("aten.add", "aten.add_") and len(own) < len(op.inputs)


def _sums_over_rows(op: Operator) -> bool:
    return op.outputs[0].numel == op.inputs[0].shape[-1] < op.inputs[0].numel
