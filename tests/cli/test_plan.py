"""``ahp plan`` and ``ahp explain`` as a user runs them."""

from __future__ import annotations

import json
import re
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from ahp.cli.layout_words import constraints_of, layout_of
from ahp.cli.main import main
from ahp.cluster.model import Cluster
from ahp.errors import BadInput
from ahp.plan import Parallelism, Plan
from ahp.words import seconds
from tests.graph.small import MINIMAX

SHORT = ["--job.sequence-length", "256", "--job.global-batch-size", "16"]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan that is searched once for all."""
    file = tmp_path_factory.mktemp("planned") / "plan.yaml"
    assert main(["plan", "tiny", "1x4xH100-SXM-80GB", *SHORT, "--top", "4", "-o", str(file)]) == 0
    return file


@pytest.fixture
def plan_file(planned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return shutil.copy(planned, tmp_path / "plan.yaml")


def test_plan_prints_a_table_and_writes_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--parallelism.tensor-parallel-degree=2", "-o", "out/p.yaml", "--top", "3"]
    assert main(["plan", "tiny", "1x4xH100-SXM-80GB", *SHORT, *words]) == 0
    out = capsys.readouterr().out
    for told in (
        "Model     tiny, 4 M parameters, 4 layers",
        "1 x 4 H100-SXM-80GB, 79.6 GiB each, datasheet figures",
        "16 sequences of 256 = 4.1 k tokens a step, bf16, adamw (chosen, not given: precision)",
        " not allowed, ",
        "Proven    nothing faster that fits was missed: the rest takes at least ",
        "why not #1",
        "chosen",
        "If one of 4 devices were lost: ",
        "Confidence: datasheet figures only",
        "Wrote out/p.yaml",
        "Next: ahp explain out/p.yaml",
    ):
        assert told in out
    rows = [line.split() for line in out.splitlines()]
    # One row for each family: with replicas, with states that are sharded, and with sequences that are divided.
    assert [row[0] for row in rows if row and row[0] in {"1", "2", "3", "4"}] == ["1", "2", "3"]
    assert re.search(
        r"the best of each family .*; (\d+ other layouts|one other layout) of these families fits?, slower or tied", out
    )
    plan = Plan.load("out/p.yaml")
    assert plan.parallelism.tensor_parallel_degree == 2
    assert plan.job.sequence_length == 256
    assert plan.forecast is not None
    assert plan.why[0].removeprefix("fastest of the layouts that fit: ").split(" a step")[0] in out


@pytest.mark.slow
def test_a_model_that_runs_in_fp32_alone_is_planned_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(MINIMAX))
    words = ["plan", "config.json", "1x1xH100-SXM-80GB", "--job.sequence-length=32", "--job.global-batch-size=8"]
    why = "self_attn mixes an fp32 tensor with weights in 16 bits"
    assert main(words) == 0
    assert f"Note      fp32: {why}" in capsys.readouterr().out
    assert Plan.load("plan.yaml").job.precision == "fp32"
    assert main([*words, "--job.precision=bf16"]) == 2
    assert f"job.precision = 'bf16': {why} (valid: fp32)" in capsys.readouterr().err
    assert main([*words, "--engine.name=deepspeed"]) == 0
    assert Plan.load("plan.yaml").job.precision == "bf16"


@pytest.mark.slow
def test_blocks_of_several_graphs_are_not_planned_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = "tests.graph.small:two_graphs"
    words = ["plan", model, "1x1xH100-SXM-80GB", *SHORT, "--parallelism.activation-checkpoint=selective"]
    assert main(words) == 0
    assert not Plan.load("plan.yaml").engine.compile
    capsys.readouterr()
    assert main([*words, "--engine.compile=true"]) == 5
    told = " ".join(capsys.readouterr().err.split())
    assert "activation_checkpoint = 'selective': with engine.compile = True a block must be one graph" in told
    assert "torch.compiler.disable" in told


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 100])
def test_output_fits_the_terminal_and_no_figure_loses_its_unit(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(width))
    words = ["plan", "tiny", "1x4xH100-SXM-80GB", *SHORT, "--parallelism.micro-batch-size", "2"]
    assert main(words) == 0
    narrow = capsys.readouterr().out.splitlines()
    assert max(map(len, narrow)) <= width
    unit, broken = re.compile(r" *(%|m?s|us|GiB|MiB|of|x)(?!\w)"), list(pairwise(narrow))
    assert not [pair for pair in broken if re.search(r"\d$", pair[0]) and unit.match(pair[1])]
    assert "\x1b" not in "".join(narrow)
    # What all rows have in common stands above the table; --wide has it in columns, each plan on one line.
    [same] = [line for line in narrow if line.startswith("All rows: ")]
    assert "mb 2" in same
    assert main([*words, "--wide"]) == 0
    wide = capsys.readouterr().out.splitlines()
    [head] = [line for line in wide if line.startswith("#")]
    assert " mb  " in head
    assert head.endswith("why not #1")
    assert not any(line.startswith("All rows: ") for line in wide)


@pytest.mark.slow
def test_a_model_without_fused_attention_is_said_to_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever kernel is asked for: transformers computes gpt-oss's attention in parts."""
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "gpt-oss-20b", "2x8xH100", "--parallelism.pipeline-parallel-degree", "1"]) == 0
    assert "ahp, no fused attention" in capsys.readouterr().out


