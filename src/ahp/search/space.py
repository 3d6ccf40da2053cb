"""The space of layouts: every combination of the searched keys, and the rules that leave some of them out.

The table is kept as a product. A block has one value of each key that a replica's devices share (tensor, context and
expert degree, sequence parallelism, pipeline degree) and of the micro-batch; so it has one number of replicas and of
micro-batches. Its rows are every way to shard the replicas, with every schedule, with every kind of recompute. No rule
looks at more than one of these four at once, but for what all of a block share: rules are masks over their values,
rows are counted by multiplication, and only what is legal is ever written out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ahp.errors import BadInput, bad_input
from ahp.forecast import rules
from ahp.plan import Parallelism
from ahp.schedule import patterns
from ahp.search.problem import Problem

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

DEEPEST_UNEVEN_VIRTUAL = 8
"""Virtual stages per rank are tried up to here whatever the number of layers; beyond only where all stages are even.
The bubble shrinks as 1/v while messages grow as v (arXiv 2104.04473, section 2.2): the gain is below 2 % of a step
from v = 8 to v = 9 even when pipeline degree and micro-batches are equal."""

RECOMPUTE = ("none", "selective", "full")
LOOPED = ("Interleaved1F1B", "InterleavedZeroBubble")
"""Schedules with any number of virtual stages."""

DEGREES = (
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "tensor_parallel_degree",
    "pipeline_parallel_degree",
    "context_parallel_degree",
)
"""The keys whose product is the number of devices."""


class Split(NamedTuple):
    """How replicas share the states of the model."""

    replicate: int
    shard: int
    zero: int


class Pipe(NamedTuple):
    """How a pipeline is run."""

    schedule: str
    virtual: int


@dataclass(frozen=True)
class Rule:
    """A rule, and how many rows of the space break it (a row may break several)."""

    name: str
    says: str
    broken: int


@dataclass(frozen=True)
class Rows:
    """The legal rows of a block: each split with each pipe with each kind of recompute, the last fastest."""

    splits: tuple[Split, ...]
    pipes: tuple[Pipe, ...]
    recompute: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.splits), len(self.pipes), len(self.recompute)

    def __len__(self) -> int:
        return len(self.splits) * len(self.pipes) * len(self.recompute)


@dataclass(frozen=True)
class Blocks:
    """One entry for each block with a legal row."""

    COLUMNS: ClassVar[tuple[str, ...]] = (
        "tensor", "context", "pipeline", "expert", "sequence_parallel", "data", "micro_batch", "micro_batches", "rows",
    )  # fmt: skip

    tensor: Ints
    context: Ints
    pipeline: Ints
    expert: Ints
    sequence_parallel: Ints
    """0 or 1."""
    data: Ints
    """Replicas that see different sequences: replicate x shard degree."""
    micro_batch: Ints
    micro_batches: Ints
    rows: Ints
    """Legal rows."""

    def __len__(self) -> int:
        return len(self.tensor)


class Space:
    """The legal layouts of a problem, and a count of the others by the rule that they break."""

    def __init__(self, choices: _Choices, blocks: Blocks, size: int, broken: tuple[Rule, ...]) -> None:
        self._choices = choices
        self.blocks = blocks
        self.size = size
        """Combinations whose degrees multiply to the number of devices, legal or not."""
        self.rules = broken

    @property
    def num_legal(self) -> int:
        return int(self.blocks.rows.sum())

    def rows(self, block: int) -> Rows:
        """The legal rows of one block."""
        of, at = self.blocks, block
        return self.legal_rows(int(of.data[at]), int(of.expert[at]), int(of.pipeline[at]), int(of.micro_batches[at]))

    def legal_rows(self, data: int, expert: int, pipeline: int, micro_batches: int) -> Rows:
        """The legal rows of every block with so many replicas, expert ranks, pipeline ranks and micro-batches."""
        return self._choices.legal_rows(data, expert, pipeline, micro_batches)

    def layout(self, block: int, row: int) -> Parallelism:
        """One row of one block as a layout."""
        rows = self.rows(block)
        split, pipe, recompute = (int(i) for i in np.unravel_index(row, rows.shape))
        return self.layout_of(block, rows.splits[split], rows.pipes[pipe], rows.recompute[recompute])

    def layout_of(self, block: int, split: Split, pipe: Pipe, recompute: str) -> Parallelism:
        """The layout of a block with these choices."""
        of = self.blocks
        return Parallelism(
            data_parallel_replicate_degree=split.replicate,
            data_parallel_shard_degree=split.shard,
            zero_stage=split.zero,
            tensor_parallel_degree=int(of.tensor[block]),
            enable_sequence_parallel=bool(of.sequence_parallel[block]),
            pipeline_parallel_degree=int(of.pipeline[block]),
            pipeline_parallel_schedule=pipe.schedule,  # type: ignore[arg-type]
            virtual_stages_per_rank=pipe.virtual,
            layers_per_stage=self._choices.given.get("layers_per_stage"),
            context_parallel_degree=int(of.context[block]),
            context_parallel_method=self._choices.given.get("context_parallel_method"),
            expert_parallel_degree=int(of.expert[block]),
            micro_batch_size=int(of.micro_batch[block]),
            activation_checkpoint=recompute,  # type: ignore[arg-type]
            recomputed_layers_per_stage=self._choices.given.get("recomputed_layers_per_stage"),
        )

    def __iter__(self) -> Iterator[Parallelism]:
        """Every legal layout."""
        for block in range(len(self.blocks)):
            for row in range(int(self.blocks.rows[block])):
                yield self.layout(block, row)


def build(asked: Problem) -> Space:
    """Every combination whose degrees multiply to the number of devices, the user's constraints kept.

    Raises:
        BadInput: constraints that no number of devices, or not this one, can meet.
    """
    choices = _Choices(asked)
    meshes = choices.meshes()
    table = np.array(meshes, dtype=np.int64)  # tensor, context, pipeline, expert, sequence_parallel, data
    micro, batch = np.array(choices.micro_batch), asked.job.global_batch_size
    per_round = table[:, [5]] * micro
    micro_batches = np.where(batch % per_round == 0, batch // per_round, 0)
    counted = _Counted(choices, meshes, micro_batches)
    legal = counted.legal()
    mesh, size = np.nonzero(legal)
    columns = [*(table[mesh, i] for i in range(6)), micro[size], micro_batches[mesh, size], legal[mesh, size]]
    blocks = Blocks(*(np.ascontiguousarray(column) for column in columns))
    return Space(choices, blocks, counted.size, tuple(counted.rules()))


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


class _Choices:
    """The values that each key may have, and why single values are impossible."""

    def __init__(self, asked: Problem) -> None:
        self.asked, self.given = asked, asked.constraints.given
        self.world = asked.cluster.num_devices
        some = "recomputed_layers_per_stage" in self.given
        self.recompute = self._values("activation_checkpoint", RECOMPUTE[1:] if some else RECOMPUTE)
        self.micro_batch = self._values("micro_batch_size", divisors(asked.job.global_batch_size))
        self.splits = cache(self._splits)
        self.pipes = cache(self._pipes)
        self.legal_rows = cache(self._legal_rows)
        self.refused = cache(self._refused)
        self.bad_split = cache(self._bad_split)
        self.bad_stages = cache(self._bad_stages)
        self.bad_schedule = cache(self._bad_schedule)
        self.bad_pipe = cache(self._bad_pipe)

    def _values(self, key: str, free: Any) -> tuple[Any, ...]:
        return (self.given[key],) if key in self.given else tuple(free)

    def meshes(self) -> list[tuple[int, int, int, int, int, int]]:
        """(tensor, context, pipeline, expert, sequence_parallel, data) whose degrees multiply to the devices."""
        for key in DEGREES:
            if key in self.given and self.world % self.given[key]:
                rule = f"must divide the {self.world} devices"
                raise bad_input(f"parallelism.{key}", self.given[key], rule, divisors(self.world))
        num_experts = self.asked.graph.config.get("num_experts")
        experts = self._values(
            "expert_parallel_degree", divisors(num_experts) if isinstance(num_experts, int) else (1,)
        )
        degrees = (self._values(key, divisors(self.world)) for key in (DEGREES[2], DEGREES[4], DEGREES[3]))
        shared = "context_parallel_method" in self.given
        found = [
            (t, c, p, e, sequence, data)
            for t, c, p in product(*degrees)
            if c > 1 or not shared
            if self.world % (t * c * p) == 0 and self.splits(data := self.world // (t * c * p))
            for e, sequence in product(experts, self._sequence_parallel(t))
        ]
        if not found:
            fixed = {
                key: self.given[key] for key in (*DEGREES, "zero_stage", "context_parallel_method") if key in self.given
            }
            words = ", ".join(f"{key} {value}" for key, value in fixed.items())
            raise BadInput(f"parallelism: no layout of {self.world} devices has {words}; free one of them")
        return found

    def _sequence_parallel(self, tensor: int) -> tuple[int, ...]:
        return tuple(map(int, self._values("enable_sequence_parallel", (False, True) if tensor > 1 else (False,))))

    def _splits(self, data: int) -> tuple[Split, ...]:
        """Ways to make ``data`` replicas share states."""
        replicate, shard, _, _, _ = (self._values(key, ()) for key in DEGREES)
        return tuple(
            Split(data // s, s, zero)
            for s in shard or divisors(data)
            if data % s == 0 and (not replicate or data // s in replicate)
            for zero in self._zero_stages(s)
        )

    def _zero_stages(self, shard: int) -> list[int]:
        stage = self.given.get("zero_stage")
        if shard > 1:
            return [1, 2, 3] if stage is None else [stage] if stage > 0 else []
        # A shard degree of 1 shards nothing whatever the stage says: kept only where the user's own degrees leave no other.
        if not stage:
            return [0]
        return [stage] if self.given.get("data_parallel_shard_degree") == 1 else []

    def _pipes(self, degree: int) -> tuple[Pipe, ...]:
        """Ways to run a pipeline of one degree; without one the schedule has nothing to order."""
        name, virtual = self.given.get("pipeline_parallel_schedule"), self.given.get("virtual_stages_per_rank")
        if degree == 1:
            return (Pipe(name or "1F1B", virtual or 1),)
        layers, most = self.asked.graph.num_layers, self.asked.most_stages
        depths = [
            v
            for v in range(2, max(most // degree, 1) + 1)
            if v <= DEEPEST_UNEVEN_VIRTUAL or 0 in (layers % (degree * v), most % (degree * v))
        ]
        found = [Pipe("GPipe", 1), Pipe("1F1B", 1), Pipe("InterleavedZeroBubble", 1)]
        found += [Pipe(schedule, v) for schedule in LOOPED for v in (depths if virtual is None else [virtual]) if v > 1]
        found += [Pipe(schedule, 2) for schedule in patterns.V_SHAPED]
        kept = [pipe for pipe in found if name in (None, pipe.schedule) and virtual in (None, pipe.virtual)]
        return tuple(kept) or (Pipe(name or "1F1B", virtual or 1),)

    def _legal_rows(self, data: int, expert: int, pipeline: int, micro_batches: int) -> Rows:
        return Rows(
            tuple(split for split in self.splits(data) if not self.bad_split(split, expert, pipeline)),
            tuple(pipe for pipe in self.pipes(pipeline) if not self.bad_pipe(pipe, pipeline, micro_batches)),
            tuple(kind for kind in self.recompute if not self.refused(activation_checkpoint=kind)),
        )

    def _refused(self, **keys: Any) -> str | None:
        """Why the engine cannot run a layout with these keys, whatever the others are."""
        return self.asked.refused(Parallelism(**keys))

    def refused_experts(self, expert: int, tensor: int, context: int) -> str | None:
        """Why the engine cannot share experts among so many ranks, whatever else they share."""
        if self.refused(tensor_parallel_degree=tensor):
            tensor = 1
        if self.refused(context_parallel_degree=context):
            context = 1
        return self.asked.refused_experts(expert, tensor_parallel_degree=tensor, context_parallel_degree=context)

    def _bad_split(self, split: Split, expert: int, pipeline: int) -> str | None:
        keys = {"data_parallel_replicate_degree": split.replicate, "data_parallel_shard_degree": split.shard}
        if self.refused(pipeline_parallel_degree=pipeline):
            pipeline = 1
        if self.refused_experts(expert, 1, 1):
            expert = 1
        return self.refused(
            **keys, zero_stage=split.zero, expert_parallel_degree=expert, pipeline_parallel_degree=pipeline
        )

    def refused_pipe(self, pipe: Pipe, pipeline: int) -> str | None:
        """Why the engine cannot run a schedule."""
        if self.refused(pipeline_parallel_degree=pipeline):
            return None
        keys: dict[str, Any] = {
            "pipeline_parallel_degree": pipeline,
            "pipeline_parallel_schedule": pipe.schedule,
            "virtual_stages_per_rank": pipe.virtual,
        }
        some = self.given.get("recomputed_layers_per_stage")
        if some is not None and len(some) == pipeline * pipe.virtual:
            keys |= {"recomputed_layers_per_stage": some, "activation_checkpoint": self.recompute[-1]}
        return self.refused(**keys)

    def _bad_stages(self, pipe: Pipe, pipeline: int) -> str | None:
        """Whether the layers go round."""
        stages, given = pipeline * pipe.virtual, self.given.get("layers_per_stage")
        if stages > max(self.asked.most_stages, 1):
            layers = self.asked.graph.num_layers
            return f"pipeline_parallel_degree x virtual_stages_per_rank must not exceed {layers} layers"
        if given is not None and sum(given) != self.asked.graph.num_layers:
            return f"layers_per_stage = {list(given)}: must sum to the model's {self.asked.graph.num_layers} layers"
        if given is not None and stages != len(given):
            return (
                f"layers_per_stage = {list(given)}: pipeline_parallel_degree x virtual_stages_per_rank must be the "
                f"{len(given)} entries of it"
            )
        return self._bad_recomputed(pipe, pipeline)

    def _bad_recomputed(self, pipe: Pipe, pipeline: int) -> str | None:
        some = self.given.get("recomputed_layers_per_stage")
        if some is None:
            return None
        if len(some) != pipeline * pipe.virtual:
            return (
                f"recomputed_layers_per_stage = {list(some)}: pipeline_parallel_degree x virtual_stages_per_rank must be the "
                f"{len(some)} entries of it"
            )
        layout = Parallelism(
            pipeline_parallel_degree=pipeline,
            virtual_stages_per_rank=pipe.virtual,
            layers_per_stage=self.given.get("layers_per_stage"),
            activation_checkpoint="full",
            recomputed_layers_per_stage=some,
        )
        return rules.recomputed(self.asked.graph.num_layers, self.asked.job, layout, self.asked.engine)

    def _bad_schedule(self, pipe: Pipe, pipeline: int, micro_batches: int) -> str | None:
        if micro_batches == 0:
            return None
        return rules.schedule(pipe.schedule, pipeline, pipe.virtual, micro_batches, in_torch=self.asked.torch_pipeline)

    def _bad_pipe(self, pipe: Pipe, pipeline: int, micro_batches: int) -> bool:
        reasons = self.refused_pipe(pipe, pipeline), self.bad_stages(pipe, pipeline)
        return any(reasons) or self.bad_schedule(pipe, pipeline, micro_batches) is not None


class _Counted:
    """Rows of each mesh and micro-batch, and how many of them break each rule; [M, K] for M meshes, K micro-batches."""

    def __init__(
        self, choices: _Choices, meshes: list[tuple[int, int, int, int, int, int]], micro_batches: Ints
    ) -> None:
        self.choices, self.meshes, self.micro_batches = choices, meshes, micro_batches
        self.num_recompute = len(choices.recompute)
        self.num_splits = np.array([len(choices.splits(mesh[5])) for mesh in meshes])
        self.num_pipes = np.array([len(choices.pipes(mesh[2])) for mesh in meshes])
        self.per_micro_batch = self.num_splits * self.num_pipes * self.num_recompute
        """[M] Rows of a mesh and one micro-batch."""
        self.size = int(self.per_micro_batch.sum()) * micro_batches.shape[1]
        self.wrong_mesh = np.zeros(len(meshes), dtype=bool)
        self.found: dict[str, tuple[str, int]] = {}

    def legal(self) -> Ints:
        """[M, K] Rows that break no rule; counts those that do."""
        asked = self.choices.asked
        graph, batch = asked.graph, asked.job.global_batch_size
        self._count(
            "batch",
            f"global_batch_size {batch} must divide by data-parallel degree x micro_batch_size",
            int(((self.micro_batches == 0) * self.per_micro_batch[:, None]).sum()),
        )
        self._of_mesh("tensor", lambda layout: rules.tensor(graph, layout), "tensor_parallel_degree")
        self._of_mesh(
            "sequence",
            lambda layout: rules.sequence(graph, layout),
            "tensor_parallel_degree",
            "enable_sequence_parallel",
        )
        self._of_mesh("context", lambda layout: rules.sequence(graph, layout), "context_parallel_degree")
        both = ("tensor_parallel_degree", "context_parallel_degree")
        self._of_mesh("attention", self._bad_attention, *both)
        ranks = ("data_parallel_replicate_degree", "context_parallel_degree")
        self._of_mesh("experts", lambda layout: rules.experts(graph, layout), "expert_parallel_degree", *ranks)
        for key in ("tensor_parallel_degree", "context_parallel_degree", "pipeline_parallel_degree"):
            self._of_mesh(f"engine: {key}", asked.refused, key)
        self._of_mesh(
            "engine: expert_parallel_degree",
            lambda layout: self.choices.refused_experts(
                layout.expert_parallel_degree, layout.tensor_parallel_degree, layout.context_parallel_degree
            ),
            "expert_parallel_degree",
            "tensor_parallel_degree",
            "context_parallel_degree",
        )
        tensor_too = ("tensor_parallel_degree", "enable_sequence_parallel")
        self._of_mesh("engine: enable_sequence_parallel", self._refused_with_sequence, *tensor_too)
        splits, pipes, recompute = self._good_splits(), self._good_pipes(), self._good_recompute()
        good = splits * ~self.wrong_mesh * recompute
        return np.where(self.micro_batches > 0, good[:, None] * pipes, 0)

    def rules(self) -> Iterator[Rule]:
        for name, (says, broken) in self.found.items():
            yield Rule(name, says, broken)

    def _count(self, name: str, says: str | None, broken: int) -> None:
        if says is not None and broken:
            before, already = self.found.get(name, (says, 0))
            self.found[name] = before, already + broken

    def _of_mesh(self, name: str, reason: Callable[[Parallelism], str | None], *keys: str) -> None:
        """A rule that looks at ``keys`` alone."""
        order = ("tensor_parallel_degree", "context_parallel_degree", "pipeline_parallel_degree",
                 "expert_parallel_degree", "enable_sequence_parallel", "data_parallel_replicate_degree")  # fmt: skip
        at = [order.index(key) for key in keys]
        values = [tuple(mesh[i] for i in at) for mesh in self.meshes]
        reasons = {}
        for value in dict.fromkeys(values):
            chosen: dict[str, Any] = dict(zip(keys, value, strict=True))
            reasons[value] = reason(Parallelism(**chosen))
        wrong = np.array([reasons[value] is not None for value in values])
        broken = int(self.per_micro_batch[wrong].sum()) * self.micro_batches.shape[1]
        self._count(name, next(filter(None, reasons.values()), None), broken)
        self.wrong_mesh |= wrong

    def _bad_attention(self, layout: Parallelism) -> str | None:
        asked = self.choices.asked
        method = self.choices.given.get("context_parallel_method")
        return rules.context(asked.graph, layout.model_copy(update={"context_parallel_method": method}), asked.engine)

    def _refused_with_sequence(self, layout: Parallelism) -> str | None:
        if not layout.enable_sequence_parallel:
            return None
        alone = self.choices.refused(tensor_parallel_degree=layout.tensor_parallel_degree)
        return None if alone else self.choices.asked.refused(layout)

    def _good_splits(self) -> Ints:
        """[M] Splits that the engine can express."""
        found = {}
        weight: dict[tuple[int, int, int], int] = {}
        for mesh, pipes in zip(self.meshes, self.num_pipes, strict=True):
            key = mesh[5], mesh[3], mesh[2]
            weight[key] = weight.get(key, 0) + int(pipes) * self.num_recompute * self.micro_batches.shape[1]
        for (data, expert, pipeline), rows in weight.items():
            reasons = [self.choices.bad_split(split, expert, pipeline) for split in self.choices.splits(data)]
            found[data, expert, pipeline] = reasons.count(None)
            for text in filter(None, reasons):
                self._count(f"engine: {text.split(' = ')[0]}", text, rows)
        return np.array([found[mesh[5], mesh[3], mesh[2]] for mesh in self.meshes])

    def _good_pipes(self) -> Ints:
        """[M, K] Ways to run the pipeline that the engine can express, the layers allow and the micro-batches suit."""
        pipeline = np.array([mesh[2] for mesh in self.meshes])
        rows = np.broadcast_to((self.num_splits * self.num_recompute)[:, None], self.micro_batches.shape)
        good = np.zeros(self.micro_batches.shape, dtype=np.int64)
        for p in np.unique(pipeline):
            of_p = pipeline == p
            counts, weights = self.micro_batches[of_p], rows[of_p]
            found = np.zeros(counts.shape, dtype=np.int64)
            for pipe in self.choices.pipes(int(p)):
                refused, stages = self.choices.refused_pipe(pipe, int(p)), self.choices.bad_stages(pipe, int(p))
                self._count("engine: pipeline_parallel_schedule", refused, int(weights.sum()))
                self._count("layers", stages, int(weights.sum()))
                for m in np.unique(counts):
                    of_m = counts == m
                    wrong = self.choices.bad_schedule(pipe, int(p), int(m))
                    self._count("schedule", wrong, int(weights[of_m].sum()))
                    found += of_m & (not (refused or stages or wrong))
            good[of_p] = found
        return good

    def _good_recompute(self) -> int:
        reasons = [self.choices.refused(activation_checkpoint=kind) for kind in self.choices.recompute]
        for text in filter(None, reasons):
            self._count("engine: activation_checkpoint", text, self.size // self.num_recompute)
        return reasons.count(None)
