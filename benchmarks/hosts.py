"""Hosts that differ: probed, planned for, and the plan measured against even layouts, plain data parallelism and many others.

    python benchmarks/hosts.py                                   all clusters, some 70 minutes
    python benchmarks/hosts.py --quick                           a smoke run: two hosts, few layouts and steps
    python benchmarks/hosts.py --only "1:3, 100 Mb/s" --markdown docs/benchmarks.md

Hosts are network namespaces of this machine (namespaces.py): each has a share of a processor by a control group, and a cable with a token bucket at
both ends. ``ahp probe --quick --nodes N`` runs on every host, in another order than that of their speeds. A few steps of layouts that wait for each
group correct what it writes; that is planned for, and every other layout is forecast before it is trained. Then all layouts run in
turns for some rounds, each a median over its steps. Wants root and a machine that nothing else uses: what else ran is said. stdout: the tables; stderr: progress.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import namespaces
import options
from hosts_layouts import Layout, calibrated, layouts_of, waiting_for_each
from machine import machine
from namespaces import Host, HostSpec
from page import require, table
from task import Task

from ahp.cluster.environment import with_ours
from ahp.cluster.measure import busy_share

MARKER = "hosts"
PORT = 29_600
LIMIT_S = 1500
"""For everything on one cluster."""
REACH_PLAN, REACH_SUM = 0.03, 0.9
"""Issue 24: the plan within 3 % of the best measured, and 90 % of what the hosts reach alone, where the link allows it."""
WARM_UP = 3
"""Steps before those that count: in the first ones a worker still takes new memory from the kernel, 2 ms a MiB on a virtual machine."""
SHARES = {"1:2": (0.9, 0.45), "1:3": (0.9, 0.3), "1:2:2": (0.9, 0.45, 0.45), "1:1.5:3": (0.9, 0.6, 0.3)}
"""Of a processor. Less than a whole one, so that the kernel's part of a message has its own; of two processors the first host has one, the others share one."""


@dataclass(frozen=True)
class Setup:
    """One cluster."""

    shares: str
    gbps: float

    @property
    def name(self) -> str:
        speed = f"{self.gbps:g} Gb/s" if self.gbps >= 1 else f"{self.gbps * 1000:g} Mb/s"
        return f"{self.shares}, {speed}"

    @property
    def hosts(self) -> list[HostSpec]:
        """The slow ones first: no order may help."""
        shares = SHARES[self.shares]
        made = [HostSpec(cores=(min(at, 1),), processors=share, gbps=self.gbps) for at, share in enumerate(shares)]
        return made[::-1]


SETUPS = [Setup("1:2", 1.0), Setup("1:3", 0.1), Setup("1:2:2", 0.5), Setup("1:1.5:3", 2.0)]
QUICK = [Setup("1:2", 1.0)]


@dataclass(frozen=True)
class Pace:
    """Steps before the clock counts and after, in each of so many rounds over all layouts."""

    warmup: int
    steps: int
    rounds: int


CALIBRATION = Pace(warmup=1, steps=2, rounds=3)
"""Before the plan is made. In rounds: a machine that is slow for some seconds would count as a slow host."""


@dataclass
class Row:
    """One layout; times in seconds."""

    words: str
    roles: list[str]
    """What it was taken for: plan, even, ddp, other."""
    predicted_s: float
    low_s: float
    high_s: float
    rounds_s: list[float] = field(default_factory=list)
    """The median of each round."""

    @property
    def measured_s(self) -> float:
        return statistics.median(self.rounds_s)

    @property
    def inside(self) -> bool:
        return self.low_s <= self.measured_s <= self.high_s


@dataclass
class Found:
    """What came of one cluster."""

    name: str
    cluster: str
    """As it was probed, in words."""
    busy: float
    rows: list[Row]
    alone_tokens_per_s: float
    tokens_per_step: int

    def best_of(self, role: str) -> Row:
        return min((row for row in self.rows if role in row.roles), key=lambda row: row.measured_s)

    def summary(self) -> dict[str, Any]:
        plan, best = self.best_of("plan"), min(self.rows, key=lambda row: row.measured_s)
        found: dict[str, Any] = {
            "plan": plan.words, "best": best.words, "plan_slower_by": plan.measured_s / best.measured_s - 1,
            "as_probed_slower_by": self.best_of("as probed").measured_s / best.measured_s - 1,
            "in_band": sum(row.inside for row in self.rows) / len(self.rows),
            "share_of_sum": self.tokens_per_step / plan.measured_s / self.alone_tokens_per_s,
        }  # fmt: skip
        for role in ("ddp", "even"):
            other = self.best_of(role)
            found[f"faster_than_{role}"] = other.measured_s / plan.measured_s
            found[f"forecast_faster_than_{role}"] = other.predicted_s / plan.predicted_s
        return found