def test_json_is_one_object_on_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ahp.search.less_memory.less_memory", lambda asked, best: "faster with a setting")
    assert main(["plan", "tiny", "1x2xH100-SXM-80GB", *SHORT, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert "faster with a setting" in told["notes"]
    assert told["certificate"]["proven"] is True
    assert told["plans"][0]["parallelism"] == Plan.load("plan.yaml").parallelism.model_dump(mode="json")
    assert told["job"]["global_batch_size"] == 16
    assert told["wrote"] == "plan.yaml"
    assert told["one_lost"]["devices_left"] == 1
    assert told["plans"][0]["worth"]["tokens_per_s"] > 0
    assert len(told["plans"]) == 10
    least = min(plan["forecast"]["step_time_s"] for plan in told["plans"])
    assert told["fastest"]["forecast"]["step_time_s"] == least
    assert all(plan["why"] for plan in told["families"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["cost", "--objective.price-per-device-hour", "2.5"], "cheapest: "),
        (["tokens-per-day", "--objective.restart-s", "300"], "5.0 min until it trains again"),
        (["fewest-devices", "--objective.target-tokens-per-s=10"], "fewest devices that reach 10 tokens/s"),
    ],
)
def test_another_objective_chooses_the_number_of_devices(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, one = str(tmp_path / "plan.yaml"), ["--parallelism.micro-batch-size", "2"]
    assert main(["plan", "tiny", "1x4xH100-SXM-80GB", *SHORT, *one, "-o", out, "--objective", *words]) == 0
    printed = capsys.readouterr().out
    assert re.search(rf"^Aim +{words[0]}: ", printed, re.MULTILINE)
    assert re.search(
        r"^Devices   \d devices?, the best of \d numbers \(1 to 4 devices\), found in ", printed, re.MULTILINE
    )
    assert told in printed
    plan = Plan.load(out)
    assert plan.cluster is not None
    assert Cluster.resolve(plan.cluster).num_devices == plan.parallelism.world_size
    assert plan.fixed == {"micro_batch_size": 2}


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--parallelism.tensor-parallel-degree", "3"], 2, "tensor_parallel_degree = 3"),
        (["--parallelism.tensor_paralel_degree", "2"], 2, "unknown key"),
        (
            ["--jobs.steps", "2"],
            2,
            "--jobs.steps: unknown key; it must begin with one of job, parallelism, engine, objective",
        ),
        (["--out", "."], 2, "--out = '.': is a folder; give a file in it"),
        (["--current", ""], 2, "plan = '': must be a plan.yaml, or a run's folder"),
        (["--engine.name", "megatron", "--engine.compile", "true"], 5, "megatron"),
        (["--job.global-batch-size", "0"], 2, "global_batch_size = 0"),
        (["--top", "0"], 2, "--top = 0"),
        (["--objective", "cost"], 2, "give --objective.price-per-device-hour"),
        (["--objective.restart-s", "3"], 2, "objective.restart_s = 3.0: the objective speed does not read it"),
        (["--objective", "tokens-per-day", "--measure", "2"], 2, "--measure = 2"),
    ],
)
def test_what_cannot_be_is_one_line_and_an_exit_code(
    words: list[str],
    code: int,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "tiny", "1x4xH100-SXM-80GB", *SHORT, *words]) == code
    captured = capsys.readouterr()
    assert told in captured.err.splitlines()[-1]
    assert captured.out == ""
    assert not Path("plan.yaml").exists()


