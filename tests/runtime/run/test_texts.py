"""Text that a job names, made ready: what is wrong with it is told by the key that names it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ahp.errors import BadInput
from ahp.plan import Plan, validated
from ahp.runtime.run.texts import prepare_texts
from tests.runtime.run.test_trainer import MODEL


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("nothere.txt", None, r" = '.*nothere\.txt': no such file"),
        ("a.pdf", "", " = .*files .pdf are not read"),
        ("a.txt", " ", " = .*it holds no text"),
        ("a.jsonl", "[1]", ": .*line 1: an object with "),
        ("a.jsonl", '{"messages": [3]}', ": .*line 1: every message needs a role"),
        ("a.jsonl", json.dumps({"messages": [{"role": "user", "content": "x"}]}), ": it holds conversations"),
        ("a.parquet", "text", ": .*not a parquet file"),
    ],
)  # fmt: skip
def test_held_out_text_is_refused_by_its_own_key(
    tmp_path: Path, name: str, content: str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors named job.data, which was right."""
    monkeypatch.setenv("AHP_CACHE", str(tmp_path / "cache"))
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    if content is not None:
        (tmp_path / name).write_text(content)
    (tmp_path / "whole.txt").write_text("plain words, some of them " * 4000)
    job = {
        "sequence_length": 8, "global_batch_size": 1, "steps": 1,
        "data": str(tmp_path / "whole.txt"), "validation": str(tmp_path / name),
    }  # fmt: skip
    plan = validated(Plan, {"model": MODEL, "job": job, "parallelism": {}}, "plan")
    with pytest.raises(BadInput, match=r"^job\.validation" + told):
        prepare_texts(plan)


def test_adapters_on_weights_that_nobody_trained_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AHP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("plain words, some of them " * 400)
    job = {"sequence_length": 8, "global_batch_size": 1, "steps": 1, "data": str(tmp_path / "a.txt"), "lora": {"r": 2}}
    prepare_texts(validated(Plan, {"model": MODEL, "job": job, "parallelism": {}}, "plan"))
    assert "init_from names trained weights" in capsys.readouterr().err
