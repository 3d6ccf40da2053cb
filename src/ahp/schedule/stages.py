"""Which layers each pipeline stage holds, and which rank holds the stage."""

from __future__ import annotations

from ahp.errors import bad_input
from ahp.plan import Parallelism


def layers_of_stages(parallelism: Parallelism, num_layers: int, *, empty_ends: bool = False) -> tuple[int, ...]:
    """Blocks of each stage in pipeline order; they add up to ``num_layers``.

    ``layers_per_stage`` where it is given; else as even as can be. The embedding always belongs to the first stage and the
    head with the loss to the last, so the last stage is the last to take one layer more, and the first the last but one;
    of the others the later ones take it first, because fewer micro-batches wait there. ``empty_ends``: the first and
    the last stage may hold nothing but the embedding and the head. Raises BadInput when the layers do not go round.
    """
    stages = parallelism.num_stages
    if parallelism.layers_per_stage is not None:
        given = parallelism.layers_per_stage
        if sum(given) != num_layers:
            raise bad_input("layers_per_stage", list(given), f"sums to {sum(given)}, the model has {num_layers} layers")
        return given
    if stages == 1:
        return (num_layers,)
    if empty_ends and num_layers < stages <= num_layers + 2:
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
    starts = [sum(layers[:stage]) for stage in range(len(layers))]
    return tuple(range(start, start + count) for start, count in zip(starts, layers, strict=True))
