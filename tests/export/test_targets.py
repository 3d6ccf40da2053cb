"""``ahp export``: what the files say, and what is refused."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from ahp.cli.export import read, run
from ahp.cluster.model import Cluster
from ahp.errors import BadInput, HardwareMismatch, NotExpressible
from ahp.export.registry import TARGETS
from ahp.export.slurm import time_s
from ahp.plan import EngineChoice, Parallelism, Plan

EIGHT = Parallelism(data_parallel_shard_degree=16, zero_stage=3)
NEEDED = ["--image", "registry.example.com/ahp:1", "--claim", "runs"]


def a_plan(folder: Path, cluster: str | dict[str, Any] = "2x8xH100-SXM-80GB", **changes: Any) -> str:
    plan = Plan(cluster=Cluster.resolve(cluster).plain(), **{"parallelism": EIGHT, **changes})
    plan.save(folder / "plan.yaml")
    return str(folder / "plan.yaml")


def a_config(folder: Path, **keys: Any) -> str:
    (folder / "config.yaml").write_text(yaml.safe_dump(keys))
    return str(folder / "config.yaml")


def directives(script: str) -> dict[str, str]:
    lines = [line.split("#", 2)[1] for line in script.splitlines() if line.startswith("#SBATCH")]
    words = [line.removeprefix("SBATCH --").strip().partition("=") for line in lines]
    return {key: value for key, _, value in words}


def test_the_script_of_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = a_plan(tmp_path)
    assert run(["slurm", path, "--time", "2-00:00:00", "--partition", "gpu", "--grace-s", "600"]) == 0
    assert capsys.readouterr().out == f"Wrote {tmp_path}/plan.sbatch\nNext: sbatch {tmp_path}/plan.sbatch\n"
    script = (tmp_path / "plan.sbatch").read_text()
    found = directives(script)
    wanted = {"nodes": "2", "gpus-per-node": "8", "signal": "USR1@600", "requeue": ""}
    assert wanted.items() <= found.items()
    assert (found["time"], found["partition"], "account" in found) == ("2-00:00:00", "gpu", False)
    srun = f"srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 ahp train {path} --workers-per-node 8"
    assert srun in script.splitlines()


@pytest.mark.parametrize(
    ("code", "requeued"), [(0, False), (1, False), (4, False), (137, False), (138, True), (143, True)]
)
def test_the_script_acts_on_exit_codes(code: int, requeued: bool, tmp_path: Path) -> None:
    run(["slurm", a_plan(tmp_path), "-o", str(tmp_path / "s")])
    for name, does in {"srun": f"exit {code}", "scontrol": f'echo "$@" > {tmp_path}/said'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/bin:/usr/bin", "SLURM_JOB_ID": "7"}
    assert subprocess.run(["bash", str(tmp_path / "s")], env=environment, check=False).returncode == code
    said = tmp_path / "said"
    assert (said.read_text() if said.exists() else None) == ("requeue 7\n" if requeued else None)


def test_a_config_is_for_as_many_nodes_as_there_are(tmp_path: Path) -> None:
    path, out = a_config(tmp_path, cluster="slurm"), tmp_path / "s"
    with pytest.raises(BadInput, match=r"--nodes and --workers-per-node missing: cluster = 'slurm'"):
        run(["slurm", path])
    run(["slurm", path, "--nodes", "2:4", "--workers-per-node", "8", "-o", str(out)])
    found = directives(out.read_text())
    assert (found["nodes"], found["gpus-per-node"]) == ("2-4", "8")
    run(["slurm", path, "--nodes", "2", "--workers-per-node", "4", "--cpu", "--force", "-o", str(out)])
    found = directives(out.read_text())
    assert (found["nodes"], found["cpus-per-task"], "gpus-per-node" in found) == ("2", "4", False)
    with pytest.raises(BadInput, match=r"cluster = 'slurm': .*another manager"):
        run(["kubernetes", path, "--nodes", "2", "--workers-per-node", "8", *NEEDED])


@pytest.mark.parametrize(
    ("words", "error", "says"),
    [
        (["--nodes", "3"], BadInput, r"--nodes = '3': .*is a plan, which is run as it is.*\(valid: 2\)"),
        (["--workers-per-node", "4"], BadInput, r"--workers-per-node = 4: .*\(valid: 8\)"),
        (["--cpu"], HardwareMismatch, r"--cpu: .* is for H100-SXM-80GB"),
        (["--time", "long"], BadInput, r"--time = 'long': must be a time"),
        (["--partition", "a b"], BadInput, r"--partition = 'a b'"),
        (["--grace-s", "0"], BadInput, r"--grace-s = 0: must be 1 to 65535"),
        (["--grace-s", "65536"], BadInput, r"--grace-s = 65536: must be 1 to 65535"),
        (["--time", "5"], BadInput, r"--grace-s = 300: must be less than --time 5, which is 300 s"),
        (["--time", "1-0:30", "--grace-s", "60000", "--partition", "a b"], BadInput, r"--partition"),
    ],
)
def test_options_that_do_not_fit(words: list[str], error: type[Exception], says: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=says):
        run(["slurm", a_plan(tmp_path), *words])
    assert not (tmp_path / "plan.sbatch").exists()


@pytest.mark.parametrize(
    ("said", "limit_s"),
    [
        ("120", 7200),
        ("2:30", 150),
        ("12:00:01", 43201),
        ("2-12", 216000),
        ("1-0:30", 88200),
        ("1-01:00:05", 90005),
        ("0", 0),
    ],
)
def test_limits_in_slurms_words(said: str, limit_s: int) -> None:
    assert time_s(said) == limit_s


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_plans_that_no_job_of_equal_nodes_runs(target: str, tmp_path: Path) -> None:
    words = NEEDED if target == "kubernetes" else []
    groups = [
        {"name": name, "nodes": 1, "devices_per_node": 8, "device": name} for name in ("H100-SXM-80GB", "A100-SXM-80GB")
    ]
    with pytest.raises(NotExpressible, match=r"groups of different nodes \(H100-SXM-80GB, A100-SXM-80GB\)"):
        run([target, a_plan(tmp_path, {"groups": groups}), *words])
    with pytest.raises(NotExpressible, match=r"12 workers do not fill nodes of 8"):
        run([target, a_plan(tmp_path, parallelism=Parallelism(data_parallel_shard_degree=12)), *words])
    if target in ("slurm", "kubernetes"):
        with pytest.raises(NotExpressible, match=r"engine.name = 'megatron'"):
            run([target, a_plan(tmp_path, engine=EngineChoice(name="megatron")), *words])


def test_an_unknown_target_or_file(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"target = 'slrm': .*\(nearest: slurm\)"):
        run(["slrm", "plan.yaml"])
    with pytest.raises(BadInput, match="no such file; write one with: ahp plan MODEL CLUSTER"):
        run(["slurm", str(tmp_path / "none.yaml")])


def test_help_names_every_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert all(f"ahp export {name} PLAN" in shown and target.what in shown for name, target in TARGETS.items())


def test_a_file_that_was_changed_is_replaced_only_by_force(tmp_path: Path) -> None:
    path, script = a_plan(tmp_path), tmp_path / "plan.sbatch"
    for _ in range(2):
        assert run(["slurm", path]) == 0, "the same content again is no change"
    written = script.read_text()
    script.write_text(written + "# mine\n")
    with pytest.raises(
        BadInput, match=r"--out = '.*plan\.sbatch': exists with other content, perhaps your own changes; .*--force"
    ):
        run(["slurm", path])
    assert script.read_text() == written + "# mine\n"
    assert run(["slurm", path, "--force"]) == 0
    assert script.read_text() == written


def documents(path: str, *words: str) -> list[dict[str, Any]]:
    out = Path(path).with_name("job.yaml")
    run(["kubernetes", path, *NEEDED, "-o", str(out), "--force", *words])
    return list(yaml.safe_load_all(out.read_text()))


def test_the_train_job_of_a_plan(tmp_path: Path) -> None:
    path = a_plan(tmp_path)
    plan, runtime, job = documents(path, "--namespace", "team")
    assert {document["metadata"]["namespace"] for document in (plan, runtime, job)} == {"team"}
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "plan.yaml").write_text(plan["data"]["plan.yaml"])
    assert read(str(tmp_path / "again" / "plan.yaml")).plan == Plan.load(path)
    trainer = job["spec"]["trainer"]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert (trainer["numNodes"], trainer["resourcesPerNode"]["limits"]) == (2, {"nvidia.com/gpu": "8"})
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    rules = replicated["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rules[0]["onExitCodes"]["values"] == [2, 3, 4, 5]
    pod = replicated["template"]["spec"]["template"]["spec"]
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == ("Never", 300)
    mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    script = pod["containers"][0]["command"][2]
    subprocess.run(["bash", "-n", "-c", script], check=True)
    assert "--nodes 2 --workers-per-node 8" in script


@pytest.mark.slow
def test_the_train_job_keeps_to_trainers_own_schema(tmp_path: Path) -> None:
    """Kubeflow's models, made from the schema of its CRDs: what they do not know would be gone, and a wrong type is refused."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="the extra dev has kubeflow-trainer-api")
    _, runtime, job = documents(a_plan(tmp_path))
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job
    assert models.TrainerV1alpha1TrainingRuntime.from_dict(runtime).to_dict() == runtime


