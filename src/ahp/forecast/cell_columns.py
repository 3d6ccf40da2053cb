"""Lower bounds on the time and memory of the cells of each group of a mixed cluster, for many layouts at once, before any stage is priced.

Dims: N = layouts, G = groups, P = places of a stage (first, between, last, whole), K = kinds of layers. Layers are counted by their
work: each counts 1 where all are of one kind, else in proportion to its time, so that all together still sum to their number. Seconds
are the device's for one micro-batch, without gathering weights, or the host's where it takes longer to launch that. No stage takes or
holds less.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple, TypeVar

import numpy as np

from ahp.arrays import Floats, Ints
from ahp.cached_method import cached_method
from ahp.cluster.cells import cell_widths, cells_of
from ahp.cluster.model import NodeGroup
from ahp.forecast import memory
from ahp.forecast.assembly import num_groups, recompute_of
from ahp.forecast.data_parallel import DataParallel
from ahp.forecast.mixed import MixedPricer
from ahp.forecast.segment import SegmentFigures
from ahp.forecast.stage_memory import kept_beside_layers, kept_of_kinds, needs_of_kinds, peak_bytes, stage_weights
from ahp.forecast.stage_table import StageTable
from ahp.forecast.states import (
    Figures,
    Shards,
    TraitColumns,
    Weights,
    cast_bytes,
    gradient_copy_bytes,
    layer_state_bytes,
    state_bytes,
    trait_columns,
    trait_figures,
    unit_bytes,
)
from ahp.forecast.units import Units
from ahp.plan import Parallelism

ENDS = ((True, False), (False, False), (False, True), (True, True))
"""(is the first stage, is the last stage) for each place: first, between, last, whole."""

FIRST, BETWEEN, LAST, WHOLE = range(4)


ROUNDED = 3.0
"""Bytes by which parts that are rounded one by one can differ from their sum."""

COUNTED = (1, 2, 8, 64)
"""Numbers of micro-batches of a replica for which copies of gradients are counted."""


Columns = TypeVar("Columns", "Work", "Launched", "Held", "States")


class Work(NamedTuple):
    """Seconds of a micro-batch, [N, G] each."""

    layer_s: Floats
    """Both passes of a layer, with as little recompute as the layout allows."""
    head_s: Floats
    """Both passes of the head."""
    forward_share: Floats
    """The largest share of the forward pass in both passes, of a layer or of the head."""
    weight_share: Floats
    """The largest share of weight gradients in both passes."""
    again_s_per_byte: Floats
    """Least seconds of recompute for each byte that it saves; 0 where there is nothing to choose."""


class Launched(NamedTuple):
    """The same of a layer where the host takes longer for a pass, [N, G] each: then it hides the device's copies, its recompute, and its
    work besides layers."""

    layer_s: Floats
    forward_share: Floats
    weight_share: Floats

    def where_longer(self, work: Work, copied_s: Floats, num_layers: int) -> tuple[Work, Floats]:
        """The longer of device and host, and the seconds of copies [C, N, G, P] that come on top: 0 where the host takes longer."""
        longer = self.layer_s > work.layer_s + copied_s[0].min(axis=-1) + work.head_s / max(num_layers, 1)
        host = Work(self.layer_s, np.zeros(1), self.forward_share, self.weight_share, np.zeros(1))
        found = Work(*(np.where(longer, *both) for both in zip(host, work, strict=True)))
        return found, np.where(longer[..., None], 0.0, copied_s)


class Held(NamedTuple):
    """Bytes of activations, [N, G] each, or [N, G, P]."""

    kept: Floats
    """Of each layer and micro-batch in flight, with as little recompute as the layout allows."""
    dropped: Floats
    """The most of ``kept`` that recompute saves."""
    outside: Floats
    """[P] Of each micro-batch in flight, besides its layers."""
    received: Floats
    """[P] Received for each micro-batch, in flight or not."""
    once: Floats
    """[P] Received for one micro-batch, however many there are."""
    in_layers: Floats
    """[P] At the peak of the layers' backward passes beyond what is kept, without recompute where there is a choice; below 0 where the
    head has freed more."""
    in_again: Floats
    """[P] The same where a layer is recomputed."""
    at_head: Floats
    """[P] The same at the peak of the head."""


class States(NamedTuple):
    """Bytes of states, the same on all groups."""

    layer: Floats
    """[N, P] Of each layer; ``layer_gradients``: the part of it that is gradients."""
    layer_gradients: Floats
    beside: Floats
    """[N, P] The same besides the layers."""
    gradients_beside: Floats
    in_layers: Floats
    """[N, P] Weights and gradients of whole units at the peak of the layers; ``at_head``: at the peak of the head."""
    at_head: Floats
    grown: Floats
    """[N, P] Gradients of each layer that the allocator keeps besides the activations they replace; ``grown_beside``: besides the layers."""
    grown_beside: Floats


@dataclass(frozen=True)
class CellColumns:
    """The bounds for N layouts."""

    num_layers: int
    alike: bool
    """Whether all layers are of one kind, so that stages have whole numbers of layers."""
    work: Work
    held: Held
    one: States
    """States with one micro-batch in all; ``several``: with more than one."""
    several: States
    room: Floats
    """[N, G, P] Bytes that a device has for tensors."""
    copied_s: Floats
    """[C, N, G, P] Least seconds per micro-batch to copy a layer's gradients and cast its weights, for each of the C numbers in
    ``COUNTED``; with more micro-batches each takes longer."""
    copied_most_s: Floats
    """[C, N, G] The most of it at any place."""
    share: Floats
    """[N, K] The work of a layer of each kind."""

    @classmethod
    def of(cls, pricer: MixedPricer, layouts: Sequence[Parallelism], *, may_choose: Sequence[bool]) -> CellColumns:
        """``layouts``: degrees of pipelines, without placements; ``may_choose``: for each, whether stages can recompute fewer than all of
        their layers. What layouts share is computed once."""
        return _Maker(pricer).columns(list(zip(layouts, may_choose, strict=True)))

    def copied_of(self, micro_batches: int) -> Floats:
        """[N, G, P] The row of ``copied_s`` that bounds ``micro_batches`` or more."""
        return self.copied_s[_row_of(micro_batches)]

    def copied_most_of(self, micro_batches: int) -> Floats:
        """[N, G] The same row of ``copied_most_s``."""
        return self.copied_most_s[_row_of(micro_batches)]

    def least_of(self, family: Ints) -> CellColumns:
        """A row for each family of layouts, which needs no more time or memory than any layout of the family. ``family``: [N] from 0, all used."""
        order, firsts = np.argsort(family, kind="stable"), np.searchsorted(np.sort(family), np.arange(family.max() + 1))

        def of_each(field: Floats, dim: int = 0, *, most: bool = False) -> Floats:
            of = np.maximum if most else np.minimum
            return of.reduceat(np.take(field, order, axis=dim), firsts, axis=dim)

        def of_all(fields: Columns) -> Columns:
            return type(fields)(*(of_each(of, most=key.endswith("_share")) for key, of in fields._asdict().items()))

        def freed(whole: Floats, part: Floats) -> Floats:
            """The part of the least whole that leaves the least."""
            return of_each(whole) - of_each(whole - part)

        def states(of: States) -> States:
            layer, beside = freed(of.layer, of.layer_gradients), freed(of.beside, of.gradients_beside)
            return of_all(of)._replace(layer_gradients=layer, gradients_beside=beside)

        held = of_all(self.held)._replace(dropped=freed(self.held.kept, self.held.dropped))
        return CellColumns(
            self.num_layers, self.alike, of_all(self.work), held, states(self.one), states(self.several),
            of_each(self.room, most=True), of_each(self.copied_s, 1), of_each(self.copied_most_s, 1, most=True),
            of_each(self.share),
        )  # fmt: skip

    @cached_property
    def same(self) -> Ints:
        """[2, N] Equal numbers for layouts whose columns are equal: those of pipeline stages, and those of the whole model on a cell."""
        return np.stack([self._numbers(slice(0, WHOLE)), self._numbers(slice(WHOLE, None))])

    def _numbers(self, places: slice) -> Ints:
        """[N] Equal numbers for layouts whose columns at ``places`` are equal."""
        by_place = *self.held[2:], *self.one, *self.several, self.room, *self.copied_s
        each = *self.work, *self.held[:2], self.share, *(of[..., places] for of in by_place)
        rows = np.concatenate([np.reshape(of, (len(self.share), -1)) for of in each], axis=1)
        kinds: dict[bytes, int] = {}
        return np.array([kinds.setdefault(row.tobytes(), len(kinds)) for row in np.ascontiguousarray(rows)])


def _row_of(micro_batches: int) -> int:
    return int(np.searchsorted(COUNTED, micro_batches, side="right")) - 1


Row = TypeVar("Row")
Layout = tuple[Parallelism, bool]


class _Maker:
    """Computes what layouts share: the work of layers does not depend on how states are sharded, and states depend neither on the
    micro-batch nor on recompute."""

    def __init__(self, pricer: MixedPricer) -> None:
        self._pricer, self._groups = pricer, pricer.groups
        first = next(iter(pricer.groups.values()))
        self._ends = first.table([(0, 0, *ends) for ends in ENDS])
        """Stages without layers, one for each place."""
        self._counts = np.array(first.graph.layers_of_kinds, dtype=np.int64)
        """[K] Layers of each kind."""
        self._segments: dict[tuple[object, ...], list[_Segments]] = {}
        self._speeds = np.array([group.unit_pricer.rates.bytes_per_s for group in pricer.groups.values()])
        """[G] Bytes per second that a device moves."""

    def columns(self, layouts: Sequence[Layout]) -> CellColumns:
        layers, of_layers = _distinct(layouts, _by_layers, self._layers)
        by_group, shares = zip(*layers, strict=True)
        piped, of_states = _distinct(layouts, _by_states, lambda layout: layout[0])
        alone = [layout.model_copy(update={"pipeline_parallel_degree": 1}) for layout in piped]
        share = np.array(shares)[of_layers]
        work, host, held = (_stacked(each, of_layers) for each in zip(*by_group, strict=True))
        devices = [group.nodes.device for group in self._groups.values()]
        by_stream = min(float(memory.Outside.of(device, 0).by_stream) for device in devices)
        sharing = [_Sharing(*self._sharing(some), self._ends, by_stream) for some in (piped, alone)]
        room, copied, one, several = (
            # A cell that holds the whole model is in no pipeline.
            np.concatenate([of_piped[..., :WHOLE], of_whole[..., WHOLE:]], axis=-1)
            for of_piped, of_whole in (
                [self._rooms(some) for some in (piped, alone)],
                [of.copied() for of in sharing],
                *([of.states(micro_batches) for of in sharing] for micro_batches in (1, 2)),
            )
        )
        copied_s = (copied[:, of_states] / share[..., None]).min(axis=2)[:, :, None] / self._speeds[:, None]
        num_layers = int(self._counts.sum())
        work, copied_s = host.where_longer(work, copied_s, num_layers)
        return CellColumns(
            num_layers=num_layers,
            alike=len(self._counts) == 1,
            work=work,
            held=held,
            one=_by_work(one[:, of_states], share),
            several=_by_work(several[:, of_states], share),
            room=room[of_states],
            copied_s=copied_s,
            copied_most_s=copied_s.max(axis=3),
            share=share,
        )

    def _layers(self, layout: Layout) -> tuple[tuple[list[Work], list[Launched], list[Held]], Floats]:
        """[G] Seconds and bytes on each group; and [K] the work of a layer of each kind."""
        parallelism, may_choose = layout
        key = _by_layers(layout)[:-2]
        if key not in self._segments:
            self._segments[key] = self._on_groups(parallelism)
        segments = self._segments[key]
        again = [of.again(parallelism.activation_checkpoint) for of in segments]
        share = np.ones(len(self._counts))
        if len(share) > 1:
            both = np.array([of.both_s + (not may_choose) * more[0] for of, more in zip(segments, again, strict=True)])
            share = (both / (both @ self._counts)[:, None]).mean(axis=0) * self._counts.sum()
        rows = [of.row(more, share, may_choose=may_choose) for of, more in zip(segments, again, strict=True)]
        work, host, held = (list(each) for each in zip(*rows, strict=True))
        return (work, host, held), share

    def _on_groups(self, parallelism: Parallelism) -> list[_Segments]:
        traits, found = self._pricer.traits(parallelism), dict[str, _Segments]()
        names = that_have(self._pricer.cluster.groups, cell_widths(parallelism)[0])
        for name in dict.fromkeys(names):
            pricer = self._groups[name]
            units, data = pricer.units(parallelism), pricer.data_parallel(parallelism, traits)
            found[name] = _Segments(units, data, self._ends, self._counts)
        return [found[name] for name in names]

    def _sharing(self, layouts: Sequence[Parallelism]) -> tuple[TraitColumns, Shards, list[Units]]:
        """For each layout, the engine's traits, the ranks that divide its states, and its units on any group."""
        groups, units = self._pricer.cluster.groups, []
        for layout in layouts:
            units.append(self._groups[that_have(groups, cell_widths(layout)[0])[0]].units(layout))
        traits = [self._pricer.traits(layout) for layout in layouts]
        shards = [Shards.of(layout, of.experts.folded) for layout, of in zip(layouts, traits, strict=True)]
        return trait_columns(trait_figures(traits)), Shards(*np.array(shards, dtype=float).T[..., None]), units

    def _rooms(self, layouts: Sequence[Parallelism]) -> Floats:
        """[n, G, P] Bytes that a device of each group has for tensors, besides its communicators."""
        counts = np.array([num_groups(layout, self._pricer.traits(layout).experts.folded) for layout in layouts])[
            :, None
        ]
        rooms = []
        for device in (group.nodes.device for group in self._groups.values()):
            most = memory.most_that_fits(device.memory_bytes)
            rooms.append(memory.most_allocated(most, memory.Outside.of(device, counts)))
        return np.stack(rooms, axis=1) * np.ones(len(ENDS))


