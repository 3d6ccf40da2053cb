"""What a checkpoint costs the steps: how long it stops them, and how much slower they are while it is written.

    python benchmarks/checkpoints.py                   one, two and four workers, two sizes
    python benchmarks/checkpoints.py --quick           a smoke run

In one process after the other: some steps alone, then a checkpoint through what ``ahp train`` uses, and steps beside it until its files
lie on the disk (in TMPDIR) and have been read back; and again. A step has the exchange of numbers between ranks that ``ahp train`` makes. The limit is a
tenth of a step or 50 ms, whichever is more. stdout: the table; stderr: progress.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import Any

import options
from machine import machine
from page import require, table
from task import MODELS, Task
from workers import run

MARKER = "checkpoints"
LEAST_LIMIT_S, SHARE_OF_A_STEP = 0.05, 0.1
"""What a checkpoint may stop the steps for: the larger."""
WARM_UP = 3


@dataclass(frozen=True)
class Case:
    """A layout on so many workers."""

    name: str
    workers: int
    degrees: dict[str, int]


CASES = (
    Case("one", 1, {}),
    Case("replicas", 2, {"data_parallel_replicate_degree": 2}),
    Case("zero3", 2, {"data_parallel_shard_degree": 2}),
    Case("zero3-x-tp", 4, {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2}),
)


@dataclass(frozen=True)
class Save:
    """One checkpoint: seconds of each step before it, that it stopped the steps (longest of any worker), of processor time of that on the
    first, of each step beside it, and until it was whole."""

    alone_s: list[float]
    blocked_s: float
    blocked_cpu_s: float
    beside_s: list[float]
    whole_s: float


def work(case: Case, task: Task, saves: int, steps: int, folder: str) -> dict[str, Any]:
    """In each worker; the first one's answer counts."""
    import torch.distributed as dist

    import ahp
    from ahp.plan import Plan, validated
    from ahp.runtime.ranks.ranks import Ranks
    from ahp.runtime.run.checkpoints import Checkpoints
    from ahp.runtime.run.folder import RunFolder

    replicas = case.degrees.get("data_parallel_replicate_degree", 1) * case.degrees.get("data_parallel_shard_degree", 1)
    rows = task.global_batch_size // replicas
    plain = {"job": task.job(10_000), "parallelism": {**case.degrees, "micro_batch_size": rows}}
    parallel = ahp.parallelize(task.build(), plain)
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), parallel.mesh.device)
    place = RunFolder(folder)
    if ranks.is_first:
        place.create()
    checkpoints = Checkpoints(validated(Plan, plain, "plan"), place, ranks, keep=1, same={})
    parallel.saver  # noqa: B018 - made before the first step, as by ahp train
    done = 0

    def step() -> float:
        nonlocal done
        began_s = time.perf_counter()
        batch = task.batch(done)
        result = parallel.step(parallel.shard({"input_ids": batch, "labels": batch}))
        ranks.highest(0)
        assert result.loss > 0
        done += 1
        return time.perf_counter() - began_s

    for _ in range(WARM_UP):
        step()
    found = []
    for _ in range(saves):
        alone_s = [step() for _ in range(steps)]
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        checkpoints.start(done, parallel.saver)
        blocked_cpu_s = time.thread_time() - began_cpu_s
        (blocked_us,) = ranks.highest(round(1e6 * checkpoints.take_wait_s()))
        beside_s = []
        assert checkpoints.saving is not None
        writing = checkpoints.saving.done
        while ranks.highest(0 if writing.done() else 1)[0]:
            beside_s.append(step())
        whole_s = time.perf_counter() - began_s
        checkpoints.finish()
        checkpoints.take_wait_s()
        found.append(asdict(Save(alone_s, blocked_us / 1e6, blocked_cpu_s, beside_s, whole_s)))
    saved = place.checkpoints()
    size = sum(file.stat().st_size for file in saved[-1].path.iterdir()) if ranks.is_first else 0
    return {"saves": found, "bytes": size}


