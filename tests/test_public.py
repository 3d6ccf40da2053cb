"""The public face: names come when asked for, and ``import ahp`` stays light."""

from __future__ import annotations

import doctest
import importlib
import inspect
import json
import pydoc
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

import ahp
from ahp.plan import EngineChoice

HEAVY = ("torch", "transformers", "pandas", "plotly", "scipy")


def heavy_modules_after(code: str) -> list[str]:
    probe = f"import sys\n{code}\nimport json; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stderr.strip().splitlines()[-1])


def test_import_is_light() -> None:
    assert heavy_modules_after("import ahp; dir(ahp); ahp.Plan; ahp.Cluster; ahp.Job; ahp.errors") == []


def test_help_is_light() -> None:
    assert heavy_modules_after("from ahp.cli.main import main; main(['--help'])") == []


@pytest.mark.parametrize("name", ["Plan", "Parallelism", "Forecast", "Job", "Cluster", "errors", "__version__"])
def test_names_resolve(name: str) -> None:
    assert getattr(ahp, name) is not None
    assert name in dir(ahp)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'sreach'"):
        ahp.sreach  # noqa: B018  # pyright: ignore


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: ahp.Job(sequence_len=8), "Job: sequence_len: unknown key (did you mean: sequence_length"),  # pyright: ignore
        (lambda: ahp.Job(sequence_length=1), "Job: sequence_length = 1: must be at least 2"),
        (lambda: ahp.Parallelism(tp=2), "tp: unknown key (did you mean: tensor_parallel_degree?)"),  # pyright: ignore
        (lambda: EngineChoice(name="megatrn"), "name = 'megatrn': there is no such value (valid: ahp, torchtitan"),  # pyright: ignore
        (lambda: ahp.Plan(job={"optimizer": {"nam": 1}}), "Plan: job.optimizer.nam: unknown key (did you mean: name?)"),  # pyright: ignore
        (lambda: ahp.Cluster(), "Cluster: groups: missing"),  # pyright: ignore
        (lambda: ahp.Job(steps=True), "Job: steps = True: must be a whole number, not true or false"),
        (lambda: ahp.Job(seed="7"), "Job: seed = '7': must be a whole number, not text"),  # pyright: ignore
        (lambda: ahp.Job(optimizer={"eps": True}), "Job: optimizer.eps = True: must be a number, not true"),  # pyright: ignore
        (
            lambda: ahp.Parallelism(pipeline_parallel_degree=2, layers_per_stage=(2, True)),
            "Parallelism: layers_per_stage.1 = True: must be a whole number",
        ),
    ],
)
def test_a_record_that_breaks_a_rule_is_bad_input(make: Callable[[], object], told: str) -> None:
    """With the place in the record; pydantic's own verb keeps pydantic's own error."""
    with pytest.raises(ahp.errors.BadInput, match=re.escape(told)):
        make()
    with pytest.raises(ValidationError):
        ahp.Job.model_validate({"sequence_len": 8})


def test_an_argument_of_another_kind_is_named() -> None:
    job: Any = {"sequence_length": 64, "global_batch_size": 8}
    with pytest.raises(ahp.errors.BadInput, match=r"graph = 'str': must be a ModelGraph \(valid: ahp.analyze"):
        ahp.search("tiny", "8xH100", job)  # pyright: ignore
    with pytest.raises(ahp.errors.BadInput, match=r"plan = 'dict': must be a Plan \(valid: ahp.Plan.load"):
        ahp.Trainer({"job": job})  # pyright: ignore


