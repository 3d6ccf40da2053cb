"""The tutorial of docs/train/first-run.md: it trains, goes on under another plan, and what it computed is right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ahp.cli.main import main
from benchmarks.own_cache import own_cache
from tests.docs.pages import ROOT, blocks
from tests.docs.test_commands import NAMED, told
from tests.search.small import cpu_workers

TEXT = "def answer(question):\n    return 42 if question else None\n\n"


@pytest.mark.slow
@pytest.mark.usefixtures("launched_on_pool")
def test_its_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a little text of its own and a machine that is not measured: a tokenizer and a probe take half a minute each. Its cores are none for bf16:
    where a processor has no units for it, torch takes up to a hundred times as long for a gradient as in fp32."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AHP_CACHE", own_cache(tmp_path))
    cpu_workers(2, 2, precisions=("fp32",)).save(tmp_path / "cluster.yaml")
    (tmp_path / "text.txt").write_text(TEXT * 400)
    done = []
    for block in blocks(ROOT / "docs/train/first-run.md"):
        if file := NAMED.match(block.code):
            assert "data: python-stdlib " in block.code
            job = block.code.replace("data: python-stdlib ", "data: text.txt ") + "cluster: cluster.yaml\n"
            (tmp_path / file[1]).write_text(job)
        for words in told(block) if block.language == "sh" else []:
            assert main(words) == 0, f"{block}: ahp {' '.join(words)}\n{capsys.readouterr().err}"
            done.append(words[0])
    assert done == ["train", "report", "explain", "generate", "train", "verify"]
    run = tmp_path / "runs" / "first"
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [*range(1, 17)]
    starts = [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]
    first, second = (start["plan"] for start in starts if "plan" in start)
    assert first != second
    assert "tp2" in second
    assert "Equal: largest relative difference" in capsys.readouterr().out
