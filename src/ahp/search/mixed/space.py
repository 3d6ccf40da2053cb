"""The shapes of a mixed cluster: layouts without a placement of their cells (what all cells have in common, stages, replicas, schedule)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product, starmap
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ahp.arrays import Ints, Mask
from ahp.cached_method import cached_method
from ahp.cluster.cells import cells_of
from ahp.cluster.model import NodeGroup
from ahp.divisors import divisors
from ahp.engines.traits import Traits
from ahp.errors import BadInput
from ahp.forecast import mixed_rules, rules
from ahp.plan import Axis, ContextMethod, Parallelism, StagePlace
from ahp.schedule.registry import PLAIN, SCHEDULES
from ahp.schedule.registry import get as schedule_of
from ahp.search.choices import DEEPEST_UNEVEN_VIRTUAL, RECOMPUTE, ScheduleChoice, zero_stages
from ahp.search.degree_rules import of_tensor
from ahp.search.mixed.given import Given
from ahp.search.problem import OF_PLACEMENTS, Problem
from ahp.search.space import Rule
from ahp.stage_place import in_words

SEVERAL = "several"
"""Stands for all schedules with several stages per rank, which share one floor and one entry in the queue."""


def one_per_rank() -> list[str]:
    """The schedules with one stage per rank; those that hold the most come last."""
    found = [schedule for schedule in SCHEDULES.values() if schedule.fewest_virtual == 1]
    return [schedule.name for schedule in sorted(found, key=lambda s: (s.all_forwards_first, s.splits_backward))]


def all_forwards_first(schedule: str) -> bool:
    """Whether ranks do all forward passes first under this schedule; False for ``SEVERAL``."""
    return schedule != SEVERAL and schedule_of(schedule).all_forwards_first


def splits_backward(schedule: str) -> bool:
    """Whether this schedule splits the backward pass; False for ``SEVERAL``, where only some schedules do."""
    return schedule != SEVERAL and schedule_of(schedule).splits_backward


KEYS = (
    "tensor_parallel_degree", "enable_sequence_parallel", "context_parallel_degree", "expert_parallel_degree", "micro_batch_size",
    "data_parallel_shard_degree", "zero_stage", "activation_checkpoint", "context_parallel_method",
)  # fmt: skip
"""The keys of a layout that all cells have in common, in the order of ``Alike``."""

PLACED = frozenset({
    *KEYS, "data_parallel_replicate_degree", "pipeline_parallel_degree", "pipeline_parallel_schedule", "layers_per_stage", "stages",
    "micro_batches_per_replica", "recomputed_layers_per_stage", "virtual_stages_per_rank", "mesh_order",
})  # fmt: skip
"""Keys that a layout over several groups can have."""


SIZES = frozenset({
    "tensor_parallel_degree", "context_parallel_degree", "data_parallel_shard_degree", "expert_parallel_degree", "micro_batch_size",
})  # fmt: skip
"""Keys whose values are sizes, which ``NEAR`` compares."""

NEAR = 4
"""Two sizes are near each other if neither is more than this many times the other. [Empirical] On twelve mixed clusters, with a node less
and with 10 % more of each piece of hardware, a brief search of the whole space found nothing faster."""


class Alike(NamedTuple):
    """What all cells of a layout have in common."""

    tensor: int
    sequence_parallel: bool
    context: int
    expert: int
    micro_batch: int
    shard: int
    zero: int
    recompute: str
    method: ContextMethod | None = None
    """How context ranks compute attention, where the engine has a choice."""

    @property
    def width(self) -> int:
        """Devices per cell."""
        return self.shard * self.context * self.tensor


@dataclass(frozen=True)
class Shape:
    """A layout without the group of each cell, and without the layers and micro-batches that follow from the groups."""

    alike: Alike
    pipeline: int
    replicas: int
    schedule: str
    """The name of a schedule, or ``SEVERAL``."""

    def layout(self) -> Parallelism:
        """The degrees of this shape."""
        return layout_of(self.alike, self.pipeline, self.replicas, self.schedule)


def layout_of(alike: Alike, pipeline: int, replicas: int = 1, schedule: str = PLAIN) -> Parallelism:
    """Degrees without a placement. ``SEVERAL`` becomes the plainest schedule that has several stages per rank, with the fewest: two."""
    pipe = ScheduleChoice("Interleaved1F1B", 2) if schedule == SEVERAL else ScheduleChoice(schedule, 1)
    of_cells: dict[str, Any] = dict(zip(KEYS, alike, strict=True))
    return Parallelism(
        data_parallel_replicate_degree=replicas,
        pipeline_parallel_degree=pipeline,
        pipeline_parallel_schedule=pipe.schedule,  # type: ignore[arg-type]
        virtual_stages_per_rank=pipe.virtual,
        **of_cells,
    )


def shape_of(layout: Parallelism) -> Shape:
    """The shape of a layout, whatever its placement."""
    return Shape(
        Alike(*(getattr(layout, key) for key in KEYS)),
        layout.pipeline_parallel_degree,
        layout.data_parallel_replicate_degree,
        layout.pipeline_parallel_schedule if layout.virtual_stages_per_rank == 1 else SEVERAL,
    )


@dataclass(frozen=True)
class Grid:
    """The pairs of stages and replicas that cells of one width can make, [N] each."""

    pipeline: Ints
    replicas: Ints


class _Sizes(NamedTuple):
    """Micro-batch sizes for cells of one width."""

    micro_batches: list[int]
    """The legal sizes, in sequences."""
    shapes: dict[tuple[str, str] | None, tuple[int, int]]
    """Numbers of shapes (without a pipeline, with one), keyed by the rule that they break, or None."""


class MixedSpace:
    """The legal shapes of a problem, and how many other shapes break each rule."""

    def __init__(
        self, asked: Problem, near: Parallelism | None = None, groups: Sequence[NodeGroup] | None = None
    ) -> None:
        """``near``: leaves out shapes with a size more than ``NEAR`` times as large or as small as in this layout; ``groups``: the groups on
        which cells can lie, instead of all. Raises BadInput where given stages and replicas do not match each other, the model or the cluster."""
        self.asked, self.given, self.placed, self._near = asked, asked.constraints.given, Given(asked), near
        self._groups = asked.cluster.groups if groups is None else groups
        self.rules: dict[str, Rule] = {}
        self.size = 0
        """Shapes, legal or not."""
        self.legal = 0
        self.twins = 0
        """Pipelines that the engine runs like those of a lower ZeRO stage; not counted in ``size``."""
        self.alike = list(self._all_alike())

    @cached_method
    def cells(self, width: int) -> tuple[int, ...]:
        """Cells of each group; 0 where the group is not part of this space."""
        return tuple(cells_of(group, width) if group in self._groups else 0 for group in self.asked.cluster.groups)

    def micro_batches(self, alike: Alike) -> int:
        """Micro-batches of all replicas together."""
        return self.asked.job.global_batch_size // (alike.shard * alike.micro_batch)

    @cached_method
    def allowed(self, pipeline: int, schedule: str, total: int) -> NDArray[np.bool_]:
        """[M + 1] Whether a replica can have m micro-batches, for each m up to ``total``."""
        numbers = np.arange(total + 1)
        if schedule == SEVERAL:
            return np.logical_or.reduce([self.legal_pipe(pipe, pipeline, numbers) for pipe in self.pipes(pipeline)])
        if pipeline == 1:
            return numbers >= 1
        return self.legal_pipe(ScheduleChoice(schedule, 1), pipeline, numbers)

    @cached_method
    def schedules(self, pipeline: int) -> tuple[str, ...]:
        """The schedules that the engine has; just one without a pipeline, where there is nothing to order."""
        name = self.given.get("pipeline_parallel_schedule")
        if pipeline == 1:
            return (PLAIN,)
        one = one_per_rank() if self.placed.virtual in (None, 1) else ()
        found = tuple(s for s in one if name in (None, s) and not self._refused_schedule(ScheduleChoice(s, 1)))
        ranks = range(2, self.placed.num_stages or 3)
        return (*((SEVERAL,) if any(map(self.pipes, ranks)) else ()), *found)

    @cached_method
    def pipes(self, pipeline: int) -> tuple[ScheduleChoice, ...]:
        """The schedules with several stages on each of ``pipeline`` ranks."""
        name, virtual, every = self.given.get("pipeline_parallel_schedule"), self.placed.virtual, SCHEDULES.values()
        most = self.asked.graph.num_layers // max(pipeline, 1)
        free = range(2, min(most, DEEPEST_UNEVEN_VIRTUAL) + 1) if virtual is None else [virtual]
        found = [(s.name, v) for v in free for s in every if s.most_virtual is None]
        found += [(s.name, v) for s in every if s.most_virtual is not None for v in s.depths(())]
        return tuple(
            pipe
            for pipe in starmap(ScheduleChoice, found)
            if name in (None, pipe.schedule)
            and virtual in (None, pipe.virtual)
            and 1 < pipe.virtual <= most
            and self.placed.goes_round(pipe, pipeline)
            and not self._refused_schedule(pipe)
        )

    def legal_pipe(self, pipe: ScheduleChoice, pipeline: int, micro_batches: Ints) -> Mask:
        """Whether ``pipeline`` ranks can run each number of micro-batches under this schedule."""
        schedule = schedule_of(pipe.schedule)
        return schedule.runs(pipeline, pipe.virtual, micro_batches, in_torch=self.asked.torch_orders)

    @cached_method
    def grid(self, width: int, total: int) -> Grid:
        """Every pair of stages and replicas that the cells, the layers and the micro-batches allow."""
        there = self.cells(width)
        cells = sum(there)
        most = min(cells, max(self.asked.graph.num_layers, 1))
        given_p, given_r = self.given.get("pipeline_parallel_degree"), self.placed.num_replicas
        pairs = [
            (p, r) for p in range(1, most + 1) if given_p in (None, p) if self._has_axis("pp", p)
            for r in range(1, min(cells // p, total) + 1) if given_r in (None, r) if self._has_axis("dp_replicate", r)
            if self.placed.has_room(p, r, there)
        ]  # fmt: skip
        found = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        return Grid(found[:, 0], found[:, 1])

    def _has_axis(self, axis: Axis, degree: int) -> bool:
        """Whether a degree goes with the given mesh order, which names the axes with a degree above 1 (``Problem.check``: in the usual order)."""
        order = self.given.get("mesh_order")
        return order is None or (axis in order) == (degree > 1)

    def runs(self, grid: Grid, schedule: str, *, pipelined: bool) -> Mask:
        """[N] Whether a schedule can have the stages of each pair in the grid, whatever the micro-batches."""
        there = (grid.pipeline > 1) == pipelined
        if schedule == SEVERAL:
            return there & self._has_pipes(int(grid.pipeline.max(initial=0)))[grid.pipeline]
        if self.placed.virtual not in (None, 1):
            return there & False
        num_stages = self.placed.num_stages
        return there if num_stages is None else there & (grid.pipeline == num_stages)

    @cached_method
    def _has_pipes(self, most: int) -> Mask:
        """[P + 1] Whether p ranks can have several stages each, for each p up to ``most``."""
        return np.array([p > 1 and bool(self.pipes(p)) for p in range(most + 1)])

    def has_choice(self, alike: Alike) -> bool:
        """Whether stages can recompute fewer than all of their layers."""
        return alike.recompute != "none" and (self.placed.recomputed or "activation_checkpoint" not in self.given)

    def _all_alike(self) -> Iterator[Alike]:
        num_experts = self.asked.graph.config.get("num_experts")
        experts = divisors(num_experts) if isinstance(num_experts, int) else [1]
        degrees = sorted({d for group in self._groups for d in divisors(group.num_devices)})
        for tensor, context, shard in product(
            self._values("tensor_parallel_degree", degrees),
            self._values("context_parallel_degree", degrees),
            self._values("data_parallel_shard_degree", divisors(self.asked.job.global_batch_size)),
        ):
            may_share = context > 1 or "context_parallel_method" not in self.given
            named = self._has_axis("tp", tensor) and self._has_axis("cp", context) and self._has_axis("dp_shard", shard)
            if may_share and named and any(self.cells(tensor * context * shard)):
                yield from self._of_width(tensor, context, shard, experts)

    def _of_width(self, tensor: int, context: int, shard: int, experts: list[int]) -> Iterator[Alike]:
        sizes = self._sizes(tensor * context * shard, shard)
        kinds = self._values("activation_checkpoint", list(RECOMPUTE[self.placed.recomputed :]))
        for zero in zero_stages(self.given, shard, context > 1):
            for sequence in self._values("enable_sequence_parallel", [False, True] if tensor > 1 else [False]):
                for expert in self._values("expert_parallel_degree", experts):
                    each = (
                        Alike(tensor, bool(sequence), context, expert, 1, shard, zero, kind, method)
                        for kind, method in product(kinds, self.methods(context))
                    )
                    legal = [alike for alike in each if self._legal(alike, sizes)]
                    yield from (alike._replace(micro_batch=m) for m in sizes.micro_batches for alike in legal)

    def _sizes(self, width: int, shard: int) -> _Sizes:
        """The legal micro-batch sizes for cells of this width, and how many shapes are legal or break each rule."""
        batch, shares, legal = self.asked.job.global_batch_size, self.placed.shares, list[int]()
        shapes = dict[tuple[str, str] | None, tuple[int, int]]()
        for micro_batch in self._values("micro_batch_size", divisors(batch)):
            total, rest = divmod(batch, shard * micro_batch)
            rule, multiple = None, "must be a multiple of data_parallel_shard_degree x micro_batch_size"
            if rest:
                rule = "batch", f"global_batch_size {batch} {multiple}"
            elif shares is not None and sum(shares) != total:
                of_all = f"global_batch_size {batch} / (data_parallel_shard_degree x micro_batch_size)"
                rule = "micro-batches", f"micro_batches_per_replica = {list(shares)}: must sum to {of_all}"
            else:
                legal.append(micro_batch)
            (alone, piped), (more_alone, more) = shapes.get(rule, (0, 0)), self._count(width, max(total, 1))
            shapes[rule] = alone + more_alone, piped + more
        return _Sizes(legal, shapes)

    @cached_method
    def methods(self, context: int) -> list[ContextMethod | None]:
        """The methods by which ``context`` ranks can share a sequence."""
        if context == 1:
            return [None]
        return self._values("context_parallel_method", self.asked.context_methods(context))

    def _values(self, key: str, free: list[Any]) -> list[Any]:
        if key in self.given:
            return [self.given[key]]
        if self._near is None or key not in SIZES:
            return free
        there = getattr(self._near, key)
        return [size for size in free if there <= NEAR * size and size <= NEAR * there]

    def _not_placed(self) -> str | None:
        """Why a given key rules out layouts over several groups, in words; None where none does."""
        for key, value in self.given.items():
            if key not in PLACED and value is not None:
                return f"{key} = {value!r}: layouts over several groups of devices do not have it (valid: null)"
        return None

    def _legal(self, alike: Alike, sizes: _Sizes) -> bool:
        """Whether degrees are legal, whatever the micro-batch size; counts all shapes that have these degrees."""
        is_twin, broken = self.is_twin(alike), self._broken(alike)
        for of_sizes, (alone, piped) in sizes.shapes.items():
            self.twins += piped * is_twin
            shapes = alone + piped * (not is_twin)
            self.size += shapes
            if (rule := of_sizes or broken) is None:
                self.legal += shapes
            else:
                self._breaks(*rule, shapes)
        return broken is None

    def _broken(self, alike: Alike) -> tuple[str, str] | None:
        """The first rule that these degrees break, as (name, message)."""
        if (rule := self._broken_anyway(alike._replace(recompute="none"))) is not None:
            return rule
        refused = self.asked.refused(layout_of(alike, 1))
        return None if refused is None else ("engine", refused)

    @cached_method
    def _broken_anyway(self, alike: Alike) -> tuple[str, str] | None:
        """The first rule that these degrees break whatever is recomputed and whatever the engine can run."""
        graph, job, engine, layout = self.asked.graph, self.asked.job, self.asked.engine, layout_of(alike, 1)
        rules_of_degrees = (
            ("not placed", self._not_placed()),
            *self._of_tensor(alike.tensor, alike.sequence_parallel),
            ("sequence", rules.sequence(graph, layout)),
            ("context", rules.context(graph, layout, engine)),
            ("experts", rules.experts(graph, job, layout, engine)),
        )
        return next(((name, says) for name, says in rules_of_degrees if says is not None), None)

    @cached_method
    def _of_tensor(self, tensor: int, sequence: bool) -> tuple[tuple[str, str | None], ...]:
        """The rules for ranks that share products, whatever else they share."""
        layout = Parallelism(tensor_parallel_degree=tensor, enable_sequence_parallel=sequence)
        return tuple((name, reason(layout)) for name, reason, _ in of_tensor(self.asked))

    @cached_method
    def _count(self, width: int, total: int) -> tuple[int, int]:
        """Numbers of shapes with cells of this width: (without a pipeline, with one)."""
        grid = self.grid(width, total)
        alone = int(self.runs(grid, self.schedules(1)[0], pipelined=False).sum())
        piped = sum(int(self.runs(grid, schedule, pipelined=True).sum()) for schedule in self.schedules(2))
        return alone, piped

    def is_twin(self, alike: Alike) -> bool:
        """Whether the engine runs pipelines of this ZeRO stage like those of a lower one; False where the user gives the stage."""
        return self._twins(alike._replace(micro_batch=1, recompute="none"))

    @cached_method
    def _twins(self, alike: Alike) -> bool:
        if alike.zero < 2 or "zero_stage" in self.given:
            return False

        def traits(zero: int) -> list[Traits]:
            return [self.asked.traits(layout_of(alike._replace(zero=zero), 2, replicas)) for replicas in (1, 2)]

        return any(traits(alike.zero) == traits(zero) for zero in range(1, alike.zero))

    def _breaks(self, name: str, says: str, shapes: int) -> None:
        before = self.rules.get(name, Rule(name, says, 0))
        self.rules[name] = Rule(name, before.says, before.broken + shapes)

    def _refused_schedule(self, pipe: ScheduleChoice) -> str | None:
        return self.asked.refused(
            Parallelism(
                pipeline_parallel_degree=2,
                pipeline_parallel_schedule=pipe.schedule,  # type: ignore[arg-type]
                virtual_stages_per_rank=pipe.virtual,
            )
        )

    def refusal(self) -> str | None:
        """Why the engine can place no stages on groups, or None."""
        name = self.asked.cluster.groups[0].name
        layers = max(self.asked.graph.num_layers, 1)
        return self.asked.refused(Parallelism(stages=(StagePlace(group=name, layers=layers),)))


def spaces_of(asked: Problem, near: Parallelism | None = None) -> list[MixedSpace]:
    """One space for each set of groups that can take part in one layout. A group without a link to another one has none, because it is searched
    alone, unless placements are given. Raises BadInput as ``MixedSpace`` does."""
    placed = any(key in asked.constraints.given for key in OF_PLACEMENTS)
    parts = (groups for groups in mixed_rules.together(asked.cluster) if placed or len(groups) > 1)
    return [MixedSpace(asked, near, groups) for groups in parts]


def no_shape(spaces: Sequence[MixedSpace]) -> BadInput:
    """The error for a problem without a legal shape."""
    space = max(spaces, key=lambda one: one.size)
    worst = max((rule for rule in space.rules.values() if rule.broken), key=lambda rule: rule.broken, default=None)
    given = ", ".join(f"{key} = {in_words(value)}" for key, value in space.given.items())
    there = ", ".join(f"{group.num_devices} devices in {group.name}" for group in space.asked.cluster.groups)
    says = (
        worst.says if worst is not None else f"no stages and replicas on whole cells go with {given}, and with {there}"
    )
    return BadInput(f"parallelism: no legal layout over the groups of the cluster: {says}")
