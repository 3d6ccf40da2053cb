"""Bytes of activations of each segment on a rank: kept from forward to backward, and at the peaks of both passes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ahp.arrays import Floats
from ahp.engines.fp8 import Kept
from ahp.forecast.compute import core_attention
from ahp.forecast.division import Division, is_weight_gradient
from ahp.forecast.kernels import Kernels, owners
from ahp.forecast.selective import asked_for, kept_results, second_products
from ahp.forecast.split import TensorSplit, is_mask
from ahp.graph.operators import LOSS, Operator, Segment


@dataclass(frozen=True, slots=True)
class Policy:
    """Bytes under a policy that keeps the results of some operators, needed or not, and recomputes all others."""

    kept: int
    """The kept results, without the segment's input."""
    made_again: int
    """What the backward pass needs besides the kept results."""


NOTHING = Policy(0, 0)
"""The policy of a segment that is not a block, and so is never recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentMemory:
    """Bytes of activations of one segment and one micro-batch on one rank."""

    saved: int
    """Kept from forward to backward."""
    saved_in_core: int = 0
    """The part of ``saved`` that unfused attention keeps between its two products."""
    saved_in_chains: int = 0
    """The part of ``saved`` that element-wise operators keep."""
    beside_products: Policy = NOTHING
    """The policy that keeps the results of weight products and of fused attention."""
    every_second_product: Policy = NOTHING
    """The policy that keeps the results of the first, third, ... weight product, and of fused attention."""
    masks: int = 0
    """Masks that the segment gets besides the hidden states: every layer reads the same masks, and recompute needs them."""
    forward_extra: int
    """At the peak of its forward pass, beyond what it keeps."""
    backward_extra: int
    """At the peak of its backward pass, beyond what it kept."""
    freed: int = 0
    """The largest tensor that the forward pass makes and frees, among those smaller than its largest result: a gap, where all that is
    allocated next is larger."""


class ActivationLiveness:
    """A run through a segment's operators: each tensor is made when its operator runs, and freed after its last use.

    Gradients of parameters are left out (they are counted with the parameters), those of the segment's input are in. ``in_8_bits``:
    how inputs of weight products are kept for the weight gradients, where these compute in 8 bits.

    A rank holds the same share of every output of one kind (C kinds: contracted or divided products, weight gradients, the
    rest), so that bytes are counted once per kind, for all divisions.
    """

    def __init__(
        self,
        segment: Segment,
        kernels: Kernels,
        split: TensorSplit,
        *,
        in_8_bits: Kept | None = None,
        attention_again: bool = False,
    ) -> None:
        """``attention_again``: see ``Launched``."""
        self._segment, self._input_bytes = segment, kernels.saved_input_bytes
        owner = owners(segment)
        kinds: dict[tuple[bool, ...], int] = {}
        of = [kinds.setdefault(_kind(op, split), len(kinds)) for op in segment.operators]
        self._one_of = [segment.operators[of.index(kind)] for kind in range(len(kinds))]
        """An operator of each kind."""
        saved = dict(kernels.saved_bytes)
        if in_8_bits in ("in_8_bits", "made_again"):
            saved = {i: count * _share_kept(segment, owner, i, in_8_bits) for i, count in saved.items()}
        core = core_attention(segment)
        self._masks = _given_masks(segment)

        def by_kind(counts: dict[int, float]) -> Floats:
            return np.bincount([of[i] for i in counts], [*counts.values()], len(kinds)).astype(float)

        self._saved = by_kind(saved)
        """[C] Bytes on one device alone."""
        self._in_core = by_kind({i: count for i, count in saved.items() if i in core})
        self._in_chains = by_kind({i: count for i, count in saved.items() if segment.operators[i].flops == 0})
        self._policies = [
            (
                by_kind({i: sum(spec.bytes for spec in segment.operators[i].outputs) for i in keeps}),
                by_kind({i: count for i, count in saved.items() if i not in keeps}),
            )
            for keeps in _policies(segment, one_graph=kernels.one_graph, attention_again=attention_again)
        ]
        """([C] bytes kept, [C] bytes made again) of each policy."""
        forward = [(op, kind) for op, kind in zip(segment.operators, of, strict=True) if op.phase == "forward"]
        self._results = np.array(
            [(_result_bytes(op, kernels), op.index not in saved, kind) for op, kind in forward]
        ).reshape(-1, 3)
        """[forward operators, 3] Bytes of what each makes on one device, whether the pass frees it, and its kind."""
        self._live = self._run(kernels, owner, saved, np.eye(len(kinds))[of] if of else np.zeros((0, 1)))
        in_loss = [op for op in segment.operators if op.module == LOSS]
        self._in_loss = {
            phase: np.array([op.module == LOSS for op in segment.operators if op.phase == phase], dtype=bool)
            for phase in self._live
        }
        self._splits_loss = any(op.index in split.divided for op in in_loss)
        self._logits = max((sum(spec.bytes for spec in op.outputs) for op in in_loss), default=0)
        """Bytes of the logits in fp32 on one device."""

    def _run(self, kernels: Kernels, owner: dict[int, int], saved: dict[int, float], kind: Floats) -> dict[str, Floats]:
        """[operators, C] Bytes while each operator runs, keyed by pass; ``kind``: [operators, C], 1 at the kind of each operator."""
        operators = self._segment.operators
        last_use = {(owner[i], op.phase): op.index for op in operators for i in (*op.depends_on, op.index)}
        frees: dict[int, list[int]] = {}
        for (made_by, phase), at in last_use.items():
            if phase == "backward" or made_by not in saved:
                frees.setdefault(at, []).append(made_by)
        held: dict[int, float] = {}
        found: dict[str, list[Floats]] = {"forward": [], "backward": []}
        live, phase = np.zeros(kind.shape[1]), "forward"
        for op in operators:
            if op.phase != phase:
                phase, held, live = op.phase, dict(saved), self._saved.copy()
            if owner[op.index] == op.index and (phase == "forward" or not _is_gradient(op, last_use)):
                held[op.index] = max(_result_bytes(op, kernels), saved.get(op.index, 0.0))
                live = live + held[op.index] * kind[op.index]
            found[phase].append(live)
            for made_by in frees.get(op.index, ()):
                live = live - held.pop(made_by, 0.0) * kind[made_by]
        return {phase: np.array(rows).reshape(len(rows), kind.shape[1]) for phase, rows in found.items()}

    def on(
        self, division: Division, *, keeps_gathered: bool = False, loss_copies: float | None = None
    ) -> SegmentMemory:
        """Memory of one rank. ``keeps_gathered``: what sequence parallelism gathers for column products is kept whole. ``loss_copies``: see
        ``TensorTraits``."""
        shares = np.array([division.output_share(op) for op in self._one_of], dtype=float)
        shares = shares if len(shares) else np.zeros(len(self._saved))
        output = self._segment.output.bytes * division.hidden_share if self._segment.output else 0
        gathered = division.gathered_bytes if keeps_gathered else 0.0
        kept = float(self._saved @ shares)
        live = {phase: rows @ shares for phase, rows in self._live.items()}
        if loss_copies is not None and division.tensor > 1 and self._splits_loss:
            in_loss = kept + loss_copies * self._logits * division.row_share
            live = {phase: np.where(self._in_loss[phase], in_loss, rows) for phase, rows in live.items()}
        forward = float(live["forward"].max(initial=0.0))
        backward = float((live["backward"] + output).max(initial=0.0))
        in_chains = float(self._in_chains @ shares)
        policies = [
            Policy(round(float(keeps @ shares)), round(float(again @ shares) + gathered))
            for keeps, again in self._policies
        ]
        return SegmentMemory(
            saved=round(kept + self._input_bytes * division.hidden_share + gathered),
            saved_in_core=round(float(self._in_core @ shares)),
            saved_in_chains=round(in_chains + gathered),
            beside_products=policies[0],
            every_second_product=policies[1],
            masks=self._masks,
            forward_extra=round(max(0.0, forward - kept)),
            backward_extra=round(max(0.0, backward - kept)),
            freed=round(self._freed_bytes(shares)),
        )

    def _freed_bytes(self, shares: Floats) -> float:
        made, freed, kind = self._results.T
        made = made * shares[kind.astype(np.int64)]
        return float((made * freed * (made < made.max(initial=0.0))).max(initial=0.0))


def _result_bytes(op: Operator, kernels: Kernels) -> float:
    """Bytes that the operator's kernel writes; 0 for an operator without one."""
    made = kernels.moved_bytes.get(op.index) and (op.flops > 0 or op.index in kernels.launched)
    return float(sum(spec.bytes for spec in op.outputs)) if made else 0.0


