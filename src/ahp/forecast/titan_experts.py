"""What torchtitan's experts run by torch's own kernels that the trace, of transformers' models, moves otherwise: how tokens are ordered by expert, and how the
results of a token's experts are summed.

Ordering is ``x[indices]``, whose gradient torch sorts and adds row by row (aten/native/cuda/Indexing.cu, indexing_backward_kernel). The sum is a
deterministic ``scatter_add``, which is the same kernel (torch 2.13, TensorAdvancedIndexing.cpp, _scatter_via_index_put), or was a batched product in fp32.
With DeepEP ordering is ``index_select``, whose gradient is ``index_add``, and the sum is ``scatter_add``; both add atomically.
"""

from __future__ import annotations

from typing import NamedTuple

from ahp.engines.traits import SumOfExperts
from ahp.forecast.division import GROUPED
from ahp.graph.operators import Operator, Phase, Segment

ADDED_ADDRESSES = 1.84
"""For each element of all copies of tokens whose rows torch adds: as long as so many addresses. 196,608 rows of 2,048 take 1.848 ms on B200
(pytorch/ao pull request 4623), 0.744 elements a clock and SM, over 1.37 (``unvectorized`` in kernels.yaml)."""

PUT_ADDRESSES = 1.0
"""The same where rows are put in their places and not added (aten/native/cuda/IndexKernel.cu, index_put_kernel)."""

BATCHED_BYTES, BATCHED_ADDRESSES = 14.0, 2.80
"""A batched product: zeros (2), results put in the order of tokens (4), cast to fp32 (6) and read (4), beyond the 2 of one kernel; and in the backward pass a
product of one column with one row, 6 to 9 ms for 65,536 tokens of 8 copies of 2,048 elements on B200 (pytorch/torchtitan pull request 2466)."""

SCALED_BYTES = (2.0, 18.0)
"""What a scatter moves beyond that: results times their weights written, by one kernel, or by three (a cast, a product, a cast)."""

ATOMIC_BYTES = (6.0, 10.0)
"""What an atomic sum moves beyond that, as if each copy had a row of its own (1.1 share one of 8 experts of 256 on 32 ranks): zeros (2) and what they are
before and after the sum (4); without a compiler the results times their weights too, written and read (4). pytorch/torchtitan 36a4b6942,
distributed/deepep/deepep.py, _unpermute_tokens and combine_tokens."""


class OfExperts(NamedTuple):
    """By operator: bytes besides the traced ones, and elements whose addresses a GPU computes one by one."""

    more_bytes: dict[int, float]
    addresses: dict[int, float]


def moved_by_torch(segment: Segment, summed: SumOfExperts, *, compiled: bool) -> OfExperts:
    """``compiled``: whether a compiler makes the kernels around the scatter, and the gradient of ``x[indices]``."""
    found = OfExperts({}, {})
    grouped = next((op for op in segment.phase("forward") if op.name in GROUPED), None)
    if grouped is None:
        return found
    copies = grouped.inputs[0]

    def rows(phase: Phase, name: str) -> list[Operator]:
        own = (op for op in segment.phase(phase) if op.name == name and op.module == grouped.module)
        return [op for op in own if op.outputs[0].shape[1:] == copies.shape[1:]]

    # Forward tokens are put in the order of experts, then results in that of tokens; backward the same the other way round.
    ordered, added = rows("forward", "aten.index"), rows("backward", "aten.index_put")
    if len(ordered) < 2 or len(added) < 2:
        return found
    results, gradients = ordered[-1].index, added[0].index
    if summed == "atomic":
        # aten/native/cuda/ScatterGatherKernel.cu and Indexing.cu, indexFuncLargeIndex: an address for each element; what an atomic sum takes besides is unknown.
        found.more_bytes[results] = ATOMIC_BYTES[not compiled] * copies.numel
        if not compiled:
            found.addresses[results] = found.addresses[added[-1].index] = PUT_ADDRESSES * copies.numel
        return found
    if summed == "scattered":
        found.more_bytes[results] = SCALED_BYTES[not compiled] * copies.numel
        found.addresses[results] = ADDED_ADDRESSES * copies.numel
    else:
        found.more_bytes[results] = BATCHED_BYTES * copies.numel
        found.addresses[results] = PUT_ADDRESSES * copies.numel
        found.addresses[gradients] = BATCHED_ADDRESSES * copies.numel
    if not compiled:
        found.addresses[added[-1].index] = ADDED_ADDRESSES * copies.numel
    return found
