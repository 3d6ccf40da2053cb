"""The space of layouts as a table: every combination is a row of NumPy columns, every rule is a mask over the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ahp.config import Constraints
from ahp.errors import BadInput, bad_input
from ahp.plan import Parallelism
from ahp.schedule import patterns

Column = NDArray[np.int64]
Mask = NDArray[np.bool_]

DEEPEST_UNEVEN_VIRTUAL = 8
"""Virtual stages per rank are tried up to here whatever the number of layers; beyond only where all stages are even.
The bubble shrinks as 1/v while messages grow as v (arXiv 2104.04473, section 2.2): the gain is below 2 % of a step
from v = 8 to v = 9 even when pipeline degree and micro-batches are equal."""

RECOMPUTE = ("none", "full")
DEGREES = (
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "tensor_parallel_degree",
    "pipeline_parallel_degree",
    "context_parallel_degree",
)
"""The keys whose product is the number of devices."""


@dataclass(frozen=True)
class Shape:
    """What of the model, the job and the cluster bounds the space."""

    num_devices: int
    num_layers: int
    global_batch_size: int


@dataclass(frozen=True)
class Rule:
    """A rule, and how many rows of the space break it (a row may break several)."""

    name: str
    says: str
    broken: int


@dataclass(frozen=True)
class Space:
    """Every combination of the searched keys for one world size, with the user's own fixed."""

    COLUMNS: ClassVar[tuple[str, ...]] = (
        "replicate", "shard", "zero", "tensor", "pipeline", "schedule", "virtual", "micro_batch", "recompute",
    )  # fmt: skip

    replicate: Column
    shard: Column
    zero: Column
    tensor: Column
    pipeline: Column
    virtual: Column
    schedule: Column
    """Index into ``patterns.GENERATED``."""
    micro_batch: Column
    recompute: Column
    """Index into ``recompute_names``."""
    shape: Shape
    recompute_names: tuple[str, ...] = RECOMPUTE
    fixed: tuple[tuple[str, Any], ...] = ()
    """Keys that are the same in every row: the user's own among those that are not searched."""

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def data_parallel(self) -> Column:
        return self.replicate * self.shard

    @cached_property
    def micro_batches(self) -> Column:
        """Micro-batches of each replica per step; 0 where the batch does not divide."""
        per_round = self.data_parallel * self.micro_batch
        return np.where(self.shape.global_batch_size % per_round == 0, self.shape.global_batch_size // per_round, 0)

    def row(self, index: int) -> Parallelism:
        """One row as a layout."""
        return Parallelism(
            data_parallel_replicate_degree=int(self.replicate[index]),
            data_parallel_shard_degree=int(self.shard[index]),
            zero_stage=int(self.zero[index]),
            tensor_parallel_degree=int(self.tensor[index]),
            pipeline_parallel_degree=int(self.pipeline[index]),
            pipeline_parallel_schedule=patterns.GENERATED[self.schedule[index]],  # type: ignore[arg-type]
            virtual_stages_per_rank=int(self.virtual[index]),
            micro_batch_size=int(self.micro_batch[index]),
            activation_checkpoint=self.recompute_names[self.recompute[index]],  # type: ignore[arg-type]
            **dict(self.fixed),
        )


def build(shape: Shape, constraints: Constraints | None = None) -> Space:
    """Every combination whose degrees multiply to the number of devices, the user's constraints kept.

    Raises:
        BadInput: constraints that no number of devices, or not this one, can meet.
    """
    given = constraints.given if constraints is not None else {}
    fixed = tuple(
        (key, given[key])
        for key in ("enable_sequence_parallel", "layers_per_stage", "context_parallel_degree", "expert_parallel_degree")
        if key in given
    )
    meshes = _meshes(shape, given)
    pipelines = {p: _pipelines(p, shape.num_layers, given) for p in {mesh[4] for mesh in meshes}}
    recompute_names = (given["activation_checkpoint"],) if "activation_checkpoint" in given else RECOMPUTE
    micro = [given["micro_batch_size"]] if "micro_batch_size" in given else divisors(shape.global_batch_size)
    outer = np.array([(*mesh, *pipe) for mesh in meshes for pipe in pipelines[mesh[4]]], dtype=np.int64)
    inner = np.array(list(product(micro, range(len(recompute_names)))), dtype=np.int64)
    table = np.concatenate([np.repeat(outer, len(inner), axis=0), np.tile(inner, (len(outer), 1))], axis=1)
    return Space(
        **{name: np.ascontiguousarray(table[:, i]) for i, name in enumerate(Space.COLUMNS)},
        shape=shape,
        recompute_names=recompute_names,
        fixed=fixed,
    )


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _meshes(shape: Shape, given: dict[str, Any]) -> list[tuple[int, int, int, int, int]]:
    """(replicate, shard, zero, tensor, pipeline) whose degrees multiply to the number of devices."""
    world = shape.num_devices
    for key in DEGREES:
        if key in given and world % given[key]:
            raise bad_input(f"parallelism.{key}", given[key], f"must divide the {world} devices", divisors(world))
    left = world // given.get("context_parallel_degree", 1)
    replicate, shard, tensor, pipeline = (
        [given[key]] if key in given else divisors(left) for key in DEGREES if key != "context_parallel_degree"
    )
    meshes = [
        (r, s, zero, t, p)
        for t, p, s in product(tensor, pipeline, shard)
        if left % (t * p * s) == 0 and (r := left // (t * p * s)) in replicate
        for zero in _zero_stages(s, given)
    ]
    if not meshes:
        fixed = {key: given[key] for key in (*DEGREES, "zero_stage") if key in given}
        words = ", ".join(f"{key} {value}" for key, value in fixed.items())
        raise BadInput(f"parallelism: no layout of {world} devices has {words}; free one of them")
    return meshes


def _zero_stages(shard: int, given: dict[str, Any]) -> list[int]:
    stage = given.get("zero_stage")
    if shard > 1:
        return [1, 2, 3] if stage is None else [stage] if stage > 0 else []
    # A shard degree of 1 shards nothing whatever the stage says: kept only where the user's own degrees leave no other.
    if not stage:
        return [0]
    return [stage] if given.get("data_parallel_shard_degree") == 1 else []


def _pipelines(degree: int, num_layers: int, given: dict[str, Any]) -> list[tuple[int, int]]:
    """(schedule, virtual stages) of one pipeline degree; without a pipeline the schedule has nothing to order."""
    names = patterns.GENERATED
    name, virtual = given.get("pipeline_parallel_schedule"), given.get("virtual_stages_per_rank")
    if degree == 1:
        schedules = [name] if name in names else ["1F1B"]
        return [(names.index(schedule), virtual or 1) for schedule in schedules]
    if name is not None and name not in names:
        raise bad_input("parallelism.pipeline_parallel_schedule", name, "is not generated yet", names)
    deepest = max(num_layers // degree, 1)
    depths = [v for v in range(2, deepest + 1) if v <= DEEPEST_UNEVEN_VIRTUAL or num_layers % (degree * v) == 0]
    pairs = [(schedule, 1) for schedule in names if schedule != "Interleaved1F1B"]
    pairs += [("Interleaved1F1B", v) for v in ([virtual] if virtual is not None else depths or [2])]
    if virtual is not None:
        pairs = [("Interleaved1F1B", virtual)] if virtual > 1 else [pair for pair in pairs if pair[1] == 1]
    return [(names.index(schedule), v) for schedule, v in pairs if name is None or schedule == name] or [
        (names.index(name or "1F1B"), virtual or 1)
    ]


def legal(space: Space, tensor_reason: Callable[[int], str | None]) -> tuple[Mask, tuple[Rule, ...]]:
    """The rows that break no rule, and the rules.

    Args:
        space: the table.
        tensor_reason: why a tensor degree is impossible for this model and engine, or None.
    """
    shape, stages = space.shape, space.pipeline * space.virtual
    fixed = dict(space.fixed)
    wrong_tensor, words = _by_value(space.tensor, tensor_reason)
    masks: list[tuple[str, str, Mask]] = [
        (
            "batch",
            f"global_batch_size {shape.global_batch_size} must divide by data-parallel degree x micro_batch_size",
            space.micro_batches == 0,
        ),
        ("tensor", words or "tensor_parallel_degree must divide what it splits", wrong_tensor),
        (
            "layers",
            f"pipeline_parallel_degree x virtual_stages_per_rank must not exceed {shape.num_layers} layers",
            (stages > shape.num_layers) & (stages > 1),
        ),
    ]
    if "layers_per_stage" in fixed:
        entries = fixed["layers_per_stage"]
        masks.append(
            (
                "layers_per_stage",
                f"pipeline_parallel_degree x virtual_stages_per_rank must be the {len(entries)} entries of it",
                stages != len(entries),
            )
        )
    masks.append(("schedule", *_schedule_rule(space)))
    ok = ~np.logical_or.reduce([mask for _, _, mask in masks])
    return ok, tuple(Rule(name, says, int(mask.sum())) for name, says, mask in masks)


def _schedule_rule(space: Space) -> tuple[str, Mask]:
    keys = np.stack([space.schedule, space.pipeline, space.virtual, space.micro_batches], axis=1)
    unique, where = np.unique(keys, axis=0, return_inverse=True)

    def reason(schedule: int, p: int, v: int, m: int) -> str | None:
        if m == 0 or (p == 1 and v == 1):
            return None
        return patterns.illegal_in_torch(patterns.GENERATED[schedule], p, v, m)

    reasons = [reason(*map(int, key)) for key in unique]
    mask = np.array([text is not None for text in reasons], dtype=bool)[where.reshape(-1)]
    return next(filter(None, reasons), "the schedule must suit the micro-batches"), mask


def _by_value(column: Column, reason: Callable[[int], str | None]) -> tuple[Mask, str | None]:
    """A mask from a reason that depends on one column alone, and the first reason."""
    values, where = np.unique(column, return_inverse=True)
    reasons = [reason(int(value)) for value in values]
    mask = np.array([text is not None for text in reasons], dtype=bool)[where.reshape(-1)]
    return mask, next(filter(None, reasons), None)


def only(space: Space, rows: Sequence[int] | NDArray[np.intp]) -> Space:
    """The space with some of its rows."""
    columns = {name: getattr(space, name)[rows] for name in Space.COLUMNS}
    return Space(**columns, shape=space.shape, recompute_names=space.recompute_names, fixed=space.fixed)
