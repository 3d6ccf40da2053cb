"""A run's folder: nothing half-written counts, nothing of another job is continued."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from ahp import run_history
from ahp.errors import BadInput
from ahp.job import Job, Optimizer
from ahp.plan import Plan
from ahp.run_files import Status, judge_status
from ahp.runtime.files import crc32
from ahp.runtime.optimizer.learning_rate import learning_rate
from ahp.runtime.ranks.environment import ROUND
from ahp.runtime.run import folder as module
from ahp.runtime.run.folder import RunFolder
from ahp.runtime.run.same_job import check_same_job
from ahp.runtime.run.trainer import Trainer


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return folder


def write_checkpoint(folder: RunFolder, step: int, plan: Plan | None = None, keep: int = 3) -> Path:
    plan = plan or Plan()
    aside = folder.open_checkpoint(step)
    (aside / "__0_0.distcp").write_bytes(b"x" * step)
    checksums = {"__0_0.distcp": crc32(aside / "__0_0.distcp")}
    meta = {"job": plan.job.model_dump(mode="json"), "model": plan.model, "crc32": checksums}
    return folder.commit_checkpoint(step, meta, keep).path


def test_status_reads_back_and_rubbish_is_no_status(folder: RunFolder) -> None:
    assert folder.status() is None
    status = Status("failed", 7, "the disk is full", 1)
    folder.write_status(status)
    assert folder.status() == status
    found = json.loads(folder.status_file.read_text())
    who = {"pid": os.getpid(), "host": socket.gethostname(), "heartbeat": found["heartbeat"]}
    assert found == {
        **who,
        "state": "failed",
        "step": 7,
        "cause": "the disk is full",
        "exit_code": 1,
        "checkpoint": 0,
        "starts": [],
    }
    folder.status_file.write_text("{")
    assert folder.status() is None


def test_metrics_end_at_a_half_line_and_truncate_to_a_step(folder: RunFolder) -> None:
    for step in range(1, 6):
        folder.append_metrics({"step": step, "loss": 1 / step})
    with folder.metrics_file.open("a") as file:
        file.write('{"step": 6, "lo')
    assert [record["step"] for record in folder.metrics()] == [1, 2, 3, 4, 5]
    folder.truncate_metrics(3)
    folder.append_metrics({"step": 4, "loss": 0.5})
    assert [record["step"] for record in folder.metrics()] == [1, 2, 3, 4]
    assert folder.metrics()[2] == {"step": 3, "loss": 1 / 3}


def test_status_is_written_on_a_full_disk_too(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """It said ``running`` for ever."""

    def full(path: Path, content: str | bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder.write_status(Status("running", 1234567))
    monkeypatch.setattr("ahp.runtime.run.folder.write_aside", full)
    for status in (Status("failed", 7, "the disk is full" * 9, 1), Status("failed", 7, "", 1)):
        folder.write_status(status)
        assert folder.status() == status


# Who writes status.json, and whether it lives


def seen(folder: RunFolder, **changes: Any) -> Status:
    found = {**json.loads(folder.status_file.read_text()), **changes}
    folder.status_file.write_text(json.dumps(found))
    status = judge_status(folder.status_file)
    assert status is not None
    return status


def ago(seconds: float) -> str:
    return (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat()


def test_a_run_whose_process_has_gone_is_dead(folder: RunFolder) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    folder.write_status(Status("running", 7))
    assert seen(folder).state == "running"
    dead = seen(folder, pid=gone.pid, heartbeat=ago(3))
    assert (dead.state, dead.step) == ("dead", 7)
    assert f"process {gone.pid} on {socket.gethostname()} has gone without a word" in (dead.cause or "")
    assert seen(folder, host="elsewhere").state == "running", "the processes of another host cannot be looked at"
    silent = seen(folder, host="elsewhere", heartbeat=ago(300))
    assert silent.state == "dead"
    assert re.search(r"was not heard of for 30\d s", silent.cause or "")
    assert seen(folder, state="done").state == "done"


def test_a_run_whose_disk_became_read_only_is_dead_and_says_so(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write_status(Status("running", 7))
    seen(folder, host="elsewhere", heartbeat=ago(300))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    status = judge_status(folder.status_file)
    assert status is not None
    assert status.state == "dead"
    assert (status.cause or "").endswith(f"or it cannot write; {folder.status_file} cannot be written")


@pytest.mark.parametrize("changes", [{"heartbeat": 3}, {"heartbeat": "today"}, {"heartbeat": None}, {"pid": None}])
def test_a_status_that_names_no_process_is_taken_as_it_is(folder: RunFolder, changes: dict[str, Any]) -> None:
    folder.write_status(Status("running", 7))
    assert seen(folder, **changes).state == "running"


def test_a_process_shows_that_it_lives_until_another_takes_over(folder: RunFolder) -> None:
    folder.heartbeat_s = 0.01
    folder.write_status(Status("running", 3))
    with folder.beating():
        folder.append_metrics({"step": 4, "loss": 1.0})
        until(lambda: folder.status() == Status("running", 4))
        with folder._writing:
            seen(folder, pid=1, step=9)
        time.sleep(0.05)
        assert folder.status() == Status("running", 9)


def test_no_heartbeat_comes_after_the_end(folder: RunFolder) -> None:
    folder.heartbeat_s = 0.001
    folder.write_status(Status("running", 3))
    with folder.beating():
        folder.write_status(Status("done", 10, None, 0))
        time.sleep(0.02)
        assert folder.status() == Status("done", 10, None, 0)


def until(true: Callable[[], bool]) -> None:
    began_s = time.monotonic()
    while not true():
        assert time.monotonic() - began_s < 120
        time.sleep(0.01)


BAD_LINES = (b"3", b"\xff\xfe{", b'{"step": 3, "lo', b'{"step": "3"}', b'{"step": 3, "loss": "<b>"}', b"[" * 9999, b"")


@pytest.mark.parametrize("bad", BAD_LINES)
def test_a_damaged_line_of_metrics_costs_no_other(folder: RunFolder, bad: bytes) -> None:
    lines = [json.dumps({"step": step, "loss": 1 / step}).encode() for step in range(1, 6)]
    folder.metrics_file.write_bytes(b"\n".join([*lines[:2], bad, *lines[3:], b""]))
    assert [record["step"] for record in folder.metrics()] == [1, 2, 4, 5]
    assert folder.truncate_metrics(4) == 3
    assert folder.metrics_file.read_bytes().splitlines() == [lines[0], lines[1], lines[3]]
    assert folder.cut_metrics_file.read_bytes().splitlines() == [bad, lines[4]]


# A run that has lost its checkpoints


def lose(folder: RunFolder, how: str) -> None:
    path = write_checkpoint(folder, 10)
    folder.append_metrics({"step": 1, "loss": 9.0})
    folder.write_status(Status("running", 10))
    match how:
        case "put away":
            folder.put_away(folder.checkpoints()[0])
        case "cut":
            (path / "__0_0.distcp").write_bytes(b"x")
        case "deleted":
            shutil.rmtree(folder.checkpoints_folder)
        case "status too":
            shutil.rmtree(folder.checkpoints_folder)
            folder.status_file.write_text("{")
        case "of an earlier version":
            shutil.rmtree(folder.checkpoints_folder)
            folder.status_file.write_text('{"state": "failed", "step": 10, "cause": null, "exit_code": 1}')


@pytest.mark.parametrize("how", ["put away", "cut", "deleted", "status too", "of an earlier version"])
def test_a_run_whose_checkpoints_are_lost_never_begins_again(folder: RunFolder, how: str) -> None:
    """The second start after a refused one began at step 0 and erased the metrics."""
    lose(folder, how)
    for _ in range(2):
        with pytest.raises(
            BadInput, match=r"no checkpoint of the run is whole.*another --run\.folder, or delete"
        ) as told:
            check_same_job(folder, Plan())
        folder.write_status(Status("failed", 1, str(told.value), 2))  # as a start does
    assert len(folder.metrics()) == 1


def test_a_checkpoint_that_is_put_back_is_gone_on_from(folder: RunFolder) -> None:
    lose(folder, "put away")
    (folder.checkpoints_folder / "step-10.damaged").rename(folder.checkpoints_folder / "step-10")
    assert check_same_job(folder, Plan()) is None


def test_a_run_that_was_stopped_before_its_first_checkpoint_begins_again(folder: RunFolder) -> None:
    folder.write_status(Status("running", 0))
    folder.append_metrics({"step": 1, "loss": 9.0})
    folder.open_checkpoint(10)
    assert check_same_job(folder, Plan()) is None
    assert folder.truncate_metrics(0) == 0
    assert folder.metrics() == []
    assert json.loads(folder.cut_metrics_file.read_text()) == {"step": 1, "loss": 9.0}


def test_checkpoint_counts_only_when_committed(folder: RunFolder) -> None:
    write_checkpoint(folder, 10)
    aside = folder.open_checkpoint(20)
    (aside / "__0_0.distcp").write_bytes(b"half")
    assert [c.step for c in folder.checkpoints()] == [10]
    folder.discard_unfinished()
    assert not aside.exists()
    assert [c.step for c in folder.checkpoints()] == [10]


def test_newest_are_kept(folder: RunFolder) -> None:
    for step in (5, 10, 100, 20):
        write_checkpoint(folder, step, keep=2)
    assert [c.step for c in folder.checkpoints()] == [20, 100]


META_WITHOUT = ("step", "files", "job", "model", "crc32")


def test_an_old_checkpoint_goes_only_when_the_new_one_is_there(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(folder, 10, keep=1)
    gone, rename = list[str](), Path.rename

    def moved(path: Path, to: Path) -> Path:
        if path.name == "step-10":
            gone.append(path.name)
            assert [saved.step for saved in RunFolder(folder.path).checkpoints()] == [10, 20]
            assert folder.checkpoints()[-1].damaged_file() is None
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", moved)
    write_checkpoint(folder, 20, keep=1)
    assert gone == ["step-10"]
    assert [path.name for path in folder.checkpoints_folder.iterdir()] == ["step-20"]


def test_what_a_kill_left_of_an_old_checkpoint_goes_at_the_next_start(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(folder, 10, keep=1)
    remove = module.shutil.rmtree

    def killed(path: Path, **options: Any) -> None:
        if path.exists():
            (path / "meta.json").unlink()
            raise KeyboardInterrupt
        remove(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            write_checkpoint(folder, 20, keep=1)
    assert folder.incomplete() == {}
    folder.discard_unfinished()
    assert [path.name for path in folder.checkpoints_folder.iterdir()] == ["step-20"]


@pytest.mark.parametrize("damage", ["cut", "gone", "no meta", "meta rubbish", *META_WITHOUT, "a checksum", "[" * 9999])
def test_damaged_checkpoint_is_passed_over(folder: RunFolder, damage: str) -> None:
    write_checkpoint(folder, 10)
    path = write_checkpoint(folder, 20)
    meta = json.loads((path / "meta.json").read_text())
    del meta[module.OWN_CHECKSUM]  # as written before it came
    if damage in META_WITHOUT:
        del meta[damage]
        (path / "meta.json").write_text(json.dumps(meta))
    elif damage == "a checksum":
        (path / "meta.json").write_text(json.dumps({**meta, "crc32": {}}))
    elif damage.startswith("["):
        (path / "meta.json").write_text(damage)
    elif damage == "cut":
        (path / "__0_0.distcp").write_bytes(b"x")
    elif damage == "gone":
        (path / "__0_0.distcp").unlink()
    elif damage == "no meta":
        (path / "meta.json").unlink()
    else:
        (path / "meta.json").write_text("[]")
    assert [c.step for c in folder.checkpoints()] == [10]
    assert list(folder.incomplete()) == ["step-20"]


@pytest.mark.slow
def test_a_bit_flipped_in_what_describes_a_checkpoint_changes_nothing_or_passes_it_over(folder: RunFolder) -> None:
    """With "steps" 18 instead of 10, and the like, the start was told of another job, and to give the old values; or the bit went unseen."""
    write_checkpoint(folder, 10)
    file = write_checkpoint(folder, 20) / "meta.json"
    whole = file.read_bytes()
    written = {key: value for key, value in json.loads(whole).items() if key != module.OWN_CHECKSUM}
    passed_over = 0
    for place in range(len(whole)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :])
        if [found.step for found in folder.checkpoints()] == [10]:
            passed_over += 1
            assert "meta.json" in folder.incomplete()["step-20"]
            assert check_same_job(folder, Plan()) is None
        else:
            found = folder.checkpoints()[-1].meta()
            assert {key: found[key] for key in written} == written
    assert passed_over > len(whole) * 0.9


def test_the_same_step_again_replaces_the_old_one(folder: RunFolder) -> None:
    write_checkpoint(folder, 10)
    aside = folder.open_checkpoint(10)
    (aside / "other").write_bytes(b"new")
    folder.commit_checkpoint(10, {"job": {}, "model": "tiny", "crc32": {"other": 0}}, keep=3)
    assert set(folder.checkpoints()[0].meta()["files"]) == {"other"}


def test_a_finished_run_that_was_killed_before_old_checkpoints_went_removes_them(folder: RunFolder) -> None:
    plan = Plan(job=Job(steps=5))
    for step in (2, 3, 4, 5):
        write_checkpoint(folder, step, plan, keep=9)
    folder.open_checkpoint(1)  # as one that was just being removed
    folder.write_status(Status("done", 5, exit_code=0))
    assert Trainer(plan, folder=folder, keep=2).run().already_done
    assert sorted(path.name for path in folder.checkpoints_folder.iterdir()) == ["step-4", "step-5"]


def test_a_finished_run_that_was_killed_before_its_last_start_ended_says_how_it_did(folder: RunFolder) -> None:
    plan = Plan(job=Job(steps=5))
    run_history.began(folder.history_file, run_history.Start("2026-11-24T12:00:00+00:00", "dp1", 1, 0))
    for step in range(1, 6):
        folder.append_metrics({"step": step, "step_time_s": 1.0, "tokens_per_s": 10.0})
    write_checkpoint(folder, 5, plan)
    folder.write_status(Status("done", 5, exit_code=0))
    for _ in range(2):
        assert Trainer(plan, folder=folder).run().already_done
        [start] = run_history.starts(folder.history_file)
        assert (start.why, start.failed, start.last_step, start.useful_s) == ("done", False, 5, 5.0)
        assert start.ended is not None
        assert json.loads(folder.status_file.read_text())["starts"] == [start.plain()]
    assert len(folder.history_file.read_text().splitlines()) == 2


def test_another_layout_may_continue_another_job_may_not(folder: RunFolder) -> None:
    plan = Plan(job=Job(seed=3))
    write_checkpoint(folder, 10, plan)
    check_same_job(folder, plan.model_copy(update={"parallelism": plan.parallelism.model_copy()}))
    with pytest.raises(BadInput, match=r"job\.seed = 4 \(the run has 3\).*--run\.folder"):
        check_same_job(folder, Plan(job=Job(seed=4)))
    with pytest.raises(BadInput, match=r"job\.optimizer\.learning_rate = 0\.5"):
        check_same_job(folder, Plan(job=Job(seed=3, optimizer=Optimizer(learning_rate=0.5))))
    with pytest.raises(BadInput, match=r"model = 'gpt2' \(the run has 'tiny'\)"):
        check_same_job(folder, Plan(model="gpt2", job=Job(seed=3)))


def test_a_run_of_before_a_key_came_goes_on(folder: RunFolder) -> None:
    write_checkpoint(folder, 10)
    meta = folder.checkpoints()[0].path / "meta.json"
    written = json.loads(meta.read_text())
    del written["job"]["packing"], written[module.OWN_CHECKSUM]
    meta.write_text(json.dumps(written))
    check_same_job(folder, Plan())
    with pytest.raises(BadInput, match=r"job\.packing = 'padded' \(the run has 'packed'\)"):
        check_same_job(folder, Plan(job=Job(packing="padded")))


def test_a_precision_that_the_devices_chose_is_told_with_the_one_to_pass(folder: RunFolder) -> None:
    """Cores without instructions for bf16 choose fp32 where nobody gives a precision."""
    write_checkpoint(folder, 10, Plan(job=Job(precision="bf16")))
    told = r"job\.precision = 'fp32' \(the run has 'bf16'\); --run\.extend true allows it, --job\.precision bf16 keeps the precision of the run"
    with pytest.raises(BadInput, match=told):
        check_same_job(folder, Plan(job=Job(precision="fp32")))
    with pytest.raises(BadInput) as refused:
        check_same_job(folder, Plan(job=Job.model_validate({"precision": "bf16", "optimizer": {"learning_rate": 0.5}})))
    assert "--job.precision" not in str(refused.value)


@pytest.mark.parametrize(("schedule", "allowed"), [("constant", True), ("cosine", False), ("wsd", True)])
def test_more_steps_continue_only_what_does_not_look_ahead(folder: RunFolder, schedule: str, allowed: bool) -> None:
    def plan(steps: int) -> Plan:
        return Plan(job=Job.model_validate({"steps": steps, "optimizer": {"schedule": schedule, "warmup_steps": 2}}))

    write_checkpoint(folder, 10, plan(20))
    if allowed:
        check_same_job(folder, plan(40))
        with pytest.raises(BadInput, match="model = 'gpt2'"):
            check_same_job(folder, plan(40).model_copy(update={"model": "gpt2"}))
    else:
        with pytest.raises(BadInput, match=r"job\.steps = 40"):
            check_same_job(folder, plan(40))
    with pytest.raises(BadInput, match=r"job\.steps = 5"):
        check_same_job(folder, plan(5))


def test_more_steps_under_a_schedule_that_looks_ahead_are_asked_for(folder: RunFolder) -> None:
    """The steps that were made had other rates than the longer job gives them: nobody goes on with that by mistake."""

    def plan(steps: int, **more: int) -> Plan:
        return Plan(job=Job.model_validate({"steps": steps, **more, "optimizer": {"warmup_steps": 2}}))

    write_checkpoint(folder, 20, plan(20))
    with pytest.raises(BadInput, match=r"job\.steps = 40 \(the run has 20\).*schedule cosine.*--run\.extend true"):
        check_same_job(folder, plan(40))
    told = check_same_job(folder, plan(40), extend=True)
    assert told is not None
    assert "the steps from 4 to 20 had other learning rates" in told
    rates = (learning_rate(Optimizer(warmup_steps=2), step, steps) for step, steps in ((19, 20), (20, 40)))
    assert "step 20 had {:.3g}, step 21 has {:.3g}".format(*rates) in told
    assert check_same_job(folder, plan(20), extend=True) is None
    for other in (plan(40, seed=4), plan(10)):
        with pytest.raises(BadInput, match=r"job\.(seed|steps) = "):
            check_same_job(folder, other, extend=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": {"learning_rate": 1e-4}},
        {"optimizer": {"warmup_steps": 90, "grad_clip": 0.1, "betas": [0.9, 0.99]}},
        {"precision": "fp32"},
        {"steps": 300, "optimizer": {"eps": 1e-6}},
    ],
)
def test_a_run_whose_loss_was_no_number_goes_on_with_other_settings(folder: RunFolder, changes: dict[str, Any]) -> None:
    """What the refusal advised was refused in that folder itself."""
    write_checkpoint(folder, 10, Plan())
    plan = Plan(job=Job.model_validate(changes))
    with pytest.raises(BadInput, match=r"job\.(optimizer|precision|steps).*--run\.extend true allows it"):
        check_same_job(folder, plan)
    told = check_same_job(folder, plan, extend=True)
    assert told is not None
    assert told.startswith("the steps from 11 on have job.")


@pytest.mark.parametrize(
    "changes", [{"optimizer": "muon"}, {"precision": "fp16"}, {"seed": 1}, {"sequence_length": 64}]
)
def test_what_the_steps_that_were_made_rest_on_stays(folder: RunFolder, changes: dict[str, Any]) -> None:
    write_checkpoint(folder, 10, Plan())
    lower = {"learning_rate": 1e-4} if isinstance(changes.get("optimizer", {}), dict) else {}
    plan = Plan(job=Job.model_validate({"optimizer": lower, **changes}))
    with pytest.raises(BadInput, match=r"(?!.*extend)job\."):
        check_same_job(folder, plan, extend=True)


def test_a_status_that_says_done_is_believed_with_the_weights_alone(folder: RunFolder) -> None:
    job = Job(steps=10)
    folder.write_status(Status("done", 10, None, 0))
    assert folder.finished(job) is None
    write_checkpoint(folder, 5, Plan(job=job))
    assert folder.finished(job) is None
    path = write_checkpoint(folder, 10, Plan(job=job))
    assert folder.finished(job) is not None
    shutil.rmtree(path)
    folder.weights_folder.mkdir()
    (folder.weights_folder / "ahp.json").write_text('{"step": 10}')
    assert folder.finished(job) is not None
    assert folder.finished(Job(steps=20)) is None


def test_two_runs_do_not_share_a_folder(folder: RunFolder) -> None:
    with folder.held(), pytest.raises(BadInput, match="another run"), RunFolder(folder.path).held():
        pass
    with RunFolder(folder.path).held():
        pass


def test_who_has_a_folder_takes_it_again(folder: RunFolder) -> None:
    with folder.held():
        with folder.held():
            pass
        with pytest.raises(BadInput, match="another run"), RunFolder(folder.path).held():
            pass


def test_workers_that_outlive_their_start_keep_the_next_one_out(folder: RunFolder) -> None:
    with folder.held_by_workers(), pytest.raises(BadInput, match="still writing"), RunFolder(folder.path).held():
        pass


def test_a_start_of_several_nodes_waits_for_workers_that_a_cut_network_left(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For as long as they may be stopped, if its launchers have started some before."""
    monkeypatch.setattr(module, "LET_GO_S", 0.3)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", f"ahp{ROUND}2")
    with ExitStack() as kept:
        kept.enter_context(folder.held_by_workers())
        threading.Timer(0.8, kept.close).start()
        with RunFolder(folder.path).held():
            pass
    assert (
        "still writing there; waiting up to 900 s for it to let go: until it is done, or its node is gone"
        in capsys.readouterr().err
    )
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", f"ahp{ROUND}1")
    with folder.held_by_workers(), pytest.raises(BadInput, match="still writing"), RunFolder(folder.path).held():
        pass


