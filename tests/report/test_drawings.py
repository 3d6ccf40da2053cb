"""Positions in the report's charts follow from the numbers: with no point, with one, and with thousands."""

from __future__ import annotations

import re

import pytest

from ahp.report import candidates, charts, curves, lanes, trace_lanes
from ahp.report.candidates import Candidate
from ahp.report.charts import Axis, Chart, Curve, Level, axis, nice_ticks, number_words, thinned
from ahp.report.curves import Measured
from ahp.report.lanes import Bar, Lane
from ahp.words import GIB

UNIT = Axis("x", 0.0, 10.0, number_words)


def points(html: str) -> list[list[tuple[float, float]]]:
    lines = re.findall(r"<polyline class='[^']*' points='([^']*)'", html)
    return [[(float(x), float(y)) for x, y in (pair.split(",") for pair in line.split())] for line in lines]


def test_points_of_a_curve_lie_where_their_numbers_say() -> None:
    told = Chart(
        [Curve("a", [0, 5, 10], [0, 2.5, 10], "c0")],
        UNIT,
        UNIT,
        [Level(5.0, "half")],
        (2.0, 4.0, "band"),
        [(5, "again")],
    )
    html = told.html()
    assert points(html) == [[(0, 1000), (500, 750), (1000, 0)]]
    assert "<line class='level' x1='0.0' y1='500.0' x2='1000.0' y2='500.0'/>" in html
    assert "<rect class='band' x='0' width='1000' y='600.0' height='200.0'/>" in html
    assert "style='left:50.00%' title='again'" in html


def test_one_point_is_drawn_and_no_point_is_no_error() -> None:
    assert points(Chart([Curve("a", [5], [5], "c0")], UNIT, UNIT).html()) == [[(500, 500), (500, 500)]]
    assert points(Chart([Curve("a", [], [], "c0")], UNIT, UNIT).html()) == [[]]
    assert axis("y", [], number_words).low < axis("y", [], number_words).high
    assert axis("y", [3.0], number_words).share(3.0) == pytest.approx(0.5)


def test_of_thousands_of_points_the_extremes_stay() -> None:
    y = [float(step % 7) for step in range(20_000)]
    y[12_345], y[777] = 100.0, -100.0
    kept = thinned(Curve("a", list(range(20_000)), y, "c0"))
    assert len(kept.x) <= charts.MOST_POINTS
    assert list(kept.x) == sorted(set(kept.x))
    assert (kept.x[0], kept.x[-1]) == (0, 19_999)
    assert {100.0, -100.0} <= set(kept.y)


@pytest.mark.parametrize("ends", [(0.0, 1.0), (0.0, 137.0), (-3e-5, 2e-4), (1e9, 1.7e9), (0.93, 0.94)])
def test_ticks_are_few_lie_inside_and_have_names_of_their_own(ends: tuple[float, float]) -> None:
    found = nice_ticks(*ends)
    assert 2 <= len(found) <= 6
    assert all(ends[0] - 1e-9 * abs(ends[0]) <= at <= ends[1] * (1 + 1e-9) for at in found)
    assert len({number_words(at) for at in found}) == len(found)


def test_bars_of_a_lane_lie_at_their_times_and_what_is_left_is_bubble() -> None:
    drawn = lanes.picture(
        [Lane("rank 0", [Bar(0, 2, "0F0"), Bar(2, 6, "0B0")]), Lane("rank 1", [Bar(2, 4, "1F0"), Bar(4, 8, "1B0")])]
    )
    places = re.findall(r"<i class='k(\w)' style='left:([\d.]+)%;width:([\d.]+)%'", drawn)
    assert places == [("F", "0", "25"), ("B", "25", "50"), ("F", "25", "25"), ("B", "50", "50")]
    assert drawn.count("bubble 25 %") == 2
    assert "1B0 is stage 1, backward, micro-batch 0" in drawn


def test_a_timeline_of_many_bars_says_what_it_leaves_out() -> None:
    many = [Lane(f"rank {rank}", [Bar(at, at + 1, f"{rank}F{at}") for at in range(1_000)]) for rank in range(10)]
    drawn = lanes.picture(many)
    assert drawn.count("<i class='kF'") == lanes.MOST_BARS
    assert "4 of 10 lanes" in drawn


def test_events_become_bars_and_lie_in_what_holds_them() -> None:
    def event(name: str, start_us: float, length_us: float, thread: int = 0) -> dict[str, object]:
        return {"ph": "X", "name": name, "pid": 3, "tid": thread, "ts": start_us, "dur": length_us}

    named = {"ph": "M", "name": "process_name", "pid": 3, "args": {"name": "rank 3 (of 8)"}}
    trace = {"traceEvents": [event("all-reduce", 20, 30), event("0F0", 0, 100), event("0B0", 100, 50), named]}
    (lane,) = trace_lanes.lanes_of_trace(trace)
    assert lane.name == "rank 3"
    assert [(bar.name, bar.depth) for bar in lane.bars] == [("0F0", 0), ("all-reduce", 1), ("0B0", 0)]
    assert [bar.end_s for bar in lane.bars] == pytest.approx([1e-4, 5e-5, 1.5e-4])
    assert trace_lanes.lanes_of_trace({"traceEvents": []}) == []


def candidate(words: str, step_s: float, used_gib: float, kind: str = "other") -> Candidate:
    return Candidate(words, step_s, 0.9 * step_s, 1.1 * step_s, int(used_gib * GIB), kind != "misfit", "", kind)


def test_candidates_lie_by_memory_and_time() -> None:
    rows = [candidate("a", 1.0, 40, "best"), candidate("b", 2.0, 20, "front"), candidate("c", 0.5, 500, "misfit")]
    drawn = candidates.picture(rows, {"H100": 80 * GIB})
    dots = re.findall(r"<a class='dot (\w+)' href='#candidate-(\d)' style='left:([\d.]+)%;bottom:([\d.]+)%'", drawn)
    drawn_last = dots[::-1]  # lies on top
    assert [(kind, number) for kind, number, *_ in drawn_last] == [("best", "1"), ("front", "2"), ("misfit", "3")]
    left, up = ([float(one[at]) for one in drawn_last] for at in (2, 3))
    assert left[1] < left[0] < left[2] <= 100
    assert up[2] < up[0] < up[1]
    assert len(points(drawn)) == 1  # the frontier has a stair from b down to a
    assert [at[0] for at in points(drawn)[0]] == sorted(at[0] for at in points(drawn)[0])
    assert "3\N{RIGHTWARDS ARROW}</a>" in drawn


def test_what_the_users_function_returned_has_charts_of_its_own() -> None:
    metrics = [{"step": step, "loss": 3.0, "step_time_s": 1.0, "memory_bytes": 1} for step in range(1, 41)]
    for step in (10, 20, 30):
        metrics[step - 1] |= {"evaluation_bleu": step / 10, "evaluation": 7.0, "evaluation_time_s": 0.1}
    metrics[39] |= {"evaluation_bleu": None}
    told = dict(curves.charts([Measured("run", metrics, None, 100)]))
    assert [title for title in told if title.startswith("Evaluation")] == ["Evaluation: bleu", "Evaluation: result"]
    ((first, *_, last),) = points(told["Evaluation: bleu"])
    assert (first[0], last[0]) == (0, 1000)
    assert first[1] > last[1]
    assert '"curves":[["measured",[10,20,30],[1.0,2.0,3.0]]]' in told["Evaluation: bleu"]
    both = dict(curves.charts([Measured("one", metrics, None, 100), Measured("two", metrics[:20], None, 100)]))
    assert len(points(both["Evaluation: bleu"])) == 2
