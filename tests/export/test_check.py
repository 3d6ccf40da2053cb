"""``ahp check``: what it says of configurations that others wrote, and that no file ends it with a traceback."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ahp.cli.check import run
from ahp.errors import AhpError, BadInput, NothingFits
from ahp.export.reading import READERS, read_foreign
from ahp.export.table import plan_of
from ahp.search import ranking
from ahp.search.result import Ranking
from ahp.search.ties import TIED
from ahp.words import WORTH_TELLING
from tests.export.test_engines import a_plan
from tests.export.test_programs import BRIDGE, MAXTEXT, NANOTRON, NEMO

CLUSTER = ["--cluster", "1x8xH100-SXM-80GB"]
TITAN = """
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 8192
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
[activation_checkpoint]
mode = "full"
[float9]
speed = "high"
"""
MEGATRON = """
#!/bin/bash
GPUS_PER_NODE=8
NUM_NODES=${NUM_NODES:-1}
TP_SIZE=2
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE   # of a node
    --nnodes $NUM_NODES
)
MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --normalization RMSNorm --swiglu --untie-embeddings-and-output-weights
    --vocab-size 128256
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\
    ${MODEL_ARGS[@]} \\
    --tensor-model-parallel-size ${TP_SIZE} --sequence-parallel --pipeline-model-parallel-size=2 \\
    --micro-batch-size 1 --global-batch-size 64 --seq-length 4096 --train-iters 100 --bf16 \\
    --use-distributed-optimizer --fancy-new-thing 3
"""


@pytest.fixture(scope="module", autouse=True)
def _each_search_is_made_once() -> Iterator[None]:
    """Most of what is checked here is said twice, to people and as JSON."""
    found: dict[str, Ranking] = {}
    searched = ranking.search

    def search(*asked: Any, **more: Any) -> Ranking:
        key = repr((asked, more))
        if key not in found:
            found[key] = searched(*asked, **more)
        return found[key]

    with mock.patch.object(ranking, "search", search):
        yield


def checked(path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert run([str(path), *CLUSTER, "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_a_torchtitan_recipe_is_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(TITAN)
    found = checked(file, capsys)
    p = found["parallelism"]
    assert (
        p["tensor_parallel_degree"],
        p["data_parallel_shard_degree"],
        p["enable_sequence_parallel"],
        p["activation_checkpoint"],
    ) == (8, 1, True, "full")
    assert found["not_understood"] == ["float9.speed = 'high': not understood"]
    assert found["assumed"] == []
    assert found["saves"] > 0.1
    assert found["best"]["forecast"]["step_time_s"] < found["forecast"]["step_time_s"]
    changed = {line[0]: line[2] for change in found["changes"] for line in change["lines"]}
    assert changed["parallelism.tensor_parallel_degree"] == found["best"]["parallelism"]["tensor_parallel_degree"]
    assert run([str(file), *CLUSTER]) == 0
    shown = capsys.readouterr().out
    assert "Change   parallelism.tensor_parallel_degree: 8 -> " in shown
    assert "Ignored  float9.speed = 'high': not understood" in shown


@pytest.mark.slow
def test_a_megatron_script_is_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "pretrain.sh"
    file.write_text(MEGATRON)
    found = checked(file, capsys)
    p = found["parallelism"]
    degrees = (
        p["tensor_parallel_degree"],
        p["pipeline_parallel_degree"],
        p["data_parallel_shard_degree"],
        p["zero_stage"],
    )
    assert degrees == (2, 2, 2, 1)
    assert (found["job"]["global_batch_size"], found["job"]["sequence_length"]) == (64, 4096)
    assert found["not_understood"] == ["--fancy-new-thing = '3': not understood"]
    assert found["forecast"]["step_time_low_s"] < found["forecast"]["step_time_s"]


MISSING = (
    "--cross-entropy-loss-fusion",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
    "--ddp-average-in-collective",
)


def test_what_the_forecast_counts_on_and_a_script_lacks_is_listed(tmp_path: Path) -> None:
    def missing(text: str) -> tuple[str, ...]:
        file = tmp_path / "pretrain.sh"
        file.write_text(text)
        return read_foreign(str(file), None, None, 8).read.missing

    assert missing(MEGATRON) == MISSING
    experts = MEGATRON.replace("--num-layers", "--num-experts 8 --moe-grouped-gemm --num-layers", 1)
    assert missing(experts) == ("--moe-permute-fusion", *MISSING)
    assert missing(MEGATRON.replace("--fancy-new-thing 3", " ".join(MISSING))) == ()


@pytest.mark.slow
def test_the_next_command_names_a_model_that_it_can_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was ``ahp plan MODEL`` where the file has the sizes of the model and no name."""
    file = tmp_path / "pretrain.sh"
    for layers, following in (("32", ["ahp plan llama3-8b 1x8xH100-SXM-80GB --engine.name megatron"]), ("8", [])):
        file.write_text(MEGATRON.replace("--num-layers 32", f"--num-layers {layers}"))
        assert [command.partition(" --job")[0] for command in checked(file, capsys)["next"]] == following
        assert run([str(file), *CLUSTER]) == 0
        assert ("Next: " in capsys.readouterr().out) == bool(following)


