"""Bounds of many blocks at once for any cut into stages and any choice of recomputed layers.

Every stage has at least one layer. The others go where they weigh least in a mix of the paths through the pipeline (``mixes``), as far as the
rank there has the memory: so no cut takes less. Dims as in ``layer_bounds``; n = some ways to share states, M = mixes, p = pipeline ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from ahp.arrays import Floats, Ints, Mask
from ahp.forecast.candidates.layer_costs import LayerCosts
from ahp.forecast.stage_memory import receives_from
from ahp.schedule.bounds import in_flight
from ahp.schedule.registry import of_ranks
from ahp.search.bounds.layer_bounds import LayerBounds, PricedBlock, Ways
from ahp.search.bounds.mixes import PARTS, Mixes, least_layers, mixes, own_stages
from ahp.search.choices import ScheduleChoice

TOGETHER = 1 << 20
"""Most figures of layers on ranks that are computed at once."""

NO_LAYER = 1e-9
"""Share of all layers: a rank that lacks the memory for fewer layers than this counts as having it."""


class Weighed(NamedTuple):
    """The weight of layers of average kind in each mix."""

    ranks_s: Floats
    """[n, R, C, M, p] Seconds of one layer on each rank."""
    base_s: Floats
    """[n, R, C, M, 1] Seconds of the layers that every cut has, and of the ends."""
    smallest: Floats
    """[n, R, C, M, 1] The lightest kind of layer as a share of the average one."""
    largest: Floats
    """[n, R, C, M, 1] The heaviest kind of layer as a multiple of the average one."""


class Piece(NamedTuple):
    """Layers that ranks can hold at a price: seconds of each layer, and how many; both broadcast to [n, R, C, M, p]."""

    each_s: Floats
    layers: Floats


@dataclass(frozen=True)
class CutRanks:
    """What the ranks of some pipelines hold in any cut, [C, p] each: every stage has at least one layer, except for ends that can be empty."""

    hold: Floats
    """The least number of layers of a rank."""
    held: Floats
    """These layers times micro-batches in flight."""
    fewest: Ints
    """Micro-batches in flight of the stage that has the fewest."""
    embeddings: Ints
    """Micro-batches in flight of the first stage, 0 elsewhere."""
    heads: Ints
    """Micro-batches in flight of the last stage, 0 elsewhere."""
    others: Ints
    """Micro-batches in flight of all stages except the last."""
    received: Ints
    """Number of stages that a rank's own stages receive from."""
    ends: Ints
    """Index of a rank's weights in ``LayerColumns.ends_weights``."""


@lru_cache(maxsize=1 << 10)
def cut_ranks(pipes: tuple[ScheduleChoice, ...], p: int, m: int, ends_hold: bool) -> CutRanks:
    """``ends_hold``: whether the first and the last stage have at least one layer, like all others."""
    found = []
    for pipe in pipes:
        own = own_stages(pipe, p)
        first, last = own == 0, own == own.size - 1
        counts = in_flight(of_ranks(pipe.schedule, p).name, p, pipe.virtual, m)
        hold = least_layers(pipe, p, ends_hold)[own]
        ends = np.array([[3, 1], [0, 2]])[first.any(axis=1) * 1, last.any(axis=1) * 1]
        by_rank = hold, hold * counts, None, counts * first, counts * last, counts * ~last
        sums = [counts.min(axis=1) if part is None else part.sum(axis=1) for part in by_rank]
        found.append((*sums, receives_from(own, p), ends))
    return CutRanks(*map(np.array, zip(*found, strict=True)))


