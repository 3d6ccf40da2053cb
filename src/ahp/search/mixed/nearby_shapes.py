"""Shapes near a given one: a factor of two moved from one degree to another, or one choice changed.

Shapes are ordered by a lower bound that ignores memory, so hundreds of deep pipelines have low bounds but do not fit. Shapes near
a fast shape mostly fit too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from typing import Any

from ahp.search.choices import RECOMPUTE
from ahp.search.mixed.space import SEVERAL, Alike, MixedSpace, Shape

OF_ALIKE = ("tensor", "context", "shard")
OF_SHAPE = ("pipeline", "replicas")


class NearbyShapes:
    """The nearby shapes of one space."""

    def __init__(self, space: MixedSpace) -> None:
        self._space, self._legal = space, set(space.alike)

    def of(self, shape: Shape) -> Iterator[Shape]:
        """Legal shapes that differ in one move, each once, and always in the same order."""
        for found in dict.fromkeys(self._moved(shape)):
            if found != shape and self.legal(found):
                yield found

    def legal(self, shape: Shape) -> bool:
        """Whether the space has this shape."""
        return shape.alike in self._legal and self._in_grid(shape)

    def _in_grid(self, shape: Shape) -> bool:
        total = self._space.micro_batches(shape.alike)
        grid = self._space.grid(shape.alike.width, total)
        if shape.schedule not in self._space.schedules(shape.pipeline):
            return False
        there = (grid.pipeline == shape.pipeline) & (grid.replicas == shape.replicas)
        there &= self._space.runs(grid, shape.schedule, pipelined=shape.pipeline > 1)
        return bool(there.any())

    def _moved(self, shape: Shape) -> Iterator[Shape]:
        keys = (*OF_ALIKE, *OF_SHAPE, None)
        for more, less in permutations(keys, 2):
            degrees = {key: _degree(shape, key) for key in (more, less) if key is not None}
            if less is None or degrees[less] % 2 == 0:
                yield self._with(shape, {key: 2 * n if key == more else n // 2 for key, n in degrees.items()})
        for key in OF_SHAPE:
            yield self._with(shape, {key: _degree(shape, key) + 1})
            yield self._with(shape, {key: _degree(shape, key) - 1})
        alike = shape.alike
        yield from (
            self._with(shape, {"micro_batch": size}) for size in (2 * alike.micro_batch, alike.micro_batch // 2)
        )
        yield from (self._with(shape, {"recompute": kind}) for kind in RECOMPUTE)
        yield from (self._with(shape, {"zero": stage}) for stage in self._stages(alike))
        yield from (self._with(shape, {"method": method}) for method in self._space.methods(alike.context))
        names = (name for name in self._space.schedules(shape.pipeline) if name != SEVERAL)
        yield from (self._with(shape, {"schedule": name}) for name in names)

    def _stages(self, alike: Alike) -> list[int]:
        """ZeRO stages; only the lowest of those that the engine runs the same way."""
        if alike.shard * alike.context == 1:
            return []
        return [stage for stage in (1, 2, 3) if not self._space.is_twin(alike._replace(zero=stage))]

    def _with(self, shape: Shape, changed: dict[str, Any]) -> Shape:
        """The shape with changed values, and with the values that depend on them."""
        keys = {
            **shape.alike._asdict(),
            "pipeline": shape.pipeline,
            "replicas": shape.replicas,
            "schedule": shape.schedule,
        }
        keys |= changed
        if "tensor" in changed:
            keys["sequence_parallel"] = keys["tensor"] > 1 and (
                shape.alike.sequence_parallel or shape.alike.tensor == 1
            )
        if "shard" in changed:
            keys["zero"] = min(keys["shard"] - 1, max(shape.alike.zero, 1))
        if "context" in changed:
            methods = self._space.methods(keys["context"])
            keys["method"] = keys["method"] if keys["method"] in methods else methods[0]
        if "pipeline" in changed:
            schedules = self._space.schedules(max(keys["pipeline"], 1))  # none where the model cannot be cut
            stays = not schedules or shape.schedule in schedules
            keys["schedule"] = shape.schedule if stays else schedules[-1]
        of_shape = {key: keys.pop(key) for key in ("pipeline", "replicas", "schedule")}
        return replace(shape, alike=Alike(**keys), **of_shape)


def _degree(shape: Shape, key: str) -> int:
    return getattr(shape if key in OF_SHAPE else shape.alike, key)