@pytest.mark.slow
def test_no_change_is_recommended_within_what_the_forecast_can_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Layouts less than 2 % apart are tied for ``ahp plan``; here their lines were listed to be changed."""
    file = tmp_path / "pretrain.sh"
    smaller = MEGATRON.replace("--num-layers 32", "--num-layers 8").replace(
        "--micro-batch-size 1", "--micro-batch-size 2"
    )
    file.write_text(smaller.replace("TP_SIZE=2", "TP_SIZE=1").replace("model-parallel-size=2", "model-parallel-size=1"))
    found = checked(file, capsys)
    assert WORTH_TELLING < found["saves"] < TIED
    assert found["changes"] == []
    assert run([str(file), *CLUSTER]) == 0
    shown = capsys.readouterr().out
    assert "less: tied, the forecast cannot tell which is faster" in shown
    assert "Change" not in shown


@pytest.mark.slow
@pytest.mark.parametrize("extra", [[], ["--parallelism.micro-batch-size", "3"]])
def test_what_a_file_does_not_say_of_the_job_is_as_a_plan_chooses_it(
    extra: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "accelerate.yaml"
    file.write_text("compute_environment: LOCAL\ndistributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\n")
    model = ["--model", "llama3.2-1b"]
    job = checked(file, capsys, *model, *extra)["job"]
    batch = 504 if extra else 512  # 4 Mi tokens, in whole micro-batches of the file's layout
    assert (job["sequence_length"], job["global_batch_size"]) == (8192, batch)
    assert run([str(file), *CLUSTER, *model, *extra]) == 0
    shown = capsys.readouterr().out
    assert f"Assumed  job.sequence_length = 8192, job.global_batch_size = {batch}" in shown
    assert "as --job.sequence-length, --job.global-batch-size" in shown
    following = shown.splitlines()[-1]
    assert following.startswith("Next: ahp plan ")
    assert f"--job.sequence-length 8192 --job.global-batch-size {batch} --job.precision " in following
    assert checked(file, capsys, *model, "--job.sequence-length", "4096")["job"]["sequence_length"] == 4096


@pytest.mark.slow
def test_the_best_layout_needs_no_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a file says after its lines were changed is the best layout."""
    from ahp.cli.export import run as export

    file = tmp_path / "recipe.toml"
    file.write_text(TITAN)
    best = checked(file, capsys)["best"]
    path = a_plan(
        tmp_path,
        "torchtitan",
        cluster="1x8xH100-SXM-80GB",
        parallelism=best["parallelism"],
        job={"sequence_length": 8192, "global_batch_size": 1},
    )
    assert export(["torchtitan", path, "--target-version", "0.2.2", "-o", str(tmp_path / "best.toml")]) == 0
    capsys.readouterr()
    again = checked(tmp_path / "best.toml", capsys)
    assert again["parallelism"]["tensor_parallel_degree"] == best["parallelism"]["tensor_parallel_degree"]
    assert again["saves"] == pytest.approx(0, abs=0.02)


