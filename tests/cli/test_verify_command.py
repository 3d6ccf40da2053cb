"""ahp verify: equal is said and exits with 0, a difference exits with 1."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from ahp.cli import verify as command
from ahp.errors import HardwareMismatch
from ahp.plan import Plan
from ahp.runtime.check.verify import Comparison, verify

MODEL = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip


def plan(**parallelism: int) -> Plan:
    job = {"sequence_length": 8, "global_batch_size": 4, "precision": "fp32", "steps": 3}
    return Plan.model_validate({"model": MODEL, "job": job, "parallelism": parallelism})


def test_a_difference_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan(tensor_parallel_degree=2).save(tmp_path / "plan.yaml")
    rows = [Comparison(1, 4.0, 4.0, 1.0, 1.0, 1e-5), Comparison(2, 4.0, 4.0, 532.7, 2.087, 1e-4)]
    monkeypatch.setattr("ahp.runtime.check.verify.verify", lambda *args, **kwargs: rows)
    assert command.run([str(tmp_path / "plan.yaml")]) == 1
    out = capsys.readouterr().out
    assert "NOT EQUAL" in out
    assert "more than allowed from step 2 on" in out
    assert max(map(len, out.partition("Next: ")[0].splitlines())) <= 100


def test_json_has_the_next_command_and_no_word_that_is_no_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The norm of a step that overflows fp16 is infinite."""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    plan(tensor_parallel_degree=2).save(path := tmp_path / "plan.yaml")
    overflowed, equal = Comparison(1, 4.0, 4.0, math.inf, math.inf, 1e-5), Comparison(2, 4.0, 4.0, 2.0, 2.0, 1e-4)
    monkeypatch.setattr("ahp.runtime.check.verify.verify", lambda *args, **kwargs: [overflowed, equal])
    assert command.run([str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert found["next"] == [f"ahp train {path}"]
    assert [step["grad_norm"] for step in found["steps"]] == [None, 2.0]


def test_refuses_what_this_machine_cannot_hold() -> None:
    huge = Plan.model_validate({"model": "llama3-70b", "parallelism": {"data_parallel_shard_degree": 8}})
    with pytest.raises(HardwareMismatch, match="GiB free"):
        verify(huge)
