"""The trace of a forecast: in the format that viewers read, strictly nested, and as long as the step."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ahp.errors import BadInput
from ahp.forecast import timeline
from ahp.forecast.priced import Priced
from ahp.forecast.step import price
from ahp.forecast.trace_events import free_lane
from ahp.graph.operators import ModelGraph
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism

from .conftest import make_cluster

NS_US = 2e-3
"""Both ends of a span are rounded to whole nanoseconds."""

SCHEDULES = {
    "none": {"data_parallel_shard_degree": 4, "tensor_parallel_degree": 2},
    "1F1B": {"pipeline_parallel_degree": 2, "data_parallel_shard_degree": 2, "tensor_parallel_degree": 2},
    "Interleaved1F1B": {"pipeline_parallel_degree": 2, "virtual_stages_per_rank": 2, "data_parallel_shard_degree": 2},
    "InterleavedZeroBubble": {"pipeline_parallel_degree": 4, "tensor_parallel_degree": 2},
    "ZBVZeroBubble": {"pipeline_parallel_degree": 2, "virtual_stages_per_rank": 2, "zero_stage": 3},
    "DualPipeV": {"pipeline_parallel_degree": 2, "virtual_stages_per_rank": 2, "activation_checkpoint": "full"},
}


def priced_layout(graph: ModelGraph, batch: int = 16, launch_s: float = 0.0, **degrees: Any) -> Priced:
    layout = Parallelism.model_validate(degrees)
    cluster = make_cluster(per_node=layout.world_size, launch_s=launch_s)
    job = Job(sequence_length=64, global_batch_size=batch)
    return price(graph, cluster, job, layout, EngineChoice(name="torchtitan"))


@pytest.fixture(params=SCHEDULES)
def priced(request: pytest.FixtureRequest, hand_graph: ModelGraph) -> Priced:
    degrees = dict(SCHEDULES[request.param])
    if request.param != "none":
        degrees["pipeline_parallel_schedule"] = request.param
    return priced_layout(hand_graph, launch_s=1e-7, **degrees)


def spans(trace: dict[str, Any], rank: int | None = None) -> list[dict[str, Any]]:
    return [e for e in trace["traceEvents"] if e["ph"] == "X" and rank in (None, e["pid"])]


def actions(trace: dict[str, Any], rank: int | None = None) -> list[dict[str, Any]]:
    return [e for e in spans(trace, rank) if "micro_batch" in e.get("args", {})]


def threads(trace: dict[str, Any]) -> dict[tuple[int, int], str]:
    named = (e for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name")
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in named}


def violations(trace: dict[str, Any]) -> Iterator[str]:
    """What breaks the trace event format (Duration, Complete, Flow and Metadata events), or makes a viewer misread it."""
    named, processes = threads(trace), set()
    stacks: dict[tuple[int, int], list[float]] = defaultdict(list)
    flows: dict[int, list[str]] = defaultdict(list)
    arguments = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index"}
    arguments["thread_sort_index"] = "sort_index"
    for e in trace["traceEvents"]:
        if not isinstance(e["pid"], int) or e["ph"] not in "MXsf":
            yield f"pid or ph: {e}"
        if e["ph"] == "M":
            processes.add(e["pid"])
            if list(e["args"]) != [arguments.get(e["name"])]:
                yield f"metadata: {e}"
        elif not isinstance(e["tid"], int) or not isinstance(e["ts"], float) or e["ts"] < 0:
            yield f"tid or ts: {e}"
        elif (e["pid"], e["tid"]) not in named or e["pid"] not in processes:
            yield f"no name for its track: {e}"
        elif e["ph"] == "X" and (not isinstance(e["dur"], float) or e["dur"] < 0):
            yield f"dur: {e}"
        elif e["ph"] in "sf":
            flows[e["id"]].append(e["ph"])
    for ends in flows.values():
        if sorted(ends) != ["f", "s"]:
            yield f"arrow with ends {ends}"
    for e in sorted(spans(trace), key=lambda e: (e["ts"], -e["dur"])):
        stack, end = stacks[e["pid"], e["tid"]], e["ts"] + e["dur"]
        while stack and stack[-1] <= e["ts"] + NS_US:
            stack.pop()
        if stack and end > stack[-1] + NS_US:
            yield f"ends after what it lies in: {e}"
        stack.append(end)


def test_trace_keeps_to_the_format(priced: Priced) -> None:
    for all_ranks in (False, True):
        trace = timeline.chrome_trace(priced, all_ranks=all_ranks)
        assert list(violations(trace)) == []
        assert all(isinstance(value, str) for value in trace["otherData"].values())


def test_the_format_check_sees_faults(priced: Priced) -> None:
    trace = timeline.chrome_trace(priced)
    late = dict(next(e for e in trace["traceEvents"] if e["ph"] == "X"))
    late |= {"ts": late["ts"] + late["dur"] / 2}
    for wrong in (late, {**late, "tid": 99}, {**late, "dur": -1.0}, {"ph": "s", "id": 10**6, **late}):
        assert list(violations({**trace, "traceEvents": [*trace["traceEvents"], wrong]}))


def test_every_action_once_for_each_place(priced: Priced) -> None:
    trace = timeline.chrome_trace(priced)
    width = priced.parallelism.world_size // len(priced.schedule.ranks)
    for place, order in enumerate(priced.schedule.ranks):
        assert [e["name"] for e in actions(trace, place * width)] == [str(a) for a in order]
    assert len(actions(trace)) == sum(map(len, priced.schedule.ranks))


def test_spans_add_up_to_the_forecast(priced: Priced) -> None:
    trace = timeline.chrome_trace(priced)
    step_us = priced.forecast.step_time_s * 1e6
    assert max(e["ts"] + e["dur"] for e in spans(trace)) == pytest.approx(step_us, abs=NS_US)
    assert max(e["ts"] + e["dur"] for e in actions(trace)) == pytest.approx(priced.timeline.makespan_s * 1e6, abs=NS_US)
    width = priced.parallelism.world_size // len(priced.schedule.ranks)
    for place, busy_s in enumerate(priced.timeline.busy_s):
        own = actions(trace, place * width)
        assert sum(e["dur"] for e in own) == pytest.approx(busy_s * 1e6, abs=NS_US * len(own))


def test_parts_fill_their_action(priced: Priced) -> None:
    trace = timeline.chrome_trace(priced)
    for action in actions(trace):
        start, end = action["ts"] - NS_US, action["ts"] + action["dur"] + NS_US
        inside = [
            e for e in spans(trace, action["pid"])
            if "args" not in e and e["tid"] < timeline.SENDS and start <= e["ts"] and e["ts"] + e["dur"] <= end
        ]  # fmt: skip
        assert sum(e["dur"] for e in inside) == pytest.approx(action["dur"], abs=NS_US * (len(inside) + 1))


def test_a_split_backward_has_two_halves(hand_graph: ModelGraph) -> None:
    degrees = SCHEDULES["InterleavedZeroBubble"]
    priced = priced_layout(hand_graph, **degrees, pipeline_parallel_schedule="InterleavedZeroBubble")
    own = spans(timeline.chrome_trace(priced), 0)
    sums: dict[str, float] = defaultdict(float)
    for e in own:
        sums[e["name"]] += e["dur"]
    m, cost = priced.schedule.num_micro_batches, priced.stages[0]
    assert sums["weight gradient"] == pytest.approx(m * cost.weight_gradient["weight_gradient"] * 1e6, rel=1e-3)
    together = m * cost.backward["backward"] * 1e6
    assert sums["input gradient"] + sums["weight gradient"] == pytest.approx(together, rel=1e-3)
    assert "backward" not in sums


def test_collectives_are_on_their_own_tracks(hand_graph: ModelGraph) -> None:
    priced = priced_layout(hand_graph, **SCHEDULES["1F1B"])
    trace = timeline.chrome_trace(priced)
    tracks = threads(trace)
    where = {e["name"]: tracks[e["pid"], e["tid"]] for e in spans(trace)}
    assert where["tensor-parallel collectives"] == "tensor, context and expert collectives"
    assert where["exposed gradient reduction"] == where["exposed weight gathering"] == "data-parallel collectives"
    assert where["optimizer and clipping"] == where["forward"] == "compute"
    assert where["0F0 to rank 4"] == "pipeline sends"


def test_arrows_lead_from_what_is_made_to_what_needs_it(priced: Priced) -> None:
    trace = timeline.chrome_trace(priced)
    ends = {(e["id"], e["ph"]): e for e in trace["traceEvents"] if e["ph"] in "sf"}
    crossings = sum(
        a.kind != "W" and other >= 0 and other < len(priced.stages)
        and priced.schedule.stage_rank[other] != priced.schedule.stage_rank[a.stage]
        for order in priced.schedule.ranks for a in order
        for other in [a.stage + (1 if a.kind == "F" else -1)]
    )  # fmt: skip
    assert len(ends) == 2 * crossings

    def at(end: dict[str, Any]) -> dict[str, Any]:
        own = actions(trace, end["pid"])
        return next(a for a in own if a["ts"] <= end["ts"] <= a["ts"] + a["dur"])

    for number in {number for number, _ in ends}:
        source, target = at(ends[number, "s"])["args"], at(ends[number, "f"])["args"]
        assert source["micro_batch"] == target["micro_batch"]
        assert abs(source["stage"] - target["stage"]) == 1
        assert ends[number, "s"]["ts"] <= ends[number, "f"]["ts"]


def test_one_rank_stands_for_all_alike(hand_graph: ModelGraph) -> None:
    priced = priced_layout(hand_graph, **SCHEDULES["1F1B"])
    few, every = timeline.chrome_trace(priced), timeline.chrome_trace(priced, all_ranks=True)
    names = [e["args"]["name"] for e in few["traceEvents"] if e["name"] == "process_name"]
    assert names == [
        "rank 0 (pipeline place 1 of 2, stage 0), stands for ranks 0 to 3 (4)",
        "rank 4 (pipeline place 2 of 2, stage 1), stands for ranks 4 to 7 (4)",
    ]
    assert {e["pid"] for e in spans(every)} == set(range(8))
    assert len(spans(every)) == 4 * len(spans(few))
    assert (few["otherData"]["ranks drawn"], every["otherData"]["ranks drawn"]) == ("2 of 8", "8 of 8")


ROUNDING_US = 1e-6
"""Of an end, which is a start and a duration added up."""


def test_a_long_step_is_cut_in_the_middle(
    hand_graph: ModelGraph, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    priced = priced_layout(hand_graph, batch=256, **SCHEDULES["1F1B"])
    whole = timeline.chrome_trace(priced)
    monkeypatch.setattr(timeline, "MOST_EVENTS", 1000)
    trace = timeline.chrome_trace(priced)
    assert len(trace["traceEvents"]) < 1000 < len(whole["traceEvents"])
    assert list(violations(trace)) == []
    gaps = [e for e in spans(trace) if "not drawn" in e["name"]]
    assert len(gaps) == 2
    for gap in gaps:
        missing = [
            e
            for e in actions(whole, gap["pid"])
            if gap["ts"] - ROUNDING_US <= e["ts"] and e["ts"] + e["dur"] <= gap["ts"] + gap["dur"] + ROUNDING_US
        ]  # fmt: skip
        assert gap["name"] == f"{len(missing)} actions not drawn"
        assert (gap["args"]["first"], gap["args"]["last"]) == (missing[0]["name"], missing[-1]["name"])
        assert len(missing) + len(actions(trace, gap["pid"])) == len(actions(whole, gap["pid"]))
    assert "the first and the last" in trace["otherData"]["actions drawn"]
    assert whole["otherData"]["actions drawn"] == "all"


def test_too_many_ranks_for_one_file(hand_graph: ModelGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    priced = priced_layout(hand_graph, **SCHEDULES["1F1B"])
    monkeypatch.setattr(timeline, "MOST_EVENTS", 400)
    timeline.chrome_trace(priced)
    with pytest.raises(BadInput, match=r"--all-ranks = True: a timeline of 8 ranks is too large, \d fit"):
        timeline.chrome_trace(priced, all_ranks=True)


def test_of_a_long_pipeline_both_ends_are_drawn(hand_graph: ModelGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    priced = priced_layout(hand_graph, pipeline_parallel_degree=4)
    monkeypatch.setattr(timeline, "MOST_PLACES", 2)
    trace = timeline.chrome_trace(priced)
    assert {e["pid"] for e in spans(trace)} == {0, 3}
    assert list(violations(trace)) == []
    assert trace["otherData"]["ranks drawn"] == "2 of 4: 1 places from either end of 4"


def test_sends_that_overlap_take_threads_of_their_own() -> None:
    busy: list[float] = []
    taken = [free_lane(busy, start, start + 2.5) for start in (0.0, 1.0, 2.0, 2.5, 3.5, 9.0)]
    assert taken == [0, 1, 2, 0, 1, 0]


def test_the_file_is_whole(priced: Priced, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "trace.json"
    timeline.write(priced, path)
    assert json.loads(path.read_text()) == json.loads(json.dumps(timeline.chrome_trace(priced)))
    assert [p.name for p in path.parent.iterdir()] == ["trace.json"]