@pytest.mark.parametrize(
    ("version", "model"),
    [("0.2.2", "qwen3-8b"), ("0.2.2", "llama3-70b"), ("0.3.0", "llama3-8b"), ("0.3.0", "llama3-405b"), ("main", "llama3-8b")],
)  # fmt: skip
def test_torchtitans_files_are_known_by_themselves(version: str, model: str, tmp_path: Path) -> None:
    """Program, release, model and layout are read from what was exported, with no option."""
    from ahp.cli.export import run as export

    layout = {"data_parallel_shard_degree": 4, "zero_stage": 2, "tensor_parallel_degree": 2, "micro_batch_size": 2}
    path = a_plan(
        tmp_path,
        "torchtitan",
        model=model,
        cluster="1x8xH100-SXM-80GB",
        parallelism={**layout, "enable_sequence_parallel": True},
        job={"sequence_length": 4096, "global_batch_size": 16},
    )
    assert export(["torchtitan", path, "--target-version", version]) == 0
    (file,) = (file for file in tmp_path.iterdir() if file.name != "plan.yaml")
    found = read_foreign(str(file), None, None, 8, 8)
    assert (found.form.dialect.name, found.form.dialect.version, found.model) == ("torchtitan", version, model)
    assert found.read.not_understood == ()
    read = plan_of(found.form.dialect, found.read.fields, model, None)
    assert read.parallelism.short() == "dp1x4 zero2 tp2+sp mb2"
    assert (read.job.sequence_length, read.job.global_batch_size) == (4096, 16)


def test_a_python_file_that_starts_from_two_models_says_neither(tmp_path: Path) -> None:
    home = "from torchtitan.models.llama3.config_registry import"
    file = tmp_path / "own.py"
    file.write_text(f"{home} llama3_8b, llama3_70b as large\nc = llama3_8b()\n")
    assert read_foreign(str(file), None, None, 8, 8).model == "llama3-8b"
    file.write_text(f"{home} llama3_8b, llama3_70b as large\nc = large()\n")
    assert read_foreign(str(file), None, None, 8, 8).model == "llama3-70b"
    file.write_text(f"{home} llama3_8b, llama3_70b as large\nc = large() if big else llama3_8b()\n")
    assert read_foreign(str(file), None, None, 8, 8).model is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "schema_version: 1\nmodel: gpt2\nparallelism: {zero_stage: 1}\n",
            "this is a plan of AHP, which ahp simulate and ahp explain judge",
        ),
        ("", "a mapping of keys was expected, and the file is empty"),
    ],
)
def test_a_yaml_of_no_program_is_refused(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(BadInput, match=says):
        run([str(file), "--cluster", "8xH100", "--model", "gpt2"])


def test_what_cannot_be_judged_is_refused(tmp_path: Path) -> None:
    files = {"a.txt": "x", "b.toml": "= =", "c.json": "[1]", "d.sh": "echo hi", "e.yaml": "- 1", "f.py": "def ("}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(BadInput, match=f"file = '{tmp_path / name}'"):
            run([str(tmp_path / name), *CLUSTER])
    with pytest.raises(BadInput, match="cannot be read"):
        run([str(tmp_path / "none.toml"), *CLUSTER])
    with pytest.raises(BadInput, match=r"c\.json': DeepSpeed's JSON: a mapping of keys was expected, not a list"):
        run([str(tmp_path / "c.json"), *CLUSTER])
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8, "train_micro_batch_size_per_gpu": "auto"}')
    with pytest.raises(BadInput, match=r"model: the file does not say it.*--model"):
        run([str(tmp_path / "ds.json"), *CLUSTER])
    assert any("'auto'" in line for line in read_foreign(str(tmp_path / "ds.json"), None, None, 8).read.not_understood)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.toml", "[tool.ruff]\nline-length = 120\n", "no key of torchtitan is in it, such as parallelism.tensor_par"),
        ("a.py", "import os\n\nlimit = 3\n", "no key of torchtitan is in it"),
        ("a.json", '{"model_type": "gpt2", "n_layer": 3}', "no key of deepspeed is in it, such as train_micro_batch"),
        (
            "a.sbatch",
            "#SBATCH --nodes=1\nsrun --cpu-bind none ahp train p.yaml --workers-per-node 3",
            "no key of megatron",
        ),
        ("a.sh", "torchrun --nnodes 1 --nproc-per-node 3 train.py --workers 2", "no key of megatron is in it"),
        (
            "a.sh",
            "torchrun --nproc-per-node 8 run_clm.py --fsdp full_shard --bf16 --lr 1e-4",
            "no key of megatron is in it",
        ),
        ("", "", "file = '': must be a configuration"),
    ],
)
def test_a_file_of_another_program_is_not_judged_by_the_defaults_of_one(
    name: str, text: str, says: str, tmp_path: Path
) -> None:
    file = str(tmp_path / name) if name else ""
    if name:
        Path(file).write_text(text)
    with pytest.raises(BadInput, match=re.escape(says)):
        run([file, *CLUSTER, "--model", "gpt2"])


