"""Which layers each pipeline stage holds, and which rank holds the stage."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Literal

from ahp.errors import bad_input
from ahp.plan import Parallelism

Ends = Literal["hold_layers", "may_be_empty", "count_as_layers"]
"""What the first and the last stage hold beside the embedding, and the head with the loss.

``hold_layers``: blocks, one at least. ``may_be_empty``: none where the layers do not go round otherwise.
``count_as_layers``: as many as are left when the embedding and the head are each taken for a layer.
"""


def layers_of_stages(parallelism: Parallelism, num_layers: int, *, ends: Ends = "hold_layers") -> tuple[int, ...]:
    """Blocks of each stage in pipeline order; they add up to ``num_layers``.

    ``layers_per_stage`` where it is given; else as even as can be. The embedding always belongs to the first stage and the
    head with the loss to the last, so the last stage is the last to take one layer more, and the first the last but one;
    of the others the later ones take it first, because fewer micro-batches wait there. Where the ends count as layers
    the first stages take one more (torchtitan's own cut, distributed/pipeline_parallel.py). Raises BadInput when the
    layers do not go round.
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
    """The layer indices of each stage, from the number of layers of each."""
    edges = accumulate(layers, initial=0)
    return tuple(range(start, end) for start, end in pairwise(edges))
