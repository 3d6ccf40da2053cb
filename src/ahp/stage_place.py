"""One stage of a pipeline on a mixed cluster: where it lies, how much of the model it has, and how wide it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import Field

from ahp.divisors import divisors
from ahp.errors import nearest
from ahp.job import Record
from ahp.words import number_of


class StagePlace(Record):
    """One pipeline stage on a mixed cluster: on which devices, and how much of the model."""

    group: str | tuple[str, ...]
    """The name of a group of the cluster; or one name for each of the data_parallel_replicate_degree replicas."""
    layers: int = Field(ge=1)
    """Blocks of the stage, the same for every replica: else their gradients would not line up."""
    recomputed_layers: int | tuple[int, ...] | None = None
    """The number of the stage's first blocks that are recomputed as ``activation_checkpoint`` says; or one number for each replica.
    None = all blocks."""
    tensor_parallel_degree: int | None = Field(default=None, ge=1)
    """Degree of this stage; None = that of the layout."""
    data_parallel_shard_degree: int | None = Field(default=None, ge=1)
    """Degree of this stage: the ranks over which it divides each micro-batch of a replica; None = that of the layout."""

    def groups(self, num_replicas: int) -> tuple[str, ...]:
        """The group of the stage in each replica."""
        return (self.group,) * num_replicas if isinstance(self.group, str) else self.group

    def recomputed(self, num_replicas: int) -> tuple[int, ...]:
        """How many blocks each replica recomputes, if any are recomputed."""
        some = self.layers if self.recomputed_layers is None else self.recomputed_layers
        return (some,) * num_replicas if isinstance(some, int) else some

    @property
    def own_width(self) -> str:
        """``/dp2/tp4``: the degrees that the stage itself gives."""
        named = ("dp", self.data_parallel_shard_degree), ("tp", self.tensor_parallel_degree)
        return "".join(f"/{axis}{degree}" for axis, degree in named if degree is not None)

    def as_wide_as_the_layout(self) -> StagePlace:
        """The same without a width of its own."""
        return self.model_copy(update={"tensor_parallel_degree": None, "data_parallel_shard_degree": None})


def in_words(value: Any) -> Any:
    """The value of a key as users read it: stages by their groups."""
    return (
        [each.group if isinstance(each, StagePlace) else each for each in value] if isinstance(value, tuple) else value
    )


Width = tuple[int, int]
"""Shard and tensor degree."""


def widths_of(stages: Sequence[StagePlace] | None, layout: Width, ranks: int) -> tuple[Width, ...]:
    """The width of each pipeline rank, from the first stage that it holds. ``layout``: the width of stages that give none."""
    if stages is None:
        return (layout,) * ranks
    shard, tensor = layout
    return tuple(
        (stage.data_parallel_shard_degree or shard, stage.tensor_parallel_degree or tensor) for stage in stages[:ranks]
    )


def given_shards(data: Mapping[str, Any]) -> list[Any]:
    """The shard degrees of a layout and of its stages, in whatever form they were given."""
    stages, key = data.get("stages"), "data_parallel_shard_degree"
    places = stages if isinstance(stages, (list, tuple)) else ()
    own = (vars(p) if isinstance(p, StagePlace) else p if isinstance(p, dict) else {} for p in places)
    return [data.get(key, 1), *(place.get(key) for place in own)]


def check_places(stages: Sequence[StagePlace], ranks: int, virtual: int, replicas: int) -> None:
    """Raises ValueError if there are not as many stages as the layout has, or not as many groups as replicas."""
    groups = [stage.group if isinstance(stage.group, str) else list(stage.group) for stage in stages]
    if len(stages) != ranks * virtual:
        several = "" if virtual == 1 else f" x virtual_stages_per_rank {virtual}"
        raise ValueError(
            f"stages = {groups}: {len(stages)} stages, it needs {ranks * virtual}: pipeline_parallel_degree {ranks}{several}"
        )
    for named in groups:
        if isinstance(named, list) and len(named) != replicas:
            raise ValueError(
                f"stages.group = {named}: {len(named)} names, data_parallel_replicate_degree is {replicas}; it needs one "
                "for each replica, or a single name for all"
            )


def check_recomputed(stage: StagePlace, replicas: int) -> int | list[int] | None:
    """The number of layers that a stage recomputes, or a list with one number per replica. Raises ValueError if it is not possible."""
    some = stage.recomputed_layers
    if some is None:
        return None
    said = some if isinstance(some, int) else list(some)
    if isinstance(some, tuple) and len(some) != replicas:
        raise ValueError(
            f"stages.recomputed_layers = {said}: {len(some)} numbers, data_parallel_replicate_degree is {replicas}; it needs "
            "one for each replica, or a single number for all"
        )
    if not all(0 <= count <= stage.layers for count in stage.recomputed(replicas)):
        raise ValueError(
            f"stages.recomputed_layers = {said}: the stage has {stage.layers} layers (valid: 0 to {stage.layers})"
        )
    return said


def check_shards(widths: Iterable[Width], micro_batch_size: int, layout_shards: int, zero_stage: int) -> None:
    """Raises ValueError if the shards of a stage cannot divide a replica's micro-batch."""
    whole = micro_batch_size * layout_shards
    for shards, _ in widths:
        if zero_stage == 0 and shards > 1:
            raise ValueError(
                f"stages.data_parallel_shard_degree = {shards}: zero_stage 0 shards nothing (valid: 1; or zero_stage 1, 2 or 3)"
            )
        if whole % shards:
            raise ValueError(
                f"stages.data_parallel_shard_degree = {shards}: does not divide the {number_of(whole, 'sequence')} of a replica's micro-batch, "
                f"micro_batch_size {micro_batch_size} x data_parallel_shard_degree {layout_shards} of the layout (valid: "
                f"{', '.join(map(str, nearest(shards, divisors(whole))))})"
            )


def check_beside_unlike_widths(expert_degree: int, mesh_order: Sequence[str] | None, ranks: int) -> None:
    """Raises ValueError for settings that work only if all stages are as wide as the layout."""
    if expert_degree > 1:
        raise ValueError(
            f"expert_parallel_degree = {expert_degree}: with stages of unlike width the number of ranks that share the experts would "
            "differ between stages (valid: 1)"
        )
    if mesh_order is not None:
        raise ValueError(
            f"mesh_order = {list(mesh_order)}: ranks of stages of unlike width are numbered stage by stage (valid: null)"
        )
    if ranks == 1:
        raise ValueError(
            "stages.tensor_parallel_degree, stages.data_parallel_shard_degree: there is one stage, and the layout sets its width "
            "(valid: null)"
        )
