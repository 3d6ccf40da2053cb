"""The same model, batch and layout hand-written in plain PyTorch and through ``ahp.parallelize``, alternating.

    python benchmarks/side_by_side.py                  every layout, some minutes
    python benchmarks/side_by_side.py --engines        against DeepSpeed, Accelerate and torchtitan (benchmarks/rivals says how to install)
    python benchmarks/side_by_side.py --quick          a smoke run
    python benchmarks/side_by_side.py --only ddp zero3

For each layout two fresh workers build both sides from the same weights and take turns: some steps of one, the same
steps of the other, on the same data. The ratio is plain / AHP: 1 or more means that AHP is at least as fast. A layout
whose losses or gradient norms differ is refused: its sides do not compute the same. stdout: the table; stderr: progress.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import options
import workers
from layouts import NUM_WORKERS, Layout, engine_layouts, layouts, ours, rival
from machine import machine
from page import require, table
from rivals import refuse_stale_locks, versions
from task import Task

MARKER, ENGINES_MARKER = "side_by_side", "side_by_side_engines"
TOLERANCE = {"fp32": 1.0e-4, "fp16": 1.0e-3, "bf16": 1.0e-2}
"""Largest relative difference of the loss, at every step, and of the gradient norm, while warming up. Both sides add
the same numbers in another order; fp16 has 11 bits of mantissa, bf16 8. Later the weights have parted by as much as rounding
makes them, and a norm follows the weights far more closely than a loss does."""
NUM_RESAMPLES = 2000
INTERVAL = (0.05, 0.95)


@dataclass(frozen=True)
class Pace:
    """How long to measure."""

    warmup: int
    """Steps of each side before the clock counts."""
    rounds: int
    """Turns of each side."""
    steps: int
    """Steps of one turn."""

    @property
    def total(self) -> int:
        return self.warmup + self.rounds * self.steps


def measure(layout: Layout, task: Task, pace: Pace) -> dict[str, Any]:
    """On each worker. Seconds per step of every turn, by the clock and of this worker's processor time, and what each
    step gave."""
    import gc

    import torch.distributed as dist

    sides = {"plain": rival(layout, task), "ahp": ours(layout, task, pace.total)}
    given: dict[str, list[tuple[float, float]]] = {"plain": [], "ahp": []}
    step_s: dict[str, list[float]] = {"plain": [], "ahp": []}
    cpu_s: dict[str, list[float]] = {"plain": [], "ahp": []}

    def turn(name: str, batches: list[Any]) -> tuple[float, float]:
        gc.collect()
        dist.barrier()
        start, start_cpu = time.perf_counter(), time.process_time()
        results = [sides[name](batch) for batch in batches]
        used = time.process_time() - start_cpu
        dist.barrier()
        seconds = time.perf_counter() - start
        given[name] += results
        return seconds / len(batches), used / len(batches)

    for step in range(pace.warmup):
        for name in sides:
            turn(name, [task.batch(step)])
    for number in range(pace.rounds):
        first = pace.warmup + number * pace.steps
        batches = [task.batch(step) for step in range(first, first + pace.steps)]
        for name in ("plain", "ahp") if number % 2 == 0 else ("ahp", "plain"):  # a drift favours neither
            seconds, used = turn(name, batches)
            step_s[name].append(seconds)
            cpu_s[name].append(used)
    return {"step_s": step_s, "cpu_s": cpu_s, "given": given}


@dataclass(frozen=True)
class Row:
    """One layout's figures. Times in seconds; ``ratio`` = plain / AHP with a bootstrap interval."""

    layout: str
    micro_batches: int
    precision: str
    plain_s: float
    ahp_s: float
    ratio: float
    ratio_low: float
    ratio_high: float
    cpu_ratio: float
    """The same ratio of the processor time that rank 0 used: what is not waiting."""
    loss_difference: float
    """Largest relative difference over all steps."""
    norm_difference: float
    """The same over the steps of the warm-up."""


class UnlikeThings(RuntimeError):
    """The two sides of a layout did not compute the same."""


def row(layout: Layout, measured: dict[str, Any], warmup: int) -> Row:
    """Figures of a layout. Raises UnlikeThings when the sides differ by more than the tolerance."""
    pairs = list(zip(measured["given"]["plain"], measured["given"]["ahp"], strict=True))
    differences = [
        max(abs(a[what] - b[what]) / abs(a[what]) for a, b in among)
        for what, among in ((0, pairs), (1, pairs[:warmup]))
    ]
    limit = TOLERANCE[layout.precision]
    if not all(difference <= limit for difference in differences):  # not a number is unlike too
        raise UnlikeThings(
            f"{layout.name}: loss differs by {differences[0]:.1e}, gradient norm by {differences[1]:.1e} "
            f"(at most {limit:.0e}): the sides do not compute the same, so their times are not compared"
        )
    plain_s, ahp_s = measured["step_s"]["plain"], measured["step_s"]["ahp"]
    low, high = interval(plain_s, ahp_s)
    return Row(
        layout.name,
        layout.micro_batches,
        layout.precision,
        statistics.median(plain_s),
        statistics.median(ahp_s),
        statistics.median(plain_s) / statistics.median(ahp_s),
        low,
        high,
        statistics.median(measured["cpu_s"]["plain"]) / statistics.median(measured["cpu_s"]["ahp"]),
        *differences,
    )


