"""What a stage waits for its weights and gradients: gathered, reduced, cast and copied, unit by unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ahp.engines.engine import Traits
from ahp.forecast.communication import Times
from ahp.forecast.data_parallel import CommUnit, DataParallel, StageParameters
from ahp.forecast.overlap import Sent, exposed_ahead_s, exposed_behind_s, hidden_s, in_buckets
from ahp.forecast.units import Units

Parts = dict[str, float]
"""Seconds of a pass, by part."""


def outside_blocks(units: Units, traits: Traits, *, first: bool, last: bool) -> tuple[int, int]:
    """Parameters of a stage that are in no block: those gathered before the blocks and sent after them, and the others.

    One unit of all, or the embedding and the head by themselves: of the head the pass forward needs the weights last, and the
    backward pass has the gradients first. A weight that both share has its gradient with the embedding's.
    """
    embedding = units.embedding.parameters if first else 0
    head = units.head.parameters if last else 0
    tied = units.tied_parameters if last and not first else 0
    shared = first and last and units.tied_parameters > 0
    return (embedding, head + tied) if traits.ends_apart and not shared else (embedding + head + tied, 0)


@dataclass(frozen=True)
class WeightCommunication:
    """The units of one stage, and what they hide behind."""

    before: CommUnit
    """Gathered before the blocks, and sent after them."""
    after: CommUnit
    """Gathered after the blocks, and sent before them."""
    blocks: Sequence[CommUnit]
    windows_forward_s: Sequence[float]
    """Of each block, seconds that collectives of weights may hide behind."""
    windows_backward_s: Sequence[float]
    """The same in the backward pass, in its order."""
    held: StageParameters
    data: DataParallel
    network: Times

    def add_gathers(self, forward: Parts, backward: Parts, first_forward: Parts, bytes_per_s: float) -> None:
        """Weights that are gathered and cast for the passes of a micro-batch, or once per step."""
        traits, in_blocks = self.data.traits, self._gathers_s[1:-1]
        cast_s = self.data.copied_bytes[0] / bytes_per_s
        target = forward if traits.forward_gathers == "per_micro_batch" else first_forward
        target["weight_gather"] = 0.0
        if traits.forward_gathers != "never":
            # What comes before the blocks, and the first of these, have nothing before them to hide behind.
            ahead_s = [*in_blocks, self._gathers_s[-1]]
            target["weight_gather"] = self._gathers_s[0] + self._ahead_s(ahead_s, self.blocks, self.windows_forward_s)
        target["casts"] = target.get("casts", 0.0) + self.held.total * cast_s
        if traits.backward_gathers == "per_micro_batch":
            # What is in no block is kept from forward to backward.
            backward["weight_gather"] = self._ahead_s(in_blocks[::-1], self.blocks[::-1], self.windows_backward_s)
            backward["casts"] = sum(w.total for w in self.blocks) * cast_s

    def add_reductions(self, backward: Parts, last_backward: Parts, bytes_per_s: float, passes_behind: int) -> None:
        """Gradients that are copied and reduced, at every micro-batch or at the last; ``passes_behind`` as ``stage_cost`` has it."""
        data, traits = self.data, self.data.traits
        order = [self.after, *self.blocks[::-1], self.before]
        reduces = [data.reduce_s(size, self.network, self.held) for size in order]
        both = [a + data.replicas_s(size, self.network) for a, size in zip(reduces, order, strict=True)]
        later_s = passes_behind * sum(self.windows_backward_s)
        last_backward["gradient_reduce"] = self._behind_s(order, both, later_s)
        if traits.reduces_every_micro_batch:
            backward["gradient_reduce"] = self._behind_s(order, reduces, later_s)
            last_backward["gradient_reduce"] -= backward["gradient_reduce"]
        copied_s = self.held.total * data.copied_bytes[1] / bytes_per_s
        backward["casts"] = backward.get("casts", 0.0) + copied_s
        if last_bytes := data.copied_bytes[2]:
            last_backward["casts"] = self.held.total * last_bytes / bytes_per_s

    @cached_property
    def _gathers_s(self) -> list[float]:
        """In the order of the forward pass."""
        order = self.before, *self.blocks, self.after
        return [self.data.gather_s(size, self.network, self.held) for size in order]

    @property
    def _gather_overlap(self) -> float:
        return self.data.overlap * self.data.traits.parameter_gather_overlap

    def _ahead_s(self, gathers_s: Sequence[float], blocks: Sequence[CommUnit], windows_s: Sequence[float]) -> float:
        """Of a pass. All blocks of the first bucket are there before any of them computes."""
        at_once, held = 0, blocks[0].total if blocks else 0
        while at_once < len(blocks) - 1 and held < self.data.traits.gather_bucket_elements:
            at_once += 1
            held += blocks[at_once].total
        windows_s = [0.0] * at_once + [*windows_s[at_once:]]
        return exposed_ahead_s(gathers_s, windows_s, self._gather_overlap)

    def _behind_s(self, order: Sequence[CommUnit], reduces_s: Sequence[float], later_s: float) -> float:
        windows_s = [0.0, *self._windows_left_s, 0.0]
        bucket = self.data.reduce_bucket(self.held)
        units = (
            (weights.total, Sent(reduce_s, window_s, weights.pieces(bucket)))
            for weights, reduce_s, window_s in zip(order, reduces_s, windows_s, strict=True)
        )
        sent = in_buckets(units, bucket)
        overlap = self.data.overlap * self.data.traits.gradient_overlap
        return exposed_behind_s(
            [s.collective_s for s in sent], [s.work_s for s in sent], overlap,
            pieces=[s.pieces for s in sent], later_s=later_s,
        )  # fmt: skip

    @cached_property
    def _windows_left_s(self) -> Sequence[float]:
        """Of the windows of a backward pass, what gathers of the next block's weights leave to the reductions of gradients: both
        go over the same network cards."""
        if self.data.traits.backward_gathers != "per_micro_batch":
            return self.windows_backward_s
        next_s = [*self._gathers_s[-3:0:-1], 0.0]
        overlap = self._gather_overlap
        return [
            own - hidden_s(gather, own, overlap) for own, gather in zip(self.windows_backward_s, next_s, strict=False)
        ]
