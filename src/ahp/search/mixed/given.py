"""The stages and replicas that the user gives for a mixed cluster, refused where they do not match each other or the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ahp.errors import BadInput, bad_input
from ahp.forecast import mixed_rules, rules
from ahp.plan import Parallelism, validated
from ahp.schedule.patterns import stage_ranks
from ahp.search.choices import ScheduleChoice
from ahp.search.problem import Problem

OF_STAGES = ("stages", "layers_per_stage", "recomputed_layers_per_stage")
"""Keys with an entry for each stage."""

KEPT = (
    *OF_STAGES, "data_parallel_replicate_degree", "pipeline_parallel_degree", "virtual_stages_per_rank", "micro_batches_per_replica",
    "activation_checkpoint",
)  # fmt: skip
"""Keys that have to match each other, whatever the degrees of a cell."""


@dataclass(frozen=True)
class Fixed:
    """The parts of a placement that the user has given."""

    layers: tuple[int, ...] | None = None
    rows: tuple[tuple[int, ...], ...] | None = None
    """The group index of each rank, by replica."""
    micro_batches: tuple[int, ...] | None = None
    recomputed: tuple[tuple[int, ...], ...] | None = None
    """Layers that each stage recomputes, by replica."""

    def fewest_layers(self, num_stages: int) -> list[int]:
        """[S] The fewest layers of each stage: one, or as many as it recomputes."""
        return [max(1, *of) for of in zip(*self.recomputed, strict=True)] if self.recomputed else [1] * num_stages


class Given:
    """Keys of stages and replicas that the user has fixed."""

    def __init__(self, asked: Problem) -> None:
        """Raises BadInput."""
        self._asked, self._keys = asked, asked.constraints.given
        self.num_stages, self.num_replicas = _stages(self._keys), _replicas(self._keys)
        self.virtual: int | None = self._keys.get("virtual_stages_per_rank")
        """Stages per rank."""
        counts = (stage.recomputed_layers for stage in self._keys.get("stages", ()))
        self.recomputed = "recomputed_layers_per_stage" in self._keys or any(some is not None for some in counts)
        """Whether the user gives the number of recomputed layers."""
        kept = {key: value for key, value in self._keys.items() if key in KEPT}
        kind = {"activation_checkpoint": "full"} if self.recomputed else {}
        self._layout = validated(Parallelism, kind | degrees(self._keys) | kept, "parallelism")
        self.shares = self._layout.micro_batches_per_replica
        """Micro-batches of each replica."""
        self._check()

    def _check(self) -> None:
        self._check_groups()
        asked, layout = self._asked, self._layout
        if layout.given_layers is None:
            self._check_recomputed(layout.recomputed_layers_per_stage or ())
            layout = layout.model_copy(update={"recomputed_layers_per_stage": None})
        depth = self._keys.get("pipeline_parallel_degree", 1)  # with free depth a rank can have several stages
        shape = Parallelism(data_parallel_replicate_degree=self.num_replicas or 1, pipeline_parallel_degree=depth)
        broken = rules.stages(asked.graph, asked.job, layout, asked.engine)
        broken = broken or mixed_rules.devices(asked.cluster, shape)
        if broken is None and layout.stages is not None:
            broken = mixed_rules.used(asked.cluster, asked.job, layout)
        if broken is not None:
            raise BadInput(broken)

    def _check_groups(self) -> None:
        usable, idle = ([g.name for g in groups] for groups in (self._asked.cluster.groups, self._asked.left_out))
        for name in (name for stage in self._layout.stages or () for name in stage.groups(1)):
            rule = "no group of the cluster has this name"
            if name in idle:
                rule = f"its devices do not compute in {self._asked.job.precision}"
            if name not in usable:
                raise bad_input("stages.group", name, rule, usable)

    def _check_recomputed(self, some: tuple[int, ...]) -> None:
        needs, num_layers = sum(max(1, count) for count in some), self._asked.graph.num_layers
        if needs > num_layers:
            rule = f"stages with so many need {needs} layers, the model has {num_layers}"
            raise bad_input("recomputed_layers_per_stage", list(some), rule)

    def goes_round(self, pipe: ScheduleChoice, pipeline: int) -> bool:
        """Whether a schedule has as many stages as given, with all stages of a rank on one group."""
        if self.num_stages not in (None, pipeline * pipe.virtual):
            return False
        groups = [stage.groups(self.num_replicas or 1) for stage in self._layout.stages or ()]
        ranks = stage_ranks(pipe.schedule, pipeline, pipe.virtual) if groups else ()
        return all(of == groups[rank] for of, rank in zip(groups, ranks, strict=True))

    def has_room(self, pipeline: int, replicas: int, cells: Sequence[int]) -> bool:
        """Whether the groups have enough ``cells`` [G] for the given stages."""
        return all(
            sum(row.count(group) for row in self._rows(pipeline, replicas) or ()) <= count
            for group, count in enumerate(cells)
        )

    def _rows(self, pipeline: int, replicas: int) -> tuple[tuple[int, ...], ...] | None:
        """The group index of each rank, by replica."""
        if (stages := self._layout.stages) is None:
            return None
        numbers_of = {group.name: number for number, group in enumerate(self._asked.cluster.groups)}
        columns = [[numbers_of[name] for name in stage.groups(replicas)] for stage in stages[:pipeline]]
        return tuple(zip(*columns, strict=True))

    def fixed(self, pipeline: int, replicas: int) -> Fixed:
        """The given parts of a placement with this many ranks and replicas."""
        layout, rows = self._layout, self._rows(pipeline, replicas)
        each = layout.recomputed_layers_per_stage
        numbers = None if each is None else (each,) * replicas
        if each is None and self.recomputed:
            numbers = tuple(zip(*(stage.recomputed(replicas) for stage in layout.stages or ()), strict=True))
        return Fixed(layout.given_layers, rows, self.shares, numbers)


def _stages(keys: Mapping[str, Any]) -> int | None:
    """The number of stages, where the user gives a key with an entry for each."""
    return next((len(keys[key]) for key in OF_STAGES if key in keys), None)


def _replicas(keys: Mapping[str, Any]) -> int | None:
    """The number of replicas, where the user gives it or something with an entry for each."""
    each: list[tuple[str, Any]] = [("micro_batches_per_replica", keys.get("micro_batches_per_replica"))]
    for stage in keys.get("stages", ()):
        each += [("stages.group", stage.group), ("stages.recomputed_layers", stage.recomputed_layers)]
    numbers = [(key, len(said)) for key, said in each if isinstance(said, tuple)]
    if (degree := keys.get("data_parallel_replicate_degree")) is not None:
        numbers.append(("data_parallel_replicate_degree", degree))
    if len({number for _, number in numbers}) > 1:
        words = ", ".join(f"{key} of {number}" for key, number in dict.fromkeys(numbers))
        raise BadInput(f"parallelism: {words} replicas (valid: the same number)")
    return numbers[0][1] if numbers else None


def degrees(keys: Mapping[str, Any]) -> dict[str, int]:
    """The replicas, ranks and stages per rank that follow from the given keys, else one. Raises BadInput where replicas do not agree."""
    stages = _stages(keys)
    virtual, pipeline = keys.get("virtual_stages_per_rank"), keys.get("pipeline_parallel_degree")
    found = {"data_parallel_replicate_degree": max(_replicas(keys) or 1, 1)}
    if stages is not None and pipeline is None:
        found["pipeline_parallel_degree"] = max(stages // (virtual or 1), 1)
    if stages is not None and pipeline is not None and virtual is None:
        found["virtual_stages_per_rank"] = max(stages // pipeline, 1)
    return found
