"""Bytes that the optimizer moves through memory for each parameter: the gradient norm, clipping and the update."""

from __future__ import annotations

from ahp.engines.traits import Traits
from ahp.job import Job

EIGHT_BIT_UPDATE_BYTES = 242
"""Bytes moved per parameter by AdamW with moments in 8 bits on a CPU, counted over the operators of runtime/optimizer/eight_bit.py: 21 to
decode each moment, 32 to add the gradient, 66 to encode both moments, 72 for the update, 30 to write the results unless the step is skipped."""

COMPILED_EIGHT_BIT_UPDATE_BYTES = 74
"""The same on a GPU, in one compiled kernel: it moves 16, but memory could move these 74 while it looks codes up. [H200] torchao's kernel of these
steps took about 16 ms more than fused AdamW (28 bytes) for 1.5 billion parameters, measured on another H200 and scaled (docs/benchmarks.md)."""

CLIP_BYTES = 12
"""Bytes moved per gradient element by clipping in fp32: one read for the norm, one read and write for the scale."""


def update_bytes(job: Job, traits: Traits, *, on_cpu: bool) -> float:
    """Bytes moved for each parameter, trained or not, by norm, clipping and AdamW."""
    # AdamW reads weight, gradient and states, and writes weight and states, in one kernel (fused=True).
    states, in_8_bits = traits.states, job.optimizer.share_in_8_bits
    moved = 2 * (states.master_weight_bytes + states.optimizer_bytes) + traits.gradients.element_bytes
    if in_8_bits:
        in_fp32 = 2 * (states.master_weight_bytes + 8) + traits.gradients.element_bytes
        in_blocks = EIGHT_BIT_UPDATE_BYTES if on_cpu else COMPILED_EIGHT_BIT_UPDATE_BYTES
        moved = in_8_bits * in_blocks + (1 - in_8_bits) * in_fp32
    # The compute copy is made again, where no gather makes it.
    if states.compute_weight_bytes and traits.gather.forward == "never":
        moved += states.master_weight_bytes + states.compute_weight_bytes
    moved += CLIP_BYTES if job.optimizer.grad_clip is not None else CLIP_BYTES // 3
    return moved * states.trained_share
