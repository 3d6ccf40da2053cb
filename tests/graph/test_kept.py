"""Graphs that were traced before are read: equal to what is traced, and never for anything that has changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ahp.cache import cache_folder
from ahp.cli.planning_job import with_sequence
from ahp.cluster.model import Cluster
from ahp.errors import BadInput
from ahp.graph import kept, positions, trace
from ahp.graph.catalogue import CATALOGUE
from ahp.graph.operators import ModelGraph
from ahp.graph.trace import analyze
from ahp.job import Job

from .small import custom

KEYS: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
JOB = Job(sequence_length=16)
SLOW = ("gpt2", "bert-base", "qwen3-8b", "mixtral-8x7b")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AHP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "graphs"


@pytest.fixture(scope="module")
def graphs() -> dict[str, ModelGraph]:
    """By what was asked; they never change."""
    return {}


@pytest.fixture
def traced(graphs: dict[str, ModelGraph], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The models that tracing was asked for; each dict is traced once for all tests."""
    found: list[Any] = []

    def once(model: Any, job: Any = None, **more: Any) -> ModelGraph:
        found.append(model)
        if not isinstance(model, dict):  # a file and a module may have changed
            return analyze(model, job, **more)
        asked = repr((sorted(model.items()), job, more))
        if asked not in graphs:
            graphs[asked] = analyze(model, job, **more)
        return graphs[asked]

    monkeypatch.setattr(trace, "analyze", once)
    return found


def test_what_is_shipped_was_traced_by_this_code() -> None:
    told = "src/ahp/graph has changed: run .venv/bin/python .ci/ship_graphs.py"
    assert (kept.SHIPPED / kept.TRACED_BY).read_text() == kept.code(), told
    assert {file.name.removesuffix(".json.gz") for file in kept.SHIPPED.glob("*.gz")} == set(CATALOGUE)


def test_what_is_shipped_is_there_for_every_release_of_torch_that_is_tested() -> None:
    for file in kept.SHIPPED.glob("*.gz"):
        releases: dict[str, set[str]] = {}
        for one in kept.unpacked(file.read_bytes()):
            for key in map(json.loads, one["keys"]):
                torch = key.pop("libraries")["torch"]
                releases.setdefault(json.dumps(key), set()).add(torch)
        assert all(found == {"2.11", "2.12", "2.13", "2.14", "2.15"} for found in releases.values()), file.name


@pytest.mark.parametrize(
    "model",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else pytest.mark.wide) for name in CATALOGUE],
)
def test_what_is_shipped_is_what_is_traced(model: str, traced: list[Any], folder: Path) -> None:
    job = with_sequence({}, model, Cluster.parse("8xH100-SXM-80GB"))
    found = kept.analyze(model, job)
    assert kept.context_of(model) == positions.context_of(model)
    if traced:
        pytest.skip("shipped for other releases of torch and transformers")
    assert not folder.exists()
    fresh = trace.analyze(model, job)
    assert (found, found.larger) == (fresh, fresh.larger)


@pytest.mark.slow
def test_a_second_look_reads_what_the_first_has_traced(traced: list[Any], folder: Path) -> None:
    first, second = kept.analyze(KEYS, JOB), kept.analyze(dict(reversed(KEYS.items())), JOB)
    assert traced == [KEYS]
    assert (second, second.larger) == (first, first.larger)
    assert (first, first.larger) == ((fresh := analyze(KEYS, JOB)), fresh.larger)
    [file] = folder.iterdir()
    assert json.loads(kept.unpacked(file.read_bytes())["key"])["model"] == {"keys": KEYS}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "job", "more"),
    [
        (KEYS | {"num_hidden_layers": 1}, {"sequence_length": 16}, {}),
        (KEYS, {"sequence_length": 8}, {}),
        (KEYS, {"sequence_length": 16, "precision": "fp32"}, {}),
        (KEYS, {"sequence_length": 16, "document_mask": True}, {}),
        (KEYS, {"sequence_length": 16}, {"attention": "math"}),
        (KEYS, {"sequence_length": 16}, {"micro_batch_size": 2}),
    ],
)
def test_another_question_has_another_answer(keys: Any, job: Any, more: Any, traced: list[Any]) -> None:
    kept.analyze(KEYS, JOB)
    found = kept.analyze(keys, job, **more)
    assert len(traced) == 2
    assert kept.analyze(keys, job, **more) == found == trace.analyze(keys, job, **more)


