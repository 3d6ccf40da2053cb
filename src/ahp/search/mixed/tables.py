"""What the stages of one layout cost on each group, in seconds, with as few layers recomputed as the device's memory allows.

Where stages can recompute fewer than all of their layers, a stage of n layers recomputes r layers, the fewest with which
the lower bound of its memory need fits. It takes at least its time with none recomputed, and at least its time with all n minus
n - r times the most that one more layer can add. Where passes wait neither for the host nor for weights, both are equal: a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ahp.arrays import Floats, Ints, Mask
from ahp.cached_method import cached_method
from ahp.forecast.cell_columns import BETWEEN, FIRST, LAST, WHOLE, CellColumns
from ahp.forecast.cells import GroupCells
from ahp.forecast.stage_room import Positions, StageRoom
from ahp.plan import Parallelism
from ahp.schedule.bounds import in_flight
from ahp.schedule.registry import get, of_ranks

ROUNDING = 1e-9
"""The part of a layer by which rounding can put the fewest above a whole number."""


class StageCosts(NamedTuple):
    """Costs of stages, in arrays of any shape."""

    whole: Floats
    """Seconds of both passes for one micro-batch, at least."""
    forward: Floats
    recomputed: Ints
    """Layers that are recomputed, at least; all where even that does not fit, and 0 where stages have no choice."""
    fits: Mask
    """Whether the lower bound of the memory need fits with these layers recomputed."""


class RankCosts(NamedTuple):
    """Costs of replicas with several stages on each of p ranks."""

    busy: Floats
    """[..., p] Seconds in which a rank computes one micro-batch, at least."""
    light: Floats
    """[..., S] Seconds of both passes of a stage with nothing recomputed, at least."""
    forward: Floats
    recomputed: Ints
    """[..., S] Layers recomputed: at least this many in all on each rank, counted first in its stage that keeps the most micro-batches."""
    fits: Mask
    """[..., p] Whether the lower bound of a rank's memory need fits with these layers recomputed."""


