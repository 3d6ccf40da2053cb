"""Starting workers: what they are given, how their ends are told, how a wish to stop reaches them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from ahp.cluster.sense import physical_cores
from ahp.errors import BadInput, HardwareMismatch
from ahp.job import Job
from ahp.plan import Parallelism, Plan
from ahp.run_files import Status
from ahp.runtime.data.tokenizer import tokenizer_of
from ahp.runtime.ranks import launch, ranks, watch
from ahp.runtime.ranks.environment import gpu_variables
from ahp.runtime.ranks.stop_signals import STOP_SIGNALS
from ahp.runtime.ranks.watch import Quiet, Watch
from ahp.runtime.run import failure
from ahp.runtime.run.export_mark import EXPORT_MARK
from ahp.runtime.run.folder import RunFolder
from ahp.runtime.run.texts import Texts, vocabulary_size
from ahp.runtime.run.trainer import Trainer
from tests.runtime.workers import listened_on

SCRIPT = """
import json, os, signal, sys, time
rank, folder, what = int(os.environ["RANK"]), sys.argv[1], sys.argv[2]
keys = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "MASTER_ADDR", "PYTORCH_ALLOC_CONF", "TORCH_FR_DUMP_TEMP_FILE")
if what == "wait":
    def noted(number, frame):
        open(f"{folder}/stopped-{rank}", "w").write(str(number))
        sys.exit(0)
    signal.signal(signal.SIGTERM, noted)
json.dump({k: os.environ[k] for k in keys}, open(f"{folder}/{rank}.json", "w"))
print("hello from", rank)
if what == "fail" and rank == 1:
    sys.exit(7)
if what == "killed" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if what == "stopped":
    os.kill(os.getpid(), signal.SIGSTOP)