def row(case: Case, model: str, found: dict[str, Any]) -> dict[str, Any]:
    """The figures of a case."""
    saves = [Save(**save) for save in found["saves"]]
    later = saves[1:] or saves
    step_s = statistics.median(seconds for save in saves for seconds in save.alone_s)
    beside_s = [seconds for save in saves for seconds in save.beside_s]
    blocked_s = statistics.median(save.blocked_s for save in later)
    slowed_s = statistics.mean(sum(seconds - step_s for seconds in save.beside_s) for save in saves)
    limit_s = max(SHARE_OF_A_STEP * step_s, LEAST_LIMIT_S)
    return {
        "layout": case.name,
        "workers": case.workers,
        "model": model,
        "bytes": found["bytes"],
        "step_s": step_s,
        "first_blocked_s": saves[0].blocked_s,
        "blocked_s": blocked_s,
        "worst_blocked_s": max(save.blocked_s for save in later),
        "blocked_cpu_s": statistics.median(save.blocked_cpu_s for save in later),
        "limit_s": limit_s,
        "held": max(saves[0].blocked_s, blocked_s) <= limit_s,
        "beside_s": statistics.median(beside_s) if beside_s else step_s,
        "slowed_s": slowed_s,
        "whole_s": statistics.median(save.whole_s for save in saves),
    }


def markdown(rows: list[dict[str, Any]], task: Task, saves: int, where: str, command: str) -> str:
    """The table with what it was measured on."""
    head = ["layout, workers", "model", "checkpoint, MB", "a step, ms", "stops it: first, ms", "later, median", "worst", "processor time",
        "limit", "a step beside, ms", "all steps beside, slower by, ms", "until whole, s"]  # fmt: skip
    ms = [
        [f"{r['layout']}, {r['workers']}", r["model"], f"{r['bytes'] / 1e6:.0f}",
         *(f"{1e3 * r[key]:.0f}" for key in ("step_s", "first_blocked_s", "blocked_s", "worst_blocked_s", "blocked_cpu_s", "limit_s",
                                             "beside_s", "slowed_s")), f"{r['whole_s']:.1f}"]
        for r in rows
    ]  # fmt: skip
    about = (
        f"LLaMA, {task.global_batch_size} sequences of {task.sequence_length} tokens, AdamW in fp32; {saves} checkpoints of each; a step's time is the median of "
        "those with no checkpoint beside them."
    )
    return f"`{command}`\n\n{about}\n\n{where}\n\n{table(head, ms)}\n"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["tiny", "medium"])
    options.add_size(parser)
    parser.add_argument("--saves", type=int, default=6, help="checkpoints of each (default: 6)")
    parser.add_argument("--steps", type=int, default=6, help="steps alone before each (default: 6)")
    options.add_output(parser, "smallest model, two checkpoints")
    arguments = parser.parse_args()
    if min(arguments.saves, arguments.steps) < 1:
        parser.error("--saves, --steps: at least 1")
    if arguments.quick:
        arguments.saves, arguments.steps, arguments.models, arguments.sequence_length = 2, 2, ["small"], 64
    if arguments.markdown:
        require(arguments.markdown, MARKER)
    return arguments


def main() -> int:
    arguments = parse()
    rows = []
    for case in (case for case in CASES if not arguments.only or case.name in arguments.only):
        for model in arguments.models:
            task = Task(model=model, sequence_length=arguments.sequence_length, global_batch_size=arguments.batch_size)
            with tempfile.TemporaryDirectory(prefix="ahp-checkpoints-") as folder:
                found = run(work, case, task, arguments.saves, arguments.steps, folder, num_workers=case.workers)
            rows.append(row(case, model, found))
            r = rows[-1]
            print(
                f"{case.name:<12} {model:<7} step {1e3 * r['step_s']:.0f} ms, stopped {1e3 * r['blocked_s']:.0f} (first "
                f"{1e3 * r['first_blocked_s']:.0f}, limit {1e3 * r['limit_s']:.0f})",
                file=sys.stderr,
                flush=True,
            )
    where = machine(1)
    words = f"{where.cpu}, {where.cores} cores shared by the workers, {where.memory_gib:.0f} GiB; Python {where.python}, torch {where.torch}; {where.date}"
    command = f"python benchmarks/checkpoints.py {' '.join(sys.argv[1:])}".strip()
    task = Task(sequence_length=arguments.sequence_length, global_batch_size=arguments.batch_size)
    text = markdown(rows, task, arguments.saves, words, command)
    options.tell(arguments, MARKER, text, {"machine": where.plain(), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
