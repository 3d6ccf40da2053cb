"""How long a forecast and a search take: one layout, a new model, a whole space.

    python benchmarks/speed.py                                   half a minute
    python benchmarks/speed.py --markdown docs/benchmarks.md     and put the table into the page

Everything runs on one thread of this machine. The first call for a model of the catalogue reads its graph, which ships; tracing it and importing
the libraries are counted apart.
stdout: the table; stderr: progress.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import machine
from page import require, table, write

MARKER = "speed"

JOB = {"sequence_length": 8192, "global_batch_size": 8192, "precision": "bf16"}
LAYOUT = {
    "data_parallel_shard_degree": 128,
    "zero_stage": 1,
    "tensor_parallel_degree": 8,
    "pipeline_parallel_degree": 16,
    "pipeline_parallel_schedule": "1F1B",
}
MODELS = ("llama3-8b", "llama3-405b")
CLUSTER = "2048x8xH100-SXM-80GB"
SEARCHES = (("llama3-8b", "8x8xH100-SXM-80GB"), ("llama3-405b", CLUSTER))


def import_s() -> float:
    """Seconds of ``import ahp`` in a fresh interpreter, beyond those of the interpreter itself."""

    def run(code: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - start

    return statistics.median(run("import ahp") for _ in range(5)) - statistics.median(run("pass") for _ in range(5))


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def simulate_rows(model: str) -> list[list[str]]:
    """The first call for a model, another micro-batch, another schedule, and the same layout again."""
    import ahp
    from ahp.graph import trace

    def price(**changes: Any) -> Any:
        return ahp.simulate(model=model, cluster=CLUSTER, job=JOB, parallelism={**LAYOUT, **changes})

    first = seconds(price)
    larger = [seconds(lambda size=size: price(micro_batch_size=size)) for size in (2, 4)]
    others = [
        seconds(lambda dp=dp, tp=tp: price(data_parallel_shard_degree=dp, tensor_parallel_degree=tp))
        for dp, tp in ((256, 4), (512, 2))
    ]
    again = [seconds(price) for _ in range(50)]
    return [
        [f"{model}, its graph traced on fake tensors", _ms(seconds(lambda: trace.analyze(model, ahp.Job(**JOB))))],
        [f"{model}, first call: its graph read", _ms(first)],
        [f"{model}, another micro-batch", _ms(statistics.median(larger))],
        [f"{model}, another tensor degree", _ms(statistics.median(others))],
        [f"{model}, the same units again, median of 50", _ms(statistics.median(again))],
    ]


def search_row(model: str, cluster: str) -> list[str]:
    """A whole search of a traced model."""
    import ahp

    job = ahp.Job(**JOB)
    graph = ahp.analyze(model, job)
    where = ahp.Cluster.parse(cluster)
    found: list[Any] = []
    elapsed = seconds(lambda: found.append(ahp.search(graph, where, job)))
    return [f"search, {model} on {cluster}, {found[0].certificate.rows:,} layouts", _ms(elapsed)]


def _ms(elapsed_s: float) -> str:
    return f"{1e3 * elapsed_s:,.0f}" if elapsed_s >= 0.1 else f"{1e3 * elapsed_s:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path, help="write the table between the page's markers")
    args = parser.parse_args()
    if args.markdown:
        require(args.markdown, MARKER)
    print("import ahp", file=sys.stderr)
    rows = [["import ahp, beyond the interpreter", _ms(import_s())]]
    import torch

    import ahp
    from ahp.graph import trace

    torch.set_num_threads(1)
    print("the libraries", file=sys.stderr)
    rows.append(["torch and transformers, once in a process", _ms(seconds(lambda: trace.analyze("tiny", ahp.Job())))])
    for model in MODELS:
        print(f"simulate {model}", file=sys.stderr)
        rows += simulate_rows(model)
    for model, cluster in SEARCHES:
        print(f"search {model} on {cluster}", file=sys.stderr)
        rows.append(search_row(model, cluster))
    command = f"python benchmarks/speed.py{' --markdown docs/benchmarks.md' if args.markdown else ''}"
    here = machine(1)
    text = f"`{command}`\n\n{here.cpu}, one thread; Python {here.python}, torch {here.torch}; {here.date}\n\n"
    text += table(["what", "ms"], rows)
    print(text)
    if args.markdown:
        write(args.markdown, MARKER, text)


if __name__ == "__main__":
    main()
