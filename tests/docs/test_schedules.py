"""The table of docs/schedules.md is what the schedules themselves say."""

from __future__ import annotations

import re

import pytest

from ahp.schedule.makespan import makespan
from ahp.schedule.registry import SCHEDULES
from ahp.schedule.simulate import StageTimes
from tests.docs.pages import ROOT

RANKS, MICRO_BATCHES = 4, 8
ROWS = re.findall(
    r"^\| (\w+) \| (\d)[^|]* \| (whole|in two parts) \| ([\d.]+) % \| ([\d., ]+) \|$",
    (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)


def test_every_schedule_is_in_the_table() -> None:
    assert {name for name, *_ in ROWS} == set(SCHEDULES)


@pytest.mark.parametrize(("name", "stages", "backward", "bubble", "kept"), ROWS)
def test_a_row_is_what_the_schedule_says(name: str, stages: str, backward: str, bubble: str, kept: str) -> None:
    schedule, v = SCHEDULES[name], int(stages)
    times = [StageTimes(1 / v, 2 / v, 1 / v, 1 / v)] * (RANKS * v)
    work_s = 3.0 * MICRO_BATCHES
    found = makespan(name, RANKS, v, MICRO_BATCHES, times).makespan_s / work_s - 1.0
    assert float(bubble) == pytest.approx(100 * found, abs=0.06)
    assert (backward == "in two parts") == schedule.splits_backward
    held = schedule.in_flight(RANKS, v, MICRO_BATCHES).sum(axis=1) / v
    assert [float(count) for count in kept.split(", ")] == held.tolist()