def _given_masks(segment: Segment) -> int:
    """Bytes of the masks that a segment reads and does not make."""
    by_index = {op.index: op for op in segment.operators}
    found = set()
    for op in segment.phase("forward"):
        made = [spec for i in op.depends_on for spec in by_index[i].outputs]
        found |= {spec for spec in op.inputs if is_mask(spec) and spec not in made and not op.parameters}
    return sum(spec.bytes for spec in found)


def _policies(segment: Segment, *, one_graph: bool, attention_again: bool) -> list[frozenset[int]]:
    """The operators whose results are kept by ``beside_products`` and by ``every_second_product``."""
    results = kept_results(segment)
    policies = [results, results - second_products(segment, attention_too=attention_again)]
    return [asked_for(segment, kept) for kept in policies] if one_graph else policies


def _kind(op: Operator, split: TensorSplit) -> tuple[bool, ...]:
    """All facts of an operator that ``Division.output_share`` depends on."""
    in_parts = op.index in split.contracted, op.index in split.divided
    in_parts += op.index in split.masks, op.index in split.keys, op.index in split.rows
    return *in_parts, is_weight_gradient(op), op.flops == 0


def _is_gradient(op: Operator, last_use: dict[tuple[int, str], int]) -> bool:
    """Whether a backward operator makes the gradient of a parameter: nothing, or nothing but a view, reads it."""
    return is_weight_gradient(op) or last_use[op.index, "backward"] == op.index


def _share_kept(segment: Segment, owner: dict[int, int], index: int, how: Kept) -> float:
    """The share of a kept 16-bit tensor when weight gradients read it in 8 bits: 0.5, or 1.5 where there are other readers; 0 where it is
    made again."""
    readers = [
        op for op in segment.phase("backward") if any(owner[i] == index for i in op.depends_on) and op.bytes_written
    ]
    by_weights = [is_weight_gradient(op) for op in readers]
    if not any(by_weights):
        return 1.0
    if how == "made_again":
        return 0.0 if all(by_weights) and segment.operators[index].flops == 0 else 1.0
    return 0.5 if all(by_weights) else 1.5