@pytest.mark.slow
def test_without_a_cluster_it_is_as_large_as_the_degrees_make_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(
        TITAN.replace("tensor_parallel_degree = 8", "tensor_parallel_degree = 8\ncontext_parallel_degree = 2")
    )
    assert run([str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["assumed_cluster"] == "2x8xH100"
    assert found["parallelism"]["data_parallel_shard_degree"] == 1
    monkeypatch.setenv("COLUMNS", "80")
    file.write_text(
        TITAN.replace("data_parallel_shard_degree = -1", "data_parallel_shard_degree = 1").replace(
            "tensor_parallel_degree = 8", "tensor_parallel_degree = 4"
        )
    )
    assert run([str(file)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "Assumed  4xH100: give the devices with --cluster" in shown
    assert all(len(line) <= 80 or line.startswith("Next: ") for line in shown)
    file.write_text(TITAN.replace("tensor_parallel_degree = 8", "tensor_parallel_degree = 3"))
    with pytest.raises(BadInput, match="does not divide 8 devices; give the devices with --cluster"):
        run([str(file)])


@pytest.mark.parametrize(
    ("enabled", "precision"), [("true", "bf16"), ('"true"', "bf16"), ("1", "bf16"), ('"false"', "fp32"), ("0", "fp32")]
)
def test_a_switch_of_deepspeeds_file_may_be_text(tmp_path: Path, enabled: str, precision: str) -> None:
    """As DeepSpeed reads it. The text "false" was taken for true."""
    file = tmp_path / "ds.json"
    file.write_text(f'{{"train_micro_batch_size_per_gpu": 1, "bf16": {{"enabled": {enabled}}}}}')
    found = read_foreign(str(file), None, None, 8).read
    assert (found.fields["job.precision"], list(found.not_understood)) == (precision, [])


@pytest.mark.parametrize("enabled", ['"8"', "null", "[1]", '"yes please"'])
def test_a_switch_of_deepspeeds_file_that_is_none_is_listed(tmp_path: Path, enabled: str) -> None:
    file = tmp_path / "ds.json"
    file.write_text(f'{{"train_micro_batch_size_per_gpu": 1, "bf16": {{"enabled": {enabled}}}}}')
    [told] = read_foreign(str(file), None, None, 8).read.not_understood
    assert told.startswith("bf16.enabled = ")


def test_states_in_host_memory_are_listed_with_what_that_means(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    offload = (
        '{"offload_optimizer": {"device": "cpu", "pin_memory": true}, "offload_param": {"device": "none"}, "stage": 3}'
    )
    file.write_text(
        f'{{"train_micro_batch_size_per_gpu": 1, "bf16": {{"enabled": true}}, "zero_optimization": {offload}}}'
    )
    [told] = read_foreign(str(file), None, None, 8).read.not_understood
    assert told.startswith(
        "zero_optimization.offload_optimizer.device = 'cpu': in host memory; AHP prices DeepSpeed without"
    )


def test_megatrons_arguments_beside_deepspeeds_file_are_not_left_out_of_account(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}}')
    file = tmp_path / "run.sh"
    file.write_text("deepspeed --num_gpus 8 pretrain_gpt.py --tensor-model-parallel-size 2 --deepspeed_config ds.json")
    with pytest.raises(BadInput, match=r"run.sh': it starts Megatron-DeepSpeed.*--engine deepspeed the JSON"):
        run([str(file), *CLUSTER, "--model", "gpt2"])
    assert read_foreign(str(file), "deepspeed", None, 8).form.dialect.name == "deepspeed"


def test_a_default_that_a_script_assigns_is_read(tmp_path: Path) -> None:
    file = tmp_path / "s.sh"
    file.write_text(MEGATRON.replace("${TP_SIZE}", "${TENSOR:=4}"))
    assert read_foreign(str(file), None, None, 8).read.fields["parallelism.tensor_parallel_degree"] == 4


@pytest.mark.slow
def test_where_nothing_fits_the_files_own_layout_is_told(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(TITAN.replace('"8B"', '"70B"').replace("tensor_parallel_degree = 8", "tensor_parallel_degree = 2"))
    with pytest.raises(
        NothingFits, match=r"(?s)^the file's layout, dp1x1 zero0 tp2\+sp mb1 full: .*does not fit: .*nothing fits: "
    ):
        run([str(file), "--cluster", "2xH100"])


@pytest.mark.slow
def test_a_layout_that_cannot_be_read_is_not_guessed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(TITAN.replace('mode = "full"', 'mode = "selective"'))
    with pytest.raises(
        BadInput, match=r"selective_ac_option = '2': one block in 2 .*--parallelism.activation-checkpoint"
    ):
        run([str(file), *CLUSTER])
    found = checked(file, capsys, "--parallelism.activation-checkpoint", "selective")
    assert found["parallelism"]["activation_checkpoint"] == "selective"
    (tmp_path / "s.sh").write_text(
        MEGATRON.replace("--nnodes $NUM_NODES", "").replace("--nproc_per_node $GPUS_PER_NODE", "")
    )
    with pytest.raises(BadInput, match="--nnodes, --nproc-per-node: missing, so the data-parallel degree is not known"):
        run([str(tmp_path / "s.sh"), *CLUSTER])


WHOLE = [
    TITAN,
    MEGATRON,
    '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}',
    "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n",
    NANOTRON,
    MAXTEXT,
    NEMO,
    BRIDGE,
]
PROGRAMS = (
    "torchtitan",
    "megatron",
    "deepspeed",
    "accelerate",
    "nanotron",
    "maxtext",
    "nemo",
    "bridge",
    "accelerate-megatron",
)
ENDS = (".toml", ".sh", ".json", *(".yaml",) * 5)
SPOILT = st.sampled_from(
    [
        "",
        "-1",
        "0",
        "null",
        "[]",
        "{}",
        "'",
        '"',
        "(",
        ")",
        "${",
        "true",
        "1e999",
        "auto",
        "=",
        "\n",
        "99999999999999999999",
        "inf",
    ]
)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_file_ends_it_with_a_traceback(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    at = data.draw(st.integers(0, len(WHOLE) - 1))
    text = WHOLE[at]
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        text = text[:start] + data.draw(SPOILT) + text[start + data.draw(st.integers(0, 8)) :]
    engine = PROGRAMS[at]
    file = tmp_path_factory.getbasetemp() / f"spoilt-{at}{ENDS[at]}"
    file.write_text(text)
    try:
        found = read_foreign(str(file), engine, None, 8)
        plan_of(found.form.dialect, found.read.fields, "llama3-8b", None)
    except AhpError:
        return
    assert found.form in READERS[engine].values()
