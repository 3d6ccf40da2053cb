"""Text that a job names, made ready: what is wrong with it is told by the key that names it."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from ahp.errors import BadInput
from ahp.graph.models import build_model
from ahp.plan import Plan, validated
from ahp.runtime.data import tokenizer as tokenizers
from ahp.runtime.data.tokenizer import save_for_transformers
from ahp.runtime.run import export_mark
from ahp.runtime.run.texts import prepare_texts, what_it_reads
from tests.runtime.run.test_trainer import MODEL


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("nothere.txt", None, r" = '.*nothere\.txt': no such file"),
        ("a.pdf", "", " = .*files .pdf are not read"),
        ("a.txt", " ", " = .*it holds no text"),
        ("a.jsonl", "[1]", ": .*line 1: an object with "),
        ("a.jsonl", '{"text": 5, "x": null}', r": .*line 1: a key text, .*was expected \(its keys: text \(a number\), x \(null\)\)"),
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


def test_a_full_cache_is_named_and_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers started workers ten times over "a file: No space left on device"."""
    monkeypatch.setenv("AHP_CACHE", str(tmp_path / "cache"))

    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("ahp.runtime.data.corpus._Maker.write", full)
    (tmp_path / "a.txt").write_text("plain words, some of them " * 400)
    job = {"sequence_length": 8, "global_batch_size": 1, "steps": 1, "data": str(tmp_path / "a.txt")}
    plan = validated(Plan, {"model": MODEL, "job": job, "parallelism": {}}, "plan")
    with pytest.raises(
        BadInput, match=r"AHP_CACHE = .*cache': cannot be written \(No space left on device\); make room"
    ) as refused:
        prepare_texts(plan)
    assert not refused.value.may_pass
    assert not list((tmp_path / "cache" / "corpora").iterdir())


def test_adapters_on_weights_that_nobody_trained_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AHP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("plain words, some of them " * 400)
    job = {"sequence_length": 8, "global_batch_size": 1, "steps": 1, "data": str(tmp_path / "a.txt"), "lora": {"r": 2}}
    prepare_texts(validated(Plan, {"model": MODEL, "job": job, "parallelism": {}}, "plan"))
    assert "init_from names trained weights" in capsys.readouterr().err


def test_given_weights_that_have_changed_since_a_run_exported_them_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AHP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("plain words, some of them " * 400)
    given = tmp_path / "hf"
    build_model(MODEL, device="cpu").save_pretrained(given)  # type: ignore[operator]
    words = tokenizers.train(["plain words, some of them"], 300)
    save_for_transformers(words, given)
    export_mark.write(given, 8, {})
    job = {"sequence_length": 8, "global_batch_size": 1, "steps": 1, "data": str(tmp_path / "a.txt")}
    plan = validated(Plan, {"model": MODEL, "init_from": str(given), "job": job, "parallelism": {}}, "plan")
    prepare_texts(plan)
    (given / "config.json").write_text("{}")  # the user's own business
    prepare_texts(plan)
    content = bytearray((given / "model.safetensors").read_bytes())
    content[-5] ^= 1
    (given / "model.safetensors").write_bytes(content)
    with pytest.raises(
        BadInput, match=r"init_from = .*model\.safetensors has changed since a run exported it; .*delete ahp\.json"
    ):
        prepare_texts(plan)
    (given / "ahp.json").unlink()
    prepare_texts(plan)


@pytest.mark.parametrize("key", ["data", "validation"])
def test_text_that_is_not_there_is_told_before_a_model_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """Which takes seconds of imports where the model is new."""
    monkeypatch.setattr("ahp.runtime.run.texts.what_it_reads", lambda *given: pytest.fail("built for nothing"))
    (tmp_path / "a.txt").write_text("plain words, some of them " * 400)
    job = {"sequence_length": 8, "steps": 1, "data": str(tmp_path / "a.txt"), key: str(tmp_path / "no.txt")}
    with pytest.raises(BadInput, match=rf"^job\.{key} = .*no\.txt': no such file or folder"):
        prepare_texts(validated(Plan, {"model": MODEL, "job": job, "parallelism": {}}, "plan"))


def test_what_a_model_reads_is_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that starts again builds no model, which would import transformers; what is refused is so each time."""
    monkeypatch.setenv("AHP_CACHE", str(tmp_path))
    masked = {
        "model_type": "bert", "vocab_size": 50, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 32,
    }  # fmt: skip
    assert what_it_reads(MODEL, 16) == (False, 300)
    assert what_it_reads(masked, 16) == (True, 50)
    for _ in range(2):
        with pytest.raises(BadInput, match=r"job\.sequence_length = 33: the model takes 32 positions"):
            what_it_reads(masked, 33)
    monkeypatch.setattr("ahp.graph.models.build_model", lambda *given, **more: pytest.fail("built again"))
    assert what_it_reads(MODEL, 16) == (False, 300)
    assert what_it_reads(masked, 16) == (True, 50)
