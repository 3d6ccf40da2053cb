"""Layouts with stages of different width, in addition to those whose cells are all alike.

Stages have one width within a group of devices, and different widths on different groups. The most promising ones, by the time of a layer on
each group at each width, are priced, and the fastest are improved layer by layer. Of the others only a loose bound is known, by the work of
their layers (``ShapeFloors.of_any_widths_s``).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import permutations, product
from typing import Any, NamedTuple

import numpy as np

from ahp.cached_method import cached_method
from ahp.cluster.cells import first_devices
from ahp.cluster.model import NodeGroup
from ahp.divisors import divisors
from ahp.errors import AhpError
from ahp.forecast import mixed_rules, rules
from ahp.forecast.priced import Priced
from ahp.plan import ContextMethod, Parallelism, StagePlace, validated
from ahp.search.fewest import fewest, said_plainly, with_all
from ahp.search.mixed.balance import share
from ahp.search.mixed.given import degrees
from ahp.search.mixed.space import one_per_rank
from ahp.search.pairs import Pair, by_time
from ahp.search.problem import Problem
from ahp.stage_place import Width

GIVEN = (
    "tensor_parallel_degree", "data_parallel_shard_degree", "stages", "layers_per_stage", "recomputed_layers_per_stage",
    "micro_batches_per_replica", "mesh_order", "pipeline_parallel_order",
)  # fmt: skip
"""Keys that set how wide stages are, or where they lie. Where the user gives one, no other widths are tried."""
ONE = ("expert_parallel_degree", "virtual_stages_per_rank")
"""Keys that must be 1 with stages of different width. Where the user gives more, no such layout is tried."""
MOST_STAGES = 4
"""The most stages of a group in each replica: many narrow stages wait longer than a few wide ones."""
FEW = (1, 2, 4, 8, 16, 32)
"""Sequences of a replica's micro-batch that are tried besides those of the fastest layouts with cells alike."""
LOOKED_AT, PRICED, IMPROVED, MOVES = 512, 64, 4, 12
"""How many of the most promising layouts are looked at, until so many fit and are priced; how many of the fastest are improved, and the most
layers moved. [Empirical] On three types of devices x 256 with compiled blocks the first 146 do not fit, and the 28th that does leads to the fastest plan."""


@dataclass(frozen=True)
class Side:
    """The stages of one group."""

    group: str
    stages: int
    width: Width
    layer_s: float
    """Seconds of the forward and backward pass of one layer for one micro-batch of a replica."""


class Common(NamedTuple):
    """What all stages have in common."""

    whole: int
    """Sequences in a replica's micro-batch."""
    replicas: int
    context: int = 1
    method: ContextMethod | None = None

    def layout(self, **keys: Any) -> Parallelism:
        """A layout with this way to share sequences, and further keys."""
        return Parallelism(context_parallel_degree=self.context, context_parallel_method=self.method, **keys)


class Promise(NamedTuple):
    """A layout before its layers are cut into stages, with the time that it promises."""

    pipeline_s: float
    """Seconds of the pipeline from its layers alone, as if all stages took equally long."""
    sides: tuple[Side, ...]
    common: Common


@dataclass(frozen=True)
class UnlikeWidths:
    """The layouts found with stages of different width."""

    fitting: list[Pair] = field(default_factory=list)
    """Layouts that fit, fastest first."""
    forecasts: int = 0


def unlike_widths(asked: Problem, ranked: Sequence[Pair], best_s: float = math.inf) -> UnlikeWidths:
    """Search near the sequences per micro-batch, replicas and context ranks of layouts with cells alike (``ranked``, fastest first).

    ``best_s``: a layout whose layers alone take as long or longer is not priced.
    """
    if not may_differ(asked):
        return UnlikeWidths()
    finder, best = _Finder(asked), list[Priced]()
    for promise in heapq.nsmallest(LOOKED_AT, finder.promising(ranked), key=lambda one: one.pipeline_s):
        if promise.pipeline_s >= best_s or len(best) >= PRICED:
            break
        if (found := finder.priced(finder.layout(promise))) is not None:
            best.append(found)
    best.sort(key=lambda one: one.forecast.step_time_s)
    improved = map(finder.improved, best[:IMPROVED])
    found = {one.parallelism: one.forecast for one in improved}
    return UnlikeWidths(by_time(found.items()), finder.forecasts)


def may_differ(asked: Problem) -> bool:
    """Whether the user and the model leave it to the search how wide each stage is."""
    given = asked.constraints.given
    alike = any(key in given for key in GIVEN) or any(given.get(key, 1) != 1 for key in ONE)
    return not alike and "balance_loss" not in asked.graph.config


def given_widths(asked: Problem) -> Parallelism | None:
    """The layout that the user gives together with the widths of its stages, which is then the only one; missing keys have their defaults.
    None where no width is given. Raises BadInput where it is not a valid layout."""
    given = asked.constraints.given
    if not any(stage.own_width for stage in given.get("stages", ())):
        return None
    return validated(Parallelism, {"activation_checkpoint": "auto", **degrees(given), **given}, "parallelism")


