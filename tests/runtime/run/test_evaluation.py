"""run.evaluation: the user's own function looks at the model, and its numbers are in the record of the step."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ahp.errors import BadInput
from ahp.plan import Plan
from ahp.run_files import read_record
from ahp.runtime.ranks.ranks import Ranks
from ahp.runtime.run.evaluation import figures, find
from ahp.runtime.run.folder import RunFolder
from ahp.runtime.run.loop import Settings
from ahp.runtime.run.trainer import Trainer
from tests.runtime.run.test_loop import Weight, alone, folder, loop  # noqa: F401
from tests.runtime.run.test_trainer import ALONE, PIPED, SHARDED, plan, text  # noqa: F401

NAME = "tests.runtime.run.test_evaluation:look"
LOOKS: list[int] = []
NOT_CALLABLE = 3


def look(parallel: Any, step: int) -> dict[str, Any]:
    LOOKS.append(step)
    return {"weight": float(parallel.value), "share": torch.tensor(0.5), "worst": math.inf}


@pytest.fixture(autouse=True)
def no_looks() -> None:
    LOOKS.clear()


def test_it_is_called_every_so_often_and_at_the_end(alone: Ranks, folder: RunFolder) -> None:  # noqa: F811
    weight = Weight()
    loop(alone, folder, weight, settings=Settings(checkpoint_every=4, keep=2, evaluation=NAME, evaluate_every=4)).run()
    found = [record for record in folder.metrics() if "evaluation_weight" in record]
    steps = [record["step"] for record in found]
    assert LOOKS == steps == [4, 8, 10]
    assert found[-1]["evaluation_weight"] == pytest.approx(float(weight.value))
    assert found[0]["evaluation_share"] == 0.5
    assert found[0]["evaluation_worst"] is None
    assert all(record["evaluation_time_s"] >= 0 for record in found)


@pytest.mark.parametrize(
    ("code", "told"), [("def look(:", "SyntaxError: invalid syntax"), ("raise SystemExit(3)", "SystemExit: 3")]
)
def test_a_file_that_cannot_be_imported_is_named(
    code: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "users_look.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "users_look", raising=False)
    with pytest.raises(BadInput, match=f"run.evaluation = 'users_look:look': importing users_look raised {told}"):
        find("users_look:look")


def test_it_waits_for_steps_that_are_ahead(alone: Ranks, folder: RunFolder, tmp_path: Path) -> None:  # noqa: F811
    """A look sees the weights of its step, not of one that was queued meanwhile."""
    other = RunFolder(tmp_path / "ahead")
    other.create()
    settings = Settings(checkpoint_every=4, keep=2, evaluation=NAME, evaluate_every=3)
    for where, ahead in ((folder, 0), (other, 1)):
        loop(alone, where, settings=settings, steps_ahead=ahead).run()
    values = [
        [m["evaluation_weight"] for m in where.metrics() if "evaluation_weight" in m] for where in (folder, other)
    ]
    assert values[0] == values[1]
    assert len(values[0]) == 4


def test_a_number_alone_has_no_name() -> None:
    assert figures("a:b", 2) == {"evaluation": 2.0}
    assert figures("a:b", {}) == {}
    assert figures("a:b", {"loss": torch.tensor(1.5)}) == {"evaluation_loss": 1.5}


@pytest.mark.parametrize("value", [math.nan, -math.inf, 1e301, 10**400])
def test_what_no_line_can_hold_is_null_and_the_line_is_read(value: float) -> None:
    """A line with 1e301 was taken for damaged, and the step was lost; 10**400 ended the run with a trace."""
    found = figures("a:b", value)
    assert found == {"evaluation": None}
    assert read_record(json.dumps({"step": 1, **found}).encode()) is not None


def test_a_name_that_is_taken_is_refused() -> None:
    """The time of the evaluation replaced the user's number."""
    with pytest.raises(BadInput, match=r"run\.evaluation = 'a:b': it returned a number named time_s"):
        figures("a:b", {"time_s": 1.0})


@pytest.mark.parametrize("found", [None, "good", [1.0], {"a": "b"}, {1: 2.0}, True, torch.ones(2), np.ones(2)])
def test_what_is_no_number_is_refused(found: Any) -> None:
    with pytest.raises(BadInput, match=r"run\.evaluation = 'a:b': it returned .*a number was expected"):
        figures("a:b", found)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("look", r"must name a function.*pkg\.mod:function"),
        ("not_there.at_all:look", r"No module named 'not_there'; it must lie in the folder"),
        ("tests.runtime.run.test_evaluation:lok", r"has no such function \(nearest: .*test_evaluation:look"),
        ("tests.runtime.run.test_evaluation:NOT_CALLABLE", r"it is of int, not a function"),
        ("os:getcwd", r"it cannot be called with \(parallel, step\): too many positional arguments"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_anything_starts(
    tmp_path: Path, name: str, told: str
) -> None:
    with pytest.raises(BadInput, match=told):
        find(name)
    with pytest.raises(BadInput, match=told):
        Trainer(Plan(), folder=tmp_path / "run", evaluation=name)


def perplexity(parallel: Any, step: int) -> dict[str, float]:
    """As docs/training.md has it: of batches of one's own, the same on every rank."""
    ids = torch.arange(4 * 32).reshape(4, 32) % 300
    batches = [{"input_ids": ids, "labels": ids}]
    return {"perplexity": math.exp(parallel.evaluate(parallel.shard(batch) for batch in batches))}


@pytest.mark.slow
@pytest.mark.usefixtures("launched_on_pool")
def test_every_layout_gives_the_same_numbers(text: Path, tmp_path: Path) -> None:  # noqa: F811
    found = []
    for number, layout in enumerate((ALONE, SHARDED, PIPED)):
        name = "tests.runtime.run.test_evaluation:perplexity"
        run = Trainer(plan(text, layout), folder=tmp_path / str(number), evaluation=name, evaluate_every=4)
        assert run.run().status.state == "done"
        records = RunFolder(tmp_path / str(number)).metrics()
        found.append([record["evaluation_perplexity"] for record in records if "evaluation_perplexity" in record])
    assert len(found[0]) == 2
    assert found[0][1] != found[0][0]
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-4)