def on_all(hosts: Sequence[Host], words: Sequence[Sequence[str]], folder: Path, what: str) -> list[str]:
    """Run a command on each host until all have ended, and give back what they print. Raises RuntimeError where one fails, or after ``LIMIT_S``."""
    ours = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    processes, began_s = [], time.monotonic()
    with contextlib.ExitStack() as kept:
        for host, own in zip(hosts, words, strict=True):
            out, log = (kept.enter_context((folder / f"{host.name}.{end}").open("w+")) for end in ("out", "log"))
            environment = {**with_ours(dict(os.environ)), **ours, **host.environment}
            process = subprocess.Popen([*host.prefix, *own], stdout=out, stderr=log, env=environment, cwd=folder)
            kept.callback(_end, process)
            processes.append(process)
        while any(process.poll() is None for process in processes):
            failed = [host.name for host, p in zip(hosts, processes, strict=True) if p.poll()]
            if failed or time.monotonic() - began_s > LIMIT_S:
                last = (folder / f"{failed[0]}.log").read_text()[-2000:] if failed else "not within the limit"
                raise RuntimeError(f"{what}: {failed}: {last}")
            time.sleep(0.1)
        if any(process.returncode for process in processes):
            raise RuntimeError(f"{what}: {[(folder / f'{host.name}.log').read_text()[-2000:] for host in hosts]}")
    return [(folder / f"{host.name}.out").read_text() for host in hosts]


def _end(process: subprocess.Popen[Any]) -> None:
    process.kill()
    process.wait()


def probed(hosts: Sequence[Host], folder: Path) -> Any:
    """The cluster, as all hosts sense it together."""
    from ahp.cluster.model import Cluster

    file = folder / "cluster.yaml"
    place = f"{hosts[0].address}:{PORT}"
    words = [
        sys.executable,
        "-m",
        "ahp",
        "probe",
        "--quick",
        "--nodes",
        str(len(hosts)),
        "--rendezvous",
        place,
        "-o",
        str(file),
    ]
    outputs = on_all(hosts, [words] * len(hosts), folder, "ahp probe")
    print("\n".join(outputs), file=sys.stderr)
    return Cluster.load(file)


def corrected(hosts: Sequence[Host], cluster: Any, task: Task, folder: Path) -> Any:
    """The cluster as a few steps correct it, of layouts that wait for each of its groups in turn."""
    layouts = waiting_for_each(cluster, task)
    times_s = of_rounds(measured(hosts, layouts, task, CALIBRATION, folder))
    seconds = [statistics.median(times_s[at]) for at in range(len(layouts))]
    for layout, step_s in zip(layouts, seconds, strict=True):
        told = f"{1e3 * step_s:.0f} ms, forecast {1e3 * layout.forecast.step_time_s:.0f} ms"
        print(f"  {layout.words}, {', '.join(layout.roles)}: {told}", file=sys.stderr)
    return calibrated(cluster, task, layouts, seconds, CALIBRATION.steps * CALIBRATION.rounds)


def measured(
    hosts: Sequence[Host], layouts: Sequence[Layout], task: Task, pace: Pace, folder: Path
) -> Iterator[dict[str, Any]]:
    """The output of each host for each round and layout."""
    own = {key: value for key, value in asdict(task).items() if key != "optimizer"}
    settings = {
        "task": own, "size": len(hosts), "names": [host.name for host in hosts], "address": hosts[0].address, "port": PORT + 1, **asdict(pace),
        "layouts": [layout.plain() for layout in layouts],
    }  # fmt: skip
    file = folder / "settings.json"
    file.write_text(json.dumps(settings))
    script = str(Path(__file__).with_name("host_worker.py"))
    words = [[sys.executable, script, str(number), str(file)] for number in range(len(hosts))]
    for output in on_all(hosts, words, folder, "the layouts"):
        yield from (json.loads(line) for line in output.splitlines() if line.startswith("{"))


