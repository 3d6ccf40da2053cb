"""How long the search of a whole space takes, what it looks at, and how both grow with devices and layers.

    python benchmarks/search.py                                   five minutes
    python benchmarks/search.py --quick                           a smoke run: one search on eight devices
    python benchmarks/search.py --markdown docs/benchmarks.md     tables into the page, the plot beside it

Every search runs in its own process on one thread, with the model traced before the clock starts. Peak memory is that
of the whole process, interpreter and libraries included. stdout: the tables; stderr: progress.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from machine import machine
from mixed import GROUPS, mixed_cluster
from page import require, table, write
from plot import Line, log_plot

MARKER, PLOT = "search", "search.svg"

ENGINES = ("ahp", "megatron", "torchtitan")
GROWING = "torchtitan"
"""The engine whose searches are timed by devices and by layers."""


@dataclass(frozen=True)
class Case:
    """One search: 8,192 tokens a sequence, bf16. Groups of a mixed cluster are joined by ``+``."""

    model: str
    cluster: str
    batch: int
    engine: str
    layers: int | None = None
    """None = as many as the model has."""
    method: str = "exact"
    seed: int = 0


@dataclass(frozen=True)
class Measured:
    """What one search took and looked at."""

    devices: int
    layers: int
    seconds: float
    rows: int
    legal: int
    forecasts: int
    proven: bool
    best: str
    best_s: float
    """Step time of the best row, stages as even as can be."""
    peak_mib: float


CASES = [
    Case(model, cluster, batch, engine)
    for model, cluster, batch in (
        ("llama3-8b", "8xH100-SXM-80GB", 64),
        ("mixtral-8x22b", "128x8xH100-SXM-80GB", 1024),
        ("llama3-405b", "2048x8xH100-SXM-80GB", 2048),
    )
    for engine in ENGINES
] + [
    Case("deepseek-v3", "256x8xH100-SXM-80GB", 2048, "ahp"),
    Case("llama3-70b", "+".join(GROUPS), 1024, "ahp"),
]
BY_DEVICES = [
    Case("llama3-405b", f"{nodes}x8xH100-SXM-80GB", 2048, GROWING) for nodes in (32, 64, 128, 256, 512, 1024, 2048)
]
BY_LAYERS = [Case("llama3-405b", "128x8xH100-SXM-80GB", 2048, GROWING, layers) for layers in (8, 16, 32, 64, 126)]

SOLVERS, SEEDS = ("anneal", "evolve"), (0, 1, 2)
"""Held against the exact search on the spaces of one engine."""


def one(case: Case) -> Measured:
    """Run one search in this process."""
    import torch

    import ahp
    from ahp.graph.models import load_config
    from ahp.search.method import Method

    torch.set_num_threads(1)
    job = ahp.Job(sequence_length=8192, global_batch_size=case.batch, precision="bf16")
    model: Any = case.model
    if case.layers is not None:
        config = load_config(case.model)
        assert config is not None, "models of the catalogue have a config"
        model = config.to_dict() | {"num_hidden_layers": case.layers}
    mixed = case.cluster.split("+")
    graph = ahp.analyze(model, job)
    cluster = ahp.Cluster.parse(case.cluster) if len(mixed) == 1 else mixed_cluster(tuple(mixed))
    start = time.perf_counter()
    method = Method(case.method, seed=case.seed)  # type: ignore[arg-type]
    ranking = ahp.search(graph, cluster, job, engine={"name": case.engine}, method=method)
    seconds = time.perf_counter() - start
    certificate = ranking.certificate
    return Measured(
        devices=cluster.num_devices,
        layers=graph.num_layers,
        seconds=seconds,
        rows=certificate.rows,
        legal=certificate.rows - certificate.broken,
        forecasts=certificate.forecasts,
        proven=certificate.proven,
        best=ranking.fastest.parallelism.short(),
        best_s=certificate.best_s,
        peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


def apart(case: Case) -> Measured:
    """The same in a process of its own."""
    words = f"{case.model}, {case.cluster}, {case.engine}, {case.layers or 'all'} layers, {case.method} {case.seed}"
    print(words, file=sys.stderr, flush=True)
    command = [sys.executable, __file__, "--one", json.dumps(asdict(case))]
    # As where a package is installed: modules that a search imports are not compiled anew in each process.
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    result = subprocess.run(command, check=True, capture_output=True, text=True, env=variables)
    return Measured(**json.loads(result.stdout))


def case_rows(cases: Sequence[Case], found: Sequence[Measured]) -> list[list[str]]:
    return [
        [
            f"{case.model}, {one.devices:,} devices",
            case.engine,
            f"{one.rows:,}",
            f"{one.legal:,}",
            f"{one.forecasts:,}",
            "yes" if one.proven else "no",
            f"{one.seconds:.2f}",
            f"{one.peak_mib:,.0f}",
        ]
        for case, one in zip(cases, found, strict=True)
    ]


def solver_rows(cases: Sequence[Case], found: Sequence[Measured]) -> list[list[str]]:
    """Annealing and evolution with each seed, beside the exact search of the same space."""
    rows = []
    for case, exact in zip(cases, found, strict=True):
        if case.engine != "megatron":
            continue
        space = f"{case.model}, {exact.devices:,} devices"
        rows.append([space, "exact", f"{exact.forecasts:,}", f"{exact.seconds:.2f}", "0.0"])
        for solver in SOLVERS:
            runs = [apart(replace(case, method=solver, seed=seed)) for seed in SEEDS]
            worse = ", ".join(f"{100 * (run.best_s / exact.best_s - 1):.1f}" for run in runs)
            seconds = ", ".join(f"{run.seconds:.2f}" for run in runs)
            rows.append([space, solver, ", ".join(f"{run.forecasts:,}" for run in runs), seconds, worse])
    return rows


def growth_rows(found: Sequence[Measured]) -> list[list[str]]:
    return [
        [
            f"{one.devices:,}",
            str(one.layers),
            f"{one.rows:,}",
            f"{one.legal:,}",
            f"{one.forecasts:,}",
            f"{one.seconds:.2f}",
        ]
        for one in found
    ]


def plot(by_devices: Sequence[Measured], by_layers: Sequence[Measured]) -> str:
    """Seconds against devices and layers, both axes logarithmic."""
    lines = [
        Line("126 layers, by devices", [(one.devices, one.seconds) for one in by_devices]),
        Line("1,024 devices, by layers", [(one.layers, one.seconds) for one in by_layers]),
    ]
    return log_plot(lines, "devices, or layers", "seconds of one search")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path, help="write the tables between the page's markers, the plot beside it")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(asdict(one(Case(**json.loads(args.one))))))
        return
    if args.markdown:
        require(args.markdown, MARKER)
    cases = CASES[:1] if args.quick else CASES
    found = [apart(case) for case in cases]
    by_devices, by_layers = (
        [] if args.quick else [apart(case) for case in series] for series in (BY_DEVICES, BY_LAYERS)
    )
    if args.json:
        print(json.dumps({"searches": [asdict(case) | asdict(one) for case, one in zip(cases, found, strict=True)]}))
        return
    command = f"python benchmarks/search.py{' --markdown docs/benchmarks.md' if args.markdown else ''}"
    here = machine(1)
    head = ["space", "engine", "layouts", "legal", "forecasts", "proven", "seconds", "peak, MiB"]
    text = f"`{command}`\n\n{here.cpu}, one thread; Python {here.python}, torch {here.torch}; {here.date}\n\n"
    text += table(head, case_rows(cases, found))
    if not args.quick:
        head = ["space", "method", "forecasts", "seconds", "best slower than the exact one's, %"]
        text += f"\n\nAnnealing and evolution (500 forecasts at most, seeds {', '.join(map(str, SEEDS))}) on Megatron's spaces:\n\n"
        text += table(head, solver_rows(cases, found))
    if by_devices:
        growing = ["devices", "layers", "layouts", "legal", "forecasts", "seconds"]
        text += f"\n\nHow it grows (llama3-405b on {GROWING}), by devices and by layers:\n\n"
        text += table(growing, growth_rows([*by_devices, *by_layers]))
        text += f"\n\n![Seconds of a search by devices and by layers]({PLOT})"
    print(text)
    if args.markdown:
        write(args.markdown, MARKER, text)
        (args.markdown.parent / PLOT).write_text(plot(by_devices, by_layers), encoding="utf-8")


if __name__ == "__main__":
    main()
