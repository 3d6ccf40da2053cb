"""Steps of training in other programs, from the files that ``ahp export`` writes, beside AHP's own of the same plan.

    make exports                                   install the programs into .venv-exports, then run every layout
    python benchmarks/exports.py --only zero3      one layout of each program, in an environment that has them

For each program and layout a plan for two workers of this machine is written, and ``ahp export`` makes the program's file of it. The program's
own launcher starts the program with that file. It has the same weights and batches, builds the layout itself, and trains. Loss and gradient norm
before clipping of each step are held against AHP's, and against one process of plain PyTorch. stdout: the table; stderr: progress.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import options
import psutil
import workers
from layouts import NUM_WORKERS
from page import require, table
from rivals import refuse_stale_locks
from task import Task

MARKER = "exports"
STEPS = 3
TOLERANCE = 1.0e-4
"""Largest relative difference of loss and gradient norm, at every step: fp32, the same numbers added in another order."""
LIMIT_S = 400
HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Case:
    """One layout in one program."""

    program: str
    name: str
    degrees: dict[str, Any]
    """AHP's words for it, without the micro-batch."""
    micro_batches: int = 1
    options: tuple[str, ...] = ()
    """Of ``ahp export``."""
    norm_of_sum: bool = False
    """Its gradients are those of the sum over tokens, not of the mean: its norm is divided by their number."""


