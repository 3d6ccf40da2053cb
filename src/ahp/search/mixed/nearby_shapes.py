"""Shapes near a given one: a factor of two moved from one degree to another, or one choice changed.

Shapes are ordered by a lower bound that ignores memory, so hundreds of deep pipelines have low bounds but do not fit. Shapes near
a fast shape mostly fit too.
"""

from __future__ import annotations

from collections.abc import Iterator
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
        for found in dict.fromkeys(self._with(shape, changed) for changed in self._moves(shape)):
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

    def _moves(self, shape: Shape) -> Iterator[dict[str, Any]]:
        """The values that change in each move."""
        alike, degrees = shape.alike, {key: _values(shape)[key] for key in (*OF_ALIKE, *OF_SHAPE)}
        for more, less in permutations((*degrees, None), 2):
            if less is None or degrees[less] % 2 == 0:
                moved = {key: degrees[key] for key in (more, less) if key is not None}
                yield {key: 2 * n if key == more else n // 2 for key, n in moved.items()}
        yield from ({key: degrees[key] + by} for key in OF_SHAPE for by in (1, -1))
        yield from ({"micro_batch": size} for size in (2 * alike.micro_batch, alike.micro_batch // 2))
        yield from ({"recompute": kind} for kind in RECOMPUTE)
        yield from ({"zero": stage} for stage in self._stages(alike))
        yield from ({"method": method} for method in self._space.methods(alike.context))
        yield from ({"schedule": name} for name in self._space.schedules(shape.pipeline) if name != SEVERAL)

    def _stages(self, alike: Alike) -> list[int]:
        """ZeRO stages; only the lowest of those that the engine runs the same way."""
        if alike.shard * alike.context == 1:
            return []
        return [stage for stage in (1, 2, 3) if not self._space.is_twin(alike._replace(zero=stage))]

    def _with(self, shape: Shape, changed: dict[str, Any]) -> Shape:
        """The shape with changed values, and with the values that depend on them."""
        keys = _values(shape) | changed
        if "tensor" in changed:
            in_parts = shape.alike.sequence_parallel or shape.alike.tensor == 1
            keys["sequence_parallel"] = keys["tensor"] > 1 and in_parts
        if "shard" in changed:
            keys["zero"] = min(keys["shard"] - 1, max(shape.alike.zero, 1))
        if "context" in changed:
            methods = self._space.methods(keys["context"])
            keys["method"] = keys["method"] if keys["method"] in methods else methods[0]
        if "pipeline" in changed:
            schedules = self._space.schedules(max(keys["pipeline"], 1))  # none where the model cannot be cut
            stays = not schedules or shape.schedule in schedules
            keys["schedule"] = shape.schedule if stays else schedules[-1]
        of_shape = {key: keys.pop(key) for key in (*OF_SHAPE, "schedule")}
        return Shape(Alike(**keys), **of_shape)


def _values(shape: Shape) -> dict[str, Any]:
    return {**shape.alike._asdict(), **{key: getattr(shape, key) for key in (*OF_SHAPE, "schedule")}}