class _Finder:
    """Prices layouts of one problem."""

    def __init__(self, asked: Problem) -> None:
        self.asked, self.graph, self.prices = asked, asked.graph, asked.mixed_pricer
        self.forecasts = 0

    def promising(self, ranked: Sequence[Pair]) -> Iterator[Promise]:
        """Every number of stages on every group, at the fastest widths, in every order of the groups."""
        given = self.asked.constraints.given
        for common in self._commons([layout for layout, _ in ranked[:10]]):
            micro_batches, rest = divmod(self.asked.job.global_batch_size, common.whole * common.replicas)
            if rest:
                continue
            for used in self._used(common):
                stages = sum(side.stages for side in used)
                if len({side.width for side in used}) < 2 or stages > min(micro_batches, self.graph.num_layers):
                    continue
                if given.get("pipeline_parallel_degree", stages) != stages:
                    continue
                rate = sum(side.stages / side.layer_s for side in used)
                pipeline_s = (micro_batches + stages - 1) * self.graph.num_layers / rate
                for order in permutations(used):
                    yield Promise(pipeline_s, order, common)

    def _used(self, common: Common) -> Iterator[list[Side]]:
        """Every choice of stages on groups that can take part in one layout."""
        for groups in mixed_rules.together(self.asked.cluster):
            for sides in product(*(self.sides(group.name, common) for group in groups)):
                yield [side for side in sides if side is not None]

    def _commons(self, near: Sequence[Parallelism]) -> Iterator[Common]:
        """What all stages can have in common: the user's values, else those of the layouts ``near`` and small ones."""
        given = self.asked.constraints.given
        sizes = {layout.micro_batch_size * layout.data_parallel_shard_degree for layout in near} | {*FEW}
        replicas = {layout.data_parallel_replicate_degree for layout in near} | {1, 2}
        if (size := given.get("micro_batch_size")) is not None:
            sizes = {size}
        if (count := given.get("data_parallel_replicate_degree")) is not None:
            replicas = {count}
        every = product(sizes, replicas, self._ways(near))
        return (Common(whole, count, degree, method) for whole, count, (degree, method) in every)

    def _ways(self, near: Sequence[Parallelism]) -> list[tuple[int, ContextMethod | None]]:
        """Context-parallel degrees, each with its method; the user's, else 1, 2 and those of the fastest layouts with cells alike."""
        constraints = self.asked.constraints
        degree, method = constraints.context_parallel_degree, constraints.context_parallel_method
        ways: list[tuple[int, ContextMethod | None]] = [] if method else [(1, None)]
        if degree is None:
            ways.extend((2, way) for way in self.asked.context_methods(2) if method in (None, way))
            ways.extend((layout.context_parallel_degree, layout.context_parallel_method) for layout in near)
            return list(dict.fromkeys(ways))
        if degree == 1:
            return ways
        ways = [(degree, method)]
        return ways if method else [(degree, way) for way in self.asked.context_methods(degree)]

    @cached_method
    def sides(self, name: str, common: Common) -> list[Side | None]:
        """The two fastest widths with room on a group's devices, for each number of stages; None = the group has no stage."""
        group = next(group for group in self.asked.cluster.groups if group.name == name)
        found: list[Side | None] = [None]
        for stages in range(1, MOST_STAGES + 1):
            sides = [
                Side(name, stages, width, self._layer_s(name, common._replace(replicas=1), width))
                for width in self._widths(group, common)
                if first_devices(group, [math.prod(width) * common.context] * (stages * common.replicas)) is not None
            ]
            found += sorted(sides, key=lambda side: side.layer_s)[:2]
        return found

    def _widths(self, group: NodeGroup, common: Common) -> Iterator[Width]:
        degrees = [degree for degree in divisors(group.num_devices) if degree <= group.devices_per_node]
        for tensor in degrees:  # those that shapes have, so that a bound over their widths holds
            own = common.layout(tensor_parallel_degree=tensor)
            cell, engine = tensor * common.context, self.asked.engine
            if self.graph.sequence_length % cell or rules.context(self.graph, own, engine):
                continue
            if rules.tensor(self.graph, self.asked.job, own, engine):
                continue
            yield from ((shard, tensor) for shard in divisors(common.whole) if shard * cell <= group.num_devices)

    @cached_method
    def _layer_s(self, group: str, common: Common, width: Width) -> float:
        """Seconds of the forward and backward pass of one layer for one micro-batch of a replica, which does not depend on the number of
        replicas."""
        shard, tensor = width
        own = common.layout(
            data_parallel_shard_degree=shard,
            tensor_parallel_degree=tensor,
            enable_sequence_parallel=tensor > 1,
            pipeline_parallel_degree=2,
            micro_batch_size=common.whole // shard,
            zero_stage=1 if shard * common.context > 1 else 0,
        )
        layers = self.graph.num_layers
        cost = self.prices.stage_cost(own, group, (0, layers, False, False), micro_batches=1)
        return sum(cost.seconds[:2]) / layers

    def layout(self, promise: Promise) -> Parallelism:
        """The layout of a promise, with layers in proportion to the speed of its stages."""
        _, sides, common = promise
        places = [side for side in sides for _ in range(side.stages)]
        numbers = np.arange(1, self.graph.num_layers + 1)
        layers = share([1] * len(places), len(numbers), 1, [numbers / (1 / side.layer_s) for side in places])
        assert layers is not None, "there are no more stages than layers"
        split = any(side.width[1] > 1 for side in sides)
        given = self.asked.constraints.given
        return common.layout(
            data_parallel_replicate_degree=common.replicas,
            pipeline_parallel_degree=len(places),
            micro_batch_size=common.whole,
            zero_stage=given.get("zero_stage", 1 if any(side.width[0] * common.context > 1 for side in sides) else 0),
            enable_sequence_parallel=given.get("enable_sequence_parallel", split),
            stages=tuple(
                StagePlace(
                    group=side.group,
                    layers=count,
                    data_parallel_shard_degree=side.width[0],
                    tensor_parallel_degree=side.width[1],
                )
                for side, [count] in zip(places, layers, strict=True)
            ),
            **{key: given[key] for key in ("pipeline_parallel_schedule",) if key in given},
        )

    def priced(self, layout: Parallelism) -> Priced | None:
        """The layout with the lightest kind of recompute that fits and as few layers recomputed as possible; None if it cannot run or fit."""
        given = self.asked.constraints.given.get("activation_checkpoint")
        kinds = ("selective", "full") if given is None else (given,)
        each = [layout.model_copy(update={"activation_checkpoint": kind}) for kind in kinds]
        if not self._holds(each[-1]):
            return None
        for whole in each:
            try:
                if (lightest := self._lightest(whole)) is None:
                    continue
                self.forecasts += 1
                found = self.asked.priced(whole if given not in (None, lightest.activation_checkpoint) else lightest)
            except AhpError:
                continue
            if found.forecast.fits:
                return found if self.asked.constraints.admits(found.parallelism) else None
        return None

    def _holds(self, layout: Parallelism) -> bool:
        """Whether every cell fits with all layers recomputed. The cells of a stage are alike in all replicas."""
        try:
            return all(self.prices.cells_fit(layout)(0, [stage.layers for stage in layout.stages or ()]))
        except AhpError:
            return False

    def _lightest(self, layout: Parallelism) -> Parallelism | None:
        """The layout with the fewest layers recomputed for every cell to fit; None if a cell does not fit with all layers recomputed."""
        if layout.activation_checkpoint == "none":
            return layout
        stages, fits = layout.stages or (), self.prices.cells_fit(layout)
        layers = [stage.layers for stage in stages]
        if not all(fits(0, layers)):
            return None
        some = fewest(lambda numbers: fits(0, numbers), [0] * len(layers), layers)
        places = (
            stage.model_copy(update={"recomputed_layers": count}) for stage, count in zip(stages, some, strict=True)
        )
        return said_plainly(layout.model_copy(update={"stages": tuple(places)}))

    def improved(self, best: Priced) -> Priced:
        """The layout with layers moved from the slowest stage to another one while that helps, then in the other schedules."""
        best, key = self._moved_while_faster(best), "pipeline_parallel_schedule"
        if key in self.asked.constraints.given:
            return best
        layouts = (best.parallelism.model_copy(update={key: name}) for name in one_per_rank())
        others = (self.priced(with_all(layout)) for layout in layouts)
        return min([best, *filter(None, others)], key=lambda one: one.forecast.step_time_s)

    def _moved_while_faster(self, best: Priced) -> Priced:
        for _ in range(MOVES):
            times = [one.forward_s + one.backward_s for one in best.span.times]
            slowest = max(range(len(times)), key=times.__getitem__)
            others = sorted((s for s in range(len(times)) if s != slowest), key=times.__getitem__)
            for target in others[:2]:
                moved = self._moved(best.parallelism, slowest, target)
                better = None if moved is None else self.priced(moved)
                if better is not None and better.forecast.step_time_s < best.forecast.step_time_s:
                    best = better
                    break
            else:
                return best
        return best

    def _moved(self, layout: Parallelism, source: int, target: int) -> Parallelism | None:
        stages = list(layout.stages or ())
        if stages[source].layers == 1:
            return None
        for stage, more in ((source, -1), (target, 1)):
            stages[stage] = stages[stage].model_copy(update={"layers": stages[stage].layers + more})
        return with_all(layout.model_copy(update={"stages": tuple(stages)}))
