"""What planning for a mixed cluster is worth: its search against planners that know one kind of device.

    python benchmarks/mixed.py                                two minutes
    python benchmarks/mixed.py --quick                        a smoke run: two small groups, a small model
    python benchmarks/mixed.py --markdown docs/search/mixed.md      the table into the page

One thread, with the model traced before the clock starts. All step times are forecasts for the same cluster. stdout: the
table; stderr: progress.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path
from typing import Any

from machine import machine
from page import require, table, write

MARKER = "mixed"
GROUPS = ("32x8xH100-SXM-80GB", "32x8xA100-SXM-80GB", "32x8xL4-24GB")
QUICK = ("1x4xH100-SXM-80GB", "1x4xA100-SXM-80GB")


def mixed_cluster(groups: tuple[str, ...]) -> Any:
    """Groups named by their device, joined by the slower of their usual networks."""
    from ahp.cluster.model import Cluster

    described = []
    for text in groups:
        nodes, devices, device = text.split("x", 2)
        name = device.split("-")[0].lower()
        described.append({"name": name, "nodes": int(nodes), "devices_per_node": int(devices), "device": device})
    return Cluster.from_dict({"groups": described})


def step_s(plan: Any) -> float:
    """Forecast seconds of a plan's step."""
    return plan.forecast.step_time_s


def rows_of(graph: Any, cluster: Any, job: Any) -> tuple[list[list[str]], str]:
    """One row for each planner; and the layout and the certificate of the mixed search."""
    import ahp
    from ahp import words
    from ahp.cluster.model import Cluster
    from ahp.errors import AhpError
    from ahp.forecast.step import forecast
    from ahp.plan import EngineChoice

    engine = EngineChoice(compile=False)  # the same for every planner, whatever each would decide
    start = time.process_time()
    found = ahp.search(graph, cluster, job, engine=engine)
    seconds = time.process_time() - start
    best = step_s(found.best)
    rows = [["over all groups", "below the table, as it is long", words.seconds(best), "1.00"]]

    def add(planner: str, layout: str, took_s: float) -> None:
        rows.append([planner, layout, words.seconds(took_s), f"{took_s / best:.2f}"])

    print("each group alone ...", file=sys.stderr)
    alone = {}
    for group in cluster.groups:
        try:
            plan = ahp.search(graph, Cluster(groups=(group,)), job, engine=engine, keep=1).fastest
        except AhpError as refusal:
            rows.append([f"{group.name} alone", str(refusal).splitlines()[0], "", ""])
            continue
        alone[group.name] = step_s(plan)
        add(f"{group.name} alone", plan.parallelism.short(), step_s(plan))
    print("all devices taken for the slowest ...", file=sys.stderr)
    slowest = max(cluster.groups, key=lambda group: alone.get(group.name, float("inf")))
    nodes = sum(group.nodes for group in cluster.groups)
    between = slowest.inter_node or min(
        (link.link for link in cluster.links), key=lambda link: link.bandwidth_bytes_per_s
    )
    plain = Cluster(groups=(slowest.model_copy(update={"nodes": nodes, "inter_node": between}),))
    for plan in ahp.search(graph, plain, job, engine=engine).plans:
        try:
            took_s = forecast(graph, cluster, job, plan.parallelism, engine).step_time_s
        except AhpError:
            continue  # a cell of it would lie on two groups
        add(f"all taken for {slowest.name}, equal shares", plan.parallelism.short(), took_s)
        break
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    proof = "; ".join(found.proof)
    layout = f"Over all groups: `{found.best.parallelism.short()}`"
    return (
        rows,
        f"{layout}\n\n{proof}. {seconds:.1f} s of processor time for the mixed search, peak memory {peak:,.0f} MiB.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path, help="write the table between the page's markers")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    args = parser.parse_args()
    if args.markdown:
        require(args.markdown, MARKER)
    import torch

    import ahp

    torch.set_num_threads(1)
    groups, model, batch, length = (QUICK, "tiny", 16, 128) if args.quick else (GROUPS, "llama3-70b", 1024, 8192)
    job = ahp.Job(sequence_length=length, global_batch_size=batch, precision="bf16")
    print(f"{model} on {', '.join(groups)} ...", file=sys.stderr)
    rows, told = rows_of(ahp.analyze(model, job), mixed_cluster(groups), job)
    here = machine(1)
    text = f"`python benchmarks/mixed.py`: {model} on {' + '.join(groups)}, {batch:,} sequences of {length:,} tokens, bf16, eager blocks; "
    text += f"forecasts; {here.cpu}, one thread, {here.date}\n\n"
    rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]  # a bar would end the cell
    text += table(["planned for", "layout", "a step", "times the first"], rows) + f"\n\n{told}"
    print(text)
    if args.markdown:
        write(args.markdown, MARKER, text)


if __name__ == "__main__":
    main()
