"""The trace of a forecast: complete, strictly nested, and as long as the step."""

import json

import pytest

from ahp.forecast import timeline
from ahp.forecast.step import price
from ahp.job import Job
from ahp.plan import Parallelism

from .conftest import make_cluster


@pytest.fixture
def priced(hand_graph):
    layout = Parallelism(pipeline_parallel_degree=2, virtual_stages_per_rank=2, data_parallel_shard_degree=2)
    return price(hand_graph, make_cluster(per_node=4), Job(sequence_length=64, global_batch_size=8), layout)


def test_every_action_and_nothing_overlaps(priced):
    events = [e for e in timeline.chrome_trace(priced)["traceEvents"] if e["ph"] == "X"]
    named = {e["name"] for e in events if "micro_batch" in e["args"]}
    assert named == {str(a) for rank in priced.schedule.ranks for a in rank}
    for rank in (0, 1):
        own = sorted((e["ts"], -e["dur"], e["ts"] + e["dur"], e["name"]) for e in events if e["tid"] == rank)
        open_until = []
        for start, _, end, name in own:
            while open_until and open_until[-1] <= start * (1 + 1e-12):
                open_until.pop()
            assert not open_until or end <= open_until[-1] * (1 + 1e-12), name
            open_until.append(end)
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(priced.forecast.step_time_s * 1e6)


def test_parts_fill_their_action(priced):
    events = [e for e in timeline.chrome_trace(priced)["traceEvents"] if e["ph"] == "X" and e["name"] != "optimizer"]
    actions = sum(e["dur"] for e in events if "micro_batch" in e["args"])
    parts = sum(e["dur"] for e in events if "micro_batch" not in e["args"])
    assert parts == pytest.approx(actions)


def test_the_file_is_whole(priced, tmp_path):
    path = tmp_path / "deep" / "trace.json"
    timeline.write(priced, path)
    assert json.loads(path.read_text()) == json.loads(json.dumps(timeline.chrome_trace(priced)))
    assert [p.name for p in path.parent.iterdir()] == ["trace.json"]
