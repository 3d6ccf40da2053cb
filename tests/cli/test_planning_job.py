"""The job that ``ahp plan`` chooses where none is given."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from ahp.cli.planning_job import given_job, precision_for, with_batch, with_sequence
from ahp.cluster.model import Cluster
from ahp.errors import BadInput
from ahp.forecast.rules import precision as precision_of_device
from ahp.job import Job
from ahp.plan import EngineChoice

H100 = Cluster.parse("8x8xH100-SXM-80GB")


def cores(**bf16: float) -> Cluster:
    """Two processor cores that were measured to compute fp32 at 200 GFLOP/s."""
    (group,) = Cluster.parse("2xcpu").groups
    device = group.device.model_copy(update={"peak_flops_per_s": {"fp32": 2e11, **bf16}})
    return Cluster(groups=(group.model_copy(update={"device": device}),))


def test_a_file_then_overrides(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("sequence_length: 512\nsteps: 7\noptimizer: adamw\n")
    overrides = {"job": str(file), "job.steps": 9, "job.optimizer.eps": 1e-6, "parallelism.zero_stage": 3}
    assert given_job(overrides) == {"sequence_length": 512, "steps": 9, "optimizer": {"name": "adamw", "eps": 1e-6}}
    assert overrides == {"parallelism.zero_stage": 3}


def test_a_whole_config_holds_a_job_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model: tiny\njob: {steps: 7}\n")
    assert given_job({"job": str(file)}) == {"steps": 7}
    told = f"note: only job is read from {file}, not model, parallelism\n"
    file.write_text("model: tiny\njob: {steps: 7}\nparallelism: {tensor_parallel_degree: 2}\nrun: {folder: a}\n")
    assert given_job({"job": str(file)}) == {"steps": 7}
    assert capsys.readouterr().err.endswith(told)
    file.write_text("modle:\njob: {steps: 7}\nrun: {folder: a}\n")
    assert given_job({"job": str(file)}) == {"steps": 7}
    assert capsys.readouterr().err == f"note: only job is read from {file}, not modle\n"
    file.write_text("model: tiny\njobs: {steps: 7}\n")
    with pytest.raises(BadInput, match=r"config.yaml: jobs: unknown key \(did you mean: job"):
        given_job({"job": str(file)})
    with_defaults = "run: {folder: a}\nparallelism: {tensor_parallel_degree: 2}\n"  # refused as "run: unknown key"
    file.write_text(with_defaults)
    assert given_job({"job": str(file)}) == {}
    assert capsys.readouterr().err == f"note: only job is read from {file}, not parallelism\n"
    file.write_text(f"model: tiny\n{with_defaults}")
    assert given_job({"job": str(file)}) == {}
    assert capsys.readouterr().err == f"note: only job is read from {file}, not model, parallelism\n"


def test_what_is_no_job_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such file"):
        given_job({"job": str(tmp_path / "none.yaml")})
    with pytest.raises(BadInput, match="must be a file"):
        given_job({"job": {"steps": 7}})
    with pytest.raises(BadInput, match=r"stepz: unknown key"):
        with_sequence({"stepz": 1}, "llama3-8b", H100)


@pytest.mark.parametrize(
    ("model", "cluster", "expected"),
    [
        ("llama3-8b", "8x8xH100-SXM-80GB", (8192, "bf16")),
        ("gpt2", "8xH100-SXM-80GB", (1024, "bf16")),
        ("llama3-8b", "8xV100-SXM-32GB", (8192, "fp16")),
        ("tiny", "8xH100-SXM-80GB", (Job().sequence_length, Job().precision)),
    ],
)
def test_sequence_and_precision(model: str, cluster: str, expected: tuple[int, str]) -> None:
    job = with_sequence({}, model, Cluster.parse(cluster))
    assert (job.sequence_length, job.precision) == expected


def test_weights_in_16_bits_choose_the_precision_and_are_named_where_a_device_lacks_it() -> None:
    v100 = Cluster.parse("8xV100-SXM-32GB")
    job = with_sequence({"dtype": "bf16"}, "llama3-8b", v100)
    assert job.precision == "bf16"
    device = v100.groups[0].device
    told = r"job.dtype = 'bf16': V100-SXM-32GB has no units for it.*\(valid: fp32, with job.precision fp16 or fp32\)"
    assert re.fullmatch(told, precision_of_device(job, device) or "")
    assert "job.precision = 'bf16'" in (precision_of_device(Job(precision="bf16"), device) or "")


def mixed(*devices: str) -> Cluster:
    groups = [{"name": name, "device": name, "devices_per_node": 2} for name in devices]
    links = [{"between": list(pair), "gbps": 100} for pair in pairwise(devices)]
    return Cluster.from_dict({"groups": groups, "links": links})


@pytest.mark.parametrize(
    ("cluster", "engine", "precision", "reason"),
    [
        (H100, "ahp", "bf16", ""),
        (Cluster.parse("8xT4"), "ahp", "fp16", "T4-16GB computes no bf16; the loss is scaled"),
        (Cluster.parse("8xV100-SXM-32GB"), "megatron", "fp16", "V100-SXM-32GB computes no bf16; the loss is scaled"),
        (Cluster.parse("8xT4"), "torchtitan", "fp32", "T4-16GB computes no bf16, and not every device has fp16 under"),
        (mixed("H100-SXM-80GB", "T4-16GB"), "ahp", "fp16", "T4-16GB computes no bf16"),
        (cores(bf16=4e11), "ahp", "bf16", ""),
        (cores(), "ahp", "fp32", "cpu has no units for bf16 (fp32 200.0 GFLOP/s)"),
        (cores(bf16=1e11), "ahp", "fp32", "cpu has no units for bf16 (fp32 200.0 GFLOP/s, bf16 100.0 GFLOP/s)"),
    ],
)
def test_the_precision_is_the_fastest_that_trains_well(
    cluster: Cluster, engine: str, precision: str, reason: str
) -> None:
    chosen, why = precision_for(cluster, EngineChoice.model_validate({"name": engine}))
    assert chosen == precision
    assert why.startswith(reason) if reason else not why
    bf16_alone = len({"bf16" in group.device.peak_flops_per_s for group in cluster.groups}) > 1
    assert ("--job.precision bf16 plans without these devices" in why) == bf16_alone


def test_a_key_of_another_engine_does_not_change_the_precision() -> None:
    """ahp train said "ahp does not support bf16, and ahp has fp16 under ahp" before it refused the key."""
    assert precision_for(H100, EngineChoice(enable_async_tensor_parallel=True)) == ("bf16", "")


def test_cores_beside_gpus_without_bf16_compute_in_fp32() -> None:
    both = mixed("T4-16GB", "cpu")
    there = both.with_groups([both.groups[0], cores(bf16=4e11).groups[0].model_copy(update={"name": "cpu"})])
    assert precision_for(there, EngineChoice()) == (
        "fp32",
        "T4-16GB computes no bf16, and not every device has fp16 under ahp",
    )


def test_what_is_given_is_kept() -> None:
    given = {"sequence_length": 4096, "global_batch_size": 3, "precision": "fp32", "seed": 5}
    job = with_batch(with_sequence(given, "llama3-8b", H100), given, "llama3-8b", 8 * 10**9, 64)
    assert job.model_dump(include=set(given)) == given


@pytest.mark.parametrize(
    ("parameters", "devices", "sequences"),
    [(8e9, 64, 512), (8e9, 48, 528), (8e9, 1024, 512), (0.5e9, 8, 64), (8e9, 7, 511)],
)
def test_the_batch_is_about_four_mi_tokens_and_divides(parameters: float, devices: int, sequences: int) -> None:
    job = with_batch(Job(sequence_length=8192), {}, "llama3-8b", int(parameters), devices)
    assert job.global_batch_size == sequences


def test_the_tiny_model_keeps_the_jobs_own_batch() -> None:
    assert with_batch(Job(), {}, "tiny", 8_000_000, 3) == Job()