@pytest.mark.slow
def test_other_code_or_another_release_traces_again(traced: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    kept.analyze(KEYS, JOB)
    with monkeypatch.context() as changed:
        changed.setattr(kept, "code", lambda *_: "edited")
        kept.analyze(KEYS, JOB)
        kept.analyze("tiny", JOB.model_copy(update={"sequence_length": 1024}))
    with monkeypatch.context() as changed:
        changed.setattr(kept, "_libraries", lambda: {"torch": "2.0", "transformers": "5.24"})
        kept.analyze(KEYS, JOB)
    assert traced == [KEYS, KEYS, "tiny", KEYS]


@pytest.mark.slow
def test_a_config_that_changes_is_traced_again_under_its_own_name(traced: list[Any], tmp_path: Path) -> None:
    files = [tmp_path / name / "config.json" for name in ("one", "other")]
    for file in files:
        file.parent.mkdir()
        file.write_text(json.dumps(KEYS))
    one, other = (kept.analyze(str(file.parent), JOB) for file in files)
    assert len(traced) == 1
    assert (one.name, one.model) == ("one", str(files[0].parent))
    assert (other.name, other.model) == ("other", str(files[1].parent))
    files[1].write_text(json.dumps(KEYS | {"vocab_size": 128}))
    assert kept.analyze(str(files[1]), JOB).config["vocab_size"] == 128


def test_a_file_may_have_keys_that_are_unknown_and_a_dict_may_not(tmp_path: Path) -> None:
    keys = KEYS | {"of_another_time": 1}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    kept.analyze(str(tmp_path), JOB)
    for _ in range(2):
        with pytest.raises(BadInput, match="of_another_time: unknown key"):
            kept.analyze(keys, JOB)


@pytest.mark.parametrize("damage", [b"", b"\x1f\x8b", b"[]", None])
def test_a_damaged_file_is_traced_again(damage: bytes | None, traced: list[Any], folder: Path) -> None:
    found = kept.analyze(KEYS, JOB)
    [file] = folder.iterdir()
    whole = bytearray(file.read_bytes())
    whole[len(whole) // 2] ^= 1
    file.write_bytes(whole if damage is None else damage)
    assert kept.analyze(KEYS, JOB) == found == kept.analyze(KEYS, JOB)
    assert len(traced) == 2


@pytest.mark.slow
def test_warnings_are_told_every_time(traced: list[Any]) -> None:
    for _ in range(2):
        with pytest.warns(UserWarning, match="the model takes 32 positions"):
            kept.analyze(KEYS, Job(sequence_length=64))
    assert len(traced) == 1


def test_a_folder_that_cannot_be_written_costs_time_alone(
    traced: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AHP_CACHE", str(tmp_path / "file"))
    assert kept.analyze(KEYS, JOB) == kept.analyze(KEYS, JOB)
    assert len(traced) == 2


def test_the_oldest_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST_KEPT", 2)
    for number in range(4):
        kept.kept(KEYS, {"of": number}, lambda number=number: number)
        for file in folder.iterdir():
            os.utime(file, (file.stat().st_mtime - 10,) * 2)
    values = {kept.unpacked(file.read_bytes())["value"] for file in folder.iterdir()}
    assert values == {2, 3}


@pytest.mark.slow
def test_code_is_traced_every_time(traced: list[Any], folder: Path) -> None:
    for model in ("tests.graph.small:custom", custom()):
        for _ in range(2):
            kept.analyze(model, JOB)
    assert len(traced) == 4
    assert not folder.exists()


COMMANDS = [
    "analyze tiny",
    "plan tiny 8xH100 -o plan.yaml",
    "simulate plan.yaml",
    "explain plan.yaml",
    "export slurm plan.yaml",
]

RUN = """
import sys
from ahp.cli.main import main
for command in sys.argv[1:]:
    assert main(command.split()) == 0, command
    print("imported", command, sorted({"torch", "transformers", "scipy", "pandas", "sympy", "typeguard"}.intersection(sys.modules)))
print("modules", len(sys.modules))
"""

MOST_MODULES = 1000
"""Of all these commands in one process, which import some 750 with numpy, pydantic, tyro and rich; torch alone brings more than 1,000."""


@pytest.mark.slow
def test_planning_on_what_is_known_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    words = [sys.executable, "-c", RUN, *COMMANDS]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    wanted = [f"imported {command} []" for command in COMMANDS]
    for _ in range(2):  # where the shipped graphs are for other releases, the first run traces
        run = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        told = [line for line in run.stdout.splitlines() if line.startswith("imported ")]
        if told == wanted:
            break
    assert told == wanted, run.stderr
    assert int(run.stdout.split("modules ")[-1]) <= MOST_MODULES


def test_a_user_without_a_home_folder_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AHP_CACHE", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # what it does where there is no home
    with pytest.raises(BadInput, match="AHP_CACHE is not set, and this user has no home folder"):
        cache_folder()
