"""Which layers lie in which stages, for all stages at once.

Dims: S = stages, K = kinds of layers, L = layers of the longest stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ahp.arrays import Floats, Ints, Mask


@dataclass(frozen=True)
class StageTable:
    """The stages, each [S]. A stage that several pipelines have needs to be here only once."""

    start: Ints
    end: Ints
    """The layers are ``start`` to ``end`` - 1."""
    first: Ints
    """1 where the stage has the embedding, else 0."""
    last: Ints
    """1 where the stage has the head, else 0."""
    kinds: Ints
    """[S, L] The kind of each layer, in order; the number of kinds where the stage has no more layers."""
    num_recomputed: Ints
    """How many of the stage's first layers are recomputed, if any are."""
    counts: Ints
    """[S, K] Layers of each kind."""
    recomputed: Ints
    """[S, K] Recomputed layers of each kind."""

    @cached_property
    def layers(self) -> Ints:
        return self.end - self.start

    @cached_property
    def is_recomputed(self) -> Mask:
        """[S, L] Whether each layer is recomputed, if any are."""
        return np.arange(self.kinds.shape[1]) < self.num_recomputed[:, None]

    @cached_property
    def backwards(self) -> Ints:
        """[S, L] The stage's layers in the order of the backward pass; entries that are no layer stay at the end."""
        at = np.arange(self.kinds.shape[1])
        count = self.layers[:, None]
        return np.where(at < count, count - 1 - at, at)

    def of_layers(self, of_kinds: Floats) -> Floats:
        """[..., S, L] A figure of each layer, from one of each kind, [..., K]; 0 where there is no layer."""
        nothing = np.zeros((*of_kinds.shape[:-1], 1))
        return np.concatenate([of_kinds, nothing], axis=-1)[..., self.kinds]

    @classmethod
    def of(
        cls,
        layers: Sequence[int],
        num_kinds: int,
        stages: Sequence[tuple[int, int, bool, bool]],
        recomputed: Sequence[int] | None = None,
    ) -> StageTable:
        """``layers``: the kind of each layer of the model; ``stages``: start, end, is first, is last; ``recomputed``: how many of each
        stage's first layers are recomputed, None = all."""
        kinds = np.array(layers, dtype=np.int64)
        each = kinds[:, None] == np.arange(num_kinds)
        before = np.concatenate([np.zeros((1, num_kinds), dtype=np.int64), np.cumsum(each, axis=0)])
        start, end, first, last = np.array(stages, dtype=np.int64).T
        some = end if recomputed is None else np.minimum(start + np.array(recomputed, dtype=np.int64), end)
        at = start[:, None] + np.arange((end - start).max(initial=0))
        own = np.append(kinds, num_kinds)[np.where(at < end[:, None], at, len(kinds))]
        return cls(
            start, end, first, last, own, some - start, before[end] - before[start], before[some] - before[start]
        )
