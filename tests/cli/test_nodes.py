"""What ``ahp train`` says of ``--nodes`` and ``--rendezvous``."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from ahp.cli import nodes
from ahp.cli.main import main
from ahp.cli.nodes import asked, bounded, launch, reporting, say_why
from ahp.cli.train import _refusal_in_status, leaving_stopped, read_request
from ahp.config import Elastic, Run
from ahp.errors import BadInput
from ahp.job import Job
from ahp.plan import Parallelism, Plan
from ahp.run_files import Status
from ahp.runtime.ranks import changing_nodes
from ahp.runtime.ranks.changing_nodes import JobEnded, Node
from ahp.runtime.ranks.environment import ROUND
from ahp.runtime.run import failure
from ahp.runtime.run.folder import RunFolder
from ahp.runtime.run.nodes_alike import differences
from ahp.runtime.run.stop_signal import Stopped

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
        (Elastic(min_workers=33), r"run\.elastic\.min_workers = 33: 4 nodes of 8 workers make 32 workers"),
    ],
)
def test_nodes_with_too_many_or_too_few_workers_are_refused(elastic: Elastic, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        bounded(2, 4, 8, elastic)


def test_why_a_launcher_ended_its_workers_is_kept_with_step_and_axes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path)
    folder.create()
    say_why(folder, "rank 3 on host-b is stopped (SIGSTOP)")
    assert capsys.readouterr().err.startswith("after step 0: rank 3 on host-b is stopped (SIGSTOP); the workers")
    failure.forget(folder)
    layout = Parallelism(pipeline_parallel_degree=2, data_parallel_shard_degree=2, expert_parallel_degree=2)
    Plan(parallelism=layout).save(folder.plan_file)
    folder.append_metrics({"step": 7})
    say_why(folder, "rank 3 on host-b is stopped (SIGSTOP)")
    kept, status = failure.read(folder), folder.status()
    assert kept is not None
    assert status is not None
    words = "after step 7: rank 3 on host-b is stopped (SIGSTOP) (axes of the layout: pp, dp_shard, ep)"
    assert kept.message == status.cause == words
    assert kept.may_pass


HERE = socket.gethostname()
USED_UP = "workers of this node failed, and are not started again: run.elastic.max_restarts = 3"


@pytest.mark.parametrize(
    ("before", "most", "elsewhere", "cause"),
    [
        (Status("failed", 7, "rank 1 went", 1), 3, False, f"rank 1 went\nnot started again: on {HERE}: {USED_UP}"),
        (Status("running", 7, "started again: rank 1 went"), 3, False, f"on {HERE}: {USED_UP}"),
        (
            Status("failed", 7, "rank 1 went\nnot started again: on b", 1),
            3,
            False,
            "rank 1 went\nnot started again: on b",
        ),
        (Status("failed", 7, "rank 1 went", 1), 0, False, "rank 1 went"),
        (Status("failed", 7, "rank 1 went", 1), 3, True, "rank 1 went"),
    ],
    ids=["failed", "killed without a word", "another node was first", "no start was asked for", "another node knows"],
)
def test_why_nothing_starts_again_is_in_the_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: Status, most: int, elsewhere: bool, cause: str
) -> None:
    """It was on the stderr of one node only."""
    folder = RunFolder(tmp_path / "run")
    folder.create()
    for step in range(1, 8):
        folder.append_metrics({"step": step})
    folder.write_status(before)

    def used_up(words: list[str], node: Node) -> int:
        raise JobEnded(1, USED_UP, elsewhere=elsewhere)

    monkeypatch.setattr(changing_nodes, "launch", used_up)
    run = Run.model_validate({"folder": str(folder.path), "elastic": {"max_restarts": most}})
    with pytest.raises(JobEnded):
        launch((1, 2, HOST, 1), ["config.yaml"], run, Job(), {})
    assert folder.status() == Status("failed", 7, cause, 1)


def test_a_folder_in_which_others_go_on_gets_no_end_of_this_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ahp.runtime.run.folder.LET_GO_S", 0.2)
    folder, here = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    folder.create()
    with folder.held():
        folder.write_status(Status("running", 7))
        nodes.record_end(here, JobEnded(1, USED_UP), behind=True)
        assert folder.status() == Status("running", 7)


@pytest.mark.parametrize("done", [True, False])
def test_a_node_that_a_run_did_not_need_ends_as_the_run_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    """One that waited for a place, or came back too late."""
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.write_status(Status("done", 8, None, 0) if done else Status("failed", 8, "why", 1))

    def closed(words: list[str], node: Node) -> int:
        assert node.watch.begins == folder.joined_file
        raise JobEnded(1, "the launcher of another node has ended the job")

    monkeypatch.setattr(changing_nodes, "launch", closed)
    given = (1, 2, HOST, 1), ["config.yaml"], Run(folder=str(folder.path)), Job(), {}
    if done:
        assert launch(*given) == 0
    else:
        with pytest.raises(JobEnded, match="has ended the job"):
            launch(*given)


@pytest.mark.parametrize(("steps", "least"), [(8, 1), (9, 3)])
def test_a_node_of_a_finished_run_waits_for_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, least: int
) -> None:
    folder, given = RunFolder(tmp_path / "run"), list[Node]()
    folder.create()
    folder.commit_checkpoint(folder.open_checkpoint(8) and 8, {"crc32": {}, "job": {}, "model": {}}, keep=1)
    folder.write_status(Status("done", 8, None, 0))
    monkeypatch.setattr(changing_nodes, "launch", lambda words, node: given.append(node) or 0)
    assert launch((3, 4, HOST, 1), ["config.yaml"], Run(folder=str(folder.path)), Job(steps=steps), {}) == 0
    assert [(node.least, node.most) for node in given] == [(least, 4)]


def test_a_node_that_was_asked_for_something_else_does_not_join_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others would have stopped for it, and ended with it."""
    folder = RunFolder(tmp_path)
    folder.create()
    asked = {"job": {"seed": 0}, "run": {"checkpoint_every": 5}}
    folder.asked_file.write_text(json.dumps(asked))
    monkeypatch.setattr(changing_nodes, "launch", lambda words, node: 7)

    def started(**job: int) -> int:
        return launch((1, 2, HOST, 1), ["config.yaml"], Run(folder=str(tmp_path)), Job(), {**asked, "job": job})

    assert started(seed=1) == 7, "no run goes on: the first worker decides"
    with folder.held():
        assert started(seed=0) == 7
        with pytest.raises(
            BadInput, match=r"the run that goes on there is another one: job\.seed = 1 \(the run has 0\)"
        ):
            started(seed=1)