def test_a_folder_stays_locked_without_the_logs_that_somebody_deleted(folder: RunFolder) -> None:
    """The lock was among them: a second start made another one, and both wrote."""
    with folder.held(), folder.held_by_workers():
        shutil.rmtree(folder.log_folder)
        second = RunFolder(folder.path)
        second.create()
        with pytest.raises(BadInput, match="another run is writing there"), second.held():
            pass
    with second.held():
        pass


@pytest.mark.parametrize("name", ["status.json", "metrics.jsonl", "tokenizer.json"])
def test_a_folder_in_the_place_of_a_file_is_named(folder: RunFolder, name: str) -> None:
    """The start failed in the middle, by an error of the system's."""
    (folder.path / name).mkdir()
    told = (
        f"run.folder = '{folder.path}': cannot be written ({folder.path / name}: is a folder); give another run.folder"
    )
    with pytest.raises(BadInput, match=re.escape(told)), folder.held():
        pass


def test_metrics_that_somebody_deleted_are_told(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """Their lines were lost without a word."""
    for step in (1, 2):
        folder.append_metrics({"step": step})
    assert not capsys.readouterr().err
    folder.metrics_file.unlink()
    for step in (3, 4):
        folder.append_metrics({"step": step})
    told = f"{folder.metrics_file} is gone, and with it the lines of the steps before 3; it begins again\n"
    assert capsys.readouterr().err == folder.notes_file.read_text() == told
    assert [record["step"] for record in folder.metrics()] == [3, 4]


def test_folder_that_takes_no_file_is_named(folder: RunFolder) -> None:
    (folder.path / ".lock").mkdir()
    with pytest.raises(BadInput, match=r"run\.folder = .*cannot be written \(Is a directory\)"), folder.held():
        pass


def test_a_checkpoint_under_the_name_of_another_step_does_not_count(folder: RunFolder) -> None:
    """Its weights were trained on with the batches of the steps after its name, and nothing said so."""
    older, newer = write_checkpoint(folder, 4), write_checkpoint(folder, 6)
    shutil.copytree(older, folder.checkpoints_folder / "step-8")
    shutil.copytree(older, folder.checkpoints_folder / "step-\N{SUPERSCRIPT TWO}")
    assert [checkpoint.step for checkpoint in folder.checkpoints()] == [4, 6]
    assert folder.incomplete() == {"step-8": "meta.json is of step 4"}
    aside = folder.path / "aside"
    for old, new in ((older, aside), (newer, older), (aside, newer)):
        old.rename(new)
    assert folder.checkpoints() == []


def test_a_checkpoint_that_was_put_elsewhere_is_a_link(folder: RunFolder, tmp_path: Path) -> None:
    """Removing it ended the run: rmtree takes no link. What the user has put elsewhere stays."""
    for step in (2, 4):
        place = tmp_path / f"elsewhere-{step}"
        write_checkpoint(folder, step).rename(place)
        (folder.checkpoints_folder / f"step-{step}").symlink_to(place)
    assert [checkpoint.step for checkpoint in folder.checkpoints()] == [2, 4]
    write_checkpoint(folder, 4)
    write_checkpoint(folder, 6, keep=2)
    assert sorted(path.name for path in folder.checkpoints_folder.iterdir()) == ["step-4", "step-6"]
    assert all((tmp_path / f"elsewhere-{step}" / "meta.json").is_file() for step in (2, 4))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has it")
def test_a_full_disk_is_named_before_anything_is_read(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty file can be made there: the start ended with "a file: No space left on device", which names no key."""
    monkeypatch.setattr(module.tempfile, "TemporaryFile", lambda dir: io.FileIO("/dev/full", "w"))
    told = r"run\.folder = .*cannot be written \(No space left on device\); make room there, or give"
    with pytest.raises(BadInput, match=told), folder.held():
        pass


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"run\.folder = .*file/run"):
        RunFolder(tmp_path / "file" / "run").create()
