"""``ahp simulate``: bars for people, one object for programs, a trace on request."""

import json

import pytest

from ahp.cli.simulate import run
from ahp.errors import BadInput
from ahp.plan import Plan


@pytest.fixture
def plan_file(tmp_path):
    plan = {
        "model": "tiny",
        "job": {"sequence_length": 64, "global_batch_size": 8},
        "cluster": {"nodes": 1, "devices_per_node": 2, "device": "A100-SXM-80GB"},
        "parallelism": {"pipeline_parallel_degree": 2},
    }
    path = tmp_path / "plan.yaml"
    Plan.model_validate(plan).save(path)
    return path


def test_bars_and_a_trace(plan_file, tmp_path, capsys):
    trace = tmp_path / "trace.json"
    assert run([str(plan_file), "--trace", str(trace)]) == 0
    out = capsys.readouterr().out
    for words in (
        "pp2(1F1B)",
        "2 x A100-SXM-80GB",
        "pipeline bubble",
        "optimizer",
        "memory",
        f"Wrote {trace}",
        "Next: ahp explain",
    ):
        assert words in out
    tracks = {e["tid"] for e in json.loads(trace.read_text())["traceEvents"]}
    assert tracks == {0, 1}


def test_one_json_object(plan_file, capsys):
    assert run([str(plan_file), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["forecast"]["step_time_s"] == pytest.approx(sum(result["forecast"]["step"].values()))
    assert result["parallelism"]["pipeline_parallel_degree"] == 2
    assert result["wrote"] is None


def test_a_plan_without_a_cluster_is_refused(tmp_path):
    path = tmp_path / "plan.yaml"
    Plan().save(path)
    with pytest.raises(BadInput, match="cluster = None"):
        run([str(path)])