@pytest.mark.slow
def test_a_plan_that_its_engines_file_cannot_say_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ["--engine.name", "megatron", "--parallelism.data-parallel-shard-degree", "2", "--json"]
    assert main(["plan", "bert-base", "1x2xH100-SXM-80GB", *asked]) == 0
    told = json.loads(capsys.readouterr().out)
    assert any(
        note.startswith("ahp export megatron refuses the first plan: model_type = 'bert'") for note in told["notes"]
    )
    assert told["next"] == ["ahp explain plan.yaml", "ahp simulate plan.yaml"]
    for command, after in (
        ("explain", "ahp simulate plan.yaml --trace trace.json"),
        ("simulate", "ahp explain plan.yaml"),
    ):
        assert main([command, "plan.yaml"]) == 0
        assert capsys.readouterr().out.rstrip().endswith(f"Next: {after}")


def test_plans_for_another_machine_are_not_searched_to_be_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ahp.cli.plan.find", lambda *asked: pytest.fail("searched for nothing"))
    monkeypatch.setattr("ahp.runtime.ranks.device.num_gpus", lambda: 1)
    assert main(["plan", "tiny", "1x4xH100-SXM-80GB", "--measure", "2"]) == 4
    told = "--measure = 2: plans are measured on this machine, which has 1 GPU, and the cluster has 4 of H100-SXM-80GB;"
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_explain_shows_bars_and_what_would_move_it(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["explain", str(plan_file), "--why-not", "tp=2 mb=1"]) == 0
    out = capsys.readouterr().out
    for told in (
        "step ",
        "backward",
        "memory ",
        "free",
        "What binds",
        "10 % more FLOPS: ",
        "10 % more memory: ",
        "10 % more network within nodes: ",
        "Next: ahp",
    ):
        assert told in out
    assert "Why not dp" in out
    assert "tp2 " in out.split("Why not dp")[1].splitlines()[0]
    assert out.count("difference") == 2  # of the step, of the memory
    assert "network between nodes" not in out


