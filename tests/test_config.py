"""config.yaml and dotted overrides: what is read, and what is refused in the user's own words."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from ahp.cli.overrides import split_overrides
from ahp.cluster.model import Cluster
from ahp.config import HELP, Config, Constraints, Profile, checkpoint_interval, config_help, load_config
from ahp.errors import BadInput
from ahp.job import Job
from ahp.plan import EngineChoice, Parallelism, Plan, validated
from ahp.runtime.run.trainer import Trainer
from ahp.yaml_text import parse_yaml


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def test_everything_has_a_default(tmp_path: Path) -> None:
    assert load_config() == Config()
    assert load_config(write(tmp_path, "")) == Config()
    assert load_config().job == Job()
    assert load_config().parallelism.given == {}


def test_a_whole_file(tmp_path: Path) -> None:
    config = load_config(
        write(
            tmp_path,
            """
model: {model_type: llama, hidden_size: 64}
init_from: null
cluster: 8x8xH100-SXM-80GB
job:
  steps: 3
  optimizer: {learning_rate: 1e-3, betas: [0.9, 0.99], eps: 1e-8}
parallelism: {tensor_parallel_degree: 2, layers_per_stage: [1, 2], activation_checkpoint: auto}
run: {folder: runs/x, track: []}
""",
        )
    )
    assert config.model == {"model_type": "llama", "hidden_size": 64}
    assert config.job.optimizer.learning_rate == 1e-3
    assert config.job.optimizer.betas == (0.9, 0.99)
    assert config.parallelism.given == {"tensor_parallel_degree": 2, "layers_per_stage": (1, 2)}
    assert config.run.folder == "runs/x"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1e9", 1e9),
        ("-2E+3", -2e3),
        ("1.5e3", 1500.0),
        (".5", 0.5),
        ("12", 12),
        ("8x8xH100", "8x8xH100"),
        ("e3", "e3"),
        ("1e", "1e"),
        ("[1, 2e1]", [1, 20.0]),
        ("'1e3'", "1e3"),
        ("0x10", 16),
        ("-0", 0),
        ("0.5", 0.5),
        ("010", "010"),  # eight and ninety by YAML 1.1, and neither is what was meant
        ("1:30", "1:30"),
        ("1:30.5", "1:30.5"),
    ],
)
def test_numbers_as_people_write_them(text: str, value: Any) -> None:
    assert parse_yaml(text) == value
    assert type(parse_yaml(text)) is type(value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("jobs: {}", ["jobs: unknown key", "job"]),
        ("job: {step: 3}", ["job.step: unknown key", "steps"]),
        ("job: {lora: {rank: 8}}", ["job.lora.rank: unknown key (did you mean: r?)"]),
        ("job: {dtype: bf16, precision: bf16, lora: {r: 8}}", ["job.lora = {'r': 8}: does not go with job.dtype bf16"]),
        ("job: {lora: 8}", ["job.lora = 8: must be a mapping of keys, such as r, lora_alpha"]),
        ("job: {data: [{path: a.txt, wieght: 1}]}", ["job.data.0.wieght: unknown key (did you mean: path, weight?)"]),
        ("job: {data: [{path: a.txt, weight: 0}]}", [": job.data.0.weight = 0: must be above 0.0"]),
        ("job: {data: 3}", [": job.data = 3: must be text; job.data = 3"]),
        ("job: {steps: 0}", ["job.steps = 0", "must be at least 1"]),
        ("job: {steps: yes}", ["job.steps = True: must be a whole number, not true or false"]),
        ("parallelism: {layers_per_stage: 12}", ["parallelism.layers_per_stage = 12: must be a list"]),
        ("job: {steps: '8'}", ["job.steps = '8': must be a whole number, not text"]),
        ("job: {optimizer: {weight_decay: on}}", ["job.optimizer.weight_decay = True: must be a number"]),
        (
            "parallelism: {layers_per_stage: [1, true]}",
            ["parallelism.layers_per_stage.1 = True: must be a whole number"],
        ),
        ("job: {precision: int8}", ["job.precision = 'int8'", "valid: fp32, bf16"]),
        ("job: {optimizer: {learning_rate: fast}}", ["job.optimizer.learning_rate = 'fast'"]),
        ("parallelism: {tensor_paralel_degree: 2}", ["tensor_paralel_degree: unknown key", "tensor_parallel_degree"]),
        ("job: {optimizer: {lr: 1}}", ["job.optimizer.lr: unknown key (did you mean: learning_rate?)"]),
        (
            "job: {loss_chunk_tokens: 8}",
            ["job.loss_chunk_tokens: unknown key (did you mean: engine.loss_chunk_tokens?)"],
        ),
        ("job: {loss_pieces: 8}", ["job.loss_pieces: unknown key (valid: data, data_field, packing, "]),
        ("engine: {tensor_parallel_degree: 2}", ["(did you mean: parallelism.tensor_parallel_degree?)"]),
        ("job: {torch_dtype: bf16}", ["job.torch_dtype: unknown key (did you mean: precision?)"]),
        ("sequence_length: 64", ["sequence_length: unknown key (did you mean: job.sequence_length?)"]),
        ("job: {learning_rate: 1}", ["job.learning_rate: unknown key (did you mean: job.optimizer.learning_rate?)"]),
        ("job: {batch_size: 8}", ["job.batch_size: unknown key (did you mean: global_batch_size?)"]),
        ("parallelism: {tp: 2}", ["parallelism.tp: unknown key (did you mean: tensor_parallel_degree?)"]),
        ("engine: {zzz: 2}", ["engine.zzz: unknown key (valid: name, attention, compile, "]),
        ("parallelism: {tensor_parallel_degree: 0}", ["parallelism.tensor_parallel_degree = 0"]),
        ("parallelism: fast", ["parallelism = 'fast'"]),
        ("model: 7", ["model = 7", "a name, a path or a mapping"]),
        ("init_from: 7", ["init_from = 7"]),
        ("run: {track: [mlflow]}", ["'mlflow'", "valid: tensorboard, wandb"]),
        ("job: {validation: 1.5}", ["job.validation = 1.5: must be a share", "between 0 and 1"]),
        ("run: {keep: 0}", ["run.keep = 0"]),
        ("engine: {compiled: true}", ["engine.compiled: unknown key", "compile"]),
        ("engine: {attention: fast}", ["engine.attention = 'fast'", "valid: flash, math"]),
        ("engine: {loss_chunk_tokens: 0}", ["engine.loss_chunk_tokens = 0"]),
        (
            "engine: megatron",
            ["engine.name = 'megatron'", "valid: ahp", "ahp plan MODEL CLUSTER --engine.name megatron"],
        ),
        ("run: {checkpoint_every: 0}", ["run.checkpoint_every = 0: must be 1 step or more, a time, or auto", "30min"]),
        ("run: {checkpoint_every: yes}", ["run.checkpoint_every = True"]),
        ("run: {checkpoint_every: 30sec}", ["run.checkpoint_every = '30sec'", "2h"]),
        ("run: {checkpoint_every: 0min}", ["run.checkpoint_every = '0min'"]),
        ("run: {checkpoint_every: 1:30}", ["run.checkpoint_every = '1:30'", "30min"]),
        ("job: {steps: 0100}", ["job.steps = '0100': must be a whole number, not text"]),
        ("run: {folder: ''}", ["run.folder = '': must name a folder"]),
        ("run: {on_nan: ignore}", ["run.on_nan = 'ignore'", "valid: stop, skip, rollback"]),
        ("run: {profile: [1, 2]}", ["run.profile = [1, 2]: must be a mapping of keys"]),
        ("run: {profile: {steps: [12, 10]}}", ["run.profile.steps = [12, 10]", "the last one no earlier"]),
        ("run: {profile: {steps: [0, 2]}}", ["run.profile.steps = [0, 2]", "the first step must be 1 or later"]),
        ("run: {profile: {steps: [3]}}", ["run.profile.steps"]),
        (
            "job: {steps: 20}\nrun: {profile: {steps: [10, 21]}}",
            ["run.profile.steps = [10, 21]: the job has 20 steps (job.steps)"],
        ),
        ("on: 2", ["config.yaml: True: a key must be a word, such as model, init_from, cluster"]),
        ("job: {1: 2}", ["job.1: a key must be a word, such as data, data_field, packing"]),
        ("job: {seed: 1}\njob: {seed: 2}", ["the key 'job' is given twice"]),
        ("- 1", ["a mapping of keys was expected, not a list"]),
        ("job: [", ["not YAML"]),
        ("job:\n\tsteps: 2", ["not YAML: a tab; YAML is indented by spaces (line 2, column 1)"]),
        (
            "model: tiny\n---\nmodel: gpt2",
            ["not YAML: a second document begins here; a file has one (line 2, column 1)"],
        ),
    ],
)
def test_refusals_name_the_users_key(tmp_path: Path, text: str, told: list[str]) -> None:
    with pytest.raises(BadInput) as refused:
        load_config(write(tmp_path, text))
    for words in told:
        assert words in str(refused.value)


def test_the_engine_is_part_of_the_file_and_of_the_command_line(tmp_path: Path) -> None:
    assert load_config().engine == EngineChoice()
    assert load_config().engine.compile is None, "left open"
    path = write(tmp_path, "engine: ahp\n")
    words = "--engine.compile --engine.loss-chunk-tokens 512 --engine.offload_optimizer=false"
    config = load_config(path, split_overrides(words.split())[0])
    assert config.engine == EngineChoice(compile=True, loss_chunk_tokens=512)
    assert load_config(None, split_overrides(["--engine", "ahp"])[0]).engine == EngineChoice()


@pytest.mark.parametrize(
    ("value", "steps", "seconds"),
    [
        (1, 1, None),
        (50, 50, None),
        ("30min", None, 1800.0),
        ("1.5 h", None, 5400.0),
        ("2h", None, 7200.0),
        ("auto", None, None),
    ],
)
def test_checkpoints_come_by_steps_or_by_the_time(value: Any, steps: int | None, seconds: float | None) -> None:
    config = load_config(None, {"run.checkpoint_every": value})
    assert checkpoint_interval(config.run.checkpoint_every) == (steps, seconds)


def test_steps_of_a_profile() -> None:
    assert load_config(None, {"run.profile.steps": [10, 12]}).run.profile == Profile(steps=(10, 12))
    assert load_config().run.profile is None


@pytest.mark.parametrize(
    ("key", "needed"),
    [
        ("run.validate_every", {"job.validation": 0.1}),
        ("run.validation_batches", {"job.validation": 0.1}),
        ("run.evaluate_every", {"run.evaluation": "looks:perplexity"}),
    ],
)
def test_how_often_something_happens_is_refused_without_it(key: str, needed: dict[str, Any]) -> None:
    name = key.removeprefix("run.")
    often: dict[str, Any] = {name: 7}
    assert getattr(load_config(None, {key: 7, **needed}).run, name) == 7
    with pytest.raises(BadInput, match=f"{key} = 7: has no effect without {next(iter(needed))}"):
        load_config(None, {key: 7})
    with pytest.raises(BadInput, match=f"{key} = 7: has no effect without {next(iter(needed))}"):
        Trainer(Plan(), **often)


def test_given_weights_bring_their_model() -> None:
    assert load_config(None, {"init_from": "weights"}).model == "weights"
    assert load_config(None, {"init_from": "weights", "model": "tiny"}).model == "tiny"


def test_missing_file() -> None:
    with pytest.raises(BadInput, match="no such file"):
        load_config("no/such.yaml")


def test_overrides_reach_every_depth(tmp_path: Path) -> None:
    path = write(tmp_path, "job: {steps: 5, optimizer: adamw}\nparallelism: auto\n")
    overrides, rest = split_overrides(
        shlex.split(
            "config.yaml --job.steps=20 --job.optimizer.learning-rate 1e-4 --json "
            "--parallelism.tensor-parallel-degree 4 --parallelism.enable_sequence_parallel --run.folder=runs/y "
            "--cluster 8x8xH100-SXM-80GB --job.optimizer.grad-clip=null -- --job.steps=99"
        )
    )
    assert rest == ["config.yaml", "--json", "--", "--job.steps=99"]
    config = load_config(path, overrides)
    assert config.job.steps == 20
    assert config.job.optimizer.name == "adamw"
    assert config.job.optimizer.learning_rate == 1e-4
    assert config.job.optimizer.grad_clip is None
    assert config.parallelism.given == {"tensor_parallel_degree": 4, "enable_sequence_parallel": True}
    assert config.run.folder == "runs/y"
    assert config.cluster == "8x8xH100-SXM-80GB"


@pytest.mark.parametrize("option", [["-o", "p.yaml"], ["-op.yaml"], ["-h"], ["--json"]])
def test_an_option_is_not_the_value_of_the_key_before_it(option: list[str]) -> None:
    """--engine.compile -o p.yaml took -o as its value."""
    assert split_overrides(["--engine.compile", *option]) == ({"engine.compile": True}, option)
    given, rest = split_overrides(["--job.seed", "-1", "--engine.version=-o", "--job.data", "-", *option])
    assert given == {"job.seed": -1, "engine.version": "-o", "job.data": "-"}
    assert rest == option


def test_an_override_does_not_change_the_defaults() -> None:
    load_config(None, {"job.steps": 3})
    assert load_config().job.steps == Job().steps


def test_text_that_is_not_utf8_and_a_pipe_are_refused_as_such(tmp_path: Path) -> None:
    file, pipe = tmp_path / "config.yaml", tmp_path / "pipe"
    file.write_bytes("model: café".encode("latin-1"))
    with pytest.raises(BadInput, match=r"not YAML: byte 10 \(0xe9\) is not UTF-8"):
        load_config(file)
    os.mkfifo(pipe)
    for load in (load_config, Plan.load, Cluster.load):
        with pytest.raises(BadInput, match="a pipe or a device; give a file"):
            load(pipe)


def test_override_refusals() -> None:
    assert split_overrides(["--job", "-", "--run.folder", ""]) == ({"job": "-", "run.folder": ""}, [])
    with pytest.raises(BadInput, match=r"run\.folder = '': must name a folder"):
        load_config(None, {"run.folder": ""})
    with pytest.raises(BadInput, match=r"--jobs\.steps.*unknown key.*job"):
        split_overrides(["--jobs.steps", "3"])
    with pytest.raises(BadInput, match="not YAML"):
        split_overrides(["--job.data", "[a"])
    with pytest.raises(BadInput, match=r"model = 'tiny' is not a mapping"):
        load_config(None, {"model": "tiny", "model.hidden_size": 64})
    with pytest.raises(BadInput, match=r"job\.stepz: unknown key"):
        load_config(None, {"job.stepz": 64})


def test_what_was_given_on_the_command_line_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    file = tmp_path / "tiny2.yaml"
    file.write_text("job: {steps: 5}\n")
    with pytest.raises(BadInput, match=r"^command line: job\.stpes: unknown key .*steps"):
        load_config(file, {"job.stpes": 20})
    file.write_text("job: {stepz: 5}\n")
    with pytest.raises(BadInput, match=r"^.*tiny2\.yaml: job\.stepz: unknown key"):
        load_config(file, {"job.seed": 20})


@pytest.mark.parametrize("value", [2, 0, 1.0, -0.5, True])
def test_a_share_that_is_none_is_told_in_one_line(value: Any) -> None:
    with pytest.raises(
        BadInput, match=rf"job\.validation = {value}: must be a share of the data between 0 and 1"
    ) as error:
        load_config(None, {"job.validation": value})
    assert "constrained" not in str(error.value)


def test_own_options_stay_with_the_command() -> None:
    words = ["plan.yaml", "--trace=out.json", "-o", "a.b.yaml", "--top", "3", "--model-name"]
    assert split_overrides(words) == ({}, words)
    assert split_overrides(["--cluster", "x"], roots=("job",)) == ({}, ["--cluster", "x"])


def test_constraints_have_the_keys_of_a_layout() -> None:
    assert set(Constraints.model_fields) == set(Parallelism.model_fields)
    layout = Parallelism(data_parallel_shard_degree=4, tensor_parallel_degree=2, micro_batch_size=3)
    assert Constraints.exactly(layout).admits(layout)
    assert not Constraints.exactly(layout).admits(layout.model_copy(update={"micro_batch_size": 4}))
    assert Constraints().admits(layout)


def flat_keys(kind: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in kind.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            keys += flat_keys(inner, f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return keys


def test_every_key_is_in_the_help() -> None:
    assert list(HELP) == flat_keys(Config)
    assert "job.steps = 200" in config_help()
    assert "run.folder = runs/demo" in config_help()
    assert "engine.compile = searched" in config_help()
    assert "parallelism.tensor_parallel_degree = searched" in config_help()


def test_a_release_is_taken_as_it_is_typed() -> None:
    overrides, _ = split_overrides(["--engine.version", "26.10", "--engine.name=megatron"])
    assert overrides == {"engine.version": "26.10", "engine.name": "megatron"}
    assert split_overrides(["--engine.version", "null"])[0] == {"engine.version": None}
    assert validated(EngineChoice, {"name": "megatron", "version": "2024-12"}, "engine").version == "2024-12"
    with pytest.raises(BadInput, match=r"version = 26.1: a release needs quotes, as in '26.10'"):
        validated(EngineChoice, {"name": "megatron", "version": 26.10}, "engine")


@pytest.mark.parametrize("betas", [[1.5, 0.95], [0.9, 1], [-0.1, 0.95]])
def test_means_that_torch_refuses_are_refused_here(betas: list[float]) -> None:
    with pytest.raises(BadInput, match=r"job.optimizer.betas.[01] = "):
        load_config(None, {"job.optimizer.betas": betas})
