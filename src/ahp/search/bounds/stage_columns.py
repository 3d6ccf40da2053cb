"""What the stages of a block's layouts cost, for all its rows at once: ``ahp.forecast.stage`` on arrays.

Dims: J = splits that are alike in the engine's traits, R = kinds of recompute, K = kinds of layers, L = layers,
S = stages. Every figure is that of the forecast or below it: only where blocks of several kinds share a stage is the
chain of gradient reductions shortened to its first or last link.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ahp.engines.engine import Traits
from ahp.forecast.data_parallel import CommUnit, DataParallel
from ahp.forecast.overlap import hidden_columns_s, shown_behind_s, shown_columns_s
from ahp.forecast.sharing import outside_blocks
from ahp.forecast.stage import (
    Recompute,
    recomputed,
    segment_again_s,
    segment_backward_s,
    segment_forward_s,
    tensor_backward_s,
    window_backward_s,
    window_forward_s,
)
from ahp.forecast.stage_memory import (
    StageTable,
    StageWeights,
    kept_beside_layers,
    kept_bytes,
    kept_of_kinds,
    stage_weights,
    temporary_bytes,
)
from ahp.forecast.states import last_copy_bytes
from ahp.forecast.unit import Unit
from ahp.forecast.units import Units
from ahp.search.bounds.splits import Splits

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class PassTimes:
    """Seconds of every stage: one micro-batch's passes, and what comes once per step; each broadcasts to [J, R, S]."""

    forward: Floats
    backward: Floats
    input_gradient: Floats
    weight_gradient: Floats
    """The halves of the backward, where a schedule splits it."""
    first_forward: Floats
    last_backward: Floats
    last_weight_gradient: Floats


@dataclass(frozen=True)
class Collectives:
    """Seconds of one kind of collective for weights or gradients."""

    kinds: Floats
    """[J, K] Of each kind of layer."""
    before: Floats
    """[J, S] Of what is in no block: what is gathered before the blocks and sent after them."""
    after: Floats
    """[J, S] What is gathered after the blocks and sent before them."""

    def __add__(self, other: Collectives) -> Collectives:
        return Collectives(self.kinds + other.kinds, self.before + other.before, self.after + other.after)


