"""Reasons name the part of the step that decides, with its number."""

from __future__ import annotations

import pytest

from ahp.plan import Forecast, Parallelism
from ahp.search.reasons import CHOICES, choice_words, decides, differences, does_not_fit, slower_because

GIB = 2**30


def forecast(step: dict[str, float], memory_gib: float = 60.0, probability: float = 1.0) -> Forecast:
    whole = sum(step.values())
    return Forecast(
        step_time_s=whole,
        step_time_low_s=whole * 0.9,
        step_time_high_s=whole * 1.1,
        tokens_per_s_per_device=1.0,
        mfu=0.5,
        mfu_peak="bf16",
        memory_allocated_bytes=1,
        memory_reserved_bytes=int(memory_gib * GIB),
        fit_probability=probability,
        fits=probability >= 0.95,
        step=step,
        memory={"activations": int(memory_gib * GIB * 2 / 3), "parameters": int(memory_gib * GIB / 3)},
    )


BEST = forecast({"compute": 5.0, "gradient_reduce": 0.1})


def test_the_largest_difference_is_the_reason() -> None:
    other = forecast({"compute": 5.1, "gradient_reduce": 0.4})
    assert differences(other, BEST)[0] == ("gradient_reduce", pytest.approx(0.3))
    assert slower_because(other, BEST) == "7.8 % slower: exposed gradient reduction 400 ms, 300 ms more"


def test_a_part_that_the_best_has_not() -> None:
    other = forecast({"compute": 5.0, "gradient_reduce": 0.1, "bubble": 0.5})
    assert slower_because(other, BEST) == "9.8 % slower: pipeline bubble 8.9 % of the step"
    other = forecast({"compute": 5.0, "tensor_parallel": 0.62, "gradient_reduce": 0.1})
    assert slower_because(other, BEST) == "12 % slower: tensor-parallel collectives 620 ms"


def test_a_tie_is_called_a_tie() -> None:
    other = forecast({"compute": 5.01, "gradient_reduce": 0.1}, memory_gib=70.0)
    assert slower_because(other, BEST) == "as fast within 0.2 %, 10.0 GiB more memory"
    assert slower_because(BEST, BEST) == "as fast"


def test_a_probability_below_the_one_that_is_asked_does_not_read_as_it() -> None:
    """``may not fit: 72.0 of 79.6 GiB, probability 0.95``, where 0.95 is enough."""
    assert does_not_fit(forecast({"compute": 1.0}, 72.0, 0.9496), 80 * GIB).endswith("probability 0.94")
    assert forecast({"compute": 1.0}, 72.0, 0.9501).fit_words == "0.95"


def test_what_does_not_fit_says_by_how_much() -> None:
    assert does_not_fit(forecast({"compute": 1.0}, 91.2, 0.0), 80 * GIB) == (
        "does not fit: 91.2 of 80.0 GiB, most of it activations 60.8 GiB"
    )
    assert (
        does_not_fit(forecast({"compute": 1.0}, 79.0, 0.7), 80 * GIB)
        == "may not fit: 79.0 of 80.0 GiB, probability 0.70"
    )


def test_choices_in_words() -> None:
    layout = Parallelism(
        data_parallel_replicate_degree=2, data_parallel_shard_degree=8, pipeline_parallel_degree=4, micro_batch_size=3
    )
    assert [choice_words(layout, name) for name, _ in CHOICES] == [
        "tensor parallel 1",
        "no sequence parallelism",
        "no context parallelism",
        "no expert parallelism",
        "pipeline 4",
        "1F1B",
        "ZeRO-3 over 8, 2 replicas",
        "mesh order pp > dp_replicate > dp_shard",
        "micro-batch 3",
        "no recompute",
    ]
    other = Parallelism(
        tensor_parallel_degree=2, enable_sequence_parallel=True, context_parallel_degree=2, expert_parallel_degree=4,
        pipeline_parallel_degree=2, pipeline_parallel_schedule="ZBVZeroBubble", virtual_stages_per_rank=2,
    )  # fmt: skip
    assert [choice_words(other, name) for name in ("sequence", "context", "experts", "schedule")] == [
        "sequence parallelism",
        "context parallel 2",
        "expert parallel 4",
        "ZBVZeroBubble with 2 stages per rank",
    ]
    assert choice_words(Parallelism(), "data") == "no data parallelism"
    assert choice_words(Parallelism(data_parallel_replicate_degree=4), "data") == "4 replicas"
    assert choice_words(Parallelism(activation_checkpoint="full"), "recompute") == "full recompute"


def test_a_decision_that_a_layout_does_not_have() -> None:
    assert not decides(Parallelism(), "schedule")
    assert not decides(Parallelism(), "sequence")
    assert decides(Parallelism(pipeline_parallel_degree=2), "schedule")
    assert decides(Parallelism(tensor_parallel_degree=2), "sequence")
    assert decides(Parallelism(), "pipeline")
    assert not decides(Parallelism(), "data")  # one device
    assert decides(Parallelism(tensor_parallel_degree=2), "data")