@pytest.mark.slow
def test_explain_json(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["explain", str(plan_file), "--why-not", "tp=4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    step_s = told["forecast"]["step_time_s"]
    assert len(told["sensitivity"]) == 4
    assert told["documents"] == []  # they see each other
    assert all(move["step_time_s"] <= step_s * (1 + 1e-9) for move in told["sensitivity"])
    assert told["binds"]["part"] in {"compute", *told["forecast"]["step"]}
    assert told["next"][-1] == f"ahp train {plan_file}"
    more = told["why_not"]["more"]["step"]
    assert sum(more.values()) == pytest.approx(told["why_not"]["forecast"]["step_time_s"] - step_s)
    assert told["why_not"]["parallelism"]["tensor_parallel_degree"] == 4
    assert told["why_not"]["forecast"]["step_time_s"] >= step_s


@pytest.mark.slow
def test_an_edited_plan_is_explained_and_drawn_as_it_is_now(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not as it was when its forecast was written into the file."""
    edited = plan_file.read_text().replace("activation_checkpoint: none", "activation_checkpoint: full", 1)
    plan_file.write_text(edited)
    capsys.readouterr()
    assert main(["simulate", str(plan_file), "--json"]) == 0
    today = json.loads(capsys.readouterr().out)["forecast"]
    assert main(["explain", str(plan_file), "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["forecast"] == today
    assert "note: the plan stores a forecast of " in said.err
    assert main(["report", str(plan_file)]) == 0
    page = plan_file.with_suffix(".html").read_text()
    assert f"step time, predicted</b><strong>{seconds(today['step_time_s'])}</strong>" in page


@pytest.mark.slow
def test_explain_says_how_attention_keeps_documents_apart(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By their lengths, or with a mask; nothing where they see each other."""
    title = "How attention keeps documents apart"
    told = {}
    for devices in ("2xA100-SXM-80GB", "2xMI300X"):
        assert main(["plan", "tiny", devices, *SHORT, "--job.document-mask=true", "-o", str(plan_file)]) == 0
        capsys.readouterr()
        assert main(["explain", str(plan_file)]) == 0
        out = capsys.readouterr().out
        told[devices] = " ".join(out.split(title)[1].split())
    assert told["2xA100-SXM-80GB"].startswith("- by the lengths of documents (FlashAttention-2), without a mask")
    assert told["2xMI300X"].startswith("- with a mask [sequence, sequence], and computes the scores of all pairs")


@pytest.mark.slow
def test_an_impossible_alternative_is_told_not_an_error(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["explain", str(plan_file), "--why-not", "tp=3"]) == 0
    told = "Why not: not possible: parallelism.tensor_parallel_degree = 3: must divide the 4 devices (valid: 1, 2, 4)"
    assert told in capsys.readouterr().out


def test_why_not_takes_short_and_full_names() -> None:
    (given,) = constraints_of("tp=8 pp=1, recompute=full layers_per_stage=[3,3]")
    assert given.given == {
        "tensor_parallel_degree": 8,
        "pipeline_parallel_degree": 1,
        "activation_checkpoint": "full",
        "layers_per_stage": (3, 3),
    }


@pytest.mark.parametrize(
    "layout",
    [
        {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 4, "zero_stage": 2},
        {"tensor_parallel_degree": 8, "enable_sequence_parallel": True, "activation_checkpoint": "full"},
        {"pipeline_parallel_degree": 4, "virtual_stages_per_rank": 2, "pipeline_parallel_schedule": "ZBVZeroBubble"},
        {"context_parallel_degree": 2, "expert_parallel_degree": 4, "micro_batch_size": 3},
        {"data_parallel_shard_degree": 8, "activation_checkpoint": "selective", "recomputed_layers_per_stage": (31,)},
        {"pipeline_parallel_degree": 4, "activation_checkpoint": "full", "recomputed_layers_per_stage": (6, 2, 2, 0)},
    ],
    ids=str,
)
def test_a_layout_is_read_as_tables_print_it(layout: dict) -> None:
    given = Parallelism.model_validate(layout)
    (keys,) = constraints_of(given.short())
    assert keys.admits(given)
    assert layout_of(given.short(), "--current") == given


def test_dp_is_every_way_to_share_so_many_replicas() -> None:
    ways = [(one.data_parallel_replicate_degree, one.data_parallel_shard_degree) for one in constraints_of("dp=6 tp=2")]
    assert ways == [(6, 1), (3, 2), (2, 3), (1, 6)]
    (one,) = constraints_of("dp=2x3")
    assert (one.data_parallel_replicate_degree, one.data_parallel_shard_degree) == (2, 3)
    with pytest.raises(BadInput, match="give how the replicas shard their states: dp=REPLICATExSHARD"):
        layout_of("dp=6", "--current")
    assert constraints_of("dp6 tp2 pp4") == constraints_of("dp=6 tp=2 pp=4")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("tp 8", "must be KEY=VALUE"),
        ("tensor=8", "must be KEY=VALUE"),
        ("tp=8 tp=4", "tp=4 gives tensor_parallel_degree a second time"),
        ("tp8 tensor_parallel_degree=8", "a second time"),
        ("dp=4 dp_shard=2", "dp is replicate x shard degree"),
        ("dp=0", "must be the number of replicas"),
        ("tp=two", "tensor_parallel_degree = 'two'"),
        ("dp2x4 zero1 mb64 on(h100|a100:24)", "printed of a mixed cluster's placement"),
        ("dp2x4 zero1 mb64 m(3 1)", "printed of a mixed cluster's placement"),
    ],
)
def test_words_that_are_no_layout_are_refused(words: str, told: str) -> None:
    with pytest.raises(BadInput, match=told):
        constraints_of(words)


def test_explain_needs_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "no/such.yaml"]) == 2
    assert "no such file" in capsys.readouterr().err


