"""The layers of a block's layouts, and the costs of their stages for all ways to shard states and kinds of recompute at once.

Dims: J = splits with equal engine traits, R = kinds of recompute, K = kinds of layers, S = stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from ahp.arrays import Floats, Ints
from ahp.forecast.candidates.shardings import Shardings
from ahp.forecast.data_parallel import CommUnit, DataParallel
from ahp.forecast.segment import Recompute, SegmentFigures
from ahp.forecast.sharing import StageUnits
from ahp.forecast.stage import stage_costs
from ahp.forecast.stage_memory import (
    kept_beside_layers,
    kept_bytes,
    kept_of_kinds,
    needs_of_kinds,
    stage_weights,
    temporary_bytes,
)
from ahp.forecast.stage_table import StageTable
from ahp.forecast.states import Weights
from ahp.forecast.unit import Unit
from ahp.forecast.units import Units

BESIDE = ("first_gather", "gathered", "host")
"""Seconds that a stage's first forward waits for weights, that all its gathers take, and that each forward waits for the host."""


ENDS = ((True, False), (False, True), (True, True), (False, False))
"""(has the embedding, has the head) of a rank."""


class LayerColumns(SegmentFigures):
    """The layers of a model, priced for the axes and the micro-batch of some blocks, cut into stages in any way."""

    def __init__(
        self, units: Units, recompute: Sequence[Recompute], data: DataParallel, *, some_layers: bool = False
    ) -> None:
        """``data``: of any split of these blocks; ``some_layers``: not all layers are recomputed, and they count with the memory as if
        all were, and with the time as if none were."""
        timed: list[Recompute] = ["none" if some_layers else kind for kind in recompute]
        super().__init__(units, timed, data)
        self._kept_by, self._some_layers = recompute, some_layers

    def _kinds(self, figure: Callable[[Unit], float]) -> Floats:
        """[K]"""
        return np.array([figure(unit) for unit in self.units.blocks], dtype=float)

    @cached_property
    def parameters(self) -> Floats:
        """[K]"""
        return self._kinds(lambda u: u.weights.parameters)

    @cached_property
    def experts(self) -> Floats:
        """[K] Parameters of experts."""
        return self._kinds(lambda u: u.weights.experts)

    @cached_property
    def dense(self) -> Floats:
        """[K] Parameters outside experts."""
        return self.parameters - self.experts

    @cached_property
    def weights(self) -> tuple[CommUnit, ...]:
        """The unit of communication of each kind of layer."""
        return tuple(CommUnit.of(unit) for unit in self.units.blocks)

    @cached_property
    def kept(self) -> Floats:
        """[R, K] Least bytes of activations that a layer keeps of one micro-batch."""
        kept = np.array([kept_of_kinds(self.units, kind) for kind in self._kept_by], dtype=float)
        return np.minimum(kept, kept_of_kinds(self.units, "none")) if self._some_layers else kept

    @cached_property
    def least_needs(self) -> Floats:
        """[R] Bytes at the peak of the backward pass, beyond what is kept, of the layer that needs the least."""
        return np.array(
            [needs_of_kinds(self.units, kind).min(initial=np.iinfo(np.int64).max) for kind in self.recompute]
        )

    @property
    def beside_layers(self) -> tuple[int, int, int, int]:
        """Bytes of one micro-batch that are kept by the embedding, by the head, and as the output of a stage without the head; and bytes at
        the peak of the head, beyond what is kept."""
        head = self.units.head.memory
        kept = self.units.embedding.memory.saved, head.saved, self.units.output_bytes
        return *kept, max(head.forward_extra, head.backward_extra)

    @cached_property
    def ends_weights(self) -> Weights:
        """[4] Weights of ranks without layers that have the embedding, the head, both, neither."""
        stages = StageTable.of((), len(self.units.blocks), [(0, 0, *ends) for ends in ENDS])
        return stage_weights(self.units, stages).of_ranks(np.arange(len(ENDS))[:, None])

    @cached_property
    def backward_of_kinds(self) -> Floats:
        """[R, K] Device seconds of a backward pass."""
        return self.backward_s[:-2] + self.again_s

    @cached_property
    def _launches_s(self) -> Floats:
        """[3, K] Seconds in which the host launches a forward pass, a backward pass without recompute, and the weight gradients in it; the
        engine's own work at each unit is not counted."""
        return self.data.launch_s * self.launches[:, :-2]

    @property
    def host_of_kinds(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Seconds in which the host launches a forward pass [R, K], a backward pass [R, K] and the weight gradients in it [K]; and seconds that
        the device waits for the host in a forward pass, however long its kernels take [K]."""
        (forward, backward, weights), again, launch_s = self._launches_s, self.again, self.data.launch_s
        return (
            forward + launch_s * again["beside_forward"],
            backward + launch_s * again["beside_backward"] + launch_s * again["launches"],
            weights,
            launch_s * self.plain["stalled_launches"][:-2],
        )

    @cached_property
    def least_s(self) -> Floats:
        """[8, K] Device seconds of each kind of layer: the forward pass, the backward pass without recompute, the same without weight
        gradients, 0 for all that comes once per step; and of the head in both passes."""
        backward = self.backward_s[:-2]
        return self._on_paths(self.forward_s[:-2], backward, backward - self.plain["weight_gradient"][:-2], self.head_s)

    @cached_property
    def least_host_s(self) -> Floats:
        """[8, K] The same seconds of the host, with 0 for the head."""
        forward, backward, weights = self._launches_s
        return self._on_paths(forward, backward, backward - weights, 0.0)

    def _on_paths(self, forward: Floats, backward: Floats, inputs: Floats, head: float) -> Floats:
        once = np.zeros((4, len(forward)))
        return np.concatenate([np.stack([forward, backward, inputs]), once, np.full((1, len(forward)), head)])

    @cached_property
    def least_forward_s(self) -> float:
        """Device seconds of the shortest layer's forward pass."""
        return float(self.forward_s[:-2].min(initial=np.inf)) if self.units.blocks else 0.0

    @cached_property
    def micro_batch_s(self) -> float:
        """Device seconds of both passes over all layers and both ends, without recompute."""
        return float(self.counts @ (self.forward_s + self.backward_s)[:-2]) + self.ends_s

    @cached_property
    def host_micro_batch_s(self) -> float:
        """Seconds in which the host launches both passes over all layers, without recompute."""
        return float(self.counts @ self._launches_s[:2].sum(axis=0))

    @cached_property
    def counts(self) -> Ints:
        """[K] Layers of each kind."""
        return np.bincount(np.array(self.units.layers, dtype=np.int64), minlength=len(self.units.blocks))

    @cached_property
    def again_of_kinds(self) -> Floats:
        """[R, K] Device seconds in which a backward pass computes and sends again what was not kept."""
        return self.backward_of_kinds - self.backward_s[:-2]

    @cached_property
    def head_s(self) -> float:
        """Device seconds of the head in both passes of a micro-batch."""
        return float(self.forward_s[-1] + self.backward_s[-1])

    @cached_property
    def embedding_s(self) -> float:
        """Device seconds of the embedding in both passes of a micro-batch."""
        return float(self.forward_s[-2] + self.backward_s[-2])

    @property
    def ends_s(self) -> float:
        """Device seconds of both ends in both passes of a micro-batch."""
        return self.embedding_s + self.head_s

    def kept_bytes(self, stages: StageTable) -> Floats:
        """[R, S] Bytes of activations of one micro-batch between its forward and its backward."""
        if self._some_layers:
            return self.kept @ stages.counts.T + kept_beside_layers(self.units, stages)
        return np.array([kept_bytes(self.units, kind, stages) for kind in self._kept_by], dtype=float)

    def temporary_bytes(self, stages: StageTable) -> Floats:
        """[2, R, S] Bytes at the peak of the layers' backward passes and at that of the head, beyond what is kept."""
        return np.array([temporary_bytes(self.units, kind, stages) for kind in self.recompute], dtype=float).swapaxes(
            0, 1
        )

    def freed_bytes(self, stages: StageTable) -> Ints:
        """[S] Bytes of the gap that the head leaves."""
        return self.units.head.memory.freed * stages.last

    def seconds(
        self,
        shardings: Shardings,
        which: list[int],
        m: int,
        stages: StageTable,
        passes_behind: Ints,
        bytes_per_s: float,
    ) -> dict[str, Floats]:
        """Seconds of stages (``StageCosts.seconds``, and the parts in ``BESIDE``) for some ways to shard states with equal traits and ``m``
        micro-batches: at or below the forecast, since collectives for several units count with the largest size they can have.

        ``passes_behind``: the most that ``stage_costs`` can get.
        """
        data = shardings.data(which[0], m)
        shared = shardings.shared(StageUnits.of(self.units, data.traits, stages), which, m)
        costs = stage_costs(self, shared, data, bytes_per_s, passes_behind)
        waited = costs.first_forward.get("weight_gather", np.zeros((1, 1, 1)))
        beside = waited, shared.gathers.of_stages(stages)[:, None], costs.forward["host"]
        return costs.seconds() | dict(zip(BESIDE, beside, strict=True))