class _Sharing:
    """How n layouts shard states. K = kinds of layers."""

    def __init__(
        self, traits: TraitColumns, shards: Shards, units: Sequence[Units], ends: StageTable, by_stream: float
    ) -> None:
        """``by_stream``: 0 where the allocator of some device keeps no memory for one stream alone (``memory.Outside``)."""
        self.traits, self.shards, self.by_stream = traits, shards, by_stream
        known = {one: stage_weights(one, ends) for one in dict.fromkeys(units)}
        blocks = np.array([[u.weights[1:] for u in one.blocks] for one in units], dtype=float)
        self.blocks = np.moveaxis(blocks, 2, 0)
        """[3, n, K] Parameters of each kind of layer: all, those of experts, and one weight of each shape."""
        self.outside = np.array([known[one].outside_blocks for one in units], dtype=float)
        self.head = np.array([known[one].head for one in units], dtype=float)
        """[n, P] Parameters of stages without layers; ``head``: the head's part."""

    def copied(self) -> Floats:
        """[C, n, K, P] Bytes moved per micro-batch to copy a layer's gradients and to cast its weights."""
        traits, shards = self.traits, self.shards.dense
        casts = (traits.gather.in_each_forward + traits.gather.in_each_backward) * cast_bytes(traits, shards)
        moved = np.stack([gradient_copy_bytes(traits, shards, m) + casts for m in COUNTED])
        return (self.blocks[0] * moved)[..., None] * np.ones(len(ENDS))

    def states(self, micro_batches: int) -> Floats:
        """[8, n, K, P] In the order of ``States``: bytes of a layer of each kind, and besides it in a stage of that one layer."""
        found, none, traits = [], np.zeros(self.outside.shape), self.traits
        for parameters, experts, shapes in np.moveaxis(self.blocks, 2, 0)[..., None]:
            dense = parameters - experts
            layer, gradients = layer_state_bytes(dense, experts, traits, self.shards, micro_batches)
            stage = Weights(self.outside + parameters, parameters, self.outside, self.head, experts, shapes, dense)
            parts = state_bytes(stage, traits, self.shards, micro_batches)
            beside, of_ends = sum(parts.values(), none) - layer, parts["gradients"] + none - gradients
            units = unit_bytes(stage, traits, self.shards, micro_batches)
            others = unit_bytes(replace(stage, total=self.outside, experts=0.0), traits, self.shards, micro_batches)
            pooled, grown = (self._kept(getattr(units, of) - getattr(others, of)) for of in ("pooled", "grown"))
            beside, more = beside + self._kept(units.pooled) - pooled, self._kept(units.grown) - grown
            at_peak = units.gathered + units.reduced, units.at_head
            found.append((layer + pooled, gradients, beside, of_ends, *at_peak, grown, more))
        return np.moveaxis(np.array([[none + of for of in each] for each in found]), 0, 2)

    def _kept(self, pooled_bytes: Figures) -> Figures:
        """Least bytes of tensors that lose their room where the allocator keeps ``pooled_bytes`` for other streams."""
        return np.maximum(memory.in_tensors(pooled_bytes * self.by_stream) - ROUNDED, 0.0)


