"""A path can lead to other files on another node: then the start is refused. The threads of these tests are workers of two nodes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ahp.cli import train as command
from ahp.config import Config
from ahp.errors import BadInput
from ahp.plan import Plan, validated
from ahp.runtime.data.corpus import Damaged
from ahp.runtime.ranks.meeting import NoAnswer
from ahp.runtime.ranks.preparation import Preparation
from ahp.runtime.run import folder as folders
from ahp.runtime.run.folder import RunFolder
from ahp.runtime.run.nodes_alike import refuse_other_folders, refuse_other_models, refuse_other_settings, texts_on_all
from ahp.runtime.run.same_model import described
from ahp.runtime.run.texts import Texts, prepare_texts
from ahp.runtime.run.trainer import Trainer
from tests.runtime.run.test_trainer import MODEL

SECOND = threading.local()
"""Its attribute ``here`` is set in the thread of the second node's worker."""


def on_both(work: Callable[[Preparation], Any]) -> list[Any]:
    """What each worker's ``work`` returns or raises."""
    store = dist.HashStore()

    def of(rank: int) -> Any:
        SECOND.here = rank == 1
        try:
            return work(Preparation((store, rank, 2), heartbeat_s=0.1))
        except BaseException as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(of, range(2)))


def plan_of(tmp_path: Path, **job: Any) -> Plan:
    given = {"sequence_length": 8, "global_batch_size": 1, "steps": 1, "data": str(tmp_path / "a.txt"), **job}
    return validated(Plan, {"model": MODEL, "job": given, "parallelism": {}}, "plan")


@pytest.fixture
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second node does not see the first one's cache."""
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("plain words, some of them " * 400)
    monkeypatch.setenv("AHP_CACHE", str(tmp_path / "cache"))

    def check(self: Texts, *, verify: bool) -> None:
        if SECOND.here:
            raise Damaged("not on this node")

    monkeypatch.setattr(Texts, "check", check)


@pytest.mark.usefixtures("own_caches")
@pytest.mark.parametrize(("other", "key"), [(None, ""), ("a.txt", "job.data"), ("b.txt", "job.validation")])
def test_a_node_with_other_text_is_refused(tmp_path: Path, other: str | None, key: str) -> None:
    """Its ranks trained on their own text, and nothing said so."""
    plan = plan_of(tmp_path, validation=str(tmp_path / "b.txt"))
    first = prepare_texts(plan)
    if other is not None:
        (tmp_path / other).write_text("other words, on the second node " * 400)
    found = on_both(lambda workers: texts_on_all(workers, plan, RunFolder(tmp_path / "run"), lambda: first))
    if other is None:
        assert found == [first, first]
        return
    assert isinstance(found[0], NoAnswer)
    assert isinstance(found[1], BadInput)
    assert str(found[1]).startswith(f"{key} = '{tmp_path / other}': on ")
    assert "other text" in str(found[1])


def test_a_node_with_another_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(tmp_path)
    assert on_both(lambda workers: refuse_other_models(workers, plan)) == [None, None]

    def on_its_node(model: dict[str, Any]) -> dict[str, Any]:
        return described({**model, "rms_norm_eps": 1e-3} if SECOND.here else model)

    monkeypatch.setattr("ahp.runtime.run.nodes_alike.described", on_its_node)
    first, second = on_both(lambda workers: refuse_other_models(workers, plan))
    assert isinstance(first, NoAnswer)
    assert isinstance(second, BadInput)
    assert "another model than on the node of worker 0: model.rms_norm_eps = 0.001 (the run has" in str(second)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, None),
        ({"checkpoint_every": 7}, r"run\.checkpoint_every = 7 \(the run has 5\)"),
        ({"keep": 2}, r"run\.keep = 2"),
    ],
)
def test_a_node_with_other_settings_is_refused(tmp_path: Path, changed: dict[str, Any], words: str | None) -> None:
    """Ranks that save at other steps waited for each other until a collective timed out."""
    plan = plan_of(tmp_path)
    each = [Trainer(plan, **{"folder": tmp_path, "checkpoint_every": 5, **own}) for own in ({}, changed)]
    found = on_both(lambda workers: refuse_other_settings(workers, each[workers.rank]._asked()))
    if words is None:
        assert found == [None, None]
    else:
        with pytest.raises(BadInput, match=words):
            raise found[1]


@pytest.mark.parametrize("shared", [True, False])
def test_a_folder_that_is_not_shared_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    """Each checkpoint would lack the other node's part, and count as complete."""
    monkeypatch.setattr(folders, "MARK_S", 0.3)
    each = [RunFolder(tmp_path / name) for name in ("run", "run" if shared else "other")]
    for folder in each:
        folder.create()
    found = on_both(lambda workers: refuse_other_folders(workers, each[workers.rank]))
    if shared:
        assert found == [None, None]
    else:
        with pytest.raises(BadInput, match=r"run\.folder = .*other'.* another folder than on the node of worker 0"):
            raise found[1]


def test_a_folder_that_is_not_shared_is_refused_before_anything_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first worker planned, for minutes with a large model, before the nodes looked at their folders."""
    monkeypatch.setattr(folders, "MARK_S", 0.3)
    monkeypatch.setattr("ahp.runtime.ranks.ranks.is_joined", lambda: True)
    planned: list[Any] = []
    monkeypatch.setattr(command, "make_plan", lambda *given: planned.append(given))
    workers = threading.local()
    monkeypatch.setattr("ahp.runtime.ranks.preparation.Preparation", lambda: workers.own)

    def start(own: Preparation) -> None:
        workers.own = own
        run = Config.model_validate({"run": {"folder": str(tmp_path / f"run{own.rank}")}}).run
        command.train(command.Request(run, config=Config()), command.Arguments(), "ahp train")

    first, second = on_both(start)
    assert isinstance(first, NoAnswer)
    assert isinstance(second, BadInput)
    assert "another folder than on the node of worker 0" in str(second)
    assert planned == []