class BlockStages:
    """The layers of a model, priced for the axes and the micro-batch of some blocks, cut into stages in any way."""

    def __init__(
        self, units: Units, recompute: Sequence[Recompute], data: DataParallel, *, some_layers: bool = False
    ) -> None:
        """``data``: of any split of these blocks; ``some_layers``: not all are recomputed: they keep as much as if all were, and
        take as long as if none was."""
        self.units, self.recompute, self._any, self._some_layers = units, recompute, data, some_layers
        none: Recompute = "none"
        self._timed: list[Recompute] = [none if some_layers else kind for kind in recompute]
        self._layers = np.array(units.layers, dtype=np.int64)

    def _kinds(self, figure: Callable[[Unit], float]) -> Floats:
        """[K]"""
        return np.array([figure(unit) for unit in self.units.blocks], dtype=float)

    def _kinds_recomputed(self, figure: Callable[[Unit, Recompute], float], recompute: Sequence[Recompute]) -> Floats:
        """[R, K]"""
        found = [[figure(unit, kind) for unit in self.units.blocks] for kind in recompute]
        return np.array(found, dtype=float).reshape(len(self.recompute), len(self.units.blocks))

    def _stages(self, sums: Floats, stages: StageTable, of_end: Callable[[Unit], float] | None = None) -> Floats:
        """Totals of the stages, [..., S], from running sums over the layers; with the embedding and the head where they lie."""
        total = sums[..., stages.end] - sums[..., stages.start]
        if of_end is not None:
            total = total + of_end(self.units.embedding) * stages.first + of_end(self.units.head) * stages.last
        return total

    def _over_layers(self, kinds: Floats) -> Floats:
        """Running sums over the layers, [..., L + 1], of a figure of each kind [..., K]."""
        return _sums(kinds[..., self._layers])

    @cached_property
    def work_forward(self) -> Floats:
        """[K] Seconds of each kind of layer that gathers may hide behind."""
        return self._kinds(window_forward_s)

    @cached_property
    def work_backward(self) -> Floats:
        """[R, K]"""
        return self._kinds_recomputed(lambda u, kind: window_backward_s(u, kind, self._any), self._timed)

    @cached_property
    def parameters(self) -> Floats:
        """[K]"""
        return self._kinds(lambda u: u.parameters)

    @cached_property
    def experts(self) -> Floats:
        """[K] Of the parameters, those of experts."""
        return self._kinds(lambda u: u.experts)

    @cached_property
    def weights(self) -> tuple[CommUnit, ...]:
        """Of each kind of layer, as they are sent."""
        return tuple(CommUnit.of(unit) for unit in self.units.blocks)

    @cached_property
    def kept(self) -> Floats:
        """[R, K] Bytes of activations that a layer keeps of one micro-batch, at least."""
        kept = np.array([kept_of_kinds(self.units, kind) for kind in self.recompute], dtype=float)
        return np.minimum(kept, kept_of_kinds(self.units, "none")) if self._some_layers else kept

    @cached_property
    def least_kept(self) -> Floats:
        """[R] Of the layer that keeps the least."""
        return self.kept.min(axis=-1)

    @cached_property
    def least_parameters(self) -> float:
        """Of the layer that has the fewest; so of those of experts, and of the others."""
        return float(self.parameters.min())

    @cached_property
    def least_experts(self) -> float:
        return float(self.experts.min())

    @cached_property
    def least_dense(self) -> float:
        return float((self.parameters - self.experts).min())

    @property
    def overlap(self) -> float:
        """1 where collectives can run beside computation, else 0."""
        return self._any.overlap

    @property
    def operator_s(self) -> float:
        return self._any.operator_s

    @property
    def host_is_device(self) -> bool:
        return self._any.host_is_device

    @property
    def forward_of_kinds(self) -> Floats:
        """[K] Device seconds of a forward pass."""
        return self.passes_of_kinds[0]

    @property
    def backward_of_kinds(self) -> Floats:
        """[R, K] The same of a backward pass."""
        return self.passes_of_kinds[1]

    @cached_property
    def passes_of_kinds(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Of each kind: device seconds forward [K] and backward [R, K], and what the host launches in each."""

        def whole_s(u: Unit, kind: Recompute) -> float:
            return self._backward_s(u) + segment_again_s(u, kind, self._any)

        return (
            self._kinds(segment_forward_s),
            self._kinds_recomputed(whole_s, self._timed),
            self._kinds(_forward_launches),
            self._kinds_recomputed(lambda u, kind: _backward_launches(u) + recomputed(u, kind).launches, self._timed),
        )

    @cached_property
    def _pass_sums(self) -> tuple[Floats, Floats, Floats, Floats]:
        forward, backward, launches, backward_launches = map(self._over_layers, self.passes_of_kinds)
        return forward, backward, launches, backward_launches

    def _backward_s(self, u: Unit) -> float:
        return segment_backward_s(u, self._any.tensor_overlap)

    def _hidden_s(self, u: Unit) -> float:
        """Of the tensor-parallel collectives of a backward pass, what weight gradients hide."""
        return u.tensor_backward_s - tensor_backward_s(u, self._any.tensor_overlap)

    @cached_property
    def again_of_kinds(self) -> Floats:
        """[R, K] Device seconds of a backward pass, those that compute and send again what was not kept."""
        return self.backward_of_kinds - self._kinds(self._backward_s)

    @cached_property
    def least_again_s(self) -> Floats:
        """[R] Of the layer that has the least of it."""
        return self.again_of_kinds.min(axis=-1)

    @cached_property
    def head_s(self) -> float:
        """Device seconds of the head in both passes of a micro-batch."""
        return segment_forward_s(self.units.head) + self._backward_s(self.units.head)

    @cached_property
    def ends_s(self) -> float:
        """Device seconds of the embedding and the head in both passes of a micro-batch."""
        embedding = self.units.embedding
        return segment_forward_s(embedding) + self._backward_s(embedding) + self.head_s

    def _weight_gradients(self, stages: StageTable) -> tuple[Floats, Floats]:
        """[S] Of the backward pass, what makes weight gradients: device seconds, and what the host launches."""
        seconds_s, launches = (
            self._stages(self._over_layers(self._kinds(figure)), stages, figure)
            for figure in (lambda u: u.times.weight_gradient.device_s, lambda u: u.times.weight_gradient.launches)
        )
        return seconds_s, launches

    def _ends(self, stages: StageTable, traits: Traits) -> tuple[list[int], list[int]]:
        """Parameters of each stage that are gathered before its blocks, and after them."""
        kinds = [(bool(first), bool(last)) for first, last in zip(stages.first, stages.last, strict=True)]
        known = {kind: outside_blocks(self.units, traits, first=kind[0], last=kind[1]) for kind in set(kinds)}
        return [known[kind][0] for kind in kinds], [known[kind][1] for kind in kinds]

    def weights_of(self, stages: StageTable) -> StageWeights:
        """The parameters of each stage."""
        return stage_weights(self.units, stages)

    def kept_bytes(self, stages: StageTable) -> Floats:
        """[R, S] Activations of one micro-batch between its forward and its backward."""
        if self._some_layers:
            return self.kept @ stages.counts.T + kept_beside_layers(self.units, stages)
        return np.array([kept_bytes(self.units, kind, stages) for kind in self.recompute], dtype=float)

    def temporary_bytes(self, stages: StageTable) -> Floats:
        """[R, S] Bytes at the peak of one backward pass beyond what is kept."""
        return np.array([temporary_bytes(self.units, kind, stages) for kind in self._timed], dtype=float)

    def passes(self, splits: Splits, which: list[int], m: int, stages: StageTable, bytes_per_s: float) -> PassTimes:
        """The stages for some splits, those with equal traits, and ``m`` micro-batches."""
        traits = splits.traits[which[0]]
        weights = self.weights_of(stages)
        parameters = weights.total
        forward_s, backward_s, launches, backward_launches = self._pass_sums
        forward = self._stages(forward_s, stages, segment_forward_s)[None, None]
        backward = self._stages(backward_s, stages, self._backward_s)[None]
        first = last = np.zeros((1, 1, 1))
        gathers, reduces, replicas = self._collectives(splits, which, stages)
        # [J, 1, 1] Seconds for each parameter of a micro-batch: the compute copy made, and gradients copied.
        casts, copies = (part[which, None] / bytes_per_s for part in splits.columns.moved_bytes(m))
        gather_overlap = self._any.overlap * traits.parameter_gather_overlap
        gathered = casts * parameters
        if traits.forward_gathers != "never":
            waits = self._ahead(gathers, stages, gather_overlap)[:, None]
            if traits.gathers_at_start:
                waits = waits * stages.first
            gathered = gathered + waits
        if traits.forward_gathers == "per_micro_batch":
            forward = forward + gathered
        else:
            first = first + gathered
        if again_gathered := traits.backward_gathers == "per_micro_batch":
            again = self._behind_neighbour(gathers.kinds, stages, gather_overlap)
            backward = backward + again + casts * weights.in_blocks
        backward = backward + copies * parameters
        windows = self._windows_left(gathers.kinds, stages, gather_overlap if again_gathered else 0.0)
        behind = self._behind(traits, windows, stages, in_pipeline=splits.pipeline_ranks > 1)
        last = last + behind(reduces + replicas)
        if traits.reduces_every_micro_batch:
            each = behind(reduces)
            backward, last = backward + each, last - each
        last = last + parameters * last_copy_bytes(traits) / bytes_per_s
        own = (stages.layers + 1) * traits.host_operators_per_unit / 2
        of_backward = self._stages(backward_launches, stages, _backward_launches)
        weight_s, of_weights = self._weight_gradients(stages)
        of_inputs_s = (
            backward - weight_s + self._stages(self._over_layers(self._kinds(self._hidden_s)), stages, self._hidden_s)
        )
        of_forward = self._stages(launches, stages, _forward_launches)
        found = PassTimes(
            forward=self._with_host(forward, of_forward, own, traits),
            backward=self._with_host(backward, of_backward, own, traits),
            input_gradient=self._with_host(of_inputs_s, of_backward - of_weights, own, traits),
            weight_gradient=self._with_host(weight_s, of_weights, 0.0, traits)[None, None],
            first_forward=first,
            last_backward=last,
            last_weight_gradient=last,
        )
        if self.host_is_device:
            return found
        halves = found.input_gradient + found.weight_gradient
        return replace(
            found,
            first_forward=_beyond(first, forward, found.forward),
            last_backward=_beyond(last, backward, found.backward),
            last_weight_gradient=_beyond(last, of_inputs_s + weight_s, halves),
        )

    def _with_host(self, passes_s: Floats, launches: Floats, own: Floats | float, traits: Traits) -> Floats:
        """A pass takes as long as the device, or as the host that launches it; on a CPU the engine's own is added."""
        data = self._any
        if data.host_is_device:
            return passes_s + own * data.operator_s
        return np.maximum(passes_s, (launches * traits.host_launches_per_operator + own) * data.operator_s)

    def _collectives(self, splits: Splits, which: list[int], stages: StageTable) -> tuple[Collectives, ...]:
        """Of gathering weights, reducing gradients, and summing them over replicas."""
        of_kinds = splits.collectives_of_kinds(self.weights).at(which)
        ends = [
            [splits.collectives(CommUnit(count)).at(which) for count in counts]
            for counts in self._ends(stages, splits.traits[which[0]])
        ]
        return tuple(
            Collectives(getattr(of_kinds, kind), *(np.array([getattr(one, kind) for one in end]).T for end in ends))
            for kind in ("gather", "reduce", "replicas")
        )

    def _ahead(self, gathers: Collectives, stages: StageTable, overlap: float) -> Floats:
        """[J, S] ``exposed_ahead_s`` of the forward pass: what comes before the blocks and the first block hide behind nothing."""
        layers = gathers.kinds[..., self._layers]
        work = self.work_forward[self._layers]
        before = np.concatenate([[0.0], work[:-1]]) if len(work) else work
        shown = _sums(shown_columns_s(layers, before, overlap))
        start, end = stages.start, stages.end
        after_first = np.minimum(start + 1, end)
        after = shown_columns_s(gathers.after, _where_blocks(work[None], end - 1, start < end), overlap)
        first = _where_blocks(layers, start, start < end)
        return gathers.before + first + shown[..., end] - shown[..., after_first] + after

    def _behind_neighbour(self, kinds: Floats, stages: StageTable, overlap: float) -> Floats:
        """[J, R, S] The same of the backward pass, from the last block of the stage to its first."""
        layers = kinds[..., self._layers][:, None]
        work = self.work_backward[..., self._layers]
        after = np.concatenate([work[:, 1:], np.zeros((len(work), 1))], axis=-1) if work.shape[-1] else work
        shown = _sums(shown_columns_s(layers, after[None], overlap))
        start, end = stages.start, stages.end
        before_last = np.maximum(end - 1, start)
        return _where_blocks(layers, end - 1, start < end) + shown[..., before_last] - shown[..., start]

    @cached_property
    def _work_backward_sums(self) -> Floats:
        return self._over_layers(self.work_backward)

    def _windows_left(self, kinds: Floats, stages: StageTable, overlap: float) -> tuple[Floats, Floats]:
        """[J, R, S] Of the windows of a backward pass, what gathers leave to reductions: of the last block and of all."""
        start, end = stages.start, stages.end
        some = start < end
        work = self.work_backward[..., self._layers]
        first, clock = _where_blocks(work, end - 1, some), self._stages(self._work_backward_sums, stages)
        if not overlap or not work.shape[-1]:
            return first[None], clock[None]
        # A block hides the gather of the one below it, but for the lowest of its stage.
        gathers = kinds[..., self._layers][:, None]
        below = np.concatenate([np.zeros_like(gathers[..., :1]), gathers[..., :-1]], axis=-1)
        hidden = hidden_columns_s(below, work[None], overlap)
        sums, after_lowest = _sums(hidden), np.minimum(start + 1, end)
        of_first = np.where(end - start > 1, _where_blocks(hidden, end - 1, some), 0.0)
        return first - of_first, clock - (sums[..., end] - sums[..., after_lowest])

    def _behind(
        self, traits: Traits, windows: tuple[Floats, Floats], stages: StageTable, *, in_pipeline: bool
    ) -> Callable[[Collectives], Floats]:
        """[J, R, S] ``exposed_behind_s`` of collectives, as if the chain were held up by its first or by its last block alone.

        What the last pass of a stage does not hide may hide behind those of other stages of the rank, but for the first stage.
        """
        overlap = self._any.overlap * traits.gradient_overlap
        start, end, (first_work, clock) = stages.start, stages.end, windows
        of_kinds = np.array([weights.pieces(traits.reduce_bucket_elements) for weights in self.weights], dtype=float)
        some, pieces = start < end, of_kinds[self._layers]
        first_work = first_work / np.maximum(_where_blocks(pieces, end - 1, some), 1.0)

        def exposed_s(sent: Collectives) -> Floats:
            layers = sent.kinds[..., self._layers][:, None]
            before, after = sent.before[:, None], sent.after[:, None]
            blocks = self._stages(_sums(layers), stages)
            tail = np.maximum(after, first_work) + blocks - clock
            tail = np.maximum(tail, _where_blocks(layers / pieces, start, some)) + before
            total = blocks + before + after
            tail = np.maximum(tail, 0.0) * (stages.first if in_pipeline else 1.0)
            return shown_behind_s(total, tail, overlap)

        return exposed_s


def _beyond(once_s: Floats, device_s: Floats, pass_s: Floats) -> Floats:
    """What comes once, as far as it does not run while the device waits for the host in its pass."""
    return np.maximum(once_s - (pass_s - device_s), 0.0)


def _forward_launches(u: Unit) -> float:
    return u.times.forward.launches + u.tensor_launches


def _backward_launches(u: Unit) -> float:
    return u.times.input_gradient.launches + u.times.weight_gradient.launches + u.tensor_launches


def _sums(layers: Floats) -> Floats:
    """[..., L + 1] Running sums from 0 on."""
    return np.concatenate([np.zeros((*layers.shape[:-1], 1)), np.cumsum(layers, axis=-1)], axis=-1)


def _where_blocks(layers: Floats, at: Ints, some: NDArray[np.bool_]) -> Floats:
    """The figure of layer ``at`` of each stage; 0 where the stage has no layer."""
    if layers.shape[-1] == 0:
        return np.zeros((*layers.shape[:-1], len(at)))
    return np.where(some, layers[..., np.clip(at, 0, layers.shape[-1] - 1)], 0.0)