if what != "end":
    time.sleep(60)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A worker that needs no torch, importable by the processes that the launcher starts."""
    (tmp_path / "a_worker.py").write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return "a_worker"


def start(module: str, folder: Path, what: str, hang: Watch | None = None) -> int:
    return launch.launch(module, [str(folder), what], num_workers=2, log_folder=folder / "log", watch=hang)


def test_workers_know_their_place_and_share_the_cores(module: str, tmp_path: Path) -> None:
    assert start(module, tmp_path, "end") == 0
    given = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [(g["RANK"], g["LOCAL_RANK"], g["WORLD_SIZE"]) for g in given] == [("0", "0", "2"), ("1", "1", "2")]
    assert {g["OMP_NUM_THREADS"] for g in given} == {str(max(1, physical_cores() // 2))}
    assert "OMP_NUM_THREADS" not in os.environ
    logs = sorted(tmp_path.rglob("stdout.log"))
    assert [log.read_text() for log in logs] == ["hello from 0\n", "hello from 1\n"]


@pytest.mark.parametrize(("what", "codes", "killed"), [("fail", 7, {}), ("killed", -9, {1: signal.SIGKILL})])
def test_end_of_the_worker_that_failed_is_told(
    module: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], what: str, codes: int, killed: dict[int, int]
) -> None:
    with pytest.raises(launch.WorkersEnded) as ended:
        start(module, tmp_path, what)
    assert ended.value.exit_codes[1] == codes
    assert ended.value.killed == killed
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "why", "limit_s"), [("stopped", "stopped (SIGSTOP)", 2.0), ("sleeps", "hanging", 1.0)]
)
def test_workers_that_hang_all_together_are_ended(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, why: str, limit_s: float
) -> None:
    monkeypatch.setattr(watch, "STACK_S", 0.1)
    with pytest.raises(launch.WorkersEnded) as ended:
        start(module, tmp_path, what, Watch(tmp_path / "metrics.jsonl", limit_s))
    host = socket.gethostname()
    assert ended.value.hang == (
        f"ranks 0, 1 on {host} are {why}: for {limit_s:g} s no step has ended, and no worker has computed, read or written anything"
    )
    assert set(ended.value.exit_codes) == {0, 1}


@pytest.mark.slow
def test_workers_that_wait_for_the_one_that_prepares_do_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "STACK_S", 0.0)
    begins, said = tmp_path / "joined", list[str]()
    begins.touch()
    os.utime(
        begins, (time.time() - 5, time.time() - 5)
    )  # by an earlier start; the system knows to a second when a process began
    with subprocess.Popen(["sleep", "60"], env={"RANK": "3"}) as process:
        worker, seen = psutil.Process(process.pid), Watch(tmp_path / "metrics.jsonl", 0.4, begins=begins)
        try:
            with watch.watching(seen, lambda: [worker], 1, said.append) as hang:
                time.sleep(0.8)
                assert (process.poll(), said) == (None, [])
                os.utime(begins, (time.time() + 2, time.time() + 2))
                assert process.wait(120) in (-signal.SIGUSR2, -signal.SIGKILL)
        finally:
            process.kill()
    assert hang.cause is not None
    assert hang.cause.startswith(f"rank 3 on {socket.gethostname()} is hanging: for 0.4 s no step has ended")
    assert said[0] == hang.cause


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_wish_to_stop_reaches_every_worker(module: str, tmp_path: Path, number: signal.Signals) -> None:
    addresses: set[str] = set()

    def stop_when_all_run() -> None:
        while not all((tmp_path / f"{rank}.json").exists() for rank in range(2)):
            time.sleep(0.05)
        addresses.update(listened_on() - others)
        os.kill(os.getpid(), number)

    others, before = listened_on(), signal.getsignal(number)
    threading.Thread(target=stop_when_all_run, daemon=True).start()
    assert start(module, tmp_path, "wait") == number
    assert (tmp_path / "stopped-0").read_text() == (tmp_path / "stopped-1").read_text() == str(int(signal.SIGTERM))
    assert signal.getsignal(number) == before
    assert {address.rpartition(":")[0] for address in addresses} == {
        "127.0.0.1"
    }  # of the store that workers find each other by
    assert listened_on() <= others


@pytest.mark.parametrize(("work", "code", "told"), [("0", 0, ""), ("1 // 0", 1, "ZeroDivisionError")])
def test_what_happens_while_the_interpreter_ends_changes_no_exit_code(work: str, code: int, told: str) -> None:
    script = (
        "import atexit, os; from ahp.runtime.run import worker; atexit.register(os.abort); print('said'); "
        f"worker.end_process(lambda: {work})"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (code, "said\n")
    assert told in ended.stderr


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return folder


def test_first_failure_is_the_cause(folder: RunFolder) -> None:
    folder.append_metrics({"step": 4})
    failure.record(folder, 1, HardwareMismatch("the plan is for 4 workers"))
    failure.record(folder, 0, RuntimeError("connection closed by peer"))
    told = failure.read(folder)
    assert told is not None
    assert (told.rank, told.message, told.exit_code) == (1, "the plan is for 4 workers", 4)
    status = folder.status()
    assert status is not None
    assert (status.state, status.step, status.exit_code) == ("failed", 4, 4)
    failure.forget(folder)
    assert failure.read(folder) is None


def test_reason_comes_from_the_kill_then_the_failure_then_the_codes(folder: RunFolder) -> None:
    trainer = Trainer(Plan(), folder=folder.path)
    for start, said in (("start-1_a", "an older cause"), ("start-2_b", "ImportError: no such module")):
        log = folder.log_folder / start / "attempt_0" / "0" / "stderr.log"
        log.parent.mkdir(parents=True)
        log.write_text(f"{said}\n")
        os.utime(folder.log_folder / start, (int(start[6]), int(start[6])))
    told = str(trainer._why(launch.WorkersEnded({0: 3})))
    assert told == (
        f"workers ended with exit codes {{0: 3}}; the workers' output: {folder.log_folder}\nImportError: no such module"
    )
    failure.record(folder, 0, ValueError("wrong shape"))
    why = trainer._why(launch.WorkersEnded({0: 1, 1: -15}))
    assert str(why).startswith("rank 0: ValueError: wrong shape")
    assert why.exit_code == 1
    assert "worker 1 was ended by SIGKILL" in str(trainer._why(launch.WorkersEnded({0: 1, 1: -9})))
    assert str(trainer._why(launch.WorkersEnded({0: -9}, "rank 0 is stopped"))).startswith(
        "after step 0: rank 0 is stopped; "
    )


def test_finished_run_is_left_alone(folder: RunFolder) -> None:
    folder.write_status(Status("done", 10, None, 0))
    folder.weights_folder.mkdir()
    (folder.weights_folder / EXPORT_MARK).write_text('{"step": 10}')
    outcome = Trainer(Plan(job=Job(steps=10)), folder=folder.path).run()
    assert outcome.already_done
    assert outcome.exit_code == 0
    assert not folder.plan_file.exists()


def test_a_start_keeps_the_folder_while_its_workers_run(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one wrote ``failed`` over the status of the first, which trained on."""

    def workers(*args: Any, **kwargs: Any) -> int:
        before = folder.status_file.read_bytes()
        with pytest.raises(BadInput, match="another run is writing there"):
            Trainer(Plan(job=Job(seed=4)), folder=folder.path, texts=texts).run()
        assert folder.status_file.read_bytes() == before
        assert Plan.load(folder.plan_file) == Plan()
        return signal.SIGTERM

    texts = Texts(("corpus",), None, "same")
    monkeypatch.setattr(launch, "launch", workers)
    assert Trainer(Plan(), folder=folder.path, texts=texts).run().status.state == "interrupted"
    with RunFolder(folder.path).held():
        pass


