"""What torchtitan moves around attention that the trace does not: positions as complex numbers, and keys and values that are copied for each query.

torchtitan b5bcd76, models/common/rope.py (ComplexRoPE): a cast to fp32, a complex product, a cast back; each is one kernel, with compile too, as torch's
compiler has none for complex numbers. Releases before 2026-01-27, models/llama3/model/model.py (repeat_kv). ea4989e0d, experiments/qwen3/model/model.py
(apply_rotary_emb, rotate_half): by cosine and sine, which without compile are kernels one after another.
"""

from __future__ import annotations

from collections.abc import Mapping

from ahp.forecast.one_by_one import SINKS, turned
from ahp.graph.operators import Segment

COMPLEX_BYTES, COMPLEX_ADDRESSES = (16.0, 16.0), (0.5, 0.5)
"""For each element of queries and keys, in both passes: 2 + 4, 4 + 4 and 4 + 2 bytes instead of the 4 of one kernel; the product repeats positions over
heads, and its elements are pairs."""

REAL_BYTES, REAL_ADDRESSES = (16.0, 26.0), (3.5, 2.5)
"""For each element of queries and keys that are turned by cosine and sine, without compile: bytes beyond the 4 of one kernel, and addresses that are computed
one by one. Forward two products (4 + 4), a negated half (2), ``cat`` (4) and a sum (6); backward two products, a negated half, two halves copied into zeros
(4 + 4) and two sums."""

REPEATED_BYTES = 4.0
"""For each element of queries, in both passes: both copies are written, or their gradients read (2 + 2). The kernel that copies keys turns them too, so that
it does not write them as they are; values as they are, read or written once more, move as much."""

OF_REAL_NUMBERS = (SINKS, "q_norm.weight")
"""Parameters of the models that torchtitan turns by cosine and sine, gpt-oss and Qwen3 (models/*/__init__.py, CosSinRoPE)."""


def moved_around_attention(
    segment: Segment, owner: Mapping[int, int], *, complex_positions: bool, repeated_keys: bool, compiled: bool
) -> tuple[dict[int, float], dict[int, float]]:
    """Bytes that operators move more, and elements whose addresses are computed one by one. ``owner``: who made the memory of each output."""
    more, addresses = dict[int, float](), dict[int, float]()
    real = any(p.name.endswith(OF_REAL_NUMBERS) for p in segment.parameters)
    figures = (REAL_BYTES, REAL_ADDRESSES) if real else (COMPLEX_BYTES, COMPLEX_ADDRESSES)
    fused = not complex_positions or (real and compiled)
    for op, num_bytes, of_each in () if fused else turned(segment, owner, *figures):
        more[op.index] = num_bytes * op.outputs[0].numel
        addresses[op.index] = of_each * op.outputs[0].numel
    ends = [op for op, *_ in turned(segment, owner, (0.0, 0.0), (0.0, 0.0))] if repeated_keys else []
    for phase in ("forward", "backward"):
        pair = sorted((op for op in ends if op.phase == phase), key=lambda op: op.outputs[0].numel)
        if len(pair) == 2 and pair[0].outputs[0].numel < pair[1].outputs[0].numel:
            keys, queries = pair
            more[keys.index] = more.get(keys.index, 0.0) + REPEATED_BYTES * queries.outputs[0].numel
    return more, addresses
