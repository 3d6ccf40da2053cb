"""The train and generate commands: what they accept, what they say, what they leave in status.json."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from ahp.cli import generate as generate_command
from ahp.cli import main, train_plan
from ahp.cli import train as train_command
from ahp.cli.overrides import split_overrides
from ahp.cluster import local
from ahp.config import Config, Constraints
from ahp.errors import BadInput, HardwareMismatch
from ahp.job import Job
from ahp.plan import EngineChoice, Forecast, Parallelism, Plan
from ahp.report import page
from ahp.run_files import Status
from ahp.runtime import device_limits
from ahp.runtime.ranks import device
from ahp.runtime.run import generate as generation
from ahp.runtime.run import texts, trainer
from ahp.runtime.run.checkpoint_store import CheckpointStore
from ahp.runtime.run.export_mark import EXPORT_MARK
from ahp.runtime.run.folder import RunFolder
from ahp.runtime.run.generate import generate as from_checkpoint
from ahp.runtime.run.texts import prepare_texts
from tests.runtime.run.test_checkpoint_store import save
from tests.search.small import cpu_workers

STEPS = 3


@pytest.fixture(autouse=True)
def no_real_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither workers nor a model: the folder is filled as they would fill it."""
    monkeypatch.delenv("RANK", raising=False)

    def run(self: trainer.Trainer) -> trainer.Outcome:
        folder, steps = self.folder, self.plan.job.steps
        folder.create()
        self.plan.save(folder.plan_file)
        for step in range(1, steps + 1):
            folder.append_metrics(
                {"step": step, "loss": 9.0 - step, "grad_norm": 1.0, "learning_rate": 0.1, "tokens_per_s": 8.0,
                 "step_time_s": 0.5, "predicted_step_time_s": 0.25, "memory_bytes": 1}
            )  # fmt: skip
        stopped = self.plan.job.seed == 9
        status = Status("interrupted", 2, "stopped by SIGINT", 130) if stopped else Status("done", steps, None, 0)
        folder.write_status(status)
        return trainer.Outcome(folder.path, status)

    monkeypatch.setattr(trainer.Trainer, "run", run)
    monkeypatch.setattr(texts, "prepare_texts", lambda plan, run: texts.Texts(("corpus",), None, "the same"))
    monkeypatch.setattr(
        generation, "generate", lambda folder, prompt, sampling: prompt + f"seed{sampling.seed}():\n  pass"
    )


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    Plan(job=Job(steps=STEPS)).save(tmp_path / "plan.yaml")
    return tmp_path / "plan.yaml"


def args(plan_file: Path, *more: str) -> list[str]:
    return ["train", str(plan_file), "--run.folder", str(plan_file.parent / "run"), *more]


def test_plan_is_run_as_it_is_and_told(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(args(plan_file)) == 0
    out = capsys.readouterr().out
    for words in (
        "8.000 -> 6.000 in 3 steps",
        "500 ms a step, predicted 250 ms",
        "  | def seed0():",
        "Next: ahp generate",
    ):
        assert words in out, words
    run = plan_file.parent / "run"
    assert (run / "report.html").is_file()
    assert (run / "sample.txt").read_text() == "def seed0():\n  pass\n"


def test_checkpoints_that_the_folder_has_lost_come_from_the_store(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, plan = RunFolder(plan_file.parent / "run"), Plan.load(plan_file)
    run.create()
    saved = save(run, 2, job=plan.job.model_dump(mode="json"), model=plan.model)
    run.write_status(Status("interrupted", 2, "stopped by SIGTERM", 143))
    url = f"file://{plan_file.parent}/bucket"
    CheckpointStore.open(url).put(saved)
    shutil.rmtree(run.checkpoints_folder)
    assert main.main(args(plan_file)) == 2
    assert "no checkpoint of the run is whole" in capsys.readouterr().err
    assert main.main(args(plan_file, "--run.checkpoint-store", url)) == 0
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [2]


@pytest.mark.parametrize(
    ("high_s", "steps", "off", "enough"), [(0.6, 8, False, False), (0.3, 7, True, False), (0.3, 8, True, True)]
)
def test_a_step_outside_the_band_is_told_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], high_s: float, steps: int, off: bool, enough: bool
) -> None:
    """ahp calibrate refuses a run of fewer than 8 steps."""
    forecast = Forecast(
        step_time_s=0.25, step_time_low_s=0.2, step_time_high_s=high_s, tokens_per_s_per_device=1.0, mfu=0.1,
        mfu_peak="bf16 dense", memory_allocated_bytes=1, memory_reserved_bytes=1, fit_probability=1.0, fits=True,
        step={"forward": 0.25}, memory={"parameters": 1},
    )  # fmt: skip
    Plan(job=Job(steps=steps), forecast=forecast).save(tmp_path / "plan.yaml")
    assert main.main(args(tmp_path / "plan.yaml")) == 0
    out = capsys.readouterr().out
    assert ("2 times the prediction, outside its 90 % band" in out) == off
    assert (f"ahp calibrate {tmp_path / 'run'}" in out) == enough


