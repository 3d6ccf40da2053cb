"""What is alike in the layouts of a mixed cluster, as columns: what cells take and hold at least, before any stage is priced.

How layers are computed does not depend on how their states are shared; states depend neither on the micro-batch nor on
recompute. So each is counted once for all that have it alike.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ahp.forecast.mixed import MixedPricer
from ahp.schedule.registry import PLAIN
from ahp.search.mixed.bounds import Speeds, speeds
from ahp.search.mixed.costs import GroupCells, room_bytes, that_have
from ahp.search.mixed.holding import WHOLE, Activations, States, most_layers, most_micro_batches
from ahp.search.mixed.space import SEVERAL, Alike, MixedSpace, all_forwards_first, layout_of

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

WAYS = 2
"""With all layers recomputed, where any are, and with none."""

Row = TypeVar("Row")
Bytes = TypeVar("Bytes", Activations, States)


class _Layers(NamedTuple):
    speeds: Speeds
    """With as little recomputed as there may be."""
    recomputing: Speeds
    """With all layers."""
    activations: Activations
    """[W, G, 4] Both ways; the same twice where stages have no choice."""


class Columns:
    """Of the N alikes of a space, on each of G groups."""

    def __init__(self, pricer: MixedPricer, space: MixedSpace) -> None:
        self._pricer, self._space, self._names = pricer, space, tuple(pricer.groups)
        self._num_layers = space.asked.graph.num_layers
        self._rows = {alike: row for row, alike in enumerate(space.alike)}
        self._one_way = cache(self._priced)
        layers, self._layers_of = _distinct(space.alike, _by_layers, self._layers)
        states, self._states_of = _distinct(space.alike, _by_states, self._states)
        self._speeds, self._recomputing = [of.speeds for of in layers], [of.recomputing for of in layers]
        self._activations, self._sharing = _stacked([of.activations for of in layers]), _stacked(states)
        """[rows, W, G, 4] and [rows, G, 4]."""
        _, self._held_alike = np.unique(
            np.stack(self._sharing, axis=1).reshape(len(states), -1), axis=0, return_inverse=True
        )
        """[rows] The same number where the states are."""
        self._limits: dict[tuple[object, ...], Ints] = {}
        self._cells = np.array([space.cells(alike.width) for alike in space.alike], dtype=np.int64)
        self._total = np.array([space.micro_batches(alike) for alike in space.alike], dtype=np.int64)
        self._holds_alone = self._layers_held(WHOLE) >= self._num_layers
        """[2, N, G] With one micro-batch, and with several."""
        self.cells_alone = np.where(self._holds_alone[0], self._cells, 0)
        """[N, G] Cells that can hold the whole model."""
        holds = np.stack([self._layers_held(place)[0] for place in range(WHOLE)]).max(axis=0) > 0
        self.cells_piped = np.where(holds, self._cells, 0)
        """[N, G] Cells that can hold a stage."""

    def speeds(self, alike: Alike) -> Speeds:
        """Of the units alone, with as little recomputed as there may be."""
        return self._speeds[self._layers_of[self._rows[alike]]]

    def recomputing(self, alike: Alike) -> Speeds:
        """The same with all layers recomputed, where any are."""
        return self._recomputing[self._layers_of[self._rows[alike]]]

    def cells(self, alike: Alike, *, pipelined: bool) -> tuple[int, ...]:
        """Of each group, those whose memory does not rule them out."""
        found = self.cells_piped if pipelined else self.cells_alone
        return tuple(found[self._rows[alike]].tolist())

    def same(self, alike: Alike) -> tuple[int, ...]:
        """The same for those that have all columns in common, and all shapes."""
        row = self._rows[alike]
        return int(self._layers_of[row]), int(self._held_alike[self._states_of[row]]), alike.width, alike.shard

    def alone_s(self, *, recomputing: bool = False) -> Floats:
        """[N] Seconds that layouts without a pipeline take at least; infinite where no device holds the model.

        ``recomputing``: with all layers, where any are recomputed.
        """
        return self._work_s(self.cells_alone, recomputing, splits=False)

    def piped_s(self, *, splits: bool, recomputing: bool = False) -> Floats:
        """[N] Those with one; ``splits``: some schedule computes weight gradients apart, so that none of them need be on the
        way of a micro-batch through all stages."""
        return self._work_s(self.cells_piped, recomputing, splits=splits)

    def _work_s(self, cells: Ints, recomputing: bool, *, splits: bool) -> Floats:
        speeds = self._recomputing if recomputing else self._speeds
        whole = np.array([of.whole_s for of in speeds])[self._layers_of]
        way = np.array([of.least_forward_share if splits else 1.0 for of in speeds])[self._layers_of]
        whole = np.where(cells > 0, whole, np.inf)
        rate = np.where(cells > 0, cells / whole, 0.0).sum(axis=1)
        work = self._total / np.maximum(rate, 1e-300)
        return np.where(rate > 0, np.maximum(work, way * whole.min(axis=1)), np.inf)

    def holds(self, alike: Alike, schedule: str, most: Ints, pipeline: Ints) -> Bools:
        """[M] Whether stages hold all layers, if each lies on the group that has the most room for it.

        ``most``: [M] micro-batches of some replica, at least; ``pipeline``: [M], all 1 or all above.
        """
        row = self._rows[alike]
        if pipeline[0] == 1:
            one, several = np.any(self._holds_alone[:, row] & (self._cells[row] > 0), axis=1)
            return np.where(most > 1, several, one)
        if all_forwards_first(schedule):  # as many are in flight as under any other, or more
            others = self.holds(alike, PLAIN, most, pipeline)
            if not others.any():
                return others
        layers, states = int(self._layers_of[row]), int(self._states_of[row])
        grid = alike.width, int(self._total[row])
        apart = schedule == SEVERAL or all_forwards_first(schedule)  # ranks keep other numbers than under the others
        key = layers, int(self._held_alike[states]), schedule if apart else "", grid
        if key not in self._limits:
            found, there = self._space.grid(*grid), np.flatnonzero(self._cells[row])
            ways = np.repeat(np.arange(WAYS), len(there))  # a stage on any group, either way
            there = np.tile(there, WAYS)
            self._limits[key] = most_micro_batches(
                _row(self._activations, (layers, ways, there)), _row(self._sharing, (states, there)), self._num_layers, schedule,
                np.unique(-(-grid[1] // found.replicas)), int(found.pipeline.max(initial=1)),
            )  # fmt: skip
        return most <= self._limits[key][pipeline - 2]

    def _layers_held(self, place: int) -> Ints:
        """[2, N, G] Layers of a stage that holds one micro-batch, of one in all and of several."""
        a = Activations(*(field[self._layers_of, :, :, place] for field in self._activations))
        of = States(*(field[self._states_of, None, :, place] for field in self._sharing))
        return np.stack([most_layers(a, of, self._num_layers, np.array(1), np.array(m)).max(axis=1) for m in (1, 2)])

    def _layers(self, alike: Alike) -> _Layers:
        every = self._one_way(_by_layers(alike))
        light = self._one_way(_by_layers(alike._replace(recompute="none"))) if self._space.has_choice(alike) else every
        return _Layers(light[0], every[0], _stacked([every[1], light[1]]))

    def _priced(self, alike: Alike) -> tuple[Speeds, Activations]:
        """With all layers recomputed, where any are."""
        names = self._that_have(alike.width)  # as wide as all with the same layers are, at least
        cells = [GroupCells(self._pricer, name, layout_of(alike, 2), 1) for name in names]
        return speeds([of.of_units() for of in cells]), _stacked([of.activations for of in cells])

    def _that_have(self, width: int) -> list[str]:
        return that_have(self._pricer.cluster.groups, width)

    def _states(self, alike: Alike) -> States:
        """Weights are divided alike on all groups."""
        piped, alone = layout_of(alike, 2), layout_of(alike, 1)
        first = self._that_have(alike.width)[0]
        held = [GroupCells(self._pricer, first, layout, 2).states_at for layout in (piped, piped, piped, alone)]
        layer, beside = np.array([of(place) for place, of in enumerate(held)]).T
        room = [
            [room_bytes(self._pricer.groups[name], layout) for layout in (piped, piped, piped, alone)]
            for name in self._names
        ]
        return States(np.array(room), *(np.broadcast_to(of, np.shape(room)) for of in (layer, beside)))


def _by_layers(alike: Alike) -> Alike:
    """What layers know of an alike. Experts are shared by ranks that share states."""
    shard = alike.shard if alike.expert > 1 else 1
    return alike._replace(zero=min(shard - 1, 1), shard=shard)


def _by_states(alike: Alike) -> Hashable:
    return alike._replace(micro_batch=1, recompute="")


def _distinct(
    alikes: Sequence[Alike], key: Callable[[Alike], Hashable], row: Callable[[Alike], Row]
) -> tuple[list[Row], Ints]:
    """A row for each key, and which of them is each alike's."""
    rows: list[Row] = []
    seen: dict[Hashable, int] = {}
    found = []
    for alike in alikes:
        known = key(alike)
        if known not in seen:
            seen[known] = len(rows)
            rows.append(row(alike))
        found.append(seen[known])
    return rows, np.array(found, dtype=np.int64)


def _stacked(rows: Sequence[Bytes]) -> Bytes:
    return type(rows[0])(*(np.array(field) for field in zip(*rows, strict=True)))


def _row(of: Bytes, at: tuple[int | Ints, ...]) -> Bytes:
    return type(of)(*(field[at] for field in of))
