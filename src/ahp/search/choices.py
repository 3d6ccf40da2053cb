"""The values that each key of a layout can have, one key at a time, and why a single value is impossible."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ahp.arrays import Ints, Mask
from ahp.cached_method import cached_method
from ahp.cluster.domains import joined
from ahp.divisors import divisors
from ahp.engines.traits import Traits
from ahp.errors import BadInput, bad_input
from ahp.forecast import rules
from ahp.plan import Parallelism
from ahp.schedule.registry import PLAIN, SCHEDULES
from ahp.search.orders import Degrees, Order, Ordered, Orders, Within
from ahp.search.problem import Problem
from ahp.words import number_of

DEEPEST_UNEVEN_VIRTUAL = 8
"""Virtual stages per rank are tried up to here for any number of layers; more are tried only where all stages are even.
The bubble shrinks as 1/v while messages grow as v (arXiv 2104.04473, section 2.2): the gain is below 2 % of a step
from v = 8 to v = 9 even when pipeline degree and micro-batches are equal."""

NOWHERE = Within(1, 1, 1, (1, 0))
"""The placement given to degrees that no legal layout has: where their ranks would lie is not computed."""

RECOMPUTE = ("none", "selective", "full")
DEGREES = (
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "tensor_parallel_degree",
    "pipeline_parallel_degree",
    "context_parallel_degree",
)
"""The keys whose product is the number of devices."""


class ShardingChoice(NamedTuple):
    """How replicas share the states of the model, and how they lie on nodes."""

    replicate: int
    shard: int
    zero: int
    order: Order | None = None
    """The ``mesh_order``."""


class ScheduleChoice(NamedTuple):
    """How a pipeline is run."""

    schedule: str
    virtual: int


class Shared(NamedTuple):
    """The keys of a block that decide, together with a split, whether an engine can share states that way."""

    expert: int
    pipeline: int
    """2 for any number of pipeline ranks above 1."""
    context: int
    """Ranks of the context axis, which share states too: their number if experts are shared, else 2 for any number above 1."""
    tensor: int = 1
    """2 for any number of tensor-parallel ranks above 1."""
    sequence_parallel: int = 0

    @property
    def of_states(self) -> Shared:
        """These keys without those that only decide whether a configuration file can express the layout."""
        return Shared(*self[:3])


class MeshDegrees(NamedTuple):
    """Degrees whose product is the number of devices, and the expert and sequence-parallel degrees, which reuse their ranks."""

    tensor: int
    context: int
    pipeline: int
    expert: int
    sequence_parallel: int
    data: int

    @property
    def shared(self) -> Shared:
        ranks = self.context if self.expert > 1 else min(self.context, 2)
        return Shared(self.expert, min(self.pipeline, 2), ranks, min(self.tensor, 2), self.sequence_parallel)


class Mesh(NamedTuple):
    """What a block's layouts have in common, except for the micro-batch."""

    degrees: MeshDegrees
    within: Within
    splits: tuple[ShardingChoice, ...]
    """Ways to share states with this placement, legal or not."""


def zero_stages(given: Mapping[str, Any], shard: int, context: bool) -> list[int]:
    """The ZeRO stages that ``shard`` data-parallel ranks can have; ``context``: whether there are context ranks, which hold the same weights
    and can share states without such shards. ``given``: the keys that the user fixes."""
    free, stage = [1, 2, 3] if shard > 1 else [0, 1, 2, 3] if context else [0], given.get("zero_stage")
    if stage is None:
        return free
    # One rank shards nothing whatever the stage: a stage above 0 is kept only if the user fixes a shard degree of 1.
    return [stage] if stage in free or given.get("data_parallel_shard_degree") == 1 else []