def _by_work(kinds: Floats, share: Floats) -> States:
    """States for a unit of work, from those of a layer of each kind, [8, N, K, P]."""
    of, each = States(*kinds), share[..., None]
    layer, grown = ((figures / each).min(axis=1) for figures in (of.layer, of.grown))
    gradients, of_ends = (of.layer_gradients / each).max(axis=1), of.gradients_beside.max(axis=1)
    least = States(*(figures.min(axis=1) for figures in of))
    return least._replace(layer=layer, grown=grown, layer_gradients=gradients, gradients_beside=of_ends)


class _Again(NamedTuple):
    """The effect of a kind of recompute on a layer of each kind, [K] each."""

    seconds: Floats
    dropped: Floats
    needs: Ints
    """Bytes at the peak of the backward pass."""


class _Segments:
    """Seconds and bytes of a model's segments on one group."""

    def __init__(self, units: Units, data: DataParallel, ends: StageTable, counts: Ints) -> None:
        """``counts``: [K] layers of each kind."""
        self._units, self._data, self._ends, self._counts = units, data, ends, counts
        figures = self._figures = SegmentFigures(units, (), data)
        self._forward_s, self._weights_s = figures.forward_s[:-2], figures.plain["weight_gradient"][:-2]
        self.both_s = self._forward_s + figures.backward_s[:-2]
        self._head_s = float(figures.forward_s[-1] + figures.backward_s[-1])
        self._of_head = float(figures.forward_s[-1]), float(figures.plain["weight_gradient"][-1])
        self._saved = kept_of_kinds(units, "none").astype(float)
        self._needs = cache(lambda kind: needs_of_kinds(units, kind))
        received = ((2 - ends.first - ends.last) * units.hidden_bytes).astype(float)
        every = data.traits.pipeline.receives == "all"
        self._received = [received * every, received * (not every)]

    @cached_method
    def again(self, activation_checkpoint: str) -> _Again:
        units, data = self._units, self._data
        kind = recompute_of(activation_checkpoint, data.traits, units)
        seconds = SegmentFigures(units, [kind], data).again_s[0]
        return _Again(seconds, self._saved - kept_of_kinds(units, kind).astype(float), self._needs(kind))

    def _launched(self, share: Floats) -> Launched:
        """Without recompute; each pass counts the host's or the device's seconds, whichever are longer over all layers together."""
        data = self._data
        own_s = 0.0 if data.host_is_device else data.traits.host.operators_per_unit / 2 * data.operator_s
        forward, backward, weights = data.launch_s * self._figures.launches[:, :-2]
        stalled = data.launch_s * self._figures.plain["stalled_launches"][:-2]
        backward_s = self.both_s - self._forward_s

        def longer(host_s: Floats, device_s: Floats) -> Floats:
            return host_s if host_s @ self._counts > device_s @ self._counts else device_s

        inputs = longer(backward - weights + own_s, backward_s - self._weights_s)
        forward, backward = longer(forward + own_s, self._forward_s) + stalled, longer(backward + own_s, backward_s)
        both = np.maximum(forward + backward, 1e-300)
        weights = np.maximum(backward - inputs, 0.0)
        shares = (float((of / both).max(initial=0.0)) for of in (forward, weights))
        return Launched(float((both / share).min(initial=np.inf)), *shares)  # type: ignore[arg-type]

    def row(self, again: _Again, share: Floats, *, may_choose: bool) -> tuple[Work, Launched, Held]:
        """The figures of one layout; ``share``: [K] the work of a layer of each kind."""
        both = self.both_s if may_choose else self.both_s + again.seconds
        forward, weights = list(self._forward_s / both), list(self._weights_s / both)
        if self._head_s:
            forward.append(self._of_head[0] / self._head_s)
            weights.append(self._of_head[1] / self._head_s)
        saves = again.dropped > 0
        per_byte = (again.seconds[saves] / again.dropped[saves]).min(initial=np.inf)
        kept = self._saved if may_choose else self._saved - again.dropped
        none = np.zeros(len(ENDS))
        plain, remade = (
            none + needs.min(initial=np.iinfo(np.int64).max if len(share) else 0)
            for needs in (self._needs("none") if may_choose else again.needs, again.needs)
        )
        places = (
            kept_beside_layers(self._units, self._ends), *self._received,
            peak_bytes(self._units, plain, self._ends)[0], *peak_bytes(self._units, remade, self._ends),
        )  # fmt: skip
        work_s = (
            (both / share).min(initial=np.inf), self._head_s, max(forward, default=1.0), max(weights, default=1.0),
            per_byte if may_choose and np.isfinite(per_byte) else 0.0,
        )  # fmt: skip
        of_layer = (kept / share).min(initial=np.inf), (again.dropped / share).max(initial=0.0) if may_choose else 0.0
        held = Held(*map(np.array, of_layer), *(none + of for of in places))
        return Work(*map(np.array, work_s)), self._launched(share), held


