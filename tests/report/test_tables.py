"""Tables and bars hold every figure that they were given, on a terminal and in a file."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, RenderableType

from ahp.plan import Forecast, Parallelism, Plan, Rejected
from ahp.report import tables

GIB = 2**30


def forecast(step_s: float = 6.57, **changed: object) -> Forecast:
    figures: dict = {
        "step_time_s": step_s,
        "step_time_low_s": step_s * 0.9,
        "step_time_high_s": step_s * 1.12,
        "tokens_per_s_per_device": 9970.4,
        "mfu": 0.523,
        "mfu_peak": "dense bf16",
        "memory_allocated_bytes": 55 * GIB,
        "memory_reserved_bytes": int(61.3 * GIB),
        "fit_probability": 0.99,
        "fits": True,
        "step": {"compute": step_s * 0.8, "bubble": step_s * 0.15, "gradient_reduce": step_s * 0.05, "optimizer": 0.0},
        "memory": {"activations": 40 * GIB, "parameters": 20 * GIB},
    }
    return Forecast(**{**figures, **changed})


def plan(layout: Parallelism, why: str, **kwargs: object) -> Plan:
    group = {"nodes": 8, "devices_per_node": 8, "device": {"memory_bytes": 80 * GIB}}
    return Plan(parallelism=layout, forecast=forecast(), cluster={"groups": [group]}, why=(why,), **kwargs)  # type: ignore[arg-type]


FLAT = plan(Parallelism(data_parallel_shard_degree=64), "fastest")
PIPED = plan(
    Parallelism(
        data_parallel_shard_degree=16,
        tensor_parallel_degree=2,
        pipeline_parallel_degree=2,
        virtual_stages_per_rank=4,
        micro_batch_size=3,
        activation_checkpoint="full",
    ),
    "8 % slower: pipeline bubble 9 %",
)


def drawn(what: RenderableType, width: int = 200) -> str:
    page = io.StringIO()
    Console(file=page, width=width, highlight=False).print(what)
    return page.getvalue()


def test_ranked_table_has_the_figures_of_every_plan() -> None:
    first, second = drawn(tables.ranked([FLAT, PIPED])).splitlines()[1:3]
    assert first.split()[:3] == ["1", "1x64", "3"]
    for words in ("6.57 s", "5.91 .. 7.36 s", "9,970", "52 %", "60.0 of 80.0 GiB", "chosen"):
        assert words in first
    for words in ("1x16", "2x4 Interleaved1F1B", " 3 ", "full", "8 % slower: pipeline bubble 9 %"):
        assert words in second


def test_bars_are_sorted_shares_of_the_whole() -> None:
    rows = tables.bars({"a": 1.0, "bubble": 3.0, "none": 0.0}, 4.0)
    assert rows == [("pipeline bubble", 3.0, 0.75), ("a", 1.0, 0.25)]
    lines = drawn(tables.time_bar(forecast())).splitlines()
    assert lines[0].startswith("step 6.57 s (5.91 .. 7.36 s)")
    assert [line.split("  ")[0].strip() for line in lines[1:]] == [
        "compute",
        "pipeline bubble",
        "exposed gradient reduction",
    ]
    lengths = [line.count("━") + line.count("╸") for line in lines[1:]]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == pytest.approx(0.8 * tables.BAR_CHARS, abs=1)


def test_memory_bar_names_what_is_free() -> None:
    text = drawn(tables.memory_bar(forecast(), 80 * GIB))
    assert "memory 60.0 of 80.0 GiB, fits with probability 0.99" in text
    assert "free" in text
    assert "20.0 GiB" in text
    over = drawn(tables.memory_bar(forecast(memory={"activations": 90 * GIB}), 80 * GIB))
    assert "free" not in over
    assert "112 %" in over


def test_rejected_layouts() -> None:
    loser = Rejected(parallelism=PIPED.parallelism, reason="does not fit: 91.2 of 80.0 GiB")
    text = drawn(tables.rejected(FLAT.model_copy(update={"rejected": (loser,)})))
    assert PIPED.parallelism.short() in text
    assert "does not fit: 91.2 of 80.0 GiB" in text


def test_a_pipe_is_not_wrapped_and_has_no_colours() -> None:
    page = io.StringIO()
    tables.console(page).print(tables.ranked([FLAT, PIPED]))
    assert len(page.getvalue().splitlines()) == 4
    assert "MFU against dense bf16" in page.getvalue()
    assert "\x1b" not in page.getvalue()


def test_the_fullest_rank_decides_the_capacity() -> None:
    groups = [
        {"nodes": 1, "devices_per_node": 8, "device": {"memory_bytes": 80 * GIB}},
        {"nodes": 2, "devices_per_node": 4, "device": {"memory_bytes": 24 * GIB}},
    ]
    for rank, expected in ((0, 80), (7, 80), (8, 24), (15, 24)):
        mixed = FLAT.model_copy(update={"cluster": {"groups": groups}, "forecast": forecast(fullest_rank=rank)})
        assert tables.capacity_bytes(mixed) == expected * GIB
