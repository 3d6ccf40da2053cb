"""Predicted against measured: the step time of every layout that runs on one, two and four workers, for sizes of a LLaMA.

    python benchmarks/predicted.py                     probe, predict and measure everything, some twenty minutes
    python benchmarks/predicted.py --quick             a smoke run: the smallest model, two workers, a few layouts
    python benchmarks/predicted.py --models tiny --workers 2

The machine is probed with as many workers (``ahp probe --quick --workers N``) and every layout forecast before anything
is trained. Then each layout runs its steps through ``ahp.parallelize`` on fresh workers, and all layouts again in another
round, so that what disturbs the machine for a while does not fall on one layout. Regret: how much slower than the best measured layout
the one is that ``ahp.search`` picks. stdout: the tables; stderr: progress.
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
from machine import machine
from page import require, table
from task import MODELS, Task

MARKER = "predicted"


def layouts(task: Task, num_workers: int, *, few: bool) -> list[dict[str, Any]]:
    """Degrees of every technique on so many workers, with the smallest and the largest micro-batch that it can take."""
    batch, n = task.global_batch_size, num_workers
    if n == 1:
        return [{"micro_batch_size": size} for size in (1, batch)]
    data = [{"data_parallel_replicate_degree": n, "zero_stage": 0}]
    data += [{"data_parallel_shard_degree": n, "zero_stage": stage} for stage in (1, 2, 3)]
    splits = [{"tensor_parallel_degree": n}] if MODELS[task.model]["kv_heads"] % n == 0 else []
    stages = [{"pipeline_parallel_degree": n, "pipeline_parallel_schedule": name} for name in ("GPipe", "1F1B")]
    if MODELS[task.model]["layers"] >= 2 * n:
        stages.append({**stages[0], "pipeline_parallel_schedule": "Interleaved1F1B", "virtual_stages_per_rank": 2})
    if few:
        return [{**degrees, "micro_batch_size": batch // 4} for degrees in (data[0], *splits, stages[1])]
    found = [{**degrees, "micro_batch_size": size} for degrees in data for size in (1, batch // n)]
    found += [{**degrees, "micro_batch_size": size} for degrees in splits for size in (1, batch)]
    found += [{**degrees, "micro_batch_size": size} for degrees in stages for size in (1, batch // 4)]
    return _distinct(found + (_products(batch) if n == 4 else []))


def _products(batch: int) -> list[dict[str, Any]]:
    """Two techniques at once, each over two of four workers."""
    tensor, pipeline = {"tensor_parallel_degree": 2}, {"pipeline_parallel_degree": 2}
    replicas, shards = {"data_parallel_replicate_degree": 2}, {"data_parallel_shard_degree": 2, "zero_stage": 3}
    pairs = [
        {**replicas, **shards},
        {**replicas, **tensor},
        {**shards, **tensor},
        {**replicas, **pipeline},
        {**tensor, **pipeline},
    ]
    return [{**pair, "micro_batch_size": batch // 8 or 1} for pair in pairs]


def _distinct(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [layout for number, layout in enumerate(found) if layout not in found[:number]]


def step_times_s(task: Task, parallelism: dict[str, Any], warmup: int, steps: int) -> list[float]:
    """On each worker: seconds of each step through AHP."""
    import torch.distributed as dist

    import ahp

    parallel = ahp.parallelize(task.build(), {"job": task.job(warmup + steps), "parallelism": parallelism})
    times_s = []
    for number in range(warmup + steps):
        ids = task.batch(number)
        dist.barrier()
        start = time.perf_counter()
        parallel.step(parallel.shard({"input_ids": ids, "labels": ids}))
        dist.barrier()
        times_s.append(time.perf_counter() - start)
    return times_s[warmup:]


@dataclass(frozen=True)
class Row:
    """One layout of one model; times in seconds."""

    model: str
    num_workers: int
    layout: str
    predicted_s: float
    low_s: float
    high_s: float
    measured_s: float
    picked: bool

    @property
    def error(self) -> float:
        """Signed: above 0 when the forecast is too slow."""
        return self.predicted_s / self.measured_s - 1

    @property
    def inside(self) -> bool:
        return self.low_s <= self.measured_s <= self.high_s


@dataclass(frozen=True)
class Pace:
    """Steps before the clock counts and after, in each of so many rounds over all layouts."""

    warmup: int
    steps: int
    rounds: int


def one_model(task: Task, cluster: Any, num_workers: int, pace: Pace, *, few: bool) -> list[Row]:
    """Forecast, search, then measure, for one size of model."""
    import ahp

    job = ahp.Job.model_validate(task.job(pace.warmup + pace.steps))
    graph = ahp.analyze({"model_type": "llama", **task.model_keys()}, job)
    picked = ahp.search(graph, cluster, job).best.parallelism
    wanted = [ahp.Parallelism.model_validate(degrees) for degrees in layouts(task, num_workers, few=few)]
    if picked not in wanted:
        wanted.append(picked)
    forecasts = [ahp.simulate(model=graph, cluster=cluster, job=job, parallelism=p) for p in wanted]
    times_s: list[list[float]] = [[] for _ in wanted]
    for turn in range(pace.rounds):
        for number, parallelism in enumerate(wanted):
            plain = parallelism.model_dump(mode="json")
            times_s[number] += workers.run(step_times_s, task, plain, pace.warmup, pace.steps, num_workers=num_workers)
            seen = f"{task.model} on {num_workers}, round {turn + 1}/{pace.rounds}: {parallelism.short()}"
            print(f"{seen:<60} {1e3 * statistics.median(times_s[number]):8.1f} ms", file=sys.stderr, flush=True)
    return [
        Row(task.model, num_workers, p.short(), f.step_time_s, f.step_time_low_s, f.step_time_high_s, statistics.median(t), p == picked)
        for p, f, t in zip(wanted, forecasts, times_s, strict=True)
    ]  # fmt: skip


def summary(rows: list[Row]) -> dict[str, Any]:
    """Over the layouts of one model: errors, how often inside the band, and the regret of the pick."""
    best = min(rows, key=lambda r: r.measured_s)
    picked = next(r for r in rows if r.picked)
    return {
        "mean_error": statistics.fmean(r.error for r in rows),
        "mean_absolute_error": statistics.fmean(abs(r.error) for r in rows),
        "inside_band": sum(r.inside for r in rows) / len(rows),
        "best": best.layout,
        "picked": picked.layout,
        "regret": picked.measured_s / best.measured_s - 1,
    }


def markdown(found: list[list[Row]], task: Task, pace: Pace, where: list[str], command: str) -> str:
    """A table for each model and number of workers, and what follows from it."""
    how = (
        f"{task.precision}; {task.global_batch_size} sequences of {task.sequence_length} tokens; medians of "
        f"{pace.rounds} rounds of {pace.steps} steps after {pace.warmup} to warm up. Error: predicted / measured - 1."
    )
    parts = [
        f"`{command}`",
        how,
        "\n".join(f"- {line}" for line in where),
        table(SUMMARY, [_cells(rows) for rows in found]),
    ]
    for rows in found:
        cells = [
            [f"{r.layout}{' (picked)' if r.picked else ''}", f"{1e3 * r.predicted_s:.0f}",
             f"{1e3 * r.low_s:.0f} to {1e3 * r.high_s:.0f}", f"{1e3 * r.measured_s:.0f}", f"{100 * r.error:+.1f} %"]
            for r in rows
        ]  # fmt: skip
        head = ["layout", "predicted, ms", "90 % band, ms", "measured, ms", "error"]
        parts += [f"**{rows[0].model}, {_workers(rows)}**: {_size(rows[0].model)}", table(head, cells)]
    return "\n\n".join(parts) + "\n"


SUMMARY = [
    "model",
    "workers",
    "layouts",
    "mean error",
    "mean size of it",
    "in the band",
    "picked",
    "best measured",
    "pick slower by",
]


def _cells(rows: list[Row]) -> list[str]:
    about = summary(rows)
    return [
        rows[0].model, str(rows[0].num_workers), str(len(rows)), f"{100 * about['mean_error']:+.1f} %",
        f"{100 * about['mean_absolute_error']:.1f} %", f"{100 * about['inside_band']:.0f} %",
        about["picked"], about["best"], f"{100 * about['regret']:.1f} %",
    ]  # fmt: skip


def _workers(rows: list[Row]) -> str:
    count = rows[0].num_workers
    return "1 worker" if count == 1 else f"{count} workers"


def _size(name: str) -> str:
    size = MODELS[name]
    return f"{size['layers']} blocks, hidden size {size['hidden_size']}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="sizes (default: all)")
    parser.add_argument(
        "--workers",
        nargs="+",
        type=int,
        choices=[1, 2, 4],
        default=[1, 2, 4],
        help="numbers of workers (default: 1 2 4)",
    )
    parser.add_argument(
        "--precision", choices=["fp32", "bf16"], help="default: as ahp train, bf16 where the CPU computes it fast"
    )
    options.add_size(parser)
    parser.add_argument("--steps", type=int, default=6, help="steps of each layout in a round (default: 6)")
    parser.add_argument("--rounds", type=int, default=2, help="rounds over all layouts (default: 2)")
    parser.add_argument(
        "--cluster", metavar="FILE", help="a cluster.yaml of this machine instead of a probe, for one --workers"
    )
    options.add_output(parser, "smallest model, three layouts, few steps")
    arguments = parser.parse_args()
    if arguments.batch_size < 1 or arguments.batch_size % 8:
        parser.error(f"--batch-size {arguments.batch_size}: must be a multiple of 8, for 4 micro-batches of 2 replicas")
    if arguments.cluster and not arguments.quick and len(arguments.workers) > 1:
        parser.error("--cluster: a probe holds for one number of workers; give --workers N too")
    if arguments.rounds < 1 or arguments.steps < 1:
        parser.error("--rounds and --steps: at least 1")
    if arguments.markdown:
        require(arguments.markdown, MARKER)
    return arguments


def main() -> int:
    import ahp
    from ahp.cli.planning_job import precision_for
    from ahp.plan import EngineChoice

    arguments = parse()
    pace = Pace(warmup=3, steps=arguments.steps, rounds=arguments.rounds)
    names, counts, length = arguments.models, arguments.workers, arguments.sequence_length
    if arguments.quick:
        pace, names, counts, length = Pace(warmup=1, steps=2, rounds=1), ["small"], [2], 64
    tasks: list[Task] = []
    found: list[list[Row]] = []
    where = []
    for count in counts:
        where.append(machine(count).words())
        print(where[-1], file=sys.stderr, flush=True)
        cluster = ahp.Cluster.load(arguments.cluster) if arguments.cluster else ahp.probe(quick=True, workers=count)
        precision = arguments.precision or precision_for(cluster, EngineChoice())[0]
        tasks = [Task(name, length, arguments.batch_size, precision) for name in names]
        found += [one_model(task, cluster, count, pace, few=arguments.quick) for task in tasks]
    text = markdown(found, tasks[0], pace, where, " ".join(["python", *sys.argv]))
    plain = [
        {"summary": summary(rows), "rows": [{**asdict(r), "error": r.error, "inside": r.inside} for r in rows]}
        for rows in found
    ]
    options.tell(arguments, MARKER, text, {"machines": where, "pace": asdict(pace), "models": plain})
    return 0


if __name__ == "__main__":
    sys.exit(main())