def of_rounds(said: Iterable[dict[str, Any]]) -> dict[int, list[float]]:
    """By layout, of each round the median step of the host that took longest."""
    found: dict[int, dict[int, float]] = {}
    for one in said:
        rounds, median_s = found.setdefault(one["layout"], {}), statistics.median(one["seconds"])
        rounds[one["round"]] = max(median_s, rounds.get(one["round"], 0.0))
    return {layout: [rounds[at] for at in sorted(rounds)] for layout, rounds in found.items()}


def one_cluster(setup: Setup, task: Task, pace: Pace, *, few: bool) -> Found:
    """Probe, plan, forecast, measure."""
    busy = busy_share()
    with tempfile.TemporaryDirectory(prefix="ahp-hosts-") as name, namespaces.hosts(setup.hosts) as hosts:
        folder = Path(name)
        as_probed = probed(hosts, folder)
        cluster = corrected(hosts, as_probed, task, folder)
        layouts = layouts_of(cluster, as_probed, task, few=few)
        for layout in layouts:
            print(
                f"  {layout.words}, {', '.join(layout.roles)}: {1e3 * layout.forecast.step_time_s:.0f} ms"
                if layout.forecast
                else "  each host alone",
                file=sys.stderr,
            )
        rows: list[Row | None] = [
            Row(one.words, list(one.roles), f.step_time_s, f.step_time_low_s, f.step_time_high_s) if (f := one.forecast) else None
            for one in layouts
        ]  # fmt: skip
        said = list(measured(hosts, layouts, task, pace, folder))
        alone: dict[str, list[float]] = {}
        for one in said:
            if rows[one["layout"]] is None:
                alone.setdefault(one["host"], []).append(statistics.median(one["seconds"]))
        for index, times_s in of_rounds(said).items():
            if (row := rows[index]) is not None:
                row.rounds_s = times_s
    tokens = task.global_batch_size * task.sequence_length
    own = sum(tokens / statistics.median(times_s) for times_s in alone.values())
    told = f"{words_of(as_probed, task.precision)}; measured by ahp probe --quick; {corrections(as_probed, cluster, task.precision)}"
    return Found(setup.name, told, busy, [row for row in rows if row is not None], own, tokens)


def words_of(cluster: Any, precision: str) -> str:
    """Groups and links as they were probed."""
    parts = [f"{g.name}: {g.nodes} x {g.device.peak_flops_per_s[precision] / 1e9:.0f} GFLOP/s" for g in cluster.groups]
    links = [(f"{one.between[0]} to {one.between[1]}", one.link) for one in cluster.links]
    links += [(f"within {g.name}", g.inter_node) for g in cluster.groups if g.inter_node is not None]
    parts += [
        f"{name} {link.bandwidth_bytes_per_s * 8 / 1e9:.3g} Gb/s, {link.latency_s * 1e6:.0f} us" for name, link in links
    ]
    return "; ".join(parts)


def corrections(probed: Any, cluster: Any, precision: str) -> str:
    """How many times as long each group took in the first steps as it was probed."""
    ratios = [
        f"{before.name} {before.device.peak_flops_per_s[precision] / after.device.peak_flops_per_s[precision]:.2f}"
        for before, after in zip(probed.groups, cluster.groups, strict=True)
    ]
    return f"by the first steps times {', '.join(ratios)}"


SUMMARY = ["cluster", "plan", "slower than the best measured", "as probed", "in the band", "x DDP", "as forecast", "x best even", "as forecast", "of the sum"]  # fmt: skip