class LayoutTables:
    """Costs of the stages of one layout. Dims: G groups, S stages, L layers."""

    def __init__(
        self, columns: CellColumns, row: int, groups: Sequence[GroupCells], layout: Parallelism,
        light: Sequence[GroupCells] = (), *, layers: Sequence[int], ranks: bool = False,
    ) -> None:  # fmt: skip
        """``row``: the layout's row in the columns; ``light``: the same cells with nothing recomputed, where stages can recompute fewer than all
        of their layers; ``layers``: the kind of each layer.

        ``ranks``: for a layout with several stages per rank, whether a "stage" here is all that a rank has; it is then not known which
        ranks have the first and the last stage.
        """
        self._columns, self._row, self._layout, self._ranks = columns, row, layout, ranks
        self.groups, self.light, self.has_choice = groups, light or groups, bool(light)
        self.num_layers = len(layers)
        self.num_stages = layout.pipeline_parallel_degree if ranks else layout.num_stages
        middle = [] if ranks else [FIRST, *[BETWEEN] * (self.num_stages - 2), LAST]
        self._places = np.array(
            [BETWEEN] * self.num_stages if ranks else [WHOLE] if self.num_stages == 1 else middle, dtype=np.int64
        )
        share = columns.share[row]
        self._work = np.concatenate([[0.0], np.cumsum(share[list(layers)])])
        """[L + 1] Work of the first layers."""
        self._least_work = float(share.min())
        self._dropped = columns.held.dropped[row] * share.max()
        """[G] Bytes of a micro-batch that recomputing one layer saves, at most."""

    @cached_property
    def layer_s(self) -> Floats:
        """[G] Seconds of both passes of the mean layer with none recomputed, plus the least that a stage takes besides its layers."""
        return self._seconds[1, :, -1] / self.num_layers + self._beside_s[1][:, self._places].min(axis=1)

    def least_whole_s(self, there: Mask) -> Floats:
        """[G] Seconds of the whole model for one micro-batch on a cell, with as few layers recomputed as memory allows; infinite where there
        is no cell or it has too little memory."""
        n, found = self.num_layers, np.full(len(self.groups), np.inf)
        rooms = [self._rooms(np.array([m]), (0, slice(None), 0)) for m in (1, 2)]
        holds = np.logical_or.reduce([room.hold(self._work[-1]) for room in rooms]) & there
        least = np.min([self._fewest(room.saved_bytes(self._work[-1]), self._dropped, n) for room in rooms], axis=0)
        for group in np.flatnonzero(holds).tolist():
            left = n - int(least[group]) if self.has_choice else 0
            light_s = self.light[group].line.whole_s(WHOLE) if left else 0.0
            every_s = self.groups[group].line.whole_s(WHOLE) if left < n else 0.0
            found[group] = max(light_s, every_s - left * self.groups[group].again_s if left < n else 0.0)
        return found

    def stages(self, kinds: Ints, layers: Ints | Sequence[int], micro_batches: Ints) -> StageCosts:
        """[..., S] Costs of the stages of replicas with these groups [..., S] and layers [..., S] along their stages, and this many
        micro-batches [...]."""
        work, seconds, room = self._layers_of(kinds, np.asarray(layers), micro_batches)
        return self._costs(kinds, self._places, np.asarray(layers), work, seconds, room)

    def of_ranks(self, kinds: Ints, layers: Ints | Sequence[int], micro_batches: Ints) -> RankCosts:
        """The same for replicas with several stages per rank, with these groups [..., p] along their ranks. What a rank keeps is summed over
        its stages; of what else they hold, only the largest part of one stage counts."""
        layout, n = self._layout, np.asarray(layers)
        at = get(layout.pipeline_parallel_schedule).placement
        own = at.rank_stages(layout.pipeline_parallel_degree, layout.virtual_stages_per_rank)
        group = kinds[..., np.array(at.stage_ranks(*own.shape))]
        work, seconds, room = self._layers_of(group, n, micro_batches)
        forward, light_s, every_s = self._with_ends(group, self._places, seconds)
        shape = np.broadcast_shapes(group.shape, n.shape, room.held.shape)
        order = np.argsort(-np.broadcast_to(room.held, shape)[..., own], axis=-1, kind="stable")

        def of(figures: Floats | Ints | Mask) -> NDArray[Any]:
            return np.take_along_axis(np.broadcast_to(figures, shape)[..., own], order, axis=-1)

        free, remade = of(room.free).min(axis=-1), of(room.remade).min(axis=-1)
        without = of(work * (room.states + room.held * room.kept)).sum(axis=-1) - free
        need = np.where(without > 0.0, np.maximum(without + remade, 0.0), 0.0)[..., None]
        each = of(room.held) * self._dropped[kinds][..., None]
        saved = of(n) * each
        number = np.ceil((need - (np.cumsum(saved, axis=-1) - saved)) / np.maximum(each, 1.0) - ROUNDING)
        some = np.clip(number, 0, of(n)).astype(np.int64)
        recomputed = np.zeros(shape, dtype=np.int64)
        recomputed[..., own] = np.take_along_axis(some, np.argsort(order, axis=-1), axis=-1)
        left = of(n).sum(axis=-1) - some.sum(axis=-1)
        busy, remade_s = of(light_s).sum(axis=-1), of(every_s).sum(axis=-1) - left * self._again_s[kinds]
        busy = np.where(some.sum(axis=-1) > 0, np.maximum(busy, remade_s), busy)
        fits = of(room.hold(work)).all(axis=-1) & (need[..., 0] <= saved.sum(axis=-1) + 1.0)
        return RankCosts(busy, light_s, forward, recomputed, fits)

    def _layers_of(self, kinds: Ints, n: Ints, micro_batches: Ints) -> tuple[Floats, Floats, StageRoom]:
        """[..., S] The work of ``n`` layers in each stage, their seconds as ``_costs`` takes them, and the room for them."""
        last = np.cumsum(n, axis=-1)
        first = last - n
        seconds = self._seconds[:, kinds, last] - self._seconds[:, kinds, first]
        numbers, which = np.unique(micro_batches, return_inverse=True)
        at = which.reshape(np.shape(micro_batches))[..., None], kinds, np.arange(self.num_stages)
        return self._work[last] - self._work[first], seconds, self._rooms(numbers, at)

    @cached_method
    def by_layers(self, micro_batches: int) -> StageCosts:
        """[G, S, L] Costs by number of layers, from 1 on, of the mean layer where layers differ. Infinite seconds where a stage does not fit."""
        n = np.arange(1, self.num_layers + 1)
        group = np.arange(len(self.groups))[:, None, None]
        seconds = self._seconds[:, :, -1, None, None] / self.num_layers * n
        room = self._rooms(np.array([micro_batches]), (0, ..., None))
        mean = self._work[-1] / self.num_layers
        found = self._costs(group, self._places[:, None], n, mean * n, seconds, room)
        return found._replace(whole=np.where(found.fits, found.whole, np.inf))

    def _costs(self, group: Ints, place: Ints, n: Ints, work: Floats, seconds: Floats, room: StageRoom) -> StageCosts:
        """``seconds``: of the layers, for the forward pass, both passes, and both passes with all layers recomputed."""
        forward, light_s, every_s = self._with_ends(group, place, seconds)
        fits = room.hold(work)
        if not self.has_choice:
            return StageCosts(light_s, forward, np.zeros(fits.shape, dtype=np.int64), fits)
        least = np.where(fits, self._fewest(room.saved_bytes(work), self._dropped[group], n), n)
        at_least_s = np.maximum(light_s, every_s - (n - least) * self._again_s[group])
        return StageCosts(np.where(least > 0, at_least_s, light_s), forward, least, fits)

    def _with_ends(self, group: Ints, place: Ints, seconds: Floats) -> list[Floats]:
        """The seconds including what stages take besides their layers."""
        return [of + beside[group, place] for of, beside in zip(seconds, self._beside_s, strict=True)]

    @staticmethod
    def _fewest(saved_bytes: Floats, dropped: Floats, n: Ints | int) -> Ints:
        """Layers that must be recomputed to save these bytes, at most n."""
        return np.clip(np.ceil(saved_bytes / np.maximum(dropped, 1.0) - ROUNDING), 0, n).astype(np.int64)

    def _rooms(self, micro_batches: Ints, at: Any = ()) -> StageRoom:
        """[M, G, S] Room of each stage on each group, in replicas with these micro-batches; ``at``: an index that selects some of it."""
        each = np.stack([self._room(m) for m in micro_batches.tolist()], axis=1)
        layer_s, again_s, free, held, *others = each[(slice(None), *at)]
        return StageRoom(layer_s, again_s, free, held.astype(np.int64), *others)

    @cached_method
    def _room(self, micro_batches: int) -> Floats:
        """[F, G, S] The fields of one ``StageRoom``, for one number of micro-batches."""
        at = Positions(self._held(micro_batches), self._places, np.ones(self.num_stages, dtype=np.int64))
        room = StageRoom.of(self._columns, np.array([self._row]), at, micro_batches)
        return np.array([field[0] for field in vars(room.mapped(lambda of: of)).values()])

    def _held(self, micro_batches: int) -> Ints:
        """[S] Micro-batches that each stage keeps at once, at least."""
        held = np.ones(self.num_stages, dtype=np.int64)
        if not self._ranks:
            p, v = self._layout.pipeline_parallel_degree, self._layout.virtual_stages_per_rank
            schedule = of_ranks(self._layout.pipeline_parallel_schedule, p)
            held[schedule.placement.rank_stages(p, v)] = in_flight(schedule.name, p, v, micro_batches)
        return held

    @cached_property
    def _seconds(self) -> Floats:
        """[3, G, L + 1] Seconds of the first layers: forward pass and both passes with none recomputed, both passes with all recomputed."""
        pairs = zip(self.light, self.groups, strict=True)
        each = np.array([[*light.line.layers, every.line.layers[1]] for light, every in pairs]).swapaxes(0, 1)
        return np.concatenate([np.zeros((*each.shape[:2], 1)), np.cumsum(each, axis=2)], axis=2)

    @cached_property
    def _beside_s(self) -> Floats:
        """[3, G, P] The same for what a stage does besides its layers."""
        pairs = zip(self.light, self.groups, strict=True)
        return np.array([[*light.line.beside, every.line.beside[1]] for light, every in pairs]).swapaxes(0, 1)

    @cached_property
    def last_s(self) -> Floats:
        """[G, L + 1] Seconds that a first stage with l layers takes after its last micro-batch, at least: the less of both, because more
        recompute hides more."""
        return np.array(
            [np.minimum(light.last_s, every.last_s) for light, every in zip(self.light, self.groups, strict=True)]
        )

    @cached_property
    def _again_s(self) -> Floats:
        return np.array([of.again_s for of in self.groups])

    def most_layers(self, micro_batches: Ints) -> Ints:
        """[M, G, S] Layers that a device of the group can hold in a stage, at most, recomputed or not, for each number of micro-batches."""
        most = self._rooms(micro_batches).most
        return np.minimum(np.floor(most / self._least_work + ROUNDING), self.num_layers).astype(np.int64)