def _stacked(rows: Sequence[Sequence[Columns]], of: Ints) -> Columns:
    """[N, G] or [N, G, P] each figure, from those of each different row on each group; ``of``: [N] the row of each layout."""
    fields = ([[one[at] for one in groups] for groups in rows] for at in range(len(rows[0][0])))
    return type(rows[0][0])(*(np.array(field, dtype=float)[of] for field in fields))


def _by_layers(layout: Layout) -> tuple[object, ...]:
    """The fields of a layout that the work of layers depends on; sharding counts only with experts, which ranks that shard states share."""
    p, may_choose = layout
    shard = p.data_parallel_shard_degree if p.expert_parallel_degree > 1 else 1
    return (
        p.tensor_parallel_degree, p.enable_sequence_parallel, p.context_parallel_degree, p.context_parallel_method,
        p.expert_parallel_degree, shard, min(p.zero_stage, 1) if shard > 1 else 0, p.micro_batch_size, p.activation_checkpoint, may_choose,
    )  # fmt: skip


def _by_states(layout: Layout) -> Hashable:
    p = layout[0]
    return (
        p.tensor_parallel_degree, p.enable_sequence_parallel, p.context_parallel_degree, p.context_parallel_method,
        p.expert_parallel_degree, p.data_parallel_shard_degree, p.zero_stage,
    )  # fmt: skip


def _distinct(
    of: Sequence[Layout], key: Callable[[Layout], Hashable], row: Callable[[Layout], Row]
) -> tuple[list[Row], Ints]:
    """A row for each key, and the number of each layout's row."""
    rows: list[Row] = []
    seen: dict[Hashable, int] = {}
    found = []
    for layout in of:
        known = key(layout)
        if known not in seen:
            seen[known] = len(rows)
            rows.append(row(layout))
        found.append(seen[known])
    return rows, np.array(found, dtype=np.int64)


def that_have(groups: Sequence[NodeGroup], width: int) -> list[str]:
    """The name of each group that has cells of ``width`` devices; for each other group, which cannot price such cells, the name of the
    first that has them, whose figures do not count there."""
    has = [cells_of(group, width) > 0 for group in groups]
    first = groups[has.index(True)]
    return [(group if there else first).name for group, there in zip(groups, has, strict=True)]
