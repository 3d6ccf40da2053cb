"""What binds is named with its share, and its neighbours are real layouts, priced."""

from __future__ import annotations

import pytest

from ahp.errors import NotExpressible
from ahp.plan import Forecast, Parallelism
from ahp.report.binding import Binding, binding

from .test_tables import GIB, forecast

CAPACITY = 80 * GIB
COMPUTE = {"forward": 2.0, "backward": 4.0}


def found(
    layout: Parallelism, priced: Forecast, *, others: Forecast | None = None
) -> tuple[Binding, list[Parallelism]]:
    """What binds, with every neighbour forecast as ``others``; and the neighbours that were asked for."""
    asked: list[Parallelism] = []

    def price(other: Parallelism) -> Forecast:
        asked.append(other)
        if other.enable_sequence_parallel:
            raise NotExpressible("enable_sequence_parallel = True: the engine cannot (valid: False)")
        return others or forecast(step_s=5.0)

    return binding(layout, priced, CAPACITY, price, lambda *_: CAPACITY), asked


def test_computation_binds_and_the_largest_loss_is_named() -> None:
    layout = Parallelism(tensor_parallel_degree=4, data_parallel_shard_degree=2)
    step = COMPUTE | {"tensor_parallel": 1.0, "casts": 0.5, "slowest_rank": 2.5}
    told, asked = found(layout, forecast(10.0, step=step))
    assert (told.part, told.share) == ("compute", pytest.approx(0.6))
    assert {neighbour.part for neighbour in told.neighbours} == {"tensor_parallel"}
    assert "60 % of the step" in told.sentence
    assert "tensor-parallel collectives, 10 % (1.00 s)" in told.sentence
    assert [(one.tensor_parallel_degree, one.data_parallel_shard_degree) for one in asked] == [(4, 2), (2, 4)]
    refused, faster = told.neighbours
    assert (refused.verdict, refused.helps) == ("not possible: the engine cannot (valid: False)", False)
    assert (faster.verdict, faster.helps) == ("5.00 s a step, 50 % less; 60.0 of 80.0 GiB", True)
    assert told.relief is faster


def test_where_the_largest_part_stays_the_next_is_tried() -> None:
    layout = Parallelism(tensor_parallel_degree=4, data_parallel_shard_degree=2)
    step = COMPUTE | {"tensor_parallel": 1.0, "weight_gather": 0.8, "gradient_reduce": 0.7, "casts": 0.01}
    told, _ = found(layout, forecast(5.0, step=step), others=forecast(6.0))
    assert told.relief is None
    assert [(neighbour.part, neighbour.change) for neighbour in told.neighbours] == [
        ("tensor_parallel", "enable_sequence_parallel True"),
        ("tensor_parallel", "tensor_parallel_degree 2, data_parallel_shard_degree 4"),
        ("weight_gather", "zero_stage 2"),
        ("weight_gather", "micro_batch_size 2"),
    ]
    assert told.neighbours[-1].verdict == "6.00 s a step, 20 % more; 60.0 of 80.0 GiB"


def test_a_neighbour_that_takes_as_long_does_not_take_more_or_less() -> None:
    layout = Parallelism(tensor_parallel_degree=4, data_parallel_shard_degree=2)
    told, _ = found(layout, forecast(5.0, step=COMPUTE | {"tensor_parallel": 1.0}), others=forecast(5.0001))
    assert told.neighbours[-1].verdict == "5.00 s a step, as long; 60.0 of 80.0 GiB"


def test_what_is_larger_than_computation_binds() -> None:
    layout = Parallelism(pipeline_parallel_degree=4, micro_batch_size=2, layers_per_stage=(1, 1, 2, 4))
    told, asked = found(layout, forecast(16.0, step=COMPUTE | {"bubble": 9.0, "host": 1.0}))
    assert told.part == "bubble"
    assert told.sentence == "Pipeline bubble: 56 % of the step (9.00 s); computation is 38 %."
    assert [one.micro_batch_size for one in asked] == [1, 2, 2, 2]
    assert [one.pipeline_parallel_schedule for one in asked] == ["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "1F1B"]
    assert [one.layers_per_stage for one in asked] == [(1, 1, 2, 4), None, None, None]
    assert all(one.world_size == 4 for one in asked)


def test_nothing_but_computation() -> None:
    told, asked = found(Parallelism(), forecast(6.0, step=COMPUTE | {"optimizer": 0.01}))
    assert [neighbour.part for neighbour in told.neighbours] == ["compute"]
    assert "nothing else that a layout decides reaches 1.0 %" in told.sentence
    assert [one.micro_batch_size for one in asked] == [2]


@pytest.mark.parametrize(
    ("part", "layout", "changed"),
    [
        ("activations", Parallelism(micro_batch_size=2), ["selective", "full", 1]),
        ("temporaries", Parallelism(activation_checkpoint="full", data_parallel_shard_degree=2), [2]),
        ("optimizer_states", Parallelism(data_parallel_replicate_degree=4), [4, 2]),
        ("gathered_weights", Parallelism(data_parallel_shard_degree=4, zero_stage=1), [2, 2]),
    ],
)
def test_memory_binds_where_a_layout_does_not_fit(part: str, layout: Parallelism, changed: list[object]) -> None:
    used = {part: 90 * GIB, "context": GIB}
    told, asked = found(layout, forecast(memory=used, fits=False, fit_probability=0.01))
    assert told.part == "memory"
    assert {neighbour.part for neighbour in told.neighbours} == {part}
    assert told.share == pytest.approx(91 / 80)
    assert "91.0 of 80.0 GiB" in told.sentence
    assert "(90.0 GiB) would have to shrink by 11.0 GiB" in told.sentence
    before = layout.model_dump()
    differences = [{k: v for k, v in one.model_dump().items() if v != before[k]} for one in asked]
    assert [value in difference.values() for value, difference in zip(changed, differences, strict=True)] == [
        True
    ] * len(asked)
    assert all(neighbour.helps for neighbour in told.neighbours)


def test_a_neighbour_that_does_not_fit_is_no_help() -> None:
    full = forecast(step_s=1.0, memory={"activations": 100 * GIB}, fits=False, fit_probability=0.0)
    told, _ = found(Parallelism(activation_checkpoint="full"), forecast(step=COMPUTE | {"recompute": 2.0}), others=full)
    assert [neighbour.change for neighbour in told.neighbours] == [
        "activation_checkpoint selective",
        "activation_checkpoint none",
        "micro_batch_size 2",
    ]
    assert not any(neighbour.helps for neighbour in told.neighbours)
    assert told.neighbours[0].verdict == "does not fit: 100.0 of 80.0 GiB, probability 0.00"
    assert told.memory == "60.0 of 80.0 GiB, 20.0 GiB free; most is activations, 40.0 GiB"


def test_a_neighbour_without_recompute_counts_no_layers() -> None:
    some = Parallelism(activation_checkpoint="full", recomputed_layers_per_stage=(3,))
    told, asked = found(some, forecast(step=COMPUTE | {"recompute": 2.0}))
    assert told.neighbours[0].change == "activation_checkpoint selective, recomputed_layers_per_stage null"
    assert {one.recomputed_layers_per_stage for one in asked if one.activation_checkpoint != "full"} == {None}