def test_workers_are_not_started_again_from_step_0_where_the_checkpoints_are_gone(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def workers(*args: Any, **kwargs: Any) -> int:
        folder.open_checkpoint(1)
        meta = Plan().model_dump(mode="json", include={"job", "model"})
        folder.commit_checkpoint(1, {**meta, "crc32": {}}, keep=1)
        folder.append_metrics({"step": 1, "loss": 9.0})
        folder.write_status(Status("running", 1))
        shutil.rmtree(folder.checkpoints_folder)
        raise launch.WorkersEnded({0: -9})

    monkeypatch.setattr(launch, "launch", workers)
    with pytest.raises(BadInput, match="no checkpoint of the run is whole"):
        Trainer(Plan(), folder=folder.path, texts=Texts(("corpus",), None, "same")).run()
    assert len(folder.metrics()) == 1


def test_missing_data_is_refused_before_any_worker_starts(folder: RunFolder) -> None:
    with pytest.raises(ValueError, match=r"job\.data"):
        Trainer(Plan(job=Job(data="no/such")), folder=folder.path).run()
    status = folder.status()
    assert status is not None
    assert (status.state, status.exit_code) == ("failed", 2)
    assert "job.data" in (status.cause or "")


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({}, r"fewer than one batch of job\.global_batch_size"),
        ({"validation": 0.2, "global_batch_size": 1, "sequence_length": 2}, r"job\.validation = 0\.2: its 1 tokens"),
        ({"packing": "padded"}, "fewer than one batch"),
    ],
)
def test_too_little_text_is_refused_before_any_worker_starts(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], rule: str
) -> None:
    monkeypatch.setenv("AHP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(launch, "launch", lambda *args, **kwargs: pytest.fail("a worker was started"))
    (tmp_path / "short.txt").write_text("a few words")
    job = Job.model_validate({"data": str(tmp_path / "short.txt"), **changes})
    with pytest.raises(ValueError, match=rule):
        Trainer(Plan(job=job), folder=folder.path).run()
    status = folder.status()
    assert status is not None
    assert (status.state, status.exit_code) == ("failed", 2)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_while_the_text_is_prepared_leaves_a_status(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def stop(self: Trainer) -> Any:
        os.kill(os.getpid(), number)
        time.sleep(10)

    monkeypatch.setattr(Trainer, "_texts", stop)
    monkeypatch.setattr(launch, "launch", lambda *args, **kwargs: pytest.fail("a worker was started"))
    before = signal.getsignal(number)
    outcome = Trainer(Plan(), folder=folder.path).run()
    assert outcome.exit_code == 128 + number
    assert folder.status() == outcome.status
    assert (outcome.status.state, outcome.status.cause) == ("interrupted", f"stopped by {number.name}")
    assert signal.getsignal(number) == before


def test_plan_for_gpus_is_refused_where_there_are_too_few(folder: RunFolder) -> None:
    group = {"device": {"name": "H100-SXM-80GB"}}
    plan = Plan(cluster={"groups": [group]}, parallelism=Parallelism(data_parallel_replicate_degree=1000))
    with pytest.raises(HardwareMismatch, match=r"H100-SXM-80GB and needs 1000 of them"):
        Trainer(plan, folder=folder.path).run()


def test_more_workers_than_the_machine_carries_are_not_launched(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"workers = 99999: this machine carries at most \d+ worker processes"):
        launch.launch("no.such.module", [], num_workers=99999, log_folder=tmp_path)


def test_vocabulary_is_the_configs_or_the_first_embeddings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_model.py").write_text(
        "from torch import nn\ndef make():\n    return nn.Sequential(nn.Embedding(37, 8), nn.Linear(8, 37))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert vocabulary_size("gpt2") == 50257
    assert vocabulary_size("a_model:make") == 37


def test_tokenizer_beside_the_weights_or_the_models_config_is_found(tmp_path: Path) -> None:
    assert tokenizer_of(Plan()) is None
    model, given = tmp_path / "model", tmp_path / "given"
    for folder in (model, given):
        folder.mkdir()
        assert tokenizer_of(Plan(model=str(model))) is None
    (model / "tokenizer.json").write_text("{}")
    (model / "config.json").write_text("{}")
    assert tokenizer_of(Plan(model=str(model))) == model / "tokenizer.json"
    assert tokenizer_of(Plan(model=str(model / "config.json"), init_from=str(given))) == model / "tokenizer.json"
    (given / "tokenizer.json").write_text("{}")
    assert tokenizer_of(Plan(model=str(model), init_from=str(given))) == given / "tokenizer.json"


def test_workers_inherit_what_gpus_need_and_the_users_own_values_stay(tmp_path: Path) -> None:
    found = gpu_variables({}, tmp_path)
    assert found["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert found["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/nccl-rank-"
    assert gpu_variables({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}) == {}
    assert gpu_variables({"PYTORCH_ALLOC_CONF": "", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "mine"}, tmp_path) == {}
    assert gpu_variables({**found, "TORCH_FR_BUFFER_SIZE": "7"}, tmp_path) == {}


def polls(*signs: tuple[float, float, int]) -> list[bool]:
    """What is found at each poll of a second, at a limit of three: (the progress' change, processor time, bytes)."""
    quiet = Quiet(3.0)
    return [quiet.after(1.0, *sign) for sign in signs]


def test_workers_that_show_any_sign_of_work_do_not_hang() -> None:
    nothing = (5.0, 10.0, 10**6)
    assert polls(*[nothing] * 5) == [False, False, False, True, True]
    hardly = [(5.0, 10.0 + 0.02 * second, 10**6 + 800 * second) for second in range(5)]
    assert polls(*hardly) == [False, False, False, True, True]
    for working in (
        [(5.0 + second // 3, 10.0, 10**6) for second in range(9)],  # a step in three seconds
        [(5.0, 10.0 + 0.5 * second, 10**6) for second in range(9)],
        [(5.0, 10.0, 10**6 + 2 * second * 2**20) for second in range(9)],
        [(5.0, 10.0 - second // 3, 10**6) for second in range(9)],  # a process that helped has ended
    ):
        assert not any(polls(*working))


def test_the_allocator_is_told_what_torch_may_have_read_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing transformers is enough for torch to read the variable, once."""
    told: list[str] = []
    monkeypatch.setattr(ranks, "set_allocator", told.append)
    for given in ({}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}):
        monkeypatch.setattr(ranks.os, "environ", dict(given))
        ranks.set_gpu_variables()
        assert (ranks.os.environ == given) == bool(given)
    assert told == ["expandable_segments:True"]