def markdown(found: Sequence[Found], task: Task, pace: Pace, command: str) -> str:
    """The summary, and a table for each cluster."""
    cells = []
    for one in found:
        s = one.summary()
        cells.append(
            [one.name, _cell(s["plan"]), f"{100 * s['plan_slower_by']:.1f} %", f"{100 * s['as_probed_slower_by']:.1f} %", f"{100 * s['in_band']:.0f} %",
             f"{s['faster_than_ddp']:.2f}", f"{s['forecast_faster_than_ddp']:.2f}", f"{s['faster_than_even']:.2f}",
             f"{s['forecast_faster_than_even']:.2f}", f"{100 * s['share_of_sum']:.0f} %"]
        )  # fmt: skip
    how = (
        f"{task.model}, {task.precision}; {task.global_batch_size} sequences of {task.sequence_length} tokens; medians of {pace.rounds} rounds of "
        f"{pace.steps} steps after {pace.warmup} to warm up, layouts in turns. In the first column processors 1:n of the hosts and the speed of each "
        "one's cable. Of the sum: tokens a second over those of all hosts, each alone at the same time."
    )
    parts = [f"`{command}`", machine(1).words(), how, table(SUMMARY, cells)]
    for one in found:
        rows = [
            [_cell(f"{row.words} ({', '.join(row.roles)})"), f"{1e3 * row.predicted_s:.0f}", f"{1e3 * row.low_s:.0f} to {1e3 * row.high_s:.0f}",
             f"{1e3 * row.measured_s:.0f}", f"{1e3 * min(row.rounds_s):.0f} to {1e3 * max(row.rounds_s):.0f}",
             f"{100 * (row.predicted_s / row.measured_s - 1):+.1f} %"]
            for row in sorted(one.rows, key=lambda row: row.measured_s)
        ]  # fmt: skip
        head = ["layout", "forecast, ms", "90 % band, ms", "measured, ms", "rounds, ms", "error"]
        about = f"**{one.name}**: {one.cluster}. Other programs used {one.busy:.0%} of the processors before."
        parts += [about, table(head, rows)]
    return "\n\n".join(parts) + "\n"


def _cell(words: str) -> str:
    return words.replace("|", "\\|")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [setup.name for setup in SETUPS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="CLUSTER", help=f"of {'; '.join(names)}")
    parser.add_argument("--rounds", type=int, default=3, help="over all layouts (default: 3)")
    parser.add_argument("--steps", type=int, default=3, help="of each layout in a round (default: 3)")
    parser.add_argument(
        "--model", choices=["small", "tiny"], default="small", help="size of the LLaMA (default: small)"
    )
    parser.add_argument("--sequences", type=int, help="of one step (default: 96 of 256 tokens; with --quick 12 of 64)")
    options.add_output(parser, "two hosts, few layouts and steps")
    arguments = parser.parse_args()
    arguments.sequences = (12 if arguments.quick else 96) if arguments.sequences is None else arguments.sequences
    if min(arguments.rounds, arguments.steps, arguments.sequences) < 1:
        parser.error("--rounds, --steps and --sequences: at least 1")
    if arguments.markdown:
        require(arguments.markdown, MARKER)
    return arguments


def main() -> int:
    arguments = parse()
    setups = QUICK if arguments.quick else SETUPS
    if arguments.only:
        setups = [setup for setup in SETUPS if setup.name in arguments.only]
    if (reason := namespaces.why_not(setups[0].hosts)) is not None:
        print(f"not measured: {reason}")
        return 0
    pace = Pace(WARM_UP, arguments.steps, arguments.rounds)
    task = Task(arguments.model, 256, arguments.sequences, "fp32")
    if arguments.quick:
        pace, task = Pace(1, 2, 2), Task("small", 64, arguments.sequences, "fp32")
    found = []
    for setup in setups:
        print(f"{setup.name} ...", file=sys.stderr, flush=True)
        found.append(one_cluster(setup, task, pace, few=arguments.quick))
        # What takes a quarter of an hour is kept if a later cluster fails.
        print(markdown(found[-1:], task, pace, setup.name), file=sys.stderr, flush=True)
    text = markdown(found, task, pace, " ".join(["python", *sys.argv]))
    plain = [{**asdict(one), "summary": one.summary()} for one in found]
    reached = {
        one.name: {"plan": s["plan_slower_by"] <= REACH_PLAN, "sum": s["share_of_sum"] >= REACH_SUM} for one in found for s in [one.summary()]
    }  # fmt: skip
    options.tell(arguments, MARKER, text, {"clusters": plain, "pace": asdict(pace), "reached": reached})
    return 0


if __name__ == "__main__":
    sys.exit(main())
