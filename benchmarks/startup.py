"""From the launch of two workers to the end of their first step: AHP beside plain PyTorch and other engines, in turns.

    python benchmarks/startup.py                       plain PyTorch: replicas, and ZeRO-3
    python benchmarks/startup.py --engines             DeepSpeed, Accelerate, torchtitan (benchmarks/rivals says how to install)
    python benchmarks/startup.py --quick               a smoke run

Every side is the same script under torchrun: it imports what it needs, builds the same model, splits it and takes one step on
the same batch. The ratio is the other side's seconds over AHP's: 1 or more means that AHP is there first. Sides whose first
loss or gradient norm differ are refused. stdout: the table; stderr: progress.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import PIPE
from typing import Any

import options
from layouts import NUM_WORKERS, Layout, engine_layouts, layouts, ours, rival
from machine import machine
from page import require, table
from rivals import refuse_stale_locks, versions
from side_by_side import TOLERANCE, UnlikeThings, interval
from task import Task
from workers import threads_each

MARKER = "startup"
PLAIN, ENGINES = ("ddp", "zero3"), ("accelerate-ddp", "deepspeed-zero1", "deepspeed-zero3", "torchtitan-zero3")
SIDES = ("plain", "ahp")
LONGEST_S = 600.0
"""[Empirical] Of one launch, of which DeepSpeed's first builds an extension: a minute or two, several on a busy machine."""


@dataclass(frozen=True)
class Start:
    """One launch: seconds from it until the worker has imported torch, until the model is split, until the first step is done, and the
    processor time that this worker used until then."""

    imported_s: float
    ready_s: float
    stepped_s: float
    used_s: float
    loss: float
    grad_norm: float


def work(side: str, layout: Layout, task: Task, launched_at_s: float) -> None:
    """In each worker: everything that a training script does until its first step is done."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads_each(NUM_WORKERS))
    dist.init_process_group("gloo")
    imported_s = time.time() - launched_at_s
    step = ours(layout, task, 1) if side == "ahp" else rival(layout, task)
    ready_s = time.time() - launched_at_s
    loss, norm = step(task.batch(0))
    stepped_s = time.time() - launched_at_s
    if dist.get_rank() == 0:
        print(json.dumps(asdict(Start(imported_s, ready_s, stepped_s, time.process_time(), loss, norm))), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def launch(side: str, layout: Layout, task: Task) -> Start:
    """Start the workers of one side and wait for them."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_WORKERS}", __file__,
        "--worker", side, "--only", layout.name, "--model", task.model, "--sequence-length", str(task.sequence_length),
        "--batch-size", str(task.global_batch_size), "--launched-at", repr(time.time()),
    ]  # fmt: skip
    with subprocess.Popen(
        command, stdout=PIPE, stderr=PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True
    ) as started:
        try:
            out, said = started.communicate(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGTERM)  # torchrun ends its workers
            raise RuntimeError(f"{layout.name}, {side}: no first step within {LONGEST_S:.0f} s") from None
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if started.returncode or not lines:
        raise RuntimeError(f"{layout.name}, {side}: {said[-2000:]}")
    return Start(**json.loads(lines[-1]))


def measure(layout: Layout, task: Task, rounds: int, *, warm_up: bool) -> dict[str, list[Start]]:
    """Both sides in turns; with ``warm_up`` after one start of each that fills the caches of files."""
    found: dict[str, list[Start]] = {side: [] for side in SIDES}
    for number in range(0 if warm_up else 1, rounds + 1):
        for side in SIDES if number % 2 else SIDES[::-1]:  # a drift favours neither
            start = launch(side, layout, task)
            if number:
                found[side].append(start)
    return found