DDP = {"data_parallel_replicate_degree": 2}
ZERO1, ZERO2, ZERO3 = ({"data_parallel_shard_degree": 2, "zero_stage": stage} for stage in (1, 2, 3))
TITAN = ("--target-version", "0.2.2", "--model", "exported/task")
CASES = (
    Case("accelerate", "ddp", DDP),
    Case("accelerate", "zero2", ZERO2),
    Case("accelerate", "zero3", ZERO3),
    Case("accelerate", "zero3-accumulate4", ZERO3, 4),
    Case("deepspeed", "ddp", DDP),
    Case("deepspeed", "zero1", ZERO1),
    Case("deepspeed", "zero2", ZERO2),
    Case("deepspeed", "zero3", ZERO3),
    Case("deepspeed", "zero2-accumulate4", ZERO2, 4),
    Case("torchtitan", "zero2", ZERO2, 1, TITAN),
    Case("torchtitan", "zero3", ZERO3, 1, TITAN),
    Case("torchtitan", "zero3-accumulate4", ZERO3, 4, TITAN),
    Case("torchtitan", "tp", {"tensor_parallel_degree": 2, "enable_sequence_parallel": True}, 1, TITAN),
    Case(
        "torchtitan",
        "pp-1f1b",
        {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"},
        4,
        TITAN,
        norm_of_sum=True,
    ),  # pytorch/torchtitan#2972
)
TORCHRUN = (
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--nnodes",
    "1",
    "--nproc-per-node",
    str(NUM_WORKERS),
    "--standalone",
)
LAUNCH: dict[str, tuple[tuple[str, ...], str, str]] = {
    "accelerate": ((sys.executable, "-m", "accelerate.commands.launch", "--config_file", "{file}"), "accelerated.py", ""),
    "deepspeed": (TORCHRUN, "sped.py", "--deepspeed --deepspeed_config {file}"),
    "torchtitan": (TORCHRUN, "titan.py", "--job.config_file {file}"),
}  # fmt: skip
"""The launcher, the script, and what stands behind it. DeepSpeed's own launcher counts GPUs, so torchrun starts it here."""
COMPILE = (
    "from deepspeed.accelerator import get_accelerator as found\n"
    "for name in ('ShareMemCommBuilder', 'FusedAdamBuilder'): found().create_op_builder(name).load()"
)
"""What DeepSpeed compiles at first use, its AdamW in minutes: before the first step, where nothing waits for it."""
COMPILE_LIMIT_S = 3600


def plan_of(case: Case, task: Task) -> Any:
    """The plan for two workers of this machine."""
    from ahp.cluster.local import cpu_group
    from ahp.cluster.model import Cluster
    from ahp.plan import Plan

    group = cpu_group().model_copy(update={"devices_per_node": NUM_WORKERS})
    # accelerate launch starts one process on cores, so its file is written as for GPUs.
    gpus = case.program == "accelerate"
    cluster = Cluster.resolve(f"1x{NUM_WORKERS}xH100-SXM-80GB") if gpus else Cluster(groups=(group,))
    replicas = case.degrees.get("data_parallel_replicate_degree", 1) * case.degrees.get("data_parallel_shard_degree", 1)
    rows = task.global_batch_size // (replicas * case.micro_batches)
    return Plan.model_validate(
        {
            "model": {"model_type": "llama", **task.model_keys()},
            "job": task.job(STEPS),
            "cluster": cluster.plain(),
            "engine": {"name": case.program},
            "parallelism": {**case.degrees, "micro_batch_size": rows},
        }
    )


def theirs(case: Case, task: Task, folder: Path) -> dict[str, Any]:
    """What the program's steps gave. Raises RuntimeError with the end of its output where it fails."""
    plan_of(case, task).save(folder / "plan.yaml")
    file, result = folder / f"of{_suffix(case.program)}", folder / "result.json"
    _run(
        [
            sys.executable,
            "-m",
            "ahp",
            "export",
            case.program,
            str(folder / "plan.yaml"),
            "-o",
            str(file),
            "--force",
            *case.options,
        ],
        {},
    )
    launcher, script, behind = LAUNCH[case.program]
    command = [*launcher, str(HERE / "exported" / script), *behind.split()]
    _run(
        [word.replace("{file}", str(file)) for word in command],
        {
            "EXPORTED_RESULT": str(result),
            "EXPORTED_TASK": json.dumps({key: value for key, value in asdict(task).items() if key != "optimizer"}),
            "EXPORTED_STEPS": str(STEPS),
            "EXPORTED_ACCUMULATION": str(case.micro_batches),
            "OMP_NUM_THREADS": str(workers.threads_each(NUM_WORKERS)),
        },
        folder,
    )
    return json.loads(result.read_text())


def _suffix(program: str) -> str:
    return {"accelerate": ".yaml", "deepspeed": ".json", "torchtitan": ".toml"}[program]


def _run(
    command: list[str], variables: dict[str, str], folder: Path | None = None, *, limit_s: float = LIMIT_S
) -> None:
    """Raises RuntimeError where it fails or takes longer; no process that it started is left then."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env={**os.environ, **variables}, cwd=folder, **pipes) as started:
        try:
            said, _ = started.communicate(timeout=limit_s)
            how = f"ended with {started.returncode}"
        except subprocess.TimeoutExpired:
            for process in [*psutil.Process(started.pid).children(recursive=True), started]:
                process.kill()
            said, _ = started.communicate()
            how = f"did not end within {limit_s:.0f} s"
    if started.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{how}:\n{said[-4000:]}")


def ours(case: Case, task: Task) -> list[tuple[float, float]]:
    """On each worker: the same plan through AHP's runtime."""
    import ahp

    plan = plan_of(case, task).model_dump(mode="json", include={"job", "parallelism"})
    parallel = ahp.parallelize(task.build(), plan)
    found = []
    for step in range(STEPS):
        result = parallel.step(parallel.shard({"input_ids": (ids := task.batch(step)), "labels": ids}))
        found.append((float(result.loss), float(result.grad_norm)))
    return found


def alone(task: Task) -> list[tuple[float, float]]:
    """One process, plain PyTorch and transformers."""
    import torch

    model, o = task.build(), task.optimizer
    optimizer = torch.optim.AdamW(model.parameters(), **o.keywords())
    found = []
    for step in range(STEPS):
        loss = model(input_ids=(ids := task.batch(step)), labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), o.grad_clip)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found


