"""Tables and bars hold every figure that they were given, on a terminal and in a file."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console, RenderableType

from ahp.cluster.model import Cluster
from ahp.plan import Forecast, Parallelism, Plan
from ahp.report import glossary, tables
from ahp.report.ranked import Ranked

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
    same, _, first, second = drawn(Ranked([FLAT, PIPED])).splitlines()[:4]
    assert same == "All rows: zero 3"
    assert first.split()[:3] == ["1", "1x64", "1"]
    for words in ("6.57 s", "5.91 .. 7.36 s", "638 k", "9,970", "52 %", "60.0", "chosen"):
        assert words in first
    for words in ("1x16", "2x4 Interleaved1F1B", " 3 ", "full", "8 % slower: pipeline bubble 9 %"):
        assert words in second


def test_where_a_terminal_is_narrow_reasons_stand_below_their_rows() -> None:
    for width in (80, 120):
        lines = drawn(Ranked([FLAT, PIPED]), width).splitlines()
        assert max(map(len, lines)) <= width
        assert lines[0] == "All rows: zero 3"
        assert lines[1].split()[-2:] == ["MFU", "GiB"]
        assert any("GiB = memory of the fullest rank, of 80.0;" in line for line in lines)
        assert "5.91-7.36 s" in lines[2]
        assert lines[3].split()[:3] == ["2", "1x16", "2"]
        assert lines[4] == "    Interleaved1F1B; 8 % slower: pipeline bubble 9 %"


def test_wide_has_every_column_and_each_plan_on_a_line() -> None:
    page = io.StringIO()
    Console(file=page, width=80, highlight=False).print(Ranked([FLAT, PIPED], wide=True), crop=False)
    lines = page.getvalue().splitlines()
    assert lines[0].split()[:4] == ["#", "dp", "zero", "tp"]
    assert "tok/s/device" in lines[0]
    assert lines[1].split()[:3] == ["1", "1x64", "3"]
    assert lines[2].endswith("8 % slower: pipeline bubble 9 %")


def test_a_sentence_is_broken_between_its_clauses_and_never_within_a_quantity() -> None:
    words = "the rest takes at least 56.5 s; stages cut otherwise: at least 50.4 s; 1,106 tokens/s"
    assert tables.lines_of(words, 48) == [
        "the rest takes at least 56.5 s;",
        "stages cut otherwise: at least 50.4 s;",
        "1,106 tokens/s",
    ]
    for width in range(20, 90):
        lines = tables.lines_of(words, width)
        assert max(map(len, lines)) <= width
        assert " ".join(lines) == words
        assert not any(line.startswith("s;") for line in lines)
    assert tables.lines_of("", 40) == [""]
    assert tables.lines_of("a" * 30 + " b", 20) == ["a" * 30, "b"]


def test_what_plans_are_worth_and_how_many_devices_they_take_have_columns() -> None:
    few = FLAT.model_copy(update={"parallelism": Parallelism(data_parallel_shard_degree=8)})
    lines = drawn(Ranked([FLAT, few], ["0.1", "0.2"], "per M tokens")).splitlines()
    assert lines[1].split()[:2] == ["#", "devices"]
    assert "per M tokens" in lines[1]
    assert [line.split()[1] for line in lines[2:4]] == ["64", "8"]
    assert " 0.2 " in lines[3]


def test_bars_are_sorted_shares_of_the_whole() -> None:
    rows = tables.bars({"a": 1.0, "bubble": 3.0, "none": 0.0}, 4.0)
    assert rows == [("pipeline bubble", 3.0, 0.75), ("a", 1.0, 0.25)]
    lines = drawn(tables.time_bar(forecast())).splitlines()
    assert lines[0].startswith("step 6.57 s (90 % band 5.91 .. 7.36 s)")
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
    assert over.splitlines()[-1].split() == ["too", "much", "10.0", "GiB", "12", "%", "\u2501" * 3 + "\u2578"]


def test_a_pipe_is_not_wrapped_and_has_no_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    page = io.StringIO()
    monkeypatch.delenv("COLUMNS", raising=False)
    tables.console(page).print(Ranked([FLAT, PIPED]))
    assert len(page.getvalue().splitlines()) == 5
    assert "MFU against dense bf16" in page.getvalue()
    assert "\x1b" not in page.getvalue()


def test_the_fullest_rank_decides_the_capacity() -> None:
    groups = [
        {"name": "large", "nodes": 1, "devices_per_node": 8, "device": "A100-SXM-80GB"},
        {"name": "small", "nodes": 2, "devices_per_node": 8, "device": "A100-SXM-40GB"},
    ]
    cluster = Cluster.from_dict({"groups": groups, "links": [{"between": ["large", "small"], "gbps": 100}]})
    large, small = (group.device.memory_bytes for group in cluster.groups)
    # Ranks are places of the mesh: the first stage's come first, wherever the cluster lists its group.
    stages = [{"group": name, "layers": 2} for name in ("small", "large")]
    layout = Parallelism.model_validate({"tensor_parallel_degree": 8, "pipeline_parallel_degree": 2, "stages": stages})
    for rank, expected in ((0, small), (7, small), (8, large), (15, large)):
        mixed = FLAT.model_copy(
            update={"cluster": cluster.plain(), "parallelism": layout, "forecast": forecast(fullest_rank=rank)}
        )
        assert tables.capacity_bytes(mixed) == expected


LONGEST = forecast(
    step=dict.fromkeys(glossary.STEP, 1.0),
    memory=dict.fromkeys(glossary.MEMORY, 4 * GIB),
    mfu_peak="H100-SXM-80GB, dense bf16 peak 989.4 TFLOP/s; 3 x the traced forward FLOPs, recompute not counted",
)


@pytest.mark.parametrize("width", [80, 120])
def test_bars_and_their_meanings_fit_the_terminal(width: int) -> None:
    for what in (tables.time_bar(LONGEST), tables.memory_bar(LONGEST, 80 * GIB), tables.meanings(LONGEST)):
        lines = drawn(what, width).splitlines()
        assert max(map(len, lines)) <= width
        assert lines == [line.rstrip() for line in lines]
    assert len(drawn(tables.time_bar(LONGEST), width).splitlines()) == 1 + len(glossary.STEP)
    assert len(drawn(tables.memory_bar(LONGEST, 80 * GIB), width).splitlines()) == 2 + len(glossary.MEMORY)


def test_every_part_shown_is_explained() -> None:
    text = drawn(tables.meanings(forecast(step={"bubble": 2.0, "casts": 3.0, "host": 0.0})))
    assert [line[:16].strip() for line in text.splitlines()] == [
        "casts and copies", "pipeline bubble", "activations", "parameters", "MFU",
    ]  # fmt: skip
    assert "waits for other ranks" in text


def test_a_small_share_is_not_called_nothing() -> None:
    line = drawn(tables.time_bar(forecast(step={"optimizer": 0.001}))).splitlines()[1]
    assert line == "optimizer and clipping   1.00 ms < 0.1 %"


def test_no_color_means_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def coloured() -> bool:
        page = io.StringIO()
        Console(file=page, width=80, force_terminal=True, color_system="standard").print(tables.time_bar(LONGEST))
        return re.search(r"\x1b\[[\d;]*3[0-7]m", page.getvalue()) is not None

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert coloured()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not coloured()


def test_a_terminal_without_unicode_has_bars_too() -> None:
    page = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(file=page, width=80).print(tables.time_bar(forecast()))
    page.seek(0)
    assert page.read().splitlines()[1].endswith("  " + "-" * 22)


def test_parts_that_differ_by_rounding_do_not_differ() -> None:
    one = forecast()
    other = forecast(step=one.step | {"bubble": one.step["bubble"] * (1 + 1e-15)})
    assert not re.search(r"e-\d", drawn(tables.part_by_part(other, one)))


def test_a_difference_too_small_to_be_told_has_no_sign() -> None:
    one = forecast()
    part = max(one.memory, key=lambda name: one.memory[name])
    other = forecast(memory=one.memory | {part: one.memory[part] - 1000})
    shown = drawn(tables.memory_by_part(other, one, 80 * 2**30))
    assert "0 MiB" in shown
    assert not re.search(r"[+-]0(\.0)? ", shown)