def columns_hold(
    tables: LayoutTables, cells: Sequence[int], shape: tuple[int, int], micro_batches: tuple[int, int]
) -> bool:
    """Whether the available cells of each group can hold the model in one shape of (stages, replicas).

    ``micro_batches``: the fewest that a replica can have, and the number that at least one replica has. Only as many columns lie
    wholly on the groups with the most room as these have cells for. Every other column has a cell on one of the other groups, and
    holds no more than the best of those with the fewest micro-batches. Every column has a cell of the replica with the most.
    """
    stages, replicas = shape
    groups = [group for group, count in enumerate(cells) if count]
    light, layers = tables.most_layers(np.array(micro_batches))[:, groups]
    most = layers.max(axis=0)
    by_room = sorted(range(len(groups)), key=lambda at: layers[at].sum())
    for weak in range(1, len(groups) + 1):
        limit = np.minimum(light[by_room[:weak]].max(axis=0), most)
        strong = list(by_room[weak:])
        whole_columns = sum(cells[groups[at]] for at in strong) // replicas
        gain = np.sort(np.maximum(layers[strong].max(axis=0) - limit, 0))[::-1] if strong else np.zeros(0, int)
        if weak < len(groups) and whole_columns >= stages:
            continue
        if limit.sum() + gain[:whole_columns].sum() < tables.num_layers:
            return False
    return True
