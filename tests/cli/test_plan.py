"""``ahp plan`` and ``ahp explain`` as a user runs them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ahp.cli import explain
from ahp.cli.main import main
from ahp.cluster.model import (
    AttentionSample,
    Cluster,
    CollectiveSample,
    ElementWiseSample,
    MatmulSample,
    Measurements,
    MemorySample,
)
from ahp.errors import BadInput
from ahp.plan import Parallelism, Plan

SHORT = ["--job.sequence-length", "128", "--job.global-batch-size", "16"]


@pytest.fixture
def plan_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "tiny", "1x4xH100-SXM-80GB", *SHORT, "--top", "4"]) == 0
    return tmp_path / "plan.yaml"


def test_plan_prints_a_table_and_writes_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--parallelism.tensor-parallel-degree=2", "-o", "out/p.yaml", "--top", "3"]
    assert main(["plan", "tiny", "1x4xH100-SXM-80GB", *SHORT, *words]) == 0
    out = capsys.readouterr().out
    for told in (
        "Model    tiny, 4 M parameters, 4 layers",
        "1 x 4 H100-SXM-80GB, 79.6 GiB each, datasheet figures",
        "16 sequences of 128 = 2.05 k tokens a step, bf16, adamw   (chosen, not given: precision)",
        "break a rule",
        "why not #1",
        "chosen",
        "Confidence: datasheet figures only",
        "Wrote out/p.yaml",
        "Next: ahp explain out/p.yaml",
    ):
        assert told in out
    rows = [line.split() for line in out.splitlines()]
    assert [row[0] for row in rows if row and row[0] in {"1", "2", "3", "4"}] == ["1", "2", "3"]
    plan = Plan.load("out/p.yaml")
    assert plan.parallelism.tensor_parallel_degree == 2
    assert plan.job.sequence_length == 128
    assert plan.forecast is not None
    assert plan.why[0].removeprefix("fastest of the layouts that fit: ").split(" a step")[0] in out


def test_json_is_one_object_on_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "tiny", "1x2xH100-SXM-80GB", *SHORT, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["certificate"]["proven"] is True
    assert told["plans"][0]["parallelism"] == Plan.load("plan.yaml").parallelism.model_dump(mode="json")
    assert told["job"]["global_batch_size"] == 16
    assert told["wrote"] == "plan.yaml"


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--parallelism.tensor-parallel-degree", "3"], 2, "tensor_parallel_degree = 3"),
        (["--parallelism.tensor_paralel_degree", "2"], 2, "unknown key"),
        (["--jobs.steps", "2"], 2, "--jobs.steps"),
        (["--engine.name", "megatron", "--engine.compile", "true"], 5, "megatron"),
        (["--job.global-batch-size", "0"], 2, "global_batch_size = 0"),
        (["--top", "0"], 2, "--top = 0"),
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


def test_explain_shows_bars_and_what_would_move_it(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["explain", str(plan_file), "--why-not", "tp=2 mb=1"]) == 0
    out = capsys.readouterr().out
    for told in (
        "step ",
        "backward",
        "memory ",
        "free",
        "arithmetic twice as fast",
        "network twice as fast",
        "Next: ahp",
    ):
        assert told in out
    assert "Why not dp" in out
    assert "tp2 " in out.split("Why not dp")[1].splitlines()[0]
    assert "difference" in out


def test_faster_hardware_is_faster_in_what_was_measured_too(plan_file: Path) -> None:
    subject = explain._subject(Plan.load(plan_file))
    group = subject.cluster.groups[0]
    measured = Measurements(
        matmul=(MatmulSample(m=128, n=704, k=256, dtype="bfloat16", workers=4, seconds=1e-5),),
        memory=(MemorySample(workers=4, bytes_per_s=1e12),),
        collectives=tuple(
            CollectiveSample(kind=kind, workers=4, bytes=size, seconds=size * 1e-9)  # type: ignore[arg-type]
            for kind in ("all_reduce", "all_gather", "reduce_scatter")
            for size in (1000, 10_000_000)
        ),
    )
    cluster = subject.cluster.model_copy(update={"groups": (group.model_copy(update={"measured": measured}),)})
    layout = Parallelism(data_parallel_shard_degree=4)
    before = subject.on(cluster).price(layout).step_time_s
    moved = dict(explain.what_would_move(subject.on(cluster), layout))
    assert all(step_s < before for step_s in moved.values()), moved


def test_every_measured_table_belongs_to_one_piece_of_hardware() -> None:
    attention = AttentionSample(
        heads=4, sequence=64, head_dim=32, dtype="fp32", workers=1, phase="forward", seconds=8e-5
    )
    measured = Measurements(
        matmul=(MatmulSample(m=8, n=8, k=8, dtype="fp32", workers=1, seconds=1e-5),),
        memory=(MemorySample(workers=1, bytes_per_s=1e9),),
        attention=(attention, attention.model_copy(update={"phase": "backward"})),
        element_wise=tuple(
            ElementWiseSample(kind=kind, elements=64, dtype="fp32", workers=1, seconds=1e-5)  # type: ignore[arg-type]
            for kind in ("add", "silu")
        ),
        collectives=(CollectiveSample(kind="all_reduce", workers=2, bytes=64, seconds=1e-5),),
    )
    group = Cluster.parse("2xA100-SXM-80GB").groups[0].model_copy(update={"measured": measured})
    changed: dict[str, set[str]] = {}
    for words, (faster,) in explain._faster((group,)):
        assert faster.measured is not None
        for table in Measurements.model_fields:
            for old, new in zip(getattr(measured, table), getattr(faster.measured, table), strict=True):
                if new == old:
                    continue
                speed = new.bytes_per_s / old.bytes_per_s if table == "memory" else old.seconds / new.seconds
                assert speed == pytest.approx(explain.FASTER)
                changed.setdefault(words.removesuffix(" twice as fast"), set()).add(getattr(old, "kind", table))
    assert changed == {
        "arithmetic": {"matmul", "attention", "silu"},
        "memory bandwidth": {"memory", "add"},
        "network": {"all_reduce"},
    }


def test_explain_json(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["explain", str(plan_file), "--why-not", "tp=4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    step_s = told["forecast"]["step_time_s"]
    assert len(told["what_would_move_it"]) == 3
    assert all(change["step_time_s"] <= step_s * (1 + 1e-9) for change in told["what_would_move_it"])
    assert told["why_not"]["parallelism"]["tensor_parallel_degree"] == 4
    assert told["why_not"]["forecast"]["step_time_s"] >= step_s


def test_an_impossible_alternative_is_told_not_an_error(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["explain", str(plan_file), "--why-not", "cp=2"]) == 0
    assert "Why not: not possible: context_parallel_degree = 2" in capsys.readouterr().out


def test_why_not_takes_short_and_full_names() -> None:
    given = explain.parse_why_not("tp=8 pp=1, recompute=full layers_per_stage=[3,3]")
    assert given.given == {
        "tensor_parallel_degree": 8,
        "pipeline_parallel_degree": 1,
        "activation_checkpoint": "full",
        "layers_per_stage": (3, 3),
    }
    with pytest.raises(BadInput, match="must be KEY=VALUE"):
        explain.parse_why_not("tp8")
    with pytest.raises(BadInput, match="must be KEY=VALUE"):
        explain.parse_why_not("tensor=8")


def test_explain_needs_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "no/such.yaml"]) == 2
    assert "no such file" in capsys.readouterr().err


def test_report_needs_a_runs_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "no run's folder" in capsys.readouterr().err


def test_report_writes_the_page_of_a_plan(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["report", str(plan_file), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    page = Path(told["wrote"])
    assert page == plan_file.with_suffix(".html")
    assert told["next"] == [f"ahp train {plan_file}"]
    assert Plan.load(plan_file).parallelism.short() in page.read_text()


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["plan", "tiny", "1x2xH100-SXM-80GB", *SHORT, "-o", str(tmp_path / "file" / "plan.yaml")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_what_runs_today_is_shown_beside_the_winner(tmp_path, capsys):
    words = ["tiny", "2xH100-SXM-80GB", "-o", str(tmp_path / "plan.yaml")]
    assert main(["plan", *words, "--current", "tp=2 recompute=full"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^Today    dp1x1 zero0 tp2 mb1 full: .* a step, .* slower", out, re.MULTILINE)
    assert main(["plan", *words, "--current", str(tmp_path / "plan.yaml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["current"]["against_best"] == "it is the best"
    assert main(["plan", *words, "--current", "tensor=2 x=1"]) == 2
    assert "--current = 'tensor=2'" in capsys.readouterr().err