def test_what_all_nodes_must_be_asked_for(tmp_path: Path) -> None:
    given = {"run.folder": str(tmp_path), "run.elastic": {"max_restarts": 3}, "run.sample": False}
    usual, own = read_request(None, {}).alike(), read_request(None, given).alike()
    assert usual == own
    for key, value in {"job.seed": 3, "run.checkpoint_every": 7, "parallelism.tensor_parallel_degree": 2}.items():
        assert differences(usual, read_request(None, {key: value}).alike()).startswith(f"{key} = {value} (the run has ")
    assert {"ahp", "torch", "transformers"} <= usual["versions"].keys()


def test_a_refusal_is_told_while_another_run_holds_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited to record the refusal in the other's folder, until the other nodes had left and the store with them."""
    folder = RunFolder(tmp_path)
    folder.create()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", f"ahp{ROUND}1")
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it waits"))
    with folder.held(), pytest.raises(BadInput, match="another"), _refusal_in_status(lambda: str(tmp_path)):
        raise BadInput("another run is writing there")
    assert folder.status() is None


def test_a_stop_before_the_first_step_is_in_the_status_of_a_held_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    with pytest.raises(Stopped), folder.held(), leaving_stopped(folder):
        raise Stopped(15)
    status = folder.status()
    assert status is not None
    assert (status.state, status.exit_code, status.cause) == (
        "interrupted",
        143,
        "stopped by SIGTERM before training began",
    )


@pytest.mark.parametrize(
    ("is_done", "fails", "told"), [(True, False, [0]), (True, True, [0, 2]), (False, False, []), (False, True, [])]
)
def test_launchers_learn_that_a_run_is_done_before_it_is_reported_on(
    monkeypatch: pytest.MonkeyPatch, is_done: bool, fails: bool, told: list[int]
) -> None:
    found: list[int] = []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", f"ahp{ROUND}1")
    monkeypatch.setattr("ahp.runtime.ranks.changing_nodes.end_for_all", found.append)
    with suppress(BadInput), reporting(is_done=is_done):
        assert found == told[:1]
        if fails:
            raise BadInput("the report's")
    assert found == told