def test_an_argument_that_breaks_a_rule_is_named() -> None:
    job = ahp.Job(sequence_length=64)
    one: Any = np.int64(1)
    graph = ahp.analyze("tiny", job, micro_batch_size=one)
    there: Any = (graph, "1xH100", job)
    for wrong, told in (
        (lambda: ahp.search(*there, keep=0), "keep = 0: must be a whole number, at least 1"),
        (lambda: ahp.search(*there, keep=2.5), "keep = 2.5: must be a whole number"),  # pyright: ignore
        (lambda: ahp.search(*there, constraints=[]), "parallelism = []: must be a mapping"),  # pyright: ignore
        (lambda: ahp.slicing("tiny", "2"), "tensor_parallel_degree = '2': must be a whole number, at least 2"),  # pyright: ignore
        (lambda: ahp.slicing("tiny", 2, enable_sequence_parallel="no"), "enable_sequence_parallel = 'no'"),  # pyright: ignore
        (lambda: ahp.analyze("tiny", job, attention=["flash"]), "attention = ['flash']: unknown kernel"),  # pyright: ignore
        (lambda: ahp.analyze("tiny", 0), "job = 0: must be a mapping"),  # pyright: ignore
        (lambda: ahp.Cluster.from_dict([]), "cluster = []: must be a mapping of keys"),  # pyright: ignore
        (lambda: ahp.probe(workers=1.5), "workers = 1.5: must be a whole number"),  # pyright: ignore
        (lambda: ahp.probe(num_nodes=0), "num_nodes = 0: must be a whole number"),
    ):
        with pytest.raises(ahp.errors.BadInput, match=re.escape(told)):
            wrong()


def test_whole_numbers_are_taken_as_yaml_and_other_libraries_write_them() -> None:
    job = ahp.Job(steps=1.0e3, seed=np.int64(3), optimizer={"learning_rate": "1e-3", "weight_decay": 0})  # pyright: ignore
    assert (job.steps, job.seed, job.optimizer.learning_rate, job.optimizer.weight_decay) == (1000, 3, 0.001, 0.0)


@pytest.mark.parametrize(
    ("record", "key"),
    [
        (ahp.Job(), "steps"),
        (ahp.Parallelism(), "zero_stage"),
        (ahp.Plan(), "model"),
        (ahp.Cluster.resolve("1x2xH100-SXM-80GB"), "source"),
    ],
)
def test_a_record_is_not_changed_and_says_how_to_make_another(record: Any, key: str) -> None:
    kind = type(record).__name__
    told = f"{kind}.{key} = 3: a record is not changed; make another from it: {kind}(**{{**dict(it), '{key}': ...}})"
    with pytest.raises(ahp.errors.BadInput, match=re.escape(told)):
        setattr(record, key, 3)
    assert type(record)(**{**dict(record), key: getattr(record, key)}) == record


def test_search_is_a_verb_whatever_was_imported_first() -> None:
    importlib.import_module("ahp.search")
    assert callable(ahp.search)


def test_help_on_the_verb_search_is_about_the_verb() -> None:
    from ahp.search.ranking import search

    assert inspect.signature(ahp.search) == inspect.signature(search)  # pyright: ignore[reportArgumentType]
    told = pydoc.render_doc(ahp.search, renderer=pydoc.plaintext)
    assert "Rank every legal layout that fits" in told
    assert "objective: " in told


VERBS = ("Trainer", "analyze", "parallelize", "probe", "search", "simulate", "slicing")


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_has_an_example(name: str) -> None:
    assert "\n    Example" in (inspect.getdoc(getattr(ahp, name)) or "") or "\nExample" in inspect.getdoc(
        getattr(ahp, name)
    )  # type: ignore[operator]


@pytest.mark.parametrize("name", ["analyze", "search", "simulate", "slicing"])
def test_examples_in_docstrings_are_true(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    examples = doctest.DocTestParser().get_doctest(inspect.getdoc(getattr(ahp, name)) or "", {}, name, None, None)
    assert len(examples.examples) > 1
    assert doctest.DocTestRunner().run(examples).failed == 0


def test_a_ranking_prints_as_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    job = ahp.Job(sequence_length=1024, global_batch_size=64)
    ranking = ahp.search(ahp.analyze("gpt2", job), "8xH100-SXM-80GB", job, keep=3)  # pyright: ignore[reportCallIssue]
    print(ranking)
    head, first, *rest = capsys.readouterr().out.splitlines()
    assert head.split() == ["#", "layout", "step", "tokens/s/device", "GiB", "why", "not", "#1"]
    assert first.split()[0] == "1"
    assert ranking.best.parallelism.short() in first
    assert first.endswith("chosen")
    assert ranking.best.forecast is not None
    memory = sum(ranking.best.forecast.memory.values()) / 2**30  # as the commands have it
    assert f"  {memory:.1f}  chosen" in first
    assert len(rest) == 2 + 3
    assert first.index("chosen") == head.index("why not")
    assert tuple(rest[2:]) == ranking.proof
