"""What the stages of a block's layouts cost, for all its rows at once: ``ahp.forecast.stage`` on arrays.

Dims: J = splits that are alike in the engine's traits, R = kinds of recompute, L = layers, S = stages. Every figure is
that of the forecast or below it: only where blocks of several kinds share a stage is the chain of gradient reductions
shortened to its first or last link.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ahp.forecast.communication import Network
from ahp.forecast.overlap import CONTENTION
from ahp.forecast.stage import (
    DataParallel,
    Recompute,
    Weights,
    cast_bytes,
    dropped_bytes,
    gradient_copy_bytes,
    recomputed,
    tensor_backward_s,
)
from ahp.forecast.units import Unit, Units

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class PassTimes:
    """Seconds of every stage: one micro-batch's passes, and what comes once per step; each broadcasts to [J, R, S]."""

    forward: Floats
    backward: Floats
    first_forward: Floats
    last_backward: Floats


class BlockStages:
    """The layers of a model, priced for one block's axes and micro-batch, cut into stages in any way."""

    def __init__(self, units: Units, recompute: Sequence[Recompute], data: DataParallel) -> None:
        """``data``: any of the block's, for what of a pass does not depend on how replicas share the weights."""
        self.units, self.recompute = units, recompute
        self._layers = np.array(units.layers, dtype=np.int64)
        self._overlap, self._any = data.overlap, data

    def _per_layer(self, figure: Callable[[Unit], float]) -> Floats:
        """[L]"""
        kinds = np.array([figure(unit) for unit in self.units.blocks], dtype=float)
        return kinds[self._layers] if len(kinds) else np.zeros(0)

    def _recomputed(self, figure: Callable[[Unit, Recompute], float]) -> Floats:
        """[R, L]"""
        return np.stack([self._per_layer(lambda u, kind=kind: figure(u, kind)) for kind in self.recompute])

    def _stages(self, layers: Floats, edges: Ints, of_end: Callable[[Unit], float] | None = None) -> Floats:
        """Sums over the stages, [..., S]: of ``layers`` [..., L], and of the embedding and the head where they lie."""
        sums = np.diff(_sums(layers)[..., edges], axis=-1)
        if of_end is not None:
            sums[..., 0] += of_end(self.units.embedding)
            sums[..., -1] += of_end(self.units.head)
        return sums

    @cached_property
    def _work_forward(self) -> Floats:
        """[L] Seconds between the arrival of one block's weights and the next's."""
        return self._per_layer(lambda u: u.times.forward_s + u.tensor_forward_s)

    @cached_property
    def _work_backward(self) -> Floats:
        """[R, L]"""

        def work_s(u: Unit, kind: Recompute) -> float:
            again_s = recomputed(u, kind).device_s + (u.tensor_forward_s if kind == "full" else 0.0)
            return u.times.backward_s + u.tensor_backward_s + again_s

        return self._recomputed(work_s)

    @cached_property
    def parameters(self) -> Floats:
        """[L]"""
        return self._per_layer(lambda u: u.parameters)

    @cached_property
    def experts(self) -> Floats:
        """[L]"""
        return self._per_layer(lambda u: u.experts)

    @cached_property
    def _kept(self) -> Floats:
        """[R, L]"""
        return self._recomputed(lambda u, kind: u.memory.saved - dropped_bytes(u, self.units, kind))

    @cached_property
    def _passes(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Of each layer: device seconds forward [L] and backward [R, L], and what the host launches in each."""

        def backward_s(u: Unit, kind: Recompute) -> float:
            full_s = _forward_s(u) - u.times.forward_s if kind == "full" else 0.0
            return self._backward_s(u) + recomputed(u, kind).device_s + full_s

        return (
            self._per_layer(_forward_s),
            self._recomputed(backward_s),
            self._per_layer(_forward_launches),
            self._recomputed(lambda u, kind: _backward_launches(u) + recomputed(u, kind).launches),
        )

    def _backward_s(self, u: Unit) -> float:
        return u.times.backward_s + tensor_backward_s(u, self._any) + u.context_backward_s + u.expert_s

    def least_s(self, kinds: Sequence[int]) -> tuple[float, float, float]:
        """Device seconds of the cheapest layer, forward and backward, with the best of ``kinds`` of recompute; of the head."""
        forward, backward, _, _ = self._passes
        head_s = _forward_s(self.units.head) + self._backward_s(self.units.head)
        if not len(forward):
            return 0.0, 0.0, head_s
        return float(forward.min()), float(backward[list(kinds)].min()), head_s

    def least_layer(self, kind: int) -> tuple[float, float, float]:
        """Parameters of the smallest layer, the fewest of experts, and the fewest bytes kept with one kind of recompute."""
        figures = self.parameters, self.experts, self._kept[kind]
        least = [float(figure.min()) if len(figure) else 0.0 for figure in figures]
        return least[0], least[1], least[2]

    @cached_property
    def _weight_gradient(self) -> Floats:
        return self._per_layer(lambda u: u.times.weight_gradient.device_s)

    def weight_gradient_s(self, edges: Ints) -> Floats:
        """[S] Of the backward pass, what makes weight gradients."""
        return self._stages(self._weight_gradient, edges, lambda u: u.times.weight_gradient.device_s)

    def outside(self, edges: Ints) -> Floats:
        """[S] Parameters outside the blocks: of the embedding and the head."""
        found = np.zeros(len(edges) - 1)
        found[0] += self.units.embedding.parameters
        found[-1] += self.units.head.parameters + (self.units.tied_parameters if len(found) > 1 else 0)
        return found

    def in_blocks(self, edges: Ints) -> tuple[Floats, Floats]:
        """[S] Parameters of the blocks, and of them those of experts."""
        return self._stages(self.parameters, edges), self._stages(self.experts, edges)

    def kept_bytes(self, edges: Ints) -> Floats:
        """[R, S] Activations of one micro-batch between its forward and its backward."""
        kept = self._stages(self._kept, edges, lambda u: u.memory.saved)
        kept[..., :-1] += self.units.hidden_bytes
        return kept

    def passes(self, data: Sequence[DataParallel], edges: Ints, network: Network, bytes_per_s: float) -> PassTimes:
        """The stages between ``edges`` (the first layer of each, and the number of layers) for splits with equal traits."""
        traits, outside = data[0].traits, self.outside(edges)
        forward_s, backward_s, launches, backward_launches = self._passes
        forward = self._stages(forward_s, edges, _forward_s)[None, None]
        backward = self._stages(backward_s, edges, self._backward_s)[None]
        first = last = np.zeros((1, 1, 1))
        gathers, reduces, replicas = self._collectives(data, outside, network)
        parameters = self._stages(self.parameters, edges)
        casts = np.array([cast_bytes(one) for one in data])[:, None, None] / bytes_per_s
        copies = np.array([gradient_copy_bytes(one) for one in data])[:, None, None] / bytes_per_s
        gather_overlap = self._overlap * traits.parameter_gather_overlap
        gathered = casts * (parameters + outside)
        if traits.forward_gathers != "never":
            waits = self._ahead(gathers, self._work_forward, edges, gather_overlap)[:, None]
            if traits.gathers_at_start:
                waits[..., 1:] = 0.0
            gathered = gathered + waits
        if traits.forward_gathers == "per_micro_batch":
            forward = forward + gathered
        else:
            first = first + gathered
        if traits.backward_gathers == "per_micro_batch":
            blocks = gathers[0], np.zeros_like(gathers[1])
            again = self._behind_neighbour(blocks, self._work_backward, edges, gather_overlap)
            backward = backward + again + casts * parameters
        backward = backward + copies * (parameters + outside)
        overlap = self._overlap * traits.gradient_overlap
        if traits.reduces_every_micro_batch:
            backward = backward + self._reduced(reduces, edges, overlap)
            last = last + self._reduced(replicas, edges, overlap)
        else:
            both = reduces[0] + replicas[0], reduces[1] + replicas[1]
            last = last + self._reduced(both, edges, overlap)
        if traits.compute_weight_bytes == 0 and traits.reduce_copies:
            last = last + (parameters + outside) * 2 * traits.reduce_bytes / bytes_per_s
        forward = self._with_host(forward, self._stages(launches, edges, _forward_launches), edges, data[0])
        of_backward = self._stages(backward_launches, edges, _backward_launches)
        return PassTimes(forward, self._with_host(backward, of_backward, edges, data[0]), first, last)

    def _with_host(self, passes_s: Floats, launches: Floats, edges: Ints, data: DataParallel) -> Floats:
        """A pass takes as long as the device, or as the host that launches it; on a CPU the engine's own is added."""
        own = (np.diff(edges) + 1) * data.traits.host_operators_per_unit / 2
        if data.host_is_device:
            return passes_s + own * data.operator_s
        return np.maximum(passes_s, (launches * data.traits.host_launches_per_operator + own) * data.operator_s)

    def _collectives(
        self, data: Sequence[DataParallel], outside: Floats, network: Network
    ) -> tuple[tuple[Floats, Floats], ...]:
        """Seconds of gathering, reducing and summing over replicas: of each layer [J, L], and outside the blocks [J, S]."""
        weights = [Weights.of(unit) for unit in self.units.blocks]
        ends = {int(count): Weights(int(count)) for count in outside}
        found = []
        for of in (DataParallel.gather_s, DataParallel.reduce_s, DataParallel.replicas_s):
            kinds = np.array([[of(one, weight, network) for weight in weights] for one in data], dtype=float)
            layers = kinds[:, self._layers] if len(weights) else np.zeros((len(data), 0))
            by_count = {count: [of(one, weight, network) for one in data] for count, weight in ends.items()}
            found.append((layers, np.array([by_count[int(count)] for count in outside]).T))
        return tuple(found)

    def _ahead(self, gathers: tuple[Floats, Floats], work: Floats, edges: Ints, overlap: float) -> Floats:
        """[J, S] ``exposed_ahead_s`` of the forward pass: what is outside the blocks and the first block hide behind nothing."""
        layers, outside = gathers
        before = np.concatenate([[0.0], work[:-1]]) if len(work) else work
        hidden = np.minimum(overlap * layers, before)
        shown = _sums(layers - (1.0 - CONTENTION) * hidden)
        start, end = edges[:-1], edges[1:]
        after_first = np.minimum(start + 1, end)
        return outside + _where_blocks(layers, start, start < end) + shown[..., end] - shown[..., after_first]

    def _behind_neighbour(self, gathers: tuple[Floats, Floats], work: Floats, edges: Ints, overlap: float) -> Floats:
        """[J, R, S] The same of the backward pass, from the last block of the stage to its first."""
        layers = gathers[0][:, None]
        after = np.concatenate([work[:, 1:], np.zeros((len(work), 1))], axis=-1) if work.shape[-1] else work
        hidden = np.minimum(overlap * layers, after[None])
        shown = _sums(layers - (1.0 - CONTENTION) * hidden)
        start, end = edges[:-1], edges[1:]
        before_last = np.maximum(end - 1, start)
        return _where_blocks(layers, end - 1, start < end) + shown[..., before_last] - shown[..., start]

    def _reduced(self, reduces: tuple[Floats, Floats], edges: Ints, overlap: float) -> Floats:
        """[J, R, S] ``exposed_behind_s``, as if the chain were held up by its first or by its last block alone."""
        layers, outside = reduces[0][:, None], reduces[1][:, None]
        start, end = edges[:-1], edges[1:]
        some = start < end
        blocks = np.diff(_sums(layers)[..., edges], axis=-1)
        clock = np.diff(_sums(self._work_backward)[..., edges], axis=-1)
        first_work = _where_blocks(self._work_backward, end - 1, some)
        tail = np.maximum(first_work + blocks - clock, _where_blocks(layers, start, some)) + outside
        total = blocks + outside
        return overlap * (tail + CONTENTION * (total - tail)) + (1.0 - overlap) * total


def _forward_s(u: Unit) -> float:
    return u.times.forward_s + u.tensor_forward_s + u.context_forward_s + u.expert_s


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
