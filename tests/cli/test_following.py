"""The last line of a command names one that exists and can do something with the plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ahp.cli.following import after, next_words
from ahp.cli.main import COMMANDS, main


def test_train_runs_plans_of_ahp_alone() -> None:
    assert after("my plan.yaml", "ahp", "explain") == ["ahp explain 'my plan.yaml'", "ahp train 'my plan.yaml'"]
    assert after("p.yaml", "torchtitan", "explain") == ["ahp explain p.yaml", "ahp export torchtitan p.yaml"]


def test_a_run_goes_on_in_its_folder(tmp_path: Path) -> None:
    """ahp train takes a file, where the others take the folder of a run too."""
    run = tmp_path / "my run"
    run.mkdir()
    train = f"ahp train '{run}/plan.yaml' --run.folder '{run}'"
    assert after(str(run), "ahp", "explain") == [f"ahp explain '{run}'", train]
    assert after(str(run), "deepspeed") == [f"ahp export deepspeed '{run}'"]


@pytest.mark.slow
def test_a_plan_for_another_engine_is_never_sent_to_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    engine = ["--engine.name", "torchtitan"]
    job = ["--job.sequence-length", "128", "--job.global-batch-size", "16"]
    assert main(["plan", "llama3-8b", "8xH100-SXM-80GB", *job, *engine, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["next"]
    assert told == ["ahp explain plan.yaml", "ahp simulate plan.yaml", "ahp export torchtitan plan.yaml"]
    lines = []
    for words in (["explain"], ["simulate"], ["report"]):
        assert main([*words, "plan.yaml"]) == 0
        lines.append(capsys.readouterr().out.rstrip().splitlines()[-1])
    assert lines == [
        "Next: ahp simulate plan.yaml --trace trace.json    ahp export torchtitan plan.yaml",
        "Next: ahp explain plan.yaml    ahp export torchtitan plan.yaml",
        "Next: open it in a browser    ahp simulate plan.yaml --trace trace.json",
    ]
    named = [part.split()[1] for part in told] + [
        words for line in lines for words in line.split() if words in COMMANDS
    ]
    assert set(named) <= set(COMMANDS) - {"train"}


def test_commands_that_do_not_fit_on_a_line_stand_below_each_other() -> None:
    commands = ["ahp explain plan.yaml", "ahp train plan.yaml"]
    assert next_words(commands, 100) == "Next: ahp explain plan.yaml    ahp train plan.yaml"
    assert next_words(commands, 40) == "Next: ahp explain plan.yaml\n      ahp train plan.yaml"