def interval(plain_s: list[float], ahp_s: list[float]) -> tuple[float, float]:
    """Bootstrap interval of the ratio of medians; rounds are drawn as pairs, because they share what disturbs them."""
    import numpy as np

    generator = np.random.default_rng(0)
    drawn = generator.integers(0, len(plain_s), size=(NUM_RESAMPLES, len(plain_s)))
    ratios = np.median(np.array(plain_s)[drawn], axis=1) / np.median(np.array(ahp_s)[drawn], axis=1)
    low, high = np.quantile(ratios, INTERVAL)
    return float(low), float(high)


def markdown(rows: list[Row], task: Task, pace: Pace, where: str, command: str, rival_words: str) -> str:
    """The table with what it was measured on."""
    size = task.model_keys()
    cells = [
        [r.layout, r.precision, str(r.micro_batches), f"{1e3 * r.plain_s:.1f}", f"{1e3 * r.ahp_s:.1f}",
         f"{r.ratio:.3f}", f"{r.ratio_low:.3f} to {r.ratio_high:.3f}", f"{r.cpu_ratio:.3f}", f"{r.loss_difference:.0e}"]
        for r in rows
    ]  # fmt: skip
    head = [
        "layout",
        "precision",
        "micro-batches",
        f"{rival_words}, ms",
        "AHP, ms",
        f"{rival_words} / AHP",
        "90 % interval",
        "of CPU time",
        "loss differs by",
    ]
    about = (
        f"LLaMA of {size['num_hidden_layers']} blocks, hidden size {size['hidden_size']}, vocabulary {size['vocab_size']}; "
        f"{task.global_batch_size} sequences of {task.sequence_length} tokens; medians of {pace.rounds} turns of "
        f"{pace.steps} steps after {pace.warmup} to warm up.{other_models(rows, task)}"
    )
    return f"`{command}`\n\n{about}\n\n{where}\n\n{table(head, cells)}\n"


def other_models(rows: list[Row], task: Task) -> str:
    """What layouts were measured on that were not measured on the task's own model, in words."""
    by_name = {layout.name: layout for layout in layouts()}
    others: dict[str, list[str]] = {}
    for layout in (by_name[r.layout] for r in rows if r.layout in by_name):
        its = layout.of(task)
        if (its.model, its.experts) != (task.model, task.experts):
            keys = its.model_keys()
            experts = (
                f" and {its.experts} experts of width {keys['intermediate_size']} in a block" if its.experts else ""
            )
            others.setdefault(f"hidden size {keys['hidden_size']}{experts}", []).append(f"`{layout.name}`")
    return "".join(f" {', '.join(names)}: {words}." for words, names in others.items())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [layout.name for layout in [*layouts(), *engine_layouts()]]
    options.add_layouts(parser, names, "all")
    options.add_model(parser)
    options.add_size(parser)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each side (default: 15)")
    parser.add_argument("--steps", type=int, default=2, help="steps of a turn (default: 2)")
    options.add_output(parser, "smallest model, few steps: does it run, do losses agree")
    arguments = parser.parse_args()
    share = NUM_WORKERS * max(layout.micro_batches for layout in layouts())
    if arguments.batch_size % share or arguments.batch_size < 1:
        parser.error(f"--batch-size {arguments.batch_size}: must be a multiple of {share}, 2 workers x 4 micro-batches")
    if arguments.rounds < 1 or arguments.steps < 1:
        parser.error("--rounds and --steps: at least 1")
    among = [layout.name for layout in (engine_layouts() if arguments.engines else layouts())]
    if arguments.only and (other := [name for name in arguments.only if name not in among]):
        how = "without" if arguments.engines else "with"
        parser.error(f"--only {other[0]}: goes {how} --engines (here: {', '.join(among)})")
    if arguments.markdown:
        require(arguments.markdown, ENGINES_MARKER if arguments.engines else MARKER)
    return arguments


def main() -> int:
    arguments = parse()
    pace = Pace(warmup=4, rounds=arguments.rounds, steps=arguments.steps)
    size = {"model": arguments.model, "sequence_length": arguments.sequence_length}
    if arguments.quick:
        pace, size = Pace(warmup=2, rounds=2, steps=1), {"model": "small", "sequence_length": 64}
    task = Task(**size, global_batch_size=arguments.batch_size)
    found = machine(NUM_WORKERS)
    print(found.words(), file=sys.stderr)
    rows, failed = [], []
    among = engine_layouts() if arguments.engines else layouts()
    wanted = arguments.only or [layout.name for layout in among]
    if arguments.engines:
        refuse_stale_locks()
    for layout in (layout for layout in among if layout.name in wanted):
        print(f"{layout.name:<26} ", end="", file=sys.stderr, flush=True)
        try:
            measured = workers.run(measure, layout, layout.of(task), pace, num_workers=NUM_WORKERS)
            rows.append(row(layout, measured, pace.warmup))
        except (UnlikeThings, workers.WorkerFailed) as error:
            failed.append(f"{layout.name}: {error}")
            print(f"failed\n{error}", file=sys.stderr)
        else:
            r = rows[-1]
            print(
                f"{r.ratio:.3f} ({r.ratio_low:.3f} to {r.ratio_high:.3f}), CPU time {r.cpu_ratio:.3f}", file=sys.stderr
            )
    rival_words, marker = ("engine", ENGINES_MARKER) if arguments.engines else ("plain", MARKER)
    where = found.words() + (f"; {versions(wanted)}" if arguments.engines else "")
    text = markdown(rows, task, pace, where, " ".join(["python", *sys.argv]), rival_words)
    data = {"machine": found.plain(), "task": asdict(task), "pace": asdict(pace), "failed": failed}
    options.tell(arguments, marker, text, {**data, "rows": [asdict(r) for r in rows]}, complete=not failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