def row(layout: Layout, found: dict[str, list[Start]]) -> dict[str, Any]:
    """Figures of a layout. Raises UnlikeThings where the first steps differ."""
    for what in ("loss", "grad_norm"):
        plain, own = (getattr(found[side][0], what) for side in SIDES)
        if not abs(plain - own) <= TOLERANCE[layout.precision] * abs(plain):
            raise UnlikeThings(
                f"{layout.name}: {what} of the first step is {plain} and {own}: not the same computation"
            )
    times = {side: [start.stepped_s for start in found[side]] for side in SIDES}
    low, high = interval(times["plain"], times["ahp"])
    medians = {
        f"{side}_{what}": statistics.median(getattr(start, what) for start in found[side])
        for side in SIDES
        for what in ("imported_s", "ready_s", "stepped_s", "used_s")
    }
    ratio = medians["plain_stepped_s"] / medians["ahp_stepped_s"]
    cpu_ratio = medians["plain_used_s"] / medians["ahp_used_s"]
    return {
        "layout": layout.name,
        **medians,
        "ratio": ratio,
        "ratio_low": low,
        "ratio_high": high,
        "cpu_ratio": cpu_ratio,
    }


def markdown(rows: list[dict[str, Any]], task: Task, rounds: int, where: str, command: str) -> str:
    """The table with what it was measured on."""
    head = [
        "layout",
        "other side, s",
        "AHP, s",
        "other / AHP",
        "90 % interval",
        "of CPU time",
        "other: torch there, split",
        "AHP: torch there, split",
    ]
    cells = [
        [r["layout"], f"{r['plain_stepped_s']:.2f}", f"{r['ahp_stepped_s']:.2f}", f"{r['ratio']:.3f}",
         f"{r['ratio_low']:.3f} to {r['ratio_high']:.3f}", f"{r['cpu_ratio']:.3f}",
         *(f"{r[f'{side}_imported_s']:.2f}, {r[f'{side}_ready_s']:.2f}" for side in SIDES)]
        for r in rows
    ]  # fmt: skip
    about = (
        f"Seconds from the launch of {NUM_WORKERS} workers to the end of their first step; LLaMA {task.model!r}, "
        f"{task.global_batch_size} sequences of {task.sequence_length} tokens; medians of {rounds} launches of each side, in turns."
    )
    return f"`{command}`\n\n{about}\n\n{where}\n\n{table(head, cells)}\n"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [layout.name for layout in (*layouts(), *engine_layouts())]
    options.add_layouts(parser, names, ", ".join(PLAIN))
    options.add_model(parser)
    options.add_size(parser)
    parser.add_argument("--rounds", type=int, default=7, help="launches of each side (default: 7)")
    options.add_output(parser, "smallest model, one launch: do the sides start alike")
    parser.add_argument("--worker", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--launched-at", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds: at least 1")
    if arguments.quick:
        arguments.rounds, arguments.model, arguments.sequence_length = 1, "small", 64
    if arguments.markdown:
        require(arguments.markdown, MARKER)
    return arguments


def main() -> int:
    arguments = parse()
    task = Task(
        model=arguments.model, sequence_length=arguments.sequence_length, global_batch_size=arguments.batch_size
    )
    by_name = {layout.name: layout for layout in (*layouts(), *engine_layouts())}
    wanted = [by_name[name] for name in arguments.only or (ENGINES if arguments.engines else PLAIN)]
    if arguments.worker:
        work(arguments.worker, wanted[0], wanted[0].of(task), arguments.launched_at)
        return 0
    others = [layout.name for layout in wanted if layout in engine_layouts()]
    if others:
        refuse_stale_locks()
    # As pip does for what it installs: where the environment writes no bytecode, this checkout alone would be compiled at each start.
    compileall.compile_dir(Path(__file__).parents[1] / "src" / "ahp", quiet=2)
    where = machine(NUM_WORKERS)
    print(where.words(), file=sys.stderr)
    rows = []
    for layout in wanted:
        rows.append(row(layout, measure(layout, task, arguments.rounds, warm_up=not arguments.quick)))
        r = rows[-1]
        print(f"{layout.name:<18} {r['ratio']:.3f}, CPU time {r['cpu_ratio']:.3f}", file=sys.stderr, flush=True)
    command = f"python benchmarks/startup.py {' '.join(sys.argv[1:])}".strip()
    words = where.words() + (f"; {versions(others)}" if others else "")
    text = markdown(rows, task, arguments.rounds, words, command)
    options.tell(arguments, MARKER, text, {"machine": where.plain(), "task": asdict(task), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
