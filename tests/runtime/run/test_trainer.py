"""Whole runs in real processes, launched, joined and under torchrun: stopped, killed, moved to another layout, and still
the same curve."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import yaml

from ahp.errors import AhpError, BadInput
from ahp.graph.models import build_model
from ahp.job import Job
from ahp.plan import Parallelism, Plan
from ahp.run_files import read_record
from ahp.run_history import starts
from ahp.runtime.data.corpus import prepare
from ahp.runtime.data.tokenizer import save_for_transformers
from ahp.runtime.optimizer.learning_rate import learning_rate
from ahp.runtime.run.checkpoint_store import CheckpointStore
from ahp.runtime.run.failure import TrainingFailed
from ahp.runtime.run.folder import RunFolder
from ahp.runtime.run.generate import Sampling, generate
from ahp.runtime.run.given import with_kept_model
from ahp.runtime.run.same_job import check_same_job
from ahp.runtime.run.trainer import Outcome, Trainer
from benchmarks.own_cache import own_cache
from tests.runtime import hanging
from tests.runtime.weights.test_initial import Drawing
from tests.runtime.workers import Pool, listened_on, place

pytestmark = pytest.mark.slow

MODEL = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
STEPS, HALF = 8, 4
ALONE = Parallelism()
SHARDED = Parallelism(data_parallel_shard_degree=2, zero_stage=3)
SLICED = Parallelism(tensor_parallel_degree=2)
PIPED = Parallelism(pipeline_parallel_degree=2)
EVERY = 10  # steps between two checkpoints, where a worker is killed


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("text")
    shutil.copy(json.__file__, folder / "a.txt")
    shutil.copy(shutil.__file__, folder / "b.txt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AHP_CACHE", own_cache(folder))
        yield folder


def plan(text: Path, parallelism: Parallelism = ALONE, **changes: Any) -> Plan:
    job = {"data": str(text), "steps": STEPS, "global_batch_size": 4, "sequence_length": 32, "precision": "fp32"}
    return Plan(model=MODEL, job=Job.model_validate({**job, **changes}), parallelism=parallelism)


def train(plan: Plan, folder: Path, checkpoint_every: int = HALF) -> Outcome:
    return Trainer(plan, folder=folder, checkpoint_every=checkpoint_every).run()


def join(pool: Pool, plan: Plan, folder: Path, checkpoint_every: int = HALF) -> tuple[str, int, str]:
    """``train`` on workers that have found each other already, as under torchrun. All must end alike."""
    world_size = plan.parallelism.world_size
    ends = pool.run(joined, world_size, plan, folder, checkpoint_every, os.environ["AHP_CACHE"])
    assert ends == [ends[0]] * world_size
    return ends[0]


def joined(rank: int, world_size: int, plan: Plan, folder: Path, every: int, cache: str) -> tuple[str, int, str]:
    """Runs in each worker. State, exit code, and what was raised."""
    with mock.patch.dict(os.environ, place(rank, world_size), AHP_CACHE=cache):
        try:
            outcome = train(plan, folder, every)
        except AhpError as error:
            return "failed", error.exit_code, str(error)
    return outcome.status.state, outcome.exit_code, ""


def curve(folder: Path) -> list[tuple[int, float, float]]:
    return [(m["step"], m["loss"], m["grad_norm"]) for m in RunFolder(folder).metrics()]


def stopped_half_way(whole: Path, folder: Path) -> Path:
    """The run as it was when its checkpoint of ``HALF`` had just been written, and a little more had been done."""
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns(f"step-{STEPS}", "hf", "status.json"))
    return folder


@pytest.fixture(scope="module")
def whole(pool: Pool, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert join(pool, plan(text), folder) == ("done", 0, "")
    assert len(curve(folder)) == STEPS
    return folder


@pytest.mark.usefixtures("launched_on_pool")
def test_resumed_run_is_the_same_to_the_last_digit(text: Path, whole: Path, tmp_path: Path) -> None:
    folder = stopped_half_way(whole, tmp_path / "run")
    outcome = train(plan(text), folder)
    assert (outcome.status.state, outcome.status.step, outcome.exit_code) == ("done", STEPS, 0)
    assert curve(folder) == curve(whole)
    weights = "hf/model.safetensors"
    assert (folder / weights).read_bytes() == (whole / weights).read_bytes()


@pytest.mark.usefixtures("launched_on_pool")
def test_extended_run_keeps_what_was_done_and_goes_on_with_the_longer_jobs_rates(
    pool: Pool, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, warm = tmp_path / "run", {"warmup_steps": 1}
    assert join(pool, plan(text, steps=HALF, optimizer=warm), folder) == ("done", 0, "")
    before, longer = curve(folder), plan(text, steps=STEPS, optimizer=warm)
    state, _, cause = join(pool, longer, folder)
    assert state == "failed"
    assert re.search(r"schedule cosine.*--run\.extend true", cause)
    outcome = Trainer(longer, folder=folder, checkpoint_every=HALF, extend=True).run()
    assert (outcome.status.state, outcome.status.step) == ("done", STEPS)
    assert curve(folder)[:HALF] == before
    rates = [m["learning_rate"] for m in RunFolder(folder).metrics()]
    steps = (*((i, HALF) for i in range(HALF)), *((i, STEPS) for i in range(HALF, STEPS)))
    assert rates == [learning_rate(longer.job.optimizer, *step) for step in steps]
    assert "had other learning rates than such a job gives them" in capsys.readouterr().err
    assert train(longer, folder).already_done, "its newest checkpoint is of the longer job"


@pytest.mark.parametrize("parallelism", [SHARDED, SLICED, PIPED], ids=lambda p: p.short())
def test_resumed_under_another_layout_the_curve_goes_on(
    pool: Pool, text: Path, whole: Path, tmp_path: Path, parallelism: Parallelism
) -> None:
    folder = stopped_half_way(whole, tmp_path / "run")
    assert join(pool, plan(text, parallelism), folder) == ("done", 0, "")
    assert [step for step, _, _ in curve(folder)] == list(range(1, STEPS + 1))
    assert curve(folder)[:HALF] == curve(whole)[:HALF]
    for ours, theirs in zip(curve(folder), curve(whole), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert RunFolder(folder).checkpoints()[-1].meta()["parallelism"] == parallelism.model_dump(mode="json")


def drawing(rank: int, world_size: int, *order: Any) -> tuple[str, int]:
    """``joined``, and how many random numbers this rank drew for its weights."""
    with Drawing() as drawing:
        state, *_ = joined(rank, world_size, *order)
    return state, drawing.numbers


def test_ranks_go_on_before_a_checkpoint_that_one_finds_damaged_and_draw_no_weights_again(
    pool: Pool, text: Path, tmp_path: Path
) -> None:
    order = SHARDED.world_size, plan(text, SHARDED), tmp_path / "run", HALF // 2, os.environ["AHP_CACHE"]
    first, run = pool.run(drawing, *order), RunFolder(tmp_path / "run")
    assert [state for state, _ in first] == ["done"] * 2
    assert all(numbers > 0 for _, numbers in first)
    whole, (before, newer, last) = curve(run.path), run.checkpoints()
    for folder in (last.path, run.weights_folder):
        shutil.rmtree(folder)
    second_ranks = newer.path / sorted(newer.meta()["crc32"])[1]  # each reads every second file
    content = bytearray(second_ranks.read_bytes())
    content[len(content) // 2] ^= 1
    second_ranks.write_bytes(content)
    assert pool.run(drawing, *order) == [("done", 0)] * 2
    assert curve(run.path) == whole
    assert (
        f"the checkpoint of step {newer.step} is damaged: {second_ranks.name} has changed" in run.notes_file.read_text()
    )
    assert [(each.step, each.damaged_file()) for each in run.checkpoints()] == [
        (step, None) for step in (before.step, newer.step, last.step)
    ]
    assert starts(run.history_file)[-1].first_step == before.step


def test_given_weights_are_tuned_on_conversations_and_go_out_again(pool: Pool, tmp_path: Path, text: Path) -> None:
    """From a folder of transformers to a folder of transformers, the chat template with it; once there is a checkpoint, without the first."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given, talks = tmp_path / "given", tmp_path / "talks.jsonl"
    torch.manual_seed(3)
    build_model(MODEL, device="cpu").save_pretrained(given)  # type: ignore[operator]
    save_for_transformers(prepare(str(text), MODEL["vocab_size"]).tokenizer(), given)
    turn = "{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}"
    opening = "{% if add_generation_prompt %}assistant: {% endif %}"
    settings = {
        "temperature": 0.6,
        "do_sample": False,
        "eos_token_id": [1, 5],
    }  # not those of the config, and refused by save_pretrained
    (given / "generation_config.json").write_text(json.dumps(settings))
    (given / "chat_template.jinja").write_text("{% for m in messages %}" + turn + "{% endfor %}" + opening)
    talk = [{"role": "user", "content": "def"}, {"role": "assistant", "content": "return x"}]
    talks.write_text(f"{json.dumps({'messages': talk})}\n" * 40)
    job = Job.model_validate(
        {"data": str(talks), "packing": "padded", "steps": 60, "global_batch_size": 4, "sequence_length": 32,
         "precision": "fp32", "optimizer": {"learning_rate": 2e-2, "warmup_steps": 5}}
    )  # fmt: skip
    tuned = Plan(model=str(given), init_from=str(given), job=job, parallelism=SHARDED)
    run = RunFolder(tmp_path / "run")
    assert join(pool, tuned, run.path, checkpoint_every=40) == ("done", 0, "")
    first = run.metrics()
    for gone in (given, run.checkpoints()[-1].path, run.weights_folder):
        shutil.rmtree(gone)
    assert join(pool, tuned, run.path, checkpoint_every=40) == ("done", 0, "")
    assert [record["loss"] for record in run.metrics()] == [record["loss"] for record in first]
    assert run.checkpoints()[-1].meta()["model"] == str(run.given_folder)
    assert check_same_job(run, with_kept_model(tuned, run)) is None
    with pytest.raises(BadInput, match="init_from = 'elsewhere'"):
        check_same_job(run, tuned.model_copy(update={"init_from": "elsewhere"}))
    folder = run.weights_folder
    assert json.loads((folder / "generation_config.json").read_text()) == settings
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(talk[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    written = model.generate(**prompt, max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=0)[
        0, prompt["input_ids"].shape[1] :
    ]
    assert tokenizer.decode(written, skip_special_tokens=True) == "return x"


@pytest.mark.wide  # tests/test_failures.py kills one too, among much else, and compares every digit
def test_a_killed_worker_is_started_again_and_the_curve_goes_on(text: Path, tmp_path: Path) -> None:
    folder, addresses = RunFolder(tmp_path / "run"), set[str]()

    def disturb() -> None:
        kill_a_worker(folder.path, EVERY, addresses)
        while len(starts(folder.history_file)) < 2:
            time.sleep(0.02)
        wait_for_steps(folder, starts(folder.history_file)[1].first_step + 8)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=disturb, daemon=True).start()
    outcome = train(plan(text, SHARDED, steps=400), folder.path, checkpoint_every=EVERY)
    assert outcome.exit_code == 128 + signal.SIGTERM
    assert {address.rpartition(":")[0] for address in addresses} == {"127.0.0.1"}
    first, second = starts(folder.history_file)
    assert first.why is not None
    assert re.match(r"worker \d was ended by SIGKILL after step \d+", first.why)
    assert (first.workers, second.workers, second.why) == (2, 2, "stopped by SIGTERM")
    assert second.first_step == first.saved_step >= EVERY
    assert first.last_step is not None
    assert 0 < first.last_step - second.first_step <= EVERY
    assert second.last_step == second.saved_step == outcome.status.step
    assert json.loads(folder.status_file.read_text())["starts"][0]["why"] == first.why
    metrics = folder.metrics()
    assert [record["step"] for record in metrics] == list(range(1, outcome.status.step + 1))
    lost = [record for line in folder.cut_metrics_file.read_bytes().splitlines() if (record := read_record(line))]
    assert [record["step"] for record in lost] == list(range(first.saved_step + 1, first.last_step + 1))
    for record in lost:
        again = metrics[record["step"] - 1]
        assert (again["loss"], again["grad_norm"]) == (record["loss"], record["grad_norm"])


def kill_a_worker(folder: Path, after: int, addresses: set[str]) -> None:
    """Kills one with steps behind the last checkpoint, which is of step ``after`` or later, and before the next one is begun.

    ``addresses``: gets those that the run then listens on.
    """
    run = RunFolder(folder)
    while not (checkpoints := run.checkpoints()) or checkpoints[-1].step < after:
        time.sleep(0.02)
    addresses |= listened_on()
    workers = [p for p in psutil.Process().children() if str(folder) in p.cmdline()]
    while True:
        for worker in workers:  # so that what is read about the workers does not change
            worker.suspend()
        behind = len(run.metrics()) - run.checkpoints()[-1].step
        if 2 <= behind < EVERY - 2:
            break
        for worker in workers:
            worker.resume()
        time.sleep(0.02)
    workers[-1].kill()
    for worker in workers[:-1]:
        worker.resume()


def wait_for_steps(folder: RunFolder, step: int) -> None:
    while len(folder.metrics()) < step:
        time.sleep(0.02)


def test_interrupted_run_gives_text_from_its_checkpoint(text: Path, whole: Path, tmp_path: Path) -> None:
    folder = RunFolder(stopped_half_way(whole, tmp_path / "run"))
    sampling = Sampling(max_new_tokens=12)
    assert generate(folder.path, "def ", sampling) == generate(folder.path, "def ", sampling)
    assert folder.exported_step() == HALF
    shutil.copytree(whole / "checkpoints" / f"step-{STEPS}", folder.checkpoints_folder / f"step-{STEPS}")
    generate(folder.path, "def ", sampling)
    weights = "hf/model.safetensors"
    assert (folder.path / weights).read_bytes() == (whole / weights).read_bytes()


@pytest.mark.usefixtures("launched_on_pool")
def test_a_finished_run_writes_weights_that_are_damaged_again(
    text: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It said "done"."""
    folder = shutil.copytree(whole, tmp_path / "run")
    assert train(plan(text), folder).already_done
    weights = folder / "hf" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    outcome = Trainer(plan(text), folder=folder, keep=1).run()
    assert (outcome.already_done, outcome.status.state, outcome.status.step) == (False, "done", STEPS)
    assert [one.step for one in RunFolder(folder).checkpoints()] == [STEPS], "as after a kill before older ones went"
    assert f"{weights} is missing or has changed since it was written" in capsys.readouterr().err
    assert weights.read_bytes() == (whole / "hf" / weights.name).read_bytes()
    assert curve(folder) == curve(whole)


def test_fault_in_a_worker_has_its_cause_and_exit_code(text: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingFailed, match="global_batch_size") as error:
        train(plan(text, Parallelism(micro_batch_size=3)), tmp_path / "run")
    assert error.value.exit_code == 2
    status = RunFolder(tmp_path / "run").status()
    assert status is not None
    assert (status.state, status.step, status.exit_code) == ("failed", 0, 2)


@pytest.mark.wide  # test_changing_nodes.py has the same hang with two launchers, and what is told by both
def test_a_rank_that_hangs_in_a_step_is_named(text: Path, tmp_path: Path) -> None:
    """Under the launcher: within the limit the other rank gives up, here a receive of a pipeline, and what is told is who hangs."""
    one_micro_batch = PIPED.model_copy(update={"micro_batch_size": 4, "pipeline_parallel_schedule": "GPipe"})
    hanging_plan = plan(text, one_micro_batch).model_copy(update={"model": "tests.runtime.hanging:model"})
    told = (
        f"after step {hanging.AFTER}: rank 1 on {socket.gethostname()} did not come to a collective on axis pp within"
    )
    trainer = Trainer(
        hanging_plan, folder=tmp_path / "run", checkpoint_every=2, collective_timeout_s=8.0, elastic={"max_restarts": 0}
    )
    with pytest.raises(TrainingFailed, match=re.escape(told)) as error:
        trainer.run()
    folder = RunFolder(tmp_path / "run")
    status = folder.status()
    assert status is not None
    assert (
        (status.state, status.step, status.exit_code)
        == ("failed", hanging.AFTER, 1)
        == ("failed", hanging.AFTER, error.value.exit_code)
    )
    assert status.cause is not None
    assert status.cause.startswith(told)
    assert "within run.collective_timeout_s = 8; rank 0 on" in status.cause
    assert "8000ms" in status.cause
    assert [saved.step for saved in folder.checkpoints()] == [2, hanging.AFTER]


def test_loss_that_is_no_number_stops_the_run(pool: Pool, text: Path, tmp_path: Path) -> None:
    wild = {"learning_rate": 1e30, "warmup_steps": 0, "grad_clip": None}
    state, exit_code, cause = join(pool, plan(text, optimizer=wild), tmp_path / "run", checkpoint_every=1)
    assert (state, exit_code) == ("failed", 1)
    assert re.search(r"step \d+: loss = .*learning_rate", cause)
    folder = RunFolder(tmp_path / "run")
    status = folder.status()
    assert status is not None
    assert (status.state, status.exit_code, status.cause) == ("failed", 1, cause)
    assert folder.checkpoints()


@pytest.mark.wide
def test_torchrun_joins_and_gives_the_same_curve(text: Path, whole: Path, tmp_path: Path) -> None:
    config = {
        "model": MODEL,
        "cluster": {"nodes": 1, "devices_per_node": 2, "device": "cpu"},
        "job": plan(text).job.model_dump(mode="json"),
        "parallelism": {"data_parallel_shard_degree": 2},
        "run": {"folder": str(tmp_path / "run"), "checkpoint_every": HALF},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "ahp", "train", str(tmp_path / "config.yaml"), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert (result["state"], result["step"]) == ("done", STEPS)
    for ours, theirs in zip(curve(tmp_path / "run"), curve(whole), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.usefixtures("launched_on_pool")
def test_a_run_whose_folder_is_lost_goes_on_from_the_object_store(text: Path, whole: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/bucket/run"
    half, last = RunFolder(whole).checkpoints()
    assert (half.step, last.step) == (HALF, STEPS)
    CheckpointStore.open(url).put(half)
    outcome = Trainer(plan(text), folder=tmp_path / "new", checkpoint_every=HALF, checkpoint_store=url).run()
    assert outcome.status.state == "done"
    assert curve(tmp_path / "new") == curve(whole)[HALF:]
    assert sorted(CheckpointStore.open(url).complete()) == [HALF, STEPS]
