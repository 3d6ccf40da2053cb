"""``ahp simulate``: bars for people, one object for programs, a trace on request."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from ahp.cli.main import COMMANDS, main
from ahp.cli.simulate import run
from ahp.errors import BadInput, NotExpressible
from ahp.plan import Plan
from ahp.report import glossary


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    plan = {
        "model": "tiny",
        "job": {"sequence_length": 64, "global_batch_size": 8},
        "cluster": {"nodes": 1, "devices_per_node": 4, "device": "A100-SXM-80GB"},
        "parallelism": {"pipeline_parallel_degree": 2, "data_parallel_shard_degree": 2},
    }
    path = tmp_path / "plan.yaml"
    Plan.model_validate(plan).save(path)
    return path


def next_commands(out: str) -> list[str]:
    """On one line, or where they do not fit one below the other."""
    last = out.rstrip().rpartition("Next: ")[2]
    return re.split(r"\n {6}| {4}", last)


@pytest.mark.parametrize("command", ["simulate", "explain"])
def test_a_plan_whose_model_is_code_is_announced_before_it_runs(
    command: str, plan_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Plan.load(plan_file).model_copy(update={"model": "foreign_code:build"}).save(plan_file)
    (plan_file.parent / "foreign_code.py").write_text("import sys\nprint('IT RUNS', file=sys.stderr)\n")
    monkeypatch.syspath_prepend(plan_file.parent)
    monkeypatch.delitem(sys.modules, "foreign_code", raising=False)
    assert main([command, str(plan_file)]) == 2
    err = capsys.readouterr().err
    assert err.index("the plan's model is code: foreign_code is imported and build() called") < err.index("IT RUNS")


def test_a_factory_of_pythons_own_library_is_refused(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """This one would end the process."""
    Plan.load(plan_file).model_copy(update={"model": "os:abort"}).save(plan_file)
    assert main(["simulate", str(plan_file)]) == 2
    assert "model = 'os:abort': a module of Python's standard library makes no model" in capsys.readouterr().err


def test_bars_what_binds_and_a_trace(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    assert run([str(plan_file), "--trace", str(trace)]) == 0
    out, progress = capsys.readouterr()
    assert progress.splitlines() == ["analyzing tiny ...", "pricing its neighbours ..."]
    for words in (
        "Model    tiny, 8 sequences of 64, bf16",
        "Cluster  4 x A100-SXM-80GB",
        "Engine   ahp, flash attention",
        "pp2(1F1B)",
        "pipeline bubble",
        "optimizer",
        "memory",
        "What binds",
        "What the parts are",
        glossary.STEP["bubble"],
        f"Wrote {trace}",
    ):
        assert words in out
    assert next_commands(out) == [f"ahp explain {plan_file}", f"ahp train {plan_file}"]
    assert {e["pid"] for e in json.loads(trace.read_text())["traceEvents"]} == {0, 2}
    assert run([str(plan_file), "--trace", str(trace), "--all-ranks"]) == 0
    assert {e["pid"] for e in json.loads(trace.read_text())["traceEvents"]} == {0, 1, 2, 3}


def test_one_json_object(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([str(plan_file), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    step = result["forecast"]["step"]
    assert result["forecast"]["step_time_s"] == pytest.approx(sum(step.values()))
    assert result["parallelism"]["pipeline_parallel_degree"] == 2
    assert result["engine"]["name"] == "ahp"
    assert result["wrote"] is None
    shares = {part: seconds / result["forecast"]["step_time_s"] for part, seconds in step.items()}
    assert result["binds"]["share"] in (
        pytest.approx(max(shares.values())), pytest.approx(shares["forward"] + shares["backward"]),
    )  # fmt: skip
    assert all(
        {"change", "relieves", "verdict", "step_time_s", "helps"} == set(one) for one in result["binds"]["neighbours"]
    )


@pytest.mark.parametrize("engine", ["torchtitan", "megatron", "deepspeed"])
def test_a_plan_on_another_engine(plan_file: Path, engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--engine.name", engine, "--parallelism.zero_stage", "1"]
    assert run([str(plan_file), *words]) == 0
    out = capsys.readouterr().out
    assert f"Engine   {engine}, flash attention" in out
    assert " zero1 " in out
    assert next_commands(out) == [
        f"ahp simulate {plan_file} --engine.name {engine} --parallelism.zero-stage 1 --trace trace.json"
    ]


def test_next_runs_only_what_ahp_runs(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan.load(plan_file)
    # torchtitan's own models alone have a file there
    for engine, runs in (("megatron", [f"ahp export megatron {plan_file}"]), ("torchtitan", [])):
        layout = {"pipeline_parallel_degree": 2, "data_parallel_shard_degree": 2, "zero_stage": 1}
        Plan.model_validate({**plan.model_dump(), "parallelism": layout, "engine": {"name": engine}}).save(plan_file)
        assert run([str(plan_file)]) == 0
        commands = next_commands(capsys.readouterr().out)
        assert commands == [f"ahp explain {plan_file}", *runs]
        assert all(command.split()[1] in COMMANDS for command in commands)


def test_every_part_of_a_forecast_has_a_meaning(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        [],
        ["--parallelism.activation-checkpoint", "full", "--parallelism.data_parallel_shard_degree", "1",
         "--parallelism.tensor-parallel-degree", "2"],
        ["--engine.name", "torchtitan", "--parallelism.pipeline-parallel-degree", "1",
         "--parallelism.context-parallel-degree", "2"],
    ):  # fmt: skip
        assert run([str(plan_file), *words, "--json"]) == 0
        forecast = json.loads(capsys.readouterr().out)["forecast"]
        assert set(forecast["step"]) <= set(glossary.STEP)
        assert set(forecast["memory"]) <= set(glossary.MEMORY)


def test_what_cannot_be_is_refused(plan_file: Path, tmp_path: Path) -> None:
    with pytest.raises(NotExpressible, match="accelerate"):
        run([str(plan_file), "--engine.name", "accelerate"])
    with pytest.raises(BadInput, match=r"engine.nam: unknown key \(did you mean: name"):
        run([str(plan_file), "--engine.nam", "ahp"])
    with pytest.raises(
        BadInput, match=r"engine.name = 'foo': .*\(valid: ahp, torchtitan, megatron, deepspeed, accelerate\)"
    ):
        run([str(plan_file), "--engine", "foo"])
    with pytest.raises(BadInput, match="--all-ranks = True"):
        run([str(plan_file), "--all-ranks"])
    with pytest.raises(BadInput, match="degrees multiply to 3"):
        run([str(plan_file), "--parallelism.tensor_parallel_degree", "3", "--parallelism.data_parallel_shard_degree", "1",
             "--parallelism.pipeline_parallel_degree", "1"])  # fmt: skip
    Plan().save(tmp_path / "bare.yaml")
    with pytest.raises(BadInput, match="cluster = None"):
        run([str(tmp_path / "bare.yaml")])


def test_a_mixed_plan(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is left idle is told, the track of each cell says where it lies, and memory is its own device's."""
    groups = [
        {"name": "new", "nodes": 2, "devices_per_node": 2, "device": "H100-SXM-80GB"},
        {"name": "old", "nodes": 1, "devices_per_node": 4, "device": "A100-SXM-40GB"},
    ]
    plan = Plan.load(plan_file).model_dump(mode="json")
    plan["cluster"] = {"groups": groups, "links": [{"between": ["new", "old"], "gbps": 100}]}
    plan["parallelism"] |= {"stages": [{"group": "old", "layers": 1}, {"group": "new", "layers": 3}]}
    Plan.model_validate(plan).save(plan_file)
    trace = tmp_path / "trace.json"
    assert run([str(plan_file), "--trace", str(trace)]) == 0
    out = capsys.readouterr().out
    assert "4 x H100-SXM-80GB + 4 x A100-SXM-40GB, 4 left idle" in out
    assert "on(old:1 new:3)" in out
    names = [e["args"]["name"] for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "process_name"]
    assert sorted(name.split(" (")[0] for name in names) == ["rank 0 on old", "rank 2 on new"]


@pytest.mark.parametrize("command", ["simulate", "explain"])
def test_a_plan_without_a_cluster_is_refused_with_one_that_could_be_added(
    command: str, plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Plan.load(plan_file).model_copy(update={"cluster": None}).save(plan_file)
    assert main([command, str(plan_file)]) == 2
    assert "add one, such as {device: H100, devices_per_node: 4}" in capsys.readouterr().err