def apart(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> tuple[float, float]:
    """Largest relative difference over the steps: of the loss, of the norm."""
    pairs = list(zip(one, other, strict=True))
    loss, norm = (max(abs(a[at] - b[at]) / abs(b[at]) for a, b in pairs) for at in (0, 1))
    return loss, norm


def measure(case: Case, task: Task, reference: list[tuple[float, float]]) -> dict[str, Any]:
    """A row. Raises RuntimeError where a side fails, or where they differ."""
    with tempfile.TemporaryDirectory(prefix="ahp-exports-") as folder:
        given = theirs(case, task, Path(folder))
    tokens = task.global_batch_size * (task.sequence_length - 1) if case.norm_of_sum else 1
    program = [(loss, norm / tokens) for loss, norm in zip(given["losses"], given["norms"], strict=True)]
    mine = workers.run(ours, case, task, num_workers=NUM_WORKERS)
    loss, norm = apart(program, mine)
    far = max(loss, norm, *apart(program, reference), *apart(mine, reference))
    if not far <= TOLERANCE:  # not a number is unlike too
        raise RuntimeError(
            f"differ by {far:.1e} (at most {TOLERANCE:.0e}):\nprogram {program}\nAHP     {mine}\nalone   {reference}"
        )
    return {"program": case.program, "layout": case.name, "micro_batches": case.micro_batches, "steps": program, "ahp": mine,
            "loss_difference": loss, "norm_difference": norm, "says": given["says"]}  # fmt: skip


def markdown(rows: list[dict[str, Any]], task: Task, command: str) -> str:
    """The table, with the loss and norm of the last step."""
    cells = [
        [r["program"], r["layout"], "; ".join(f"{key} {value}" for key, value in r["says"].items()), f"{r['steps'][-1][0]:.6f}",
         f"{r['ahp'][-1][0]:.6f}", f"{r['loss_difference']:.0e}", f"{r['norm_difference']:.0e}"]
        for r in rows
    ]  # fmt: skip
    head = ["program", "layout", "what it built, in its words", "its loss", "AHP's", "losses differ by", "norms by"]
    names = ", ".join(f"{name} {version(name)}" for name in dict.fromkeys([*(r["program"] for r in rows), "torch"]))
    size = task.model_keys()
    about = (
        f"LLaMA of {size['num_hidden_layers']} blocks, hidden size {size['hidden_size']}; {task.global_batch_size} sequences of "
        f"{task.sequence_length} tokens, fp32, {NUM_WORKERS} workers. Losses are of step {STEPS}; differences are the largest of {STEPS} steps, relative. {names}."
    )
    return f"`{command}`\n\n{about}\n\n{table(head, cells, to_left=3)}\n"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="+", choices=list(LAUNCH), default=list(LAUNCH), help="(default: all)")
    names = list(dict.fromkeys(case.name for case in CASES))
    parser.add_argument(
        "--only", nargs="+", choices=names, metavar="NAME", help=f"layouts (default: all): {', '.join(names)}"
    )
    options.add_output(parser, "the first layout of each program")
    arguments = parser.parse_args()
    if missing := [name for name in arguments.programs if importlib.util.find_spec(name) is None]:
        parser.error(f"--programs {missing[0]}: not installed here (make exports makes an environment that has all)")
    if arguments.markdown:
        require(arguments.markdown, MARKER)
    return arguments


def main() -> int:
    arguments = parse()
    refuse_stale_locks()
    task = Task(model="small", sequence_length=64)
    cases = [
        case
        for case in CASES
        if case.program in arguments.programs and (not arguments.only or case.name in arguments.only)
    ]
    if arguments.quick:
        cases = [case for at, case in enumerate(cases) if case.program not in {one.program for one in cases[:at]}]
    if any(case.program == "deepspeed" for case in cases):
        print("DeepSpeed compiles its AdamW: minutes the first time", file=sys.stderr)
        _run([sys.executable, "-c", COMPILE], {"DS_ACCELERATOR": "cpu"}, limit_s=COMPILE_LIMIT_S)
    reference, rows, failed = alone(task), [], []
    for case in cases:
        print(f"{case.program:<12}{case.name:<20}", end="", file=sys.stderr, flush=True)
        try:
            rows.append(measure(case, task, reference))
        except (RuntimeError, workers.WorkerFailed) as error:
            failed.append(f"{case.program} {case.name}: {error}")
            print(f"failed\n{error}", file=sys.stderr)
        else:
            print(f"loss {rows[-1]['loss_difference']:.1e}, norm {rows[-1]['norm_difference']:.1e}", file=sys.stderr)
    text = markdown(rows, task, " ".join(["python", *sys.argv]))
    options.tell(arguments, MARKER, text, {"task": asdict(task), "failed": failed, "rows": rows}, complete=not failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
