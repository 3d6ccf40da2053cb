"""The tensor-parallel collectives of one segment and one micro-batch, and how long they take."""

from __future__ import annotations

from typing import NamedTuple

from ahp.forecast.axes import Axes
from ahp.forecast.communication import Network
from ahp.forecast.compute import SegmentTimes
from ahp.forecast.division import GROUPED
from ahp.forecast.efficiency import Rates
from ahp.forecast.group import CollectiveKind, Group
from ahp.forecast.kernel_options import KernelOptions
from ahp.forecast.overlap import shown_s
from ahp.forecast.split import TensorSplit, is_weight_product
from ahp.graph.operators import Segment, TensorSpec

SCALE_BYTES = 4


class TensorCost(NamedTuple):
    """Seconds of a segment's tensor-parallel collectives for one micro-batch that computation does not hide, and how many one pass has."""

    forward_s: float
    again_s: float
    """The part of ``forward_s`` before the last result that the backward pass reads, so that recompute must run it again."""
    gather_s: float
    """The part of ``forward_s`` in all-gathers."""
    backward_s: float
    """Before products for weight gradients hide any of it."""
    launches: int
    """0 where one graph launches everything."""


class TensorCollectives:
    """Prices the tensor-parallel collectives of segments on one kind of node."""

    def __init__(self, rates: Rates, network: Network) -> None:
        self._rates, self._network = rates, network

    def of_segment(
        self,
        parts: TensorSplit,
        axes: Axes,
        times: SegmentTimes,
        how: KernelOptions,
        *,
        fp8: bool,
        sequences: int,
        num_unread: int,
    ) -> TensorCost:
        """The cost of a segment's tensor-parallel collectives.

        Without sequence parallelism partial sums are all-reduced. With it they are reduce-scattered along the sequence and
        gathered again before the next column product; the backward pass can gather the inputs once more for the weight
        gradients (arXiv 2205.05198, section 4.2.2). ``fp8``: inputs of products are gathered in 8 bits, sums stay in 16.
        ``num_unread``: how many of the last sums nothing in the backward pass reads.
        """
        group, context = axes.tensor, axes.context.size
        of_heads_s = self._heads_s(parts, group, context)

        def total(kind: CollectiveKind, tensors: tuple[TensorSpec, ...]) -> float:
            part = 0.5 if fp8 and kind == "all_gather" else 1.0
            # A single sequence gathered along its length arrives in the right order.
            copied = how.tensor.copies and (kind == "reduce_scatter" or (kind == "all_gather" and sequences > 1))
            seconds = 0.0
            for spec in tensors:
                sent = part * spec.bytes / context
                seconds += self._network.time_s(kind, sent, group)
                seconds += self._rates.element_wise_s(2 * sent, 0.0, spec.dtype) if copied else 0.0
            return seconds

        count, launched = len(parts.forward_reduce), not how.one_graph
        unread = parts.forward_reduce[count - num_unread :]
        copied, copies = (tuple(pair[i] for pair in parts.tokens_summed) for i in range(2))
        weights = parts.whole_weights if axes.sequence_parallel else parts.weights_in_parts
        of_weights_s = sum(
            self._network.time_s("all_reduce", w.bytes, group) for w in weights if how.tensor.sums_each_weight
        )
        if not axes.sequence_parallel:
            forward, backward = total("all_reduce", parts.forward_reduce), total("all_reduce", parts.backward_reduce)
            backward += total("all_reduce", copies) - total("all_reduce", copied) + of_weights_s
            forward, backward = forward + of_heads_s[0], backward + of_heads_s[1]
            return TensorCost(forward, forward - total("all_reduce", unread), 0.0, backward, count * launched)
        hidden = tuple(spec for spec in parts.forward_reduce if len(spec.shape) > 1)
        rows = tuple(spec for spec in parts.forward_reduce if len(spec.shape) == 1)
        gathered = total("all_gather", parts.backward_reduce)
        forward = total("reduce_scatter", hidden) + gathered
        gathers = total("all_gather", hidden)
        gathers += gathered if how.tensor.gathers_inputs_again else 0.0
        if how.tensor.in_pieces:
            # A rank begins or ends with its own piece: one piece of each collective has no computation to overlap with.
            overlap, beside_s = 1.0 - 1.0 / group.size, times.products.device_s
            forward, gathers, gathered = (shown_s(s, beside_s, overlap) for s in (forward, gathers, gathered))
        forward += total("all_reduce", rows) + of_heads_s[0]
        backward = gathers + total("reduce_scatter", parts.backward_reduce) + of_heads_s[1]
        backward += total("all_reduce", parts.summed_whole) - total("reduce_scatter", parts.summed_whole)
        backward += total("all_reduce", copies) - total("reduce_scatter", copied) + of_weights_s
        again = max(0.0, forward - total("reduce_scatter", unread))
        return TensorCost(forward, again, gathered, backward, 2 * count * launched)

    def _heads_s(self, parts: TensorSplit, group: Group, context: int) -> tuple[float, float]:
        """Seconds, forward and backward, due to keys with fewer heads than ranks: to sum the gradients of whole keys, or to gather
        all heads, put them together from the ranks' columns, and cut their gradients into these columns. Normed heads are gathered too."""
        forward, backward = 0.0, 0.0
        if parts.gathered_heads:
            sent = sum(spec.bytes for spec in parts.gathered_heads) / context
            copies_s = self._rates.element_wise_s(2 * sent, 0.0, parts.gathered_heads[0].dtype)
            forward = self._network.time_s("all_gather", sent, group) + copies_s
            backward = self._network.time_s("reduce_scatter", sent, group) + copies_s
        for spec in parts.normed_heads if group.size > 1 else ():
            sent = spec.bytes / context
            forward += self._network.time_s("all_gather", sent, group)
            forward += self._rates.element_wise_s(2 * sent, 0.0, spec.dtype)
        for spec in parts.key_gradients:
            backward += self._network.time_s("all_reduce", spec.bytes / context, group)
        return forward, backward

    def with_scales(self, tensor: TensorCost, parts: TensorSplit, axes: Axes, segment: Segment) -> TensorCost:
        """``tensor`` plus the time in which ranks agree on the largest element of a weight, an input or a gradient that they share."""
        column, row = len(parts.column), len(parts.row)
        products = sum(is_weight_product(op) and op.name not in GROUPED for op in segment.phase("forward"))
        scale_s = self._network.time_s("all_reduce", SCALE_BYTES, axes.tensor) if axes.tensor.size > 1 else 0.0
        tokens_s = self._network.time_s("all_reduce", SCALE_BYTES, axes.context) if axes.context.size > 1 else 0.0
        return tensor._replace(
            forward_s=tensor.forward_s + (column + 2 * row) * scale_s + products * tokens_s,
            again_s=tensor.again_s + (column + 2 * row) * scale_s + products * tokens_s,
            backward_s=tensor.backward_s + column * scale_s + products * tokens_s,
        )
