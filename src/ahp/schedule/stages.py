"""Which layers each pipeline stage holds, and which rank holds the stage."""

from __future__ import annotations

from ahp.errors import bad_input
from ahp.plan import Parallelism


def layers_of_stages(parallelism: Parallelism, num_layers: int) -> tuple[int, ...]:
    """Blocks of each stage in pipeline order; they add up to ``num_layers``.

    ``layers_per_stage`` where it is given; else as even as can be, the first stages taking one layer more.
    The embedding always belongs to the first stage and the head with the loss to the last. Raises BadInput
    when the layers do not go round.
    """
    stages = parallelism.num_stages
    if parallelism.layers_per_stage is not None:
        given = parallelism.layers_per_stage
        if sum(given) != num_layers:
            raise bad_input("layers_per_stage", list(given), f"sums to {sum(given)}, the model has {num_layers} layers")
        return given
    if stages == 1:
        return (num_layers,)
    if stages > num_layers:
        raise bad_input(
            "pipeline_parallel_degree",
            parallelism.pipeline_parallel_degree,
            f"x virtual_stages_per_rank {parallelism.virtual_stages_per_rank} = {stages} stages, "
            f"but the model has {num_layers} layers and every stage needs one",
            [d for d in range(1, num_layers + 1) if d * parallelism.virtual_stages_per_rank <= num_layers],
        )
    return tuple(num_layers // stages + (1 if stage < num_layers % stages else 0) for stage in range(stages))


def layer_ranges(layers: tuple[int, ...]) -> tuple[range, ...]:
    """The layer indices of each stage, from the number of layers of each."""
    starts = [sum(layers[:stage]) for stage in range(len(layers))]
    return tuple(range(start, start + count) for start, count in zip(starts, layers, strict=True))