def test_a_finished_run_shows_the_sample_that_it_has(
    plan_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = trainer.Trainer.run

    def finished(self: trainer.Trainer) -> trainer.Outcome:
        outcome = trained(self)
        (self.folder.path / "sample.txt").write_text("def of_the_run():\n")
        return replace(outcome, already_done=True)

    monkeypatch.setattr(trainer.Trainer, "run", finished)
    monkeypatch.setattr(generation, "generate", lambda *_: pytest.fail("the model was loaded"))
    assert main.main(args(plan_file)) == 0
    out = capsys.readouterr().out
    assert "is finished. Give more --job.steps, or another --run.folder" in out
    assert "  | def of_the_run():" in out


def test_a_sample_that_fails_fails_nothing(
    plan_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module with fewer positions than the sample has tokens ended the command with an internal error, without a report."""

    def fails(*_: Any) -> str:
        raise IndexError("index out of range in self")

    monkeypatch.setattr(generation, "generate", fails)
    assert main.main(args(plan_file)) == 0
    out, err = capsys.readouterr()
    assert "no sample: IndexError: index out of range in self" in err
    assert (plan_file.parent / "run" / "report.html").is_file()
    assert "Sample" not in out
    assert "ahp generate" not in out


def test_no_sample_is_made_where_none_is_wanted(
    plan_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "generate", lambda *_: pytest.fail("the model was loaded"))
    assert main.main(args(plan_file, "--run.sample", "false")) == 0
    out, err = capsys.readouterr()
    assert "Sample" not in out
    assert "no sample" not in err


def test_a_page_that_cannot_be_drawn_fails_nothing(
    plan_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(folder: Path) -> Path:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(page, "write", fails)
    assert main.main(args(plan_file)) == 0
    assert "no report.html: ZeroDivisionError" in capsys.readouterr().err


def test_json_is_one_object_with_the_result(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(args(plan_file, "--json")) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["state"], result["step"], result["first_loss"], result["last_loss"]) == ("done", 3, 8.0, 6.0)
    assert result["speed"] == {"median_s": 0.5, "predicted_s": 0.25, "in_band": None, "tokens_per_s": 8.0}
    assert result["plan"]["job"]["steps"] == STEPS


def test_stopped_run_names_the_same_command_and_has_the_signals_code(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Plan(job=Job(steps=STEPS, seed=9)).save(plan_file)
    assert main.main(args(plan_file)) == 130
    out = capsys.readouterr().out
    assert "Interrupted (stopped by SIGINT) after step 2 of 3" in out
    assert f"Next: ahp train {plan_file} --run.folder" in out
    assert "def " not in out


def test_the_next_commands_can_be_pasted_where_a_path_has_a_space(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = plan_file.parent / "my run"
    assert main.main(args(plan_file, "--run.folder", str(folder), "--json")) == 0
    commands = json.loads(capsys.readouterr().out)["next"]
    assert [shlex.split(command)[2] for command in commands] == [str(folder), str(folder), str(folder / "plan.yaml")]


def test_plan_takes_no_other_override(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(args(plan_file, "--job.sequence-length", "32")) == 2
    assert "--job.sequence-length" in capsys.readouterr().err
    status = RunFolder(plan_file.parent / "run").status()
    assert status is not None
    assert (status.state, status.exit_code) == ("failed", 2)
    assert "--job.sequence-length" in (status.cause or "")


def test_refusal_leaves_the_status_of_a_finished_run(plan_file: Path) -> None:
    assert main.main(args(plan_file)) == 0
    assert main.main(args(plan_file, "--job.sequence-length", "32")) == 2
    status = RunFolder(plan_file.parent / "run").status()
    assert status is not None
    assert status.state == "done"


def test_another_job_leaves_the_older_runs_files(plan_file: Path) -> None:
    run = RunFolder(plan_file.parent / "run")
    run.create()
    old = Plan(job=Job(steps=STEPS, seed=5))
    old.save(run.plan_file)
    run.open_checkpoint(1)
    run.commit_checkpoint(1, old.model_dump(mode="json", include={"job", "model"}) | {"crc32": {}}, keep=1)
    assert main.main(args(plan_file)) == 2
    assert Plan.load(run.plan_file) == old
    status = run.status()
    assert status is not None
    assert "job.seed = 0 (the run has 5)" in (status.cause or "")


def test_another_job_leaves_the_status_of_a_run_that_was_interrupted(plan_file: Path) -> None:
    """It was ``failed`` then, because somebody had named the wrong folder."""
    run, old = RunFolder(plan_file.parent / "run"), Plan(job=Job(steps=STEPS, seed=5))
    run.create()
    save(run, 1, job=old.job.model_dump(mode="json"), model=old.model)
    was = Status("interrupted", 1, "stopped by SIGTERM", 143)
    run.write_status(was)
    assert main.main(args(plan_file)) == 2
    assert run.status() == was


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("given", [(), ("--job.steps", "5")], ids=["the same", "refused by itself"])
def test_a_second_start_changes_nothing_of_the_first(
    plan_file: Path, capsys: pytest.CaptureFixture[str], given: tuple[str, ...]
) -> None:
    """It replaced the plan of the run that trained, and wrote ``failed`` over its status."""
    run = RunFolder(plan_file.parent / "run")
    run.create()
    with run.held():
        Plan(job=Job(steps=STEPS, seed=5)).save(run.plan_file)
        run.write_status(Status("running", 1))
        run.append_metrics({"step": 1, "loss": 9.0})
        before = files(run.path)
        assert main.main(args(plan_file, *given)) == 2
        assert files(run.path) == before
    assert "another run is writing there" in capsys.readouterr().err or given


def test_the_folder_is_kept_from_the_plan_to_the_report(plan_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []

    def look(name: str, then: Any) -> Any:
        def wrapped(*args: Any, **more: Any) -> Any:
            with pytest.raises(BadInput, match="another run"), RunFolder(plan_file.parent / "run").held():
                pass
            looks.append(name)
            return then(*args, **more)

        return wrapped

    monkeypatch.setattr(texts, "prepare_texts", look("texts", texts.prepare_texts))
    monkeypatch.setattr(trainer.Trainer, "run", look("run", trainer.Trainer.run))
    monkeypatch.setattr(page, "write", look("report", page.write))
    assert main.main(args(plan_file)) == 0
    assert looks == ["texts", "run", "report"]


def test_bad_config_is_told_in_the_folder_it_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"job": {"stepz": 3}, "run": {"folder": str(tmp_path / "run")}}))
    assert main.main(["train", str(file)]) == 2
    assert "stepz" in capsys.readouterr().err
    status = RunFolder(tmp_path / "run").status()
    assert status is not None
    assert "stepz" in (status.cause or "")


def test_missing_config_makes_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.main(["train", "no.yaml"]) == 2
    assert list(tmp_path.iterdir()) == []


def test_help_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["train", "--help"])
    assert ended.value.code == 0
    assert "job.optimizer.warmup_steps" in capsys.readouterr().out


def test_plan_of_an_earlier_start_is_used_only_for_the_same_wish(tmp_path: Path) -> None:
    folder, config = RunFolder(tmp_path / "run"), Config()
    folder.create()
    assert train_plan.earlier(config, folder, None) is None
    Plan(parallelism=Parallelism(data_parallel_replicate_degree=2)).save(folder.plan_file)
    folder.config_file.write_text(json.dumps(train_plan._plain(config)))
    found = train_plan.earlier(config, folder, None)
    assert found is not None
    assert found == train_plan.earlier(config, folder, 2) == train_plan.earlier(with_run(config), folder, None)
    assert train_plan.earlier(config, folder, 4) is None
    other = config.model_copy(update={"parallelism": Constraints(tensor_parallel_degree=2)})
    assert train_plan.earlier(other, folder, None) is None
    compiled = config.model_copy(update={"engine": EngineChoice(compile=True)})
    assert train_plan.earlier(compiled, folder, None) is None


@pytest.mark.parametrize(("flags", "chosen"), [({"avx2", "fma"}, "fp32"), ({"avx2", "fma", "avx512_bf16"}, "bf16")])
def test_a_precision_that_is_not_given_is_one_that_the_cores_compute_fast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: set[str], chosen: str
) -> None:
    folder = RunFolder(tmp_path / "run")
    monkeypatch.setattr(local, "gpus", list)
    monkeypatch.setattr(local.sense, "cpu_flags", lambda: flags)
    assert train_plan.with_precision(Config(), folder).job.precision == chosen
    assert ("job.precision fp32, as none is given: cpu has no units" in capsys.readouterr().err) == (chosen == "fp32")
    given = Config(job=Job(precision="bf16"))
    assert train_plan.with_precision(given, folder) == given
    in_bf16 = Config(job=Job(dtype="bf16"))
    assert train_plan.with_precision(in_bf16, folder) == in_bf16
    # A run goes on in the precision that it has, on whatever cores.
    saved = SimpleNamespace(meta=lambda: {"job": {"precision": "fp16"}})
    monkeypatch.setattr(RunFolder, "checkpoints", lambda self: [saved])
    assert train_plan.with_precision(Config(), folder).job.precision == "fp16"


def test_cores_that_were_measured_compute_in_what_they_were_measured_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe measures bf16 also where the processor has no instructions for it."""
    monkeypatch.setattr(local, "gpus", list)
    monkeypatch.setattr(local.sense, "cpu_flags", lambda: {"avx2", "fma"})
    asked = Config(job=Job(precision="bf16"))
    with pytest.raises(BadInput, match=r"job.precision = 'bf16': cpu has no units for it"):
        train_plan._refuse_here(train_plan.without_layout(asked), asked)
    cpu_workers(2, 2).save(tmp_path / "cluster.yaml")
    measured = asked.model_copy(update={"cluster": str(tmp_path / "cluster.yaml")})
    train_plan._refuse_here(train_plan.without_layout(measured), measured)


def test_a_precision_that_is_not_given_is_one_that_the_named_gpus_compute(tmp_path: Path) -> None:
    config = Config(cluster="8xT4")
    assert train_plan.with_precision(config, RunFolder(tmp_path / "run")).job.precision == "fp16"


def test_plan_of_a_start_with_an_earlier_version_is_used(tmp_path: Path) -> None:
    folder, config = RunFolder(tmp_path / "run"), Config()
    folder.create()
    Plan().save(folder.plan_file)
    older = {key: value for key, value in train_plan._plain(config).items() if key != "engine"}
    folder.config_file.write_text(json.dumps(older))
    assert train_plan.earlier(config, folder, None) == Plan()


def with_run(config: Config) -> Config:
    return config.model_copy(update={"run": config.run.model_copy(update={"checkpoint_every": 7})})


@pytest.mark.parametrize(
    ("given", "workers"),
    [
        ({}, None),
        ({"tensor_parallel_degree": 2}, None),
        (
            {
                "data_parallel_replicate_degree": 1,
                "data_parallel_shard_degree": 3,
                "tensor_parallel_degree": 2,
                "pipeline_parallel_degree": 1,
            },
            6,
        ),
        ({**dict.fromkeys(train_plan.DEGREES, 1), "context_parallel_degree": 2}, 2),
    ],
)
def test_workers_are_known_when_every_degree_is_given(given: dict[str, Any], workers: int | None) -> None:
    assert train_plan.num_workers(Constraints(**given)) == workers


def test_generate_prints_the_text_and_what_is_next(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate_command.run(["runs/x", "--prompt", "class ", "--seed", "3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("class seed3():")
    assert "Next: ahp report runs/x" in out
    assert "ahp generate runs/x --prompt 'class ' --seed 4" in out
    assert generate_command.run(["runs/my run"]) == 0
    assert "Next: ahp report 'runs/my run'    ahp generate 'runs/my run' --seed 1" in capsys.readouterr().out
    assert generate_command.run(["runs/x", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == "seed0():\n  pass"
    with pytest.raises(BadInput, match="seed"):
        generate_command.run(["runs/x", "--seed", "-1"])


def test_demonstration_differs_in_four_keys_and_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[train_command.Request] = []

    def no_training(request: train_command.Request, *_: Any, **__: Any) -> int:
        seen.append(request)
        return 0

    monkeypatch.setattr(train_command, "train", no_training)
    (tmp_path / "empty.yaml").write_text("")
    assert train_command.run(["--job.steps", "5", "--run.folder", str(tmp_path)]) == 0
    assert train_command.run(["--job.optimizer", "{learning_rate: 0.5}"]) == 0
    assert train_command.run([str(tmp_path / "empty.yaml")]) == 0
    demo, whole, plain = (request.config.job for request in seen if request.config is not None)
    assert (demo.steps, demo.global_batch_size) == (5, train_command.DEMO["job.global_batch_size"])
    assert (demo.optimizer.learning_rate, demo.optimizer.warmup_steps) == (3.0e-3, 30)
    assert whole.optimizer.learning_rate == 0.5
    assert plain == Job()


@pytest.mark.parametrize(
    ("wrong", "told", "code"),
    [
        (["--engine", "megatron"], "engine.name = 'megatron'", 2),
        (["--engine.offload_optimizer"], "engine.offload_optimizer = True: on a CPU", 4),
        (["--engine.enable_async_tensor_parallel"], "engine.enable_async_tensor_parallel = True", 5),
    ],
)
def test_an_engine_that_cannot_be_is_told_before_the_machine_is_measured(
    wrong: list[str],
    told: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def no_probe(*_: Any, **__: Any) -> None:
        raise AssertionError("measured for nothing")

    monkeypatch.setattr(train_plan, "_local", no_probe)
    monkeypatch.setattr(device, "num_gpus", lambda: 0)
    assert main.main(["train", *wrong, "--run.folder", str(tmp_path / "run")]) == code
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_the_engine_that_is_asked_for_is_that_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_plan, "_local", lambda folder, workers: cpu_workers(2, 2))
    asked = ["--engine.compile", "--engine.loss_chunk_tokens", "100", "--engine.attention", "math"]
    assert main.main(["train", *asked, "--run.folder", str(tmp_path / "run")]) == 0
    plan = Plan.load(tmp_path / "run")
    assert plan.engine == EngineChoice(compile=True, loss_chunk_tokens=100, attention="math")
    assert plan.forecast is not None


def test_blocks_are_left_eager_where_a_gpu_has_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "num_gpus", lambda: 8)
    monkeypatch.setattr(device_limits, "find_spec", lambda name: None)
    engine, why = train_plan._engine(Config())
    assert engine.compile is False
    assert "the package triton" in why[0]
    with pytest.raises(HardwareMismatch, match=r"engine.compile = True: needs the package triton"):
        train_plan._engine(Config(engine=EngineChoice(compile=True)))
    monkeypatch.setattr(device_limits, "find_spec", lambda name: name)
    monkeypatch.setattr(device_limits.shutil, "which", lambda name: name)
    assert train_plan._engine(Config()) == (EngineChoice(), ())


@pytest.mark.parametrize("option", ["--steps", "--steps=20", "--learning-rate"])
def test_the_last_part_of_a_key_is_told_with_the_whole(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["train", option, "20"]) == 2
    name = option.split("=")[0]
    whole = "--job.optimizer.learning_rate" if "rate" in name else "--job.steps"
    assert f"{name}: no option of ahp train; keys are given whole (did you mean: {whole}?)" in capsys.readouterr().err


def hardly_any_text(tmp_path: Path) -> dict[str, str]:
    file = tmp_path / "a.txt"
    file.write_text("def call(x): return x + 1\n" * 400)
    return {"--job.data": str(file), "--run.folder": str(tmp_path / "run"), "--job.sequence-length": "16"}


EARLY: dict[str, tuple[dict[str, str], int, str]] = {
    "data": ({"--job.data": "no.txt"}, 2, "job.data = 'no.txt'"),
    "model": ({"--model": "tini"}, 2, "model = 'tini'"),
    "validation": ({"--job.validation": "0.001"}, 2, "job.validation = 0.001: its"),
    "length": ({"--job.sequence-length": "2048"}, 2, "job.sequence_length = 2048"),
    "weights": ({"--init-from": "nowhere", "--model": "tiny"}, 2, "init_from = 'nowhere': no such folder"),
    "folder-without-model": ({"--init-from": "."}, 2, "init_from = '.': it holds no config.json"),
    "weights-and-model": ({"--init-from": "nowhere"}, 2, "init_from = 'nowhere': no such folder"),
    "cluster": ({"--cluster": "1x64xH100"}, 4, "needs 64 of them on this node"),
    "degrees": (
        {"--parallelism": "{data_parallel_replicate_degree: 9999, data_parallel_shard_degree: 1, tensor_parallel_degree: 1, pipeline_parallel_degree: 1}"},
        2,
        "parallelism: its degrees make 9999 workers: this machine carries at most",
    ),
    "precision": ({"--job.precision": "fp16"}, 2, "job.precision = 'fp16': cpu has no units for it (valid: "),
    "evaluation": ({"--run.evaluation": "nowhere:score"}, 2, "run.evaluation = 'nowhere:score': No module named"),
    "few-workers": (
        {"--run.elastic.min-workers": "9999"}, 2, "run.elastic.min_workers = 9999: this machine's devices make"
    ),
    "job": ({"--job.seed": "7"}, 2, "job.seed = 7 (the run has 0)"),
    "text": ({}, 2, "the text or its tokenizer has changed since step 1"),
}  # fmt: skip
"""What is given, the exit code, and what is said."""


@pytest.mark.parametrize("case", EARLY)
def test_what_needs_no_plan_is_told_before_the_machine_is_measured(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It came after a probe, a search and 40 lines of plan."""
    given, code, told = EARLY[case]
    monkeypatch.setenv("AHP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(texts, "prepare_texts", prepare_texts)
    monkeypatch.setattr(train_plan, "_local", lambda *_: pytest.fail("measured for nothing"))
    words = [word for pair in {**hardly_any_text(tmp_path), **given}.items() for word in pair]
    if case in ("job", "text"):
        request = train_command.read_request(None, train_command.DEMO | split_overrides(words)[0])
        assert request.config is not None
        job = request.config.job.model_copy(update={"seed": 0, "precision": "fp32"})  # which all cores have
        run = RunFolder(tmp_path / "run")
        run.create()
        run.open_checkpoint(1)
        meta = {"job": job.model_dump(mode="json"), "model": "tiny", "data_fingerprint": "another", "crc32": {}}
        run.commit_checkpoint(1, meta, keep=1)
    assert main.main(["train", *words]) == code
    out, err = capsys.readouterr()
    assert told in err
    assert "analyzing" not in err
    assert out == ""


def test_a_finished_run_needs_neither_its_text_nor_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asked for another layout, it says that it has finished."""
    monkeypatch.setattr(texts, "prepare_texts", lambda plan: pytest.fail("text was prepared"))
    monkeypatch.setattr(train_plan, "_local", lambda *_: pytest.fail("measured for nothing"))
    run = RunFolder(tmp_path / "run")
    run.create()
    done = Plan(job=Job(steps=STEPS, data="gone.txt"))
    done.save(run.plan_file)
    run.write_status(Status("done", STEPS, None, 0))
    run.weights_folder.mkdir()
    (run.weights_folder / EXPORT_MARK).write_text(json.dumps({"step": STEPS}))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"job": {"steps": STEPS, "data": "gone.txt"}}))
    words = ["train", str(tmp_path / "config.yaml"), "--run.folder", str(run.path)]
    assert main.main([*words, "--parallelism.tensor-parallel-degree", "2"]) == 0
    assert Plan.load(run.plan_file) == done


def test_generate_of_a_folder_without_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no run's folder"):
        from_checkpoint(tmp_path)


def test_a_held_out_loss_that_is_no_number_is_said() -> None:
    """The number of an earlier step was shown, as if it were that of the weights that are kept."""
    result = {
        "folder": "run", "state": "done", "step": 4, "plan": {"job": {"steps": 4}}, "first_loss": 5.0, "last_loss": 4.0, "next": ["x"],
        "speed": {"predicted_s": None, "median_s": 1.0, "tokens_per_s": 10.0, "in_band": None}, "report": None, "validation_loss": None,
    }  # fmt: skip
    assert any(line.startswith("Held out no number") for line in train_command.words(result, already_done=False))
    lines = train_command.words({**result, "validation_loss": 4.5}, already_done=False)
    assert any(line.startswith("Held out 4.500") for line in lines)
