"""What the stages of one layout cost on each group: seconds, with as few layers recomputed as the device's memory asks for.

Where stages may recompute fewer than all of their layers, a stage of n layers recomputes r of them, the fewest with which
the lower bound of its need fits. It takes at least what it takes with none, and at least what it takes with all n less n - r times
the most that one layer more can add. Where passes neither wait for the host nor for weights both are the same: a line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ahp.plan import Parallelism
from ahp.schedule.registry import of_ranks
from ahp.search.mixed.costs import ENDS, GroupCells, place_of, room_bytes
from ahp.search.mixed.holding import BETWEEN, Activations, States, most_layers

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

ROUNDING = 1e-9
"""Of a layer, by which the fewest may come out above a whole number."""


class Bytes(NamedTuple):
    """Of the layers of stages, each of any shape."""

    kept: Floats
    """Of one micro-batch, with none recomputed."""
    parameters: Floats
    """Not bytes: a number."""


class Seconds(NamedTuple):
    """Of the layers of stages for one micro-batch, each of any shape."""

    forward: Floats
    light: Floats
    """Both passes, with none recomputed."""
    every: Floats
    """Both, with all recomputed."""


class StageCosts(NamedTuple):
    """Of stages, each of any shape."""

    whole: Floats
    """Seconds of both passes for one micro-batch, at least."""
    forward: Floats
    recomputed: Ints
    """Layers that are recomputed, at least; all where not even that fits, and where stages have no choice none is counted."""
    fits: Bools
    """Whether the lower bound of the need does, so recomputed."""


class LayoutTables:
    """G groups, S stages, L layers."""

    def __init__(
        self,
        groups: Sequence[GroupCells],
        layout: Parallelism,
        light: Sequence[GroupCells] = (),
        *,
        ranks: bool = False,
    ) -> None:
        """``light``: the same cells with nothing recomputed, where stages may recompute fewer than all of their layers.

        ``ranks``: of a layout with several stages on a rank, whether a "stage" here is all that a rank has; which of them are the ends
        is not known then.
        """
        self.groups, self.layout, self.light = groups, layout, light or groups
        self.has_choice = bool(light)
        self.num_layers = len(groups[0].units.layers)
        self.num_stages = layout.pipeline_parallel_degree if ranks else layout.num_stages
        self._room = np.array([room_bytes(cells.pricer, layout) for cells in groups])
        places = [BETWEEN if ranks else place_of(stage, self.num_stages) for stage in range(self.num_stages)]
        self._places = np.array(places)
        self.most_layers = cache(self._most_layers)
        self.by_layers = cache(self._by_layers)

    @property
    def layer_s(self) -> Floats:
        """[G] Seconds of both passes of the mean layer with none recomputed, and of the stage with the least beside it."""
        beside = self._beside_s[1][:, self._places].min(axis=1)
        return np.array([float(of.work.layers[1].mean()) for of in self.light]) + beside

    @property
    def whole_s(self) -> Floats:
        """[G] Of a stage with all layers, none recomputed."""
        return np.array([of.work.whole_s(self._places[-1]) for of in self.light])

    def least_whole_s(self, seconds: Callable[[GroupCells], float]) -> Floats:
        """[G] Seconds of the whole model for one micro-batch on a cell; ``seconds``: of a cell's, asked where they matter."""
        n, spared = self.num_layers, np.zeros(len(self.groups), dtype=np.int64)
        if self.has_choice:
            group, sizes = np.arange(len(self.groups)), Bytes(*self._bytes[:, :, -1])
            ways = (self._recomputed(group, np.array(0), np.array(n), sizes, np.array(m))[0] for m in (1, 2))
            spared = n - np.min(list(ways), axis=0)
        found = []
        for light, every, left, again_s in zip(self.light, self.groups, spared.tolist(), self._again_s, strict=True):
            least = seconds(light) if left else 0.0
            most = seconds(every) - left * again_s if left < n else 0.0
            found.append(max(least, most))
        return np.array(found)

    def stages(self, kinds: Ints, layers: Sequence[int], micro_batches: Ints) -> StageCosts:
        """[..., S] Of replicas with these groups along their stages, [..., S], and so many micro-batches, [...]."""
        edges = np.cumsum([0, *layers])
        seconds, sizes = (of[:, kinds, edges[1:]] - of[:, kinds, edges[:-1]] for of in (self._seconds, self._bytes))
        stage, m = np.arange(self.num_stages), micro_batches[..., None]
        return self._costs(kinds, stage, np.diff(edges), Seconds(*seconds), Bytes(*sizes), m)

    def _by_layers(self, micro_batches: int) -> StageCosts:
        """[G, S, L] By number of layers from 1 on; where layers differ of the mean one. Infinite seconds where it does not fit."""
        n = np.arange(1, self.num_layers + 1)
        group, stage = np.arange(len(self.groups))[:, None, None], np.arange(self.num_stages)[None, :, None]
        seconds, sizes = (of[:, :, -1, None, None] / self.num_layers * n for of in (self._seconds, self._bytes))
        found = self._costs(group, stage, n, Seconds(*seconds), Bytes(*sizes), np.array(micro_batches))
        fits = found.fits & (self.most_layers(micro_batches)[..., None] >= n)
        return found._replace(whole=np.where(fits, found.whole, np.inf))

    def _costs(self, group: Ints, stage: Ints, n: Ints, seconds: Seconds, sizes: Bytes, m: Ints) -> StageCosts:
        place = self._places[stage]
        forward, light, every = (of[group, place] for of in self._beside_s)
        least, fits = self._recomputed(group, stage, n, sizes, m)
        whole = seconds.light + light
        if self.has_choice:
            whole = np.where(least > 0, self._at_least_s(group, whole, seconds.every + every, n - least), whole)
        return StageCosts(whole, seconds.forward + forward, least, fits)

    def _at_least_s(self, group: Ints, light_s: Floats, every_s: Floats, spared: Ints) -> Floats:
        """``spared``: layers that are not recomputed."""
        return np.maximum(light_s, every_s - spared * self._again_s[group])

    def _recomputed(self, group: Ints, stage: Ints, n: Ints, sizes: Bytes, m: Ints) -> tuple[Ints, Bools]:
        """The fewest of n layers, and whether the stage fits so; all where it does not."""
        place, several = self._places[stage], np.minimum(m, 2) - 1
        beside, each, per_gradient, of_outside = (of[several, group, place] for of in self._states)
        light, every = self._activations
        held = self._held(stage, m)
        left = self._room[group] - beside - each * sizes.parameters
        left = left - light.received[group, place] * m - light.once[group, place]
        # Of one micro-batch the gradients grow as activations go.
        gone = np.where(m > 1, 0.0, per_gradient * sizes.parameters + of_outside)
        kept = held * (sizes.kept + light.outside[group, place]) - gone
        fits = np.maximum(kept, 0.0) <= left - light.temporary[group, place]
        if not self.has_choice:
            return np.zeros(fits.shape, dtype=np.int64), fits
        left = left - every.temporary[group, place]
        need = (kept - left) / np.maximum(held * self._dropped[group], 1.0)
        least = np.clip(np.ceil(need - ROUNDING), 1, n)
        return np.where(fits, 0, least).astype(np.int64), fits | ((left >= 0) & (need - ROUNDING <= n))

    def _held(self, stage: Ints, m: Ints) -> Ints:
        """Micro-batches that a stage keeps at once, at least."""
        if self.layout.virtual_stages_per_rank > 1:
            return 1 + 0 * (stage + m)
        schedule = of_ranks(self.layout.pipeline_parallel_schedule, self.num_stages)
        return m + 0 * stage if schedule.all_forwards_first else np.minimum(self.num_stages - stage, m)

    @cached_property
    def _seconds(self) -> Floats:
        """[3, G, L + 1] Of the first layers, in the order of ``Seconds``."""
        pairs = zip(self.light, self.groups, strict=True)
        return _first([[*light.work.layers, every.work.layers[1]] for light, every in pairs])

    @cached_property
    def _bytes(self) -> Floats:
        """[2, G, L + 1] The same of ``Bytes``."""
        return _first([[of.kept, of.parameters] for of in self.light])

    @cached_property
    def _beside_s(self) -> tuple[Floats, Floats, Floats]:
        """[G, 4] Seconds of a stage beside its layers: forward, both passes, both with all layers recomputed."""
        light, every = (np.array([of.work.beside for of in cells]) for cells in (self.light, self.groups))
        return light[..., 0], light[..., 1], every[..., 1]

    @cached_property
    def _again_s(self) -> Floats:
        return np.array([of.again_s for of in self.groups])

    @cached_property
    def _dropped(self) -> Floats:
        """[G] Bytes of a micro-batch that recomputing one layer saves, at most."""
        pairs = zip(self.light, self.groups, strict=True)
        return np.array([float((light.kept - every.kept).max(initial=0.0)) for light, every in pairs])

    @cached_property
    def _activations(self) -> tuple[Activations, Activations]:
        """[G, 4] With none recomputed, and with all."""
        light, every = (
            Activations(*map(np.array, zip(*(of.activations for of in cells), strict=True)))
            for cells in (self.light, self.groups)
        )
        return light, every

    @cached_property
    def _states(self) -> Floats:
        """[4, 2, G, 4] Bytes beside the layers, of each parameter in them, of these of gradients, and of gradients beside; for one
        micro-batch and for several."""
        return np.moveaxis(np.array([of.state_bytes for of in self.groups]), (3, 1), (0, 1))

    def _most_layers(self, micro_batches: int) -> Ints:
        """[G, S] Layers that a device of the group can hold in a stage, at most, recomputed or not."""
        m = np.array(micro_batches)
        states = np.array([[of.states_at(place) for place in range(len(ENDS))] for of in self.groups])[:, self._places]
        of = States(self._room[:, None], states[..., 0], states[..., 1])
        held = self._held(np.arange(self.num_stages), m)
        ways = (Activations(*(field[:, self._places] for field in a)) for a in self._activations)
        return np.max([most_layers(a, of, self.num_layers, held, m) for a in ways], axis=0)


def _first(layers: list[list[Floats]]) -> Floats:
    """[F, G, L + 1] Sums over the first 0, 1, ... layers, from lists of figures [L] for each group."""
    of = np.moveaxis(np.array(layers), 1, 0)
    return np.concatenate([np.zeros((*of.shape[:2], 1)), np.cumsum(of, axis=2)], axis=2)