def test_what_a_train_job_needs(tmp_path: Path) -> None:
    path = a_plan(tmp_path)
    for missing in ("image", "claim"):
        words = [word for pair in (NEEDED[:2], NEEDED[2:]) if pair[0] != f"--{missing}" for word in pair]
        with pytest.raises(BadInput, match=f"--{missing} missing"):
            run(["kubernetes", path, *words])
    with pytest.raises(BadInput, match=r"--name = 'A_b': must be a DNS label"):
        run(["kubernetes", path, *NEEDED, "--name", "A_b"])
    for key, value in (("image", ""), ("image", "a b"), ("claim", "C!"), ("namespace", "")):
        with pytest.raises(BadInput, match=f"--{key} = '{value}': is not a valid Kubernetes name"):
            run(["kubernetes", path, *NEEDED, f"--{key}", value])
    with pytest.raises(BadInput, match="--ahp = '': must be a program"):
        run(["slurm", path, "--ahp", ""])


def test_on_stdout_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["slurm", a_plan(tmp_path), "-o", "-"])
    shown = capsys.readouterr()
    assert shown.out.startswith("#!/bin/bash\n")
    assert shown.err == "Next: sbatch FILE\n"
    run(["slurm", a_plan(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out)["next"] == [f"sbatch {tmp_path}/plan.sbatch"]