def test_report_needs_a_runs_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "not a run's folder" in capsys.readouterr().err


def test_report_writes_the_page_of_a_plan(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["report", str(plan_file), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    page = Path(told["wrote"])
    assert page == plan_file.with_suffix(".html")
    assert told["next"] == [f"ahp train {plan_file}"]
    assert Plan.load(plan_file).parallelism.short() in page.read_text()


def test_report_says_how_far_a_run_came_and_whether_it_lives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run that was killed it said ``running`` for ever."""
    monkeypatch.setattr("ahp.report.page.write", lambda source, out: source / "report.html")
    Plan().save(tmp_path / "plan.yaml")
    who = {"pid": 1, "host": "elsewhere", "heartbeat": "2026-01-01T00:00:00+00:00"}
    status = {"state": "running", "step": 7, "cause": None, "exit_code": None}
    (tmp_path / "status.json").write_text(json.dumps({**status, **who}))
    assert main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "Run   dead, step 7: process 1 on elsewhere was not heard of for" in out
    assert "the same ahp train goes on from its last checkpoint" in out
    assert main(["report", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["step"]) == ("dead", 7)


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["plan", "tiny", "1x2xH100-SXM-80GB", *SHORT, "-o", str(tmp_path / "file" / "plan.yaml")]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.slow
def test_what_runs_today_is_shown_beside_the_winner(tmp_path, capsys):
    words = ["tiny", "2xH100-SXM-80GB", "-o", str(tmp_path / "plan.yaml")]
    assert main(["plan", *words, "--current", "tp=2 recompute=full"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^Today     dp1x1 zero0 tp2 mb1 full: .* a step, .* (slower|times as long)", out, re.MULTILINE)
    assert main(["plan", *words, "--current", str(tmp_path / "plan.yaml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["current"]["against_best"] == "it is the best"
    assert main(["plan", *words, "--current", "tensor=2 x=1"]) == 2
    assert "--current = 'tensor=2'" in capsys.readouterr().err


@pytest.mark.slow
def test_explain_draws_a_found_schedule_beside_a_pattern(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pipeline = ["--parallelism.pipeline-parallel-degree", "4", "--parallelism.pipeline-parallel-schedule"]
    for name in ("1F1B", "Synthesized"):
        assert main(["plan", "tiny", "1x4xH100-SXM-80GB", *SHORT, *pipeline, name]) == 0
        assert Plan.load("plan.yaml").parallelism.pipeline_parallel_schedule == name
        capsys.readouterr()
        assert main(["explain", "plan.yaml", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)["schedules"]
        assert "Synthesized" in told["drawings"]
        assert len(told["drawings"]) == 2
        assert all(len(lines) == 4 and set("".join(lines)) <= set("FBIWfbiw.") for lines in told["drawings"].values())
        assert "made for these stages" in told["words"]
    assert main(["explain", "plan.yaml"]) == 0
    assert "Schedule (F forward" in capsys.readouterr().out