class Choices:
    """The values that each key can have, and why a single value is impossible."""

    def __init__(self, asked: Problem) -> None:
        self.asked, self.given = asked, asked.constraints.given
        self.world = asked.cluster.num_devices
        some = "recomputed_layers_per_stage" in self.given
        self.recompute = self._values("activation_checkpoint", RECOMPUTE[1:] if some else RECOMPUTE)
        self.micro_batch = self._values("micro_batch_size", divisors(asked.job.global_batch_size))
        self.orders = Orders(joined(asked.cluster.groups[0]).devices_per_node, asked.refused_order)
        self.folds = self.folded(2, 2, 1, 1)
        """Whether the engine lays experts over tensor-parallel ranks at all, given the user's ``expert_tensor_parallel_degree``."""
        self._same_splits: dict[tuple[ShardingChoice, ...], tuple[ShardingChoice, ...]] = {}
        self._legal: dict[tuple[int, Shared], tuple[ShardingChoice, ...]] = {}

    def _values(self, key: str, free: Any) -> tuple[Any, ...]:
        return (self.given[key],) if key in self.given else tuple(free)

    def degrees(self) -> list[MeshDegrees]:
        """All degrees whose product is the number of devices. Raises BadInput if the user's constraints leave none."""
        for key in DEGREES:
            if key in self.given and self.world % self.given[key]:
                rule = f"must divide the {number_of(self.world, 'device')}"
                batch = self.asked.job.global_batch_size if key.startswith("data_parallel") else self.world
                raise bad_input(f"parallelism.{key}", self.given[key], rule, divisors(math.gcd(self.world, batch)))
        num_experts = self.asked.graph.config.get("num_experts")
        experts = self._values(
            "expert_parallel_degree", divisors(num_experts) if isinstance(num_experts, int) else (1,)
        )
        degrees = (self._values(key, divisors(self.world)) for key in (DEGREES[2], DEGREES[4], DEGREES[3]))
        shared = "context_parallel_method" in self.given
        found = [
            MeshDegrees(t, c, p, e, sequence, data)
            for t, c, p in product(*degrees)
            if c > 1 or not shared
            if self.world % (t * c * p) == 0 and self.splits(data := self.world // (t * c * p), c > 1)
            for e, sequence in product(experts, self._sequence_parallel(t))
        ]
        if not found:
            raise self._none_has()
        return found

    def meshes(self, degrees: list[MeshDegrees], broken: Mask) -> tuple[list[Mesh], Ints]:
        """Each way in which ranks with these degrees can lie on nodes, and the index of its degrees. ``broken`` degrees, which no legal layout
        has, get the usual order alone unless the user gives an order."""
        found, of, usual_alone = list[Mesh](), list[int](), "mesh_order" not in self.given
        for number, (one, wrong) in enumerate(zip(degrees, broken.tolist(), strict=True)):
            t, c, p, e, sequence, data = one
            if wrong and usual_alone:
                lying = ((NOWHERE, self.splits(data, c > 1)),)
            else:
                lying = self.lying(t, c, p, e, data, self.folded(t, e, sequence, data * c))
            found += [Mesh(one, within, splits) for within, splits in lying]
            of += [number] * len(lying)
        if not found:
            raise self._none_has()
        return found, np.array(of, dtype=np.int64)

    def _none_has(self) -> BadInput:
        keys = (*DEGREES, "zero_stage", "context_parallel_method", "mesh_order")
        fixed = {key: self.given[key] for key in keys if key in self.given}
        words = ", ".join(f"{key} {value}" for key, value in fixed.items())
        return BadInput(
            f"parallelism: no layout of {number_of(self.world, 'device')} has {words}; leave one of these keys to the search"
        )

    def _sequence_parallel(self, tensor: int) -> tuple[int, ...]:
        return tuple(map(int, self._values("enable_sequence_parallel", (False, True) if tensor > 1 else (False,))))

    @cached_method
    def splits(self, data: int, context: bool) -> tuple[ShardingChoice, ...]:
        """Ways to make ``data`` replicas share states; ``context``: whether each has several context ranks, which share states too."""
        replicate, shard, _, _, _ = (self._values(key, ()) for key in DEGREES)
        return tuple(
            ShardingChoice(data // s, s, zero)
            for s in shard or divisors(data)
            if data % s == 0 and (not replicate or data // s in replicate)
            for zero in zero_stages(self.given, s, context)
        )

    @cached_method
    def folded(self, tensor: int, expert: int, sequence: int, ranks: int) -> bool:
        """Whether the engine lays whole experts over tensor-parallel ranks; ``ranks``: those of the data and context axes."""
        layout = Parallelism(
            data_parallel_replicate_degree=ranks,
            tensor_parallel_degree=tensor,
            enable_sequence_parallel=bool(sequence),
            expert_parallel_degree=expert,
            expert_tensor_parallel_degree=self.given.get("expert_tensor_parallel_degree"),
        )
        return self.asked.traits(layout).experts.folded

    @cached_method
    def lying(
        self, tensor: int, context: int, pipeline: int, expert: int, data: int, folded: bool
    ) -> tuple[tuple[Within, tuple[ShardingChoice, ...]], ...]:
        """Ways to share states, grouped by where the devices of a replica lie; the usual place first."""
        found: dict[Within, list[ShardingChoice]] = {}
        shared = data * context * (tensor if folded else 1)
        expert = expert if shared % expert == 0 else 1  # otherwise no layout is legal
        ordered: dict[int, tuple[Ordered, ...]] = {}
        for replicate, shard, zero, _ in self.splits(data, context > 1):
            if shard not in ordered:
                degrees = Degrees((pipeline, replicate, shard, context, tensor), expert, folded)
                ordered[shard] = self.orders.different(degrees, self.given.get("mesh_order"))
            for order, within in ordered[shard]:
                found.setdefault(within, []).append(ShardingChoice(replicate, shard, zero, order))
        tuples = ((within, tuple(splits)) for within, splits in found.items())
        return tuple((within, self._same_splits.setdefault(splits, splits)) for within, splits in tuples)

    @cached_method
    def pipes(self, degree: int) -> tuple[ScheduleChoice, ...]:
        """Ways to run a pipeline of this degree. There is one way for degree 1, where the schedule has nothing to order."""
        name, virtual = self.given.get("pipeline_parallel_schedule"), self.given.get("virtual_stages_per_rank")
        if degree == 1:
            return (ScheduleChoice(PLAIN, virtual or 1),)
        layers, most = self.asked.graph.num_layers, self.asked.most_stages
        depths = [
            v
            for v in range(2, max(most // degree, 1) + 1)
            if v <= DEEPEST_UNEVEN_VIRTUAL or 0 in (layers % (degree * v), most % (degree * v))
        ]
        found = [ScheduleChoice(schedule.name, 1) for schedule in SCHEDULES.values() if schedule.fewest_virtual == 1]
        found += [
            ScheduleChoice(schedule.name, v)
            for schedule in SCHEDULES.values()
            for v in schedule.depths(depths if virtual is None else [virtual])
        ]
        kept = [pipe for pipe in found if name in (None, pipe.schedule) and virtual in (None, pipe.virtual)]
        return tuple(kept) or (ScheduleChoice(name or PLAIN, virtual or 1),)

    @cached_method
    def shared(self, of: MeshDegrees) -> Shared:
        """``of.shared``, one object for equal degrees."""
        return of.shared

    def legal_splits(self, splits: tuple[ShardingChoice, ...], mesh: Shared) -> tuple[ShardingChoice, ...]:
        """The legal ones of a mesh's splits; of ZeRO stages that the engine runs in the same way, only the first."""
        key = id(splits), mesh  # ``lying`` keeps the tuples, and equal ones are one object
        if key not in self._legal:
            self._legal[key] = tuple(
                split
                for split in splits
                if split.zero in self.legal_stages(split.replicate, split.shard, mesh)
                and not (split.order and self.orders.refused(split.order))
            )
        return self._legal[key]

    @cached_method
    def legal_stages(self, replicate: int, shard: int, mesh: Shared) -> tuple[int, ...]:
        """ZeRO stages that the engine can express for these replicas and shards; of stages it runs in the same way, only the first."""
        found: dict[Traits, int] = {}
        for zero in zero_stages(self.given, shard, mesh.context > 1):
            if not self.bad_split((replicate, shard, zero), mesh):
                found.setdefault(self.traits((replicate, shard, zero), mesh.of_states), zero)
        return tuple(found.values())

    @cached_method
    def legal_states(self, of: MeshDegrees) -> tuple[ShardingChoice, ...]:
        found: dict[tuple[int, int, int], ShardingChoice] = {}
        folded = self.folded(of.tensor, of.expert, of.sequence_parallel, of.data * of.context)
        for _, splits in self.lying(of.tensor, of.context, of.pipeline, of.expert, of.data, folded):
            for split in self.legal_splits(splits, self.shared(of)):
                found.setdefault(split[:3], split)
        return tuple(found.values())

    @cached_method
    def legal_pipes(self, pipeline: int, micro_batches: int) -> tuple[ScheduleChoice, ...]:
        return tuple(
            pipe
            for pipe in self.pipes(pipeline)
            if not (
                self.refused_pipe(pipe, pipeline)
                or self.bad_stages(pipe, pipeline)
                or self.bad_schedule(pipe, pipeline, micro_batches)
            )
        )

    @cached_method
    def legal_recompute(self, tensor: int, context: int, expert: int) -> tuple[str, ...]:
        return tuple(kind for kind in self.recompute if not self.bad_recompute(kind, tensor, context, expert))

    @cached_method
    def bad_recompute(self, kind: str, tensor: int, context: int, expert: int) -> str | None:
        """Why the engine cannot recompute like this with these degrees; None if it cannot run the degrees without recompute either."""
        if refused := self.refused(activation_checkpoint=kind):
            return refused
        lighter: dict[str, Any] = {
            "tensor_parallel_degree": tensor,
            "context_parallel_degree": context,
            "context_parallel_method": self.given.get("context_parallel_method"),
        }
        keys = {**lighter, "activation_checkpoint": kind}
        shared = self.asked.refused_experts(expert, **keys)
        if shared and not self.asked.refused_experts(expert, **lighter):
            return shared
        graph, engine = self.asked.graph, self.asked.engine
        broken = rules.context(graph, Parallelism(**keys), engine)
        return None if rules.context(graph, Parallelism(**lighter), engine) else broken

    @cached_method
    def refused_experts(self, expert: int, tensor: int, context: int) -> str | None:
        """Why the engine cannot share experts among this many ranks, whatever else they share."""
        if self.refused(tensor_parallel_degree=tensor):
            tensor = 1
        if self.refused(context_parallel_degree=context):
            context = 1
        return self.asked.refused_experts(expert, tensor_parallel_degree=tensor, context_parallel_degree=context)

    def refused_split(self, split: ShardingChoice, mesh: Shared) -> str | None:
        """Why the engine cannot share states or number ranks in this way."""
        refused = self.bad_split(split[:3], mesh)
        return refused or (None if split.order is None else self.orders.refused(split.order))

    @cached_method
    def refused(self, **keys: Any) -> str | None:
        """Why the engine cannot run a layout with these keys, whatever the others are."""
        return self.asked.refused(Parallelism(**keys))

    @cached_method
    def bad_split(self, split: tuple[int, int, int], mesh: Shared) -> str | None:
        """Why the engine cannot share states in this way, or why its configuration file cannot express it."""
        return self.refused_sharing(split, mesh.of_states) or self.asked.untold(self._sharing(split, mesh))

    @cached_method
    def refused_sharing(self, split: tuple[int, int, int], mesh: Shared) -> str | None:
        return self.asked.refused(self._sharing(split, mesh))

    @cached_method
    def traits(self, split: tuple[int, int, int], mesh: Shared) -> Traits:
        """The engine's traits when it shares states in this way."""
        layout = self._sharing(split, mesh)
        return self.asked.traits(layout)

    @cached_method
    def _sharing(self, split: tuple[int, int, int], mesh: Shared) -> Parallelism:
        """A layout that shares states in this way, with the other keys that decide whether the engine can run it."""
        degrees: dict[str, Any] = dict(zip((*DEGREES[:2], "zero_stage"), split, strict=True))
        return self._sharing_nothing(mesh).model_copy(update=degrees)

    @cached_method
    def _sharing_nothing(self, mesh: Shared) -> Parallelism:
        context = 1 if self.refused(context_parallel_degree=mesh.context) else mesh.context
        return Parallelism(
            context_parallel_degree=context,
            expert_parallel_degree=1 if self.refused_experts(mesh.expert, 1, 1) else mesh.expert,
            pipeline_parallel_degree=1 if self.bad_depth(mesh.pipeline) else mesh.pipeline,
            tensor_parallel_degree=1 if self.refused(tensor_parallel_degree=mesh.tensor) else mesh.tensor,
            enable_sequence_parallel=bool(mesh.sequence_parallel),
        )

    @cached_method
    def refused_pipe(self, pipe: ScheduleChoice, pipeline: int) -> str | None:
        """Why the engine cannot run a schedule, or why its configuration file cannot express it."""
        if self.bad_depth(pipeline):
            return None
        keys: dict[str, Any] = {
            "pipeline_parallel_degree": pipeline,
            "pipeline_parallel_schedule": pipe.schedule,
            "virtual_stages_per_rank": pipe.virtual,
        }
        some = self.given.get("recomputed_layers_per_stage")
        if some is not None and len(some) == pipeline * pipe.virtual:
            keys |= {"recomputed_layers_per_stage": some, "activation_checkpoint": self.recompute[-1]}
        return self.refused(**keys) or self.asked.untold(Parallelism(**keys))

    @cached_method
    def bad_depth(self, pipeline: int) -> str | None:
        """Why the engine cannot have this many pipeline ranks, or why its configuration file cannot express it."""
        layout = Parallelism(pipeline_parallel_degree=pipeline)
        return self.asked.refused(layout) or self.asked.untold(layout)

    @cached_method
    def bad_stages(self, pipe: ScheduleChoice, pipeline: int) -> str | None:
        """Why the model's layers cannot be cut into the stages of this pipeline; or None."""
        stages, given = pipeline * pipe.virtual, self.given.get("layers_per_stage")
        if stages > (most := max(self.asked.most_stages, 1)):
            return self._too_many_stages(most)
        if given is not None and sum(given) != self.asked.graph.num_layers:
            return f"layers_per_stage = {list(given)}: must sum to the model's {self.asked.graph.num_layers} layers"
        for key in ("layers_per_stage", "recomputed_layers_per_stage"):
            if (each := self.given.get(key)) is not None and stages != len(each):
                rule = "pipeline_parallel_degree x virtual_stages_per_rank must be the"
                return f"{key} = {list(each)}: {rule} {len(each)} entries of it"
        return self._bad_recomputed(pipe, pipeline)

    def _too_many_stages(self, most: int) -> str:
        """The reason, in terms of the keys that the user gave, so that it is the same for every degree."""
        layers, pipeline = self.asked.graph.num_layers, self.given.get("pipeline_parallel_degree", 1)
        if (virtual := self.given.get("virtual_stages_per_rank", 1)) > 1 and pipeline <= most:
            valid = most // max(pipeline, 2)
            rule = f"that many times pipeline_parallel_degree must not exceed {layers} layers"
            return f"virtual_stages_per_rank = {virtual}: {rule} (valid: {f'1 to {valid}' if valid > 1 else 1})"
        if pipeline > most:
            return f"pipeline_parallel_degree = {pipeline}: must not exceed {layers} layers (valid: 1 to {most})"
        return f"pipeline_parallel_degree x virtual_stages_per_rank must not exceed {layers} layers"

    def _bad_recomputed(self, pipe: ScheduleChoice, pipeline: int) -> str | None:
        some = self.given.get("recomputed_layers_per_stage")
        if some is None:
            return None
        layout = Parallelism(
            pipeline_parallel_degree=pipeline,
            virtual_stages_per_rank=pipe.virtual,
            layers_per_stage=self.given.get("layers_per_stage"),
            activation_checkpoint="full",
            recomputed_layers_per_stage=some,
        )
        return rules.recomputed(self.asked.graph.num_layers, self.asked.job, layout, self.asked.engine)

    @cached_method
    def bad_schedule(self, pipe: ScheduleChoice, pipeline: int, micro_batches: int) -> str | None:
        if micro_batches == 0:
            return None
        return rules.schedule(pipe.schedule, pipeline, pipe.virtual, micro_batches, in_torch=self.asked.torch_orders)
