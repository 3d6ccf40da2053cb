"""Which layers each pipeline stage holds, and which rank holds the stage."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Literal

from ahp.errors import bad_input
from ahp.plan import Parallelism

Ends = Literal["hold_layers", "may_be_empty", "count_as_layers"]
"""What the first stage holds besides the embedding, and the last besides the head with the loss.

``hold_layers``: at least one block each. ``may_be_empty``: no blocks if there are too few for every stage.
``count_as_layers``: what is left of an even split in which the embedding and the head count as a layer each.
"""


def layers_of_stages(parallelism: Parallelism, num_layers: int, *, ends: Ends = "hold_layers") -> tuple[int, ...]:
    """Blocks of each stage in pipeline order; they add up to ``num_layers``.

    Given layers (``layers_per_stage``) are used as they are; else the split is as even as possible. The embedding always belongs
    to the first stage and the head with the loss to the last, so the last stage is the last to get an extra layer, and the first
    stage the second to last; among the others the later ones get it first, because fewer micro-batches wait there. With
    ``count_as_layers`` the first stages get it (torchtitan's own cut, distributed/pipeline_parallel.py). Raises BadInput when
    given layers do not add up, or there are too few for every stage.
    """
    stages = parallelism.num_stages
    given = parallelism.given_layers
    if given is not None:
        if sum(given) != num_layers:
            key = "layers_per_stage" if parallelism.stages is None else "stages.layers"
            raise bad_input(key, list(given), f"sums to {sum(given)}, the model has {num_layers} layers")
        return given
    if stages == 1:
        return (num_layers,)
    if ends == "count_as_layers" and stages <= num_layers + 2:
        least, more = divmod(num_layers + 2, stages)
        return tuple(least + (stage < more) - (stage in (0, stages - 1)) for stage in range(stages))
    if ends == "may_be_empty" and num_layers < stages <= num_layers + 2:
        return (0, *(1,) * (stages - 2), num_layers - stages + 2)
    if stages > num_layers:
        raise bad_input(
            "pipeline_parallel_degree",
            parallelism.pipeline_parallel_degree,
            f"x virtual_stages_per_rank {parallelism.virtual_stages_per_rank} = {stages} stages, "
            f"but the model has {num_layers} layers and every stage needs one",
            [d for d in range(1, num_layers + 1) if d * parallelism.virtual_stages_per_rank <= num_layers],
        )
    order = [*range(stages - 2, 0, -1), 0, stages - 1]
    more = set(order[: num_layers % stages])
    return tuple(num_layers // stages + (stage in more) for stage in range(stages))


def layer_ranges(layers: tuple[int, ...]) -> tuple[range, ...]:
    """The layer indices of each stage, from the number of layers per stage."""
    edges = accumulate(layers, initial=0)
    return tuple(range(start, end) for start, end in pairwise(edges))
