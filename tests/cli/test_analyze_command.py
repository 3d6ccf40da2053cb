"""``ahp analyze``: the table, the whole graph as JSON, DOT, and the next command; the result alone on stdout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ahp.cli.analyze import heaviest, repeated, run, six_n
from ahp.errors import BadInput
from ahp.graph import kept
from ahp.graph.export import from_plain
from ahp.job import Job


def test_the_table_names_every_part_and_the_next_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tiny", "--sequence-length", "256"]) == 0
    out, err = capsys.readouterr()
    for word in ("4,000,000", "embedding", "block", "head", "1 x 256 tokens", "6 N", "mlp.down_proj"):
        assert word in out
    assert out.rstrip().endswith("Next: ahp plan tiny CLUSTER")
    assert "analyzed in" in err
    assert "chosen" not in out


@pytest.mark.parametrize("model", ["llama3-405b", "qwen3-235b-a22b"])
def test_the_largest_models_fit_80_columns_whole(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run([model]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    graph = kept.analyze(model, Job(sequence_length=8192))
    [whole] = [line.split() for line in out.splitlines() if line.startswith("whole ")]
    forward = sum(times * part.flops("forward") for part, times in repeated(graph))
    assert float(whole[4]) * {"TFLOP": 1e12, "PFLOP": 1e15}[whole[5]] == pytest.approx(forward, rel=5e-3)


@pytest.mark.slow
def test_the_length_is_the_models_own_when_not_given(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 48, "vocab_size": 50}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run([str(tmp_path)]) == 0
    assert "1 x 48 tokens" in capsys.readouterr().out
    assert run(["tests.graph.small:custom"]) == 0
    assert f"1 x {Job().sequence_length} tokens" in capsys.readouterr().out


@pytest.mark.slow
def test_json_is_the_whole_graph(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tiny", "--sequence-length=64", "--micro-batch-size", "2", "--precision", "fp32", "--json"]) == 0
    graph = from_plain(json.loads(capsys.readouterr().out))
    assert (graph.micro_batch_size, graph.sequence_length, graph.dtype) == (2, 64, "float32")
    assert graph == kept.analyze("tiny", Job(sequence_length=64, precision="fp32"), micro_batch_size=2)


@pytest.mark.slow
def test_dot_is_a_digraph(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tiny", "--sequence-length", "64", "--attention", "math", "--dot"]) == 0
    out = capsys.readouterr().out
    assert out.startswith('digraph "tiny" {')
    assert out.endswith("}\n")
    assert "aten._softmax" in out


def test_one_form_at_a_time() -> None:
    with pytest.raises(BadInput, match="give only one"):
        run(["tiny", "--json", "--dot"])


@pytest.mark.parametrize("words", [["tini"], ["tiny", "--sequence-length", "1"], ["tiny", "--micro-batch-size", "0"]])
def test_bad_input(words: list[str]) -> None:
    with pytest.raises(BadInput):
        run(words)


def test_the_heaviest_are_counted_over_all_layers() -> None:
    graph = kept.analyze("tiny", Job(sequence_length=256))
    rows = heaviest(graph)
    assert [row[3] for row in rows] == sorted((row[3] for row in rows), reverse=True)
    up = next(row for row in rows if row[0].module == "mlp.up_proj" and row[0].phase == "forward")
    assert up[2:4] == (4, 4 * 2 * 256 * 256 * 704)


def test_six_n_leaves_out_the_table_that_is_only_looked_up() -> None:
    """Without attention, traced / 6 N = (N - embedding - norms) / N."""
    graph = kept.analyze("tiny", Job(sequence_length=256))
    looked_up = 2048 * 256 + 9 * 256
    share = (graph.num_parameters - looked_up) / graph.num_parameters
    assert f"without attention {share:.3f}" in six_n(graph)[1][1]