class CutBounds(LayerBounds):
    """Some blocks of one problem, in any cut."""

    def of_any_cut_s(self, most_bytes: float) -> Floats:
        """[B] Lower bound in seconds of all rows that fit, for any cut into stages."""
        found = np.full(len(self._of), np.inf)
        for rows, pipelines in self._alike_pipelines():
            for some in pipelines.parts(rows):
                found[some] = pipelines.cut_s(some, most_bytes).min(axis=(1, 2))
        return self._of_blocks(found)

    def of_any_part_s(self, most_bytes: float, ways: Ways) -> Floats:
        """[B] Like ``of_any_cut_s`` with any part of the layers recomputed, where the engine can do that; infinite if it cannot."""
        found = np.full(len(self._of), np.inf)
        for rows, pipelines in self._alike_pipelines():
            can = pipelines.can(ways)
            for some in pipelines.parts(rows) if can.any() else ():
                part_s = pipelines.part_s(some, np.flatnonzero(can.any(axis=1)).tolist(), most_bytes)
                found[some] = np.where(can[can.any(axis=1)], part_s, np.inf).min(axis=(1, 2))
        return self._of_blocks(found)

    def _alike_pipelines(self) -> Iterator[tuple[Ints, AnyCut]]:
        """Pipelines with the same ranks and micro-batches, after the ways to share states of the blocks that have them."""
        found: dict[tuple[object, ...], list[int]] = {}
        for at, block in enumerate(self.blocks):
            found.setdefault((block.p, block.m, block.rows.pipes), []).append(at)
        for blocks in found.values():
            yield np.flatnonzero(np.isin(self._of, blocks)), AnyCut(self, self.blocks[blocks[0]])

    def layers(self, rows: Ints, kinds: list[int] | slice, again_s: Floats | float = 0.0) -> LayerCosts:
        """[n, R, K] Times of layers with some kinds of recompute; ``again_s``: seconds of the backward pass not to count."""
        found = LayerCosts(*(part[rows][:, kinds] for part in self._costs))
        backward, inputs = found.backward - again_s, found.input_gradient - again_s
        return found._replace(backward=backward, input_gradient=inputs)

    def launched(self, rows: Ints) -> LayerCosts | None:
        """[n, R, K] Times of layers where the device waits for the host; None if it never does."""
        return None if self._launched is None else LayerCosts(*(part[rows] for part in self._launched))

    def weighed(self, rows: Ints, mix: Mixes, layer: LayerCosts, *, ends: bool = True) -> Weighed:
        """Weights in mixes [C, M] of layers with the times ``layer`` [n, R, K]; ``ends``: count the embedding and the head too."""
        of = self._of[rows]
        dense, experts = (self._kinds_of(name).min(axis=1, keepdims=True)[of] for name in ("dense", "experts"))
        once_s = layer.first_forward + (1.0 - self._ahead[rows, :, None]) * layer.first_gather
        last_s = (1.0 - self._beside[rows, :, None]) * layer.last_backward
        update_s = np.broadcast_to(self._updates_s(rows, dense, experts, 1)[..., None], once_s.shape)
        parts = layer.forward, layer.backward, layer.input_gradient, once_s, last_s, update_s
        each_s = np.stack(parts, axis=-1)  # [n, R, K, T]
        kinds_s = np.tensordot(each_s, mix.ranks, (-1, -1))  # [n, R, K, C, M, p]
        base_s = np.tensordot(each_s, mix.base, (-1, -1)).min(axis=2)[..., None]
        of_kind_s = kinds_s.mean(axis=-1, keepdims=True)
        average_s = np.tensordot(of_kind_s, self._shares, (2, 0))
        relative = of_kind_s / average_s[:, :, None]
        embedding_s, head_s = (self._column(name)[of][..., None] for name in ("embedding_s", "head_s"))
        ends_s = (embedding_s * mix.embedding + head_s * mix.head) * ends
        ranks_s = (kinds_s / of_kind_s).min(axis=2) * average_s
        return Weighed(ranks_s, base_s + ends_s[:, None, ..., None], relative.min(axis=2), relative.max(axis=2))

    # Bytes of ranks.

    @cached_property
    def ends_bytes(self) -> tuple[Floats, Floats]:
        """[N, 4] each: states of a rank with the embedding, the head, both, neither; and the gradients among them."""
        found = (block.splits.columns.states(block.stages.ends_weights, block.m) for block in self.blocks)
        states, gradients = zip(*((held, np.broadcast_to(part, held.shape)) for held, part in found), strict=True)
        return np.concatenate(states), np.concatenate(gradients)

    @cached_property
    def layer_bytes(self) -> tuple[Floats, Floats]:
        """[N, 1] each: least states that a layer adds to its rank, and the gradients among them."""
        states, gradients = zip(*(self._states_of(block) for block in self.blocks), strict=True)
        return np.concatenate(states), np.concatenate(gradients)

    def _states_of(self, block: PricedBlock) -> tuple[Floats, Floats]:
        columns, stages = block.splits.columns, block.stages
        states, gradients = columns.states_of_layer(stages.dense.min(), stages.experts.min(), block.m)
        return states, np.broadcast_to(gradients, states.shape)

    def of_stages(self, rows: Ints, name: str) -> Floats:
        """[n, ...] Figures of layers or of the ends."""
        return self._of_stages(name)[rows]

    def received(self, rows: Ints) -> Floats:
        """[n, 1] Bytes that a rank holds for what each stage sends it."""
        return self._buffers[self._of[rows]]


