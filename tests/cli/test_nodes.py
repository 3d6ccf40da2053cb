"""What ``ahp train`` says of ``--nodes`` and ``--rendezvous``."""

from __future__ import annotations

import pytest

from ahp.cli.main import main
from ahp.cli.nodes import asked, bounded
from ahp.config import Elastic
from ahp.errors import BadInput

HOST = "10.0.0.1:29500"


@pytest.mark.parametrize(("words", "least", "most"), [("2", 2, 2), ("2:4", 2, 4)])
def test_how_many_nodes_there_are(words: str, least: int, most: int) -> None:
    assert asked(words, HOST, None) == (least, most, HOST, None)


def test_without_them_there_is_one() -> None:
    assert asked(None, None, None) is None


def test_a_worker_that_such_a_launcher_started_is_none_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "ahp-round-3")
    monkeypatch.setenv("RANK", "0")
    assert asked("2", HOST, None) is None


@pytest.mark.parametrize(
    ("nodes", "rendezvous", "workers", "words"),
    [
        ("2", None, None, "--rendezvous missing: several nodes need"),
        (None, HOST, None, "--nodes missing"),
        (None, None, 8, "--nodes and --rendezvous missing"),
        ("4:2", HOST, None, "--nodes = '4:2': must be a number of nodes, or the least and the most"),
        ("0", HOST, None, "--nodes = '0'"),
        ("two", HOST, None, "--nodes = 'two'"),
        ("2", "10.0.0.1:x", None, "--rendezvous = '10.0.0.1:x': must be an address"),
        ("2", "10.0.0.1,", None, "--rendezvous = '10.0.0.1,': must be an address"),
        ("2", HOST, 0, "--workers-per-node = 0: must be at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused(
    nodes: str | None, rendezvous: str | None, workers: int | None, words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        asked(nodes, rendezvous, workers)


def test_under_another_launcher_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert main(["train", "--nodes", "2", "--rendezvous", HOST]) == 2
    assert "a launcher (torchrun) has started this process" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("elastic", "least", "most"),
    [
        (Elastic(), 2, 4),
        (Elastic(max_workers=25), 2, 3),
        (Elastic(min_workers=17), 3, 4),
        (Elastic(min_workers=24, max_workers=24), 3, 3),
    ],
)
def test_nodes_stay_within_the_workers_that_are_wanted(elastic: Elastic, least: int, most: int) -> None:
    assert bounded(2, 4, 8, elastic) == (least, most)


@pytest.mark.parametrize(
    ("elastic", "words"),
    [
        (Elastic(max_workers=15), r"run\.elastic\.max_workers = 15: 2 nodes of 8 workers make 16 workers"),
        (Elastic(min_workers=33), r"run\.elastic\.min_workers = 33: 4 nodes of 8 workers have 32"),
    ],
)
def test_nodes_with_too_many_or_too_few_workers_are_refused(elastic: Elastic, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        bounded(2, 4, 8, elastic)
