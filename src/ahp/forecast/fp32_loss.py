"""Megatron-LM's own fusion of the loss: a few kernels that work in place on a copy of the logits in fp32."""

from __future__ import annotations

from ahp.graph.operators import LOSS, Segment

FP32_BYTES = 4
FORWARD_BYTES = 5 * FP32_BYTES
"""For each logit, beside the read of the logit itself: the first kernel writes the copy, the second subtracts and exponentiates it in place, the
third divides it in place (Megatron-LM d98e8a6, core/fusions/fused_cross_entropy.py, calculate_*, each one kernel by torch.compile)."""
BACKWARD_BYTES = 2 * FP32_BYTES
"""For each logit, beside the write of its gradient: calculate_gradients changes the softmax in place."""


def loss_in_fp32(
    segment: Segment, owner: dict[int, int], kept: dict[int, float], moved: dict[int, float]
) -> tuple[dict[int, float], dict[int, float]]:
    """``kept`` and ``moved`` with the loss in fp32: the softmax is kept until backward in place of the logits. They are unchanged for a segment without a
    loss, and for logits that are in fp32 already.

    ``owner``: see ``owners``; ``kept`` and ``moved``: bytes by operator, with the loss in one kernel.
    """
    casts = [op for op in segment.operators if op.module == LOSS and op.name == "aten._to_copy" and op.index in moved]
    into = next(
        (op for op in casts if op.phase == "forward" and op.outputs[0].bytes == FP32_BYTES * op.outputs[0].numel), None
    )
    back = next((op for op in reversed(casts) if op.phase == "backward"), None)
    if into is None or back is None:
        return kept, moved
    logits = into.outputs[0].numel
    kept = {index: held for index, held in kept.items() if index not in {owner[i] for i in into.depends_on}}
    more = {into.index: FORWARD_BYTES * logits, back.index: BACKWARD_BYTES * logits}
    moved = {**moved, **{index: moved[index] + changed for index, changed in more.items()}}
    return {**kept, into.index: float(FP32_BYTES * logits)}, moved