class AnyCut:
    """Pipelines with the same ranks and micro-batches, in any cut."""

    def __init__(self, of: CutBounds, block: PricedBlock) -> None:
        """``block``: one of the blocks that have these pipelines."""
        self.of, self.block = of, block
        stages, layers = block.stages, of.asked.graph.num_layers
        head = stages.head_s / max(stages.micro_batch_s - stages.ends_s, 1e-12) * layers
        pipelines = block.rows.pipes, block.p, block.m, of.asked.stage_ends == "hold_layers"
        self.ranks, self.mix = cut_ranks(*pipelines), mixes(*pipelines, layers, round(2 * head) / 2)
        self.num_layers = layers

    def parts(self, rows: Ints) -> Iterator[Ints]:
        """Parts of ``rows`` that are small enough to compute at once."""
        size = max(1, TOGETHER // (self.mix.ranks.size * len(self.block.rows.recompute)))
        return (rows[at : at + size] for at in range(0, len(rows), size))

    def can(self, ways: Ways) -> Mask:
        """[R, C] Whether the engine can recompute a part of the layers."""
        rows, p = self.block.rows, self.block.p
        return np.array(
            [[name != "none" and ways(p, pipe, name) for pipe in rows.pipes] for name in rows.recompute], dtype=bool
        )

    def cut_s(self, rows: Ints, most_bytes: float) -> Floats:
        """[n, R, C] Lower bound in seconds with all layers recomputed in one way."""
        more, _ = self._room(rows, slice(None), slice(None), most_bytes)

        def least_s(weighed: Weighed) -> Floats:
            return self._least_s(weighed, [Piece(weighed.ranks_s, more[..., None, :])])

        found = least_s(self.of.weighed(rows, self.mix, self.of.layers(rows, slice(None))))
        if (launched := self.of.launched(rows)) is not None:
            found = np.maximum(found, least_s(self.of.weighed(rows, self.mix, launched, ends=False)))
        return np.where((more >= -NO_LAYER * self.num_layers).all(axis=-1), found, np.inf)

    def part_s(self, rows: Ints, kinds: list[int], most_bytes: float) -> Floats:
        """[n, kinds, C] Lower bound in seconds with some layers recomputed in this way and others not: a full rank takes one more layer if it
        recomputes more of its own. Collectives hide as if all layers were recomputed.
        """
        none = [self.block.rows.recompute.index("none")]
        again_s = self.of.of_stages(rows, "again_of_kinds")[:, kinds]
        weighed = self.of.weighed(rows, self.mix, self.of.layers(rows, kinds, again_s))
        most, light = self._room(rows, none, kinds, most_bytes)
        all_again, heavy = self._room(rows, kinds, kinds, most_bytes)
        most = np.clip(most, 0.0, np.maximum(all_again, 0.0))
        backward, inputs = (PARTS.index(name) for name in ("backward", "input_gradient"))
        passes = self.mix.ranks[..., backward] + self.mix.ranks[..., inputs]  # [C, M, p]
        again_s = again_s.min(axis=-1)[..., None, None, None] * passes / weighed.largest
        with np.errstate(divide="ignore", invalid="ignore"):
            others = np.where(light > heavy, light / (light - heavy), np.inf)  # recomputed to make room for one more
            dearer_s = np.where(again_s > 0, others[..., None, :] * again_s, 0.0)
        pieces = [
            Piece(weighed.ranks_s, most[..., None, :]),
            Piece(weighed.ranks_s + dearer_s, (all_again - most)[..., None, :]),
        ]
        found = self._least_s(weighed, pieces)
        found = np.where((all_again >= -NO_LAYER * self.num_layers).all(axis=-1), found, np.inf)
        as_they_are = self.of.weighed(rows, self.mix, self.of.layers(rows, none))
        anywhere = Piece(as_they_are.ranks_s.min(axis=-1, keepdims=True), np.array(float(self.num_layers)))
        return np.maximum(found, self._least_s(as_they_are, [anywhere]))

    def _least_s(self, weighed: Weighed, pieces: list[Piece]) -> Floats:
        """[n, R, C] Seconds of the mix that weighs most, with the layers beyond those of every cut where they weigh least; infinite if there
        is no room."""
        hold = self.ranks.hold.sum(axis=-1)[:, None, None]  # [C, 1, 1]
        left = self.num_layers - weighed.smallest * hold  # layers of average kind
        room = [piece.layers * weighed.largest for piece in pieces]
        if room[0].shape[-1] == self.block.p:
            room[0] = room[0] + self.ranks.hold[:, None] * (weighed.largest - weighed.smallest)
        each_s, room_of = (
            np.concatenate(np.broadcast_arrays(*part), axis=-1) for part in ([piece.each_s for piece in pieces], room)
        )
        each_s, room_of = np.broadcast_arrays(each_s, np.maximum(room_of, 0.0))
        if each_s.shape[-1] > 1:
            order = np.argsort(each_s, axis=-1)
            each_s, room_of = (np.take_along_axis(part, order, axis=-1) for part in (each_s, room_of))
        placed = np.clip(left - (np.cumsum(room_of, axis=-1) - room_of), 0.0, room_of)
        placed_s = np.multiply(placed, each_s, out=np.zeros_like(placed), where=placed > 0)
        found = weighed.base_s[..., 0] + placed_s.sum(axis=-1)
        enough = placed.sum(axis=-1) >= left[..., 0] - NO_LAYER * self.num_layers
        return np.where(enough, found, np.inf).max(axis=-1)

    def _room(
        self, rows: Ints, kinds: list[int] | slice, of_base: list[int] | slice, most_bytes: float
    ) -> tuple[Floats, Floats]:
        """[n, R, C, p] each, with some kinds of recompute: layers that a rank has memory for beyond those of every cut, below 0 if not even
        those fit; and bytes that one more takes. ``of_base``: the kinds of recompute of the layers of every cut."""
        of, ranks = self.of, self.ranks
        states, gradients = (part[rows][:, ranks.ends] for part in of.ends_bytes)  # [n, C, p]
        layer, gradient = (part[rows][..., None, None] for part in of.layer_bytes)  # [n, 1, 1, 1]
        least = of.of_stages(rows, "kept").min(axis=-1), of.of_stages(rows, "least_needs")
        kept, needs = (part[..., None, None] for part in least)
        kept, needs, kept_of_base = kept[:, kinds], needs[:, kinds], kept[:, of_base]
        embedding, head, hidden, at_head = of.of_stages(rows, "beside_layers").T[..., None, None]  # [n, 1, 1] each
        peak = np.where(
            np.isin(ranks.ends, (1, 2)),
            np.maximum(needs - head[:, None], at_head[:, None]),
            np.where(ranks.hold > 0, needs, 0.0),
        )
        held = embedding * ranks.embeddings + head * ranks.heads + hidden * ranks.others
        most = of.ways.part(rows).most_allocated(most_bytes)[..., None]
        free = (most - states - of.received(rows)[..., None] * ranks.received)[:, None] - peak
        each = np.maximum(layer - gradient + kept * ranks.fewest, 1.0)
        of_them = ranks.hold * (layer - gradient) + kept_of_base * ranks.held
        more = (free + (gradients - held)[:, None] - of_them) / each
        return np.minimum(more, free / np.maximum(layer, 1.0) - ranks.hold), each
