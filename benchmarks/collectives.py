"""The forecast of collectives against published measurements, row by row.

    python benchmarks/collectives.py ROWS.json                   price every row from the catalogue alone
    python benchmarks/collectives.py ROWS.json --rows            and print every row
    python benchmarks/collectives.py ROWS.json --leave-one-out   derive the constants without each publisher in turn
    python benchmarks/collectives.py ROWS.json --markdown docs/forecast/collectives.md   and write both errors there
    python benchmarks/collectives.py ROWS.json --derive          what stands under ``derived`` in forecast/nccl.yaml, and the catalogue's latencies of networks

ROWS.json is a list of objects with ``id, source, hardware, gpus, nodes, collective, size_bytes, time_us, busbw_GBps,
algo``; the rows of ``collectives_nodes.yaml`` are added. A bandwidth without a size is taken as that of 16 GiB. Errors are
forecast / measured - 1. Nothing is asserted and no time of this machine is taken: the same file gives the same table anywhere.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from page import require, table, write

from ahp.cluster import catalogue
from ahp.cluster.model import NodeGroup
from ahp.cluster.parse import resolve
from ahp.forecast.group import Group, strided_group
from ahp.forecast.nccl import Nccl, constants

MARKER = "collectives"
MIB = 2**20
PEAK_BYTES = 16 * 2**30
"""Size for a row that only says what bandwidth is reached at best."""

SKIPPED: tuple[tuple[str, str], ...] = (
    ("p2p", "a copy or a write between two devices, not NCCL"),
    ("host_link", "a copy to the host, not NCCL"),
    ("DeepEP", "DeepEP's own kernels, not NCCL"),
    ("SHARP 8x400Gb", "switches of the network add up: NCCL does so only when told to"),
    ("100GbE TCP", "a cluster cannot say that 100 Gb/s are without RDMA"),
    ("PCI Gen5 2x4", "two groups of four behind different host bridges"),
    ("PCI Gen6 2x4", "two groups of four behind different host bridges"),
    ("allreduce_bandwidth", "neither hardware nor size stated"),
)

CLUSTERS: tuple[tuple[str, str], ...] = (
    ("not stated (4 nodes", "4x8xA100-SXM-80GB@800"),
    ("2x200Gb", "4x8xH100-SXM-80GB@400"),
    ("2x400Gb", "4x8xH100-SXM-80GB@800"),
    ("8x200Gb", "4x8xA100-SXM-80GB@1600"),
    ("8x400Gb", "4x8xH100-SXM-80GB@3200"),
    ("200Gb RDMA", "2x1xH100-SXM-80GB@200"),
    ("400Gb RDMA", "2x1xH100-SXM-80GB@400"),
    ("B200-SXM x32", "4x8xB200-SXM@3200"),
    ("H200-SXM x32", "4x8xH200-SXM-141GB@3200"),
    ("PCI Gen4", "8xA100-PCIe-80GB"),
    ("PCI Gen5", "8xH100-PCIe-80GB"),
    ("PCI Gen6", "8xH100-PCIe-80GB"),
    ("GB200", "72xGB200-NVL72"),
    ("V100 x64", "16x4xV100-SXM-32GB@400"),
    ("V100 x16", "4x4xV100-SXM-32GB@400"),
    ("V100-SXM2-32GB x4", "4xV100-SXM-32GB"),
    ("V100-SXM2-16GB x4", "4xV100-SXM-16GB"),
    ("A100-80GB x32, Omni-Path", "4x8xA100-SXM-80GB@400"),
    ("B200", "8xB200-SXM"),
    ("H200", "8xH200-SXM-141GB"),
    ("H100", "8xH100-SXM-80GB"),
    ("A100", "8xA100-SXM-80GB"),
    ("V100", "8xV100-SXM-32GB"),
)
"""Cluster in AHP's short form by what a row's hardware holds, first match. Omni-Path: Jean Zay, 4 x 100 Gb/s a node."""

PCIE_GEN6_BYTES_PER_S = 121e9
"""x16 at 64 GT/s with 242 of 256 bytes of a flit for data (PCI Express 6.0); no part in the catalogue has it."""

NODES = Path(__file__).with_name("collectives_nodes.yaml")

FILLED_OVER = "efa"
"""The network whose rows say how a ring and a tree over nodes fill; of the others they say the latency alone."""

GUESSED = ("not stated", "Omni-Path")
"""Hardware that a row does not state, or of which its source says that figures fluctuate: priced, but counted apart."""


@dataclass(frozen=True)
class Row:
    """One measurement with the cluster that it is priced on."""

    name: str
    publisher: str
    device: str
    kind: str
    num_bytes: int
    nodes: NodeGroup
    group: Group
    network: str | None
    """What is between the nodes, a name of ``networks`` in the catalogue; None = the device's usual one."""
    algorithm: str | None
    """The only one allowed, where the source forbids others."""
    measured_s: float
    guessed: bool

    @property
    def size(self) -> str:
        return "< 1 MiB" if self.num_bytes < MIB else "1-64 MiB" if self.num_bytes < 64 * MIB else ">= 64 MiB"


def read(path: Path) -> tuple[list[Row], dict[str, str]]:
    """The rows that can be priced, and the reason for each of the others."""
    rows, skipped = [], {}
    for raw in json.loads(path.read_text(encoding="utf-8")):
        words = f"{raw['collective']} {raw['hardware']} {raw['source']}"
        reason = next((why for part, why in SKIPPED if part in words), None)
        short = next((text for part, text in CLUSTERS if part in raw["hardware"]), None)
        if reason or short is None:
            skipped[raw["id"]] = reason or "hardware not in the catalogue"
            continue
        rows.append(_row(raw, short))
    return rows + over_nodes(), skipped


def over_nodes() -> list[Row]:
    """The rows of collectives_nodes.yaml."""
    found = []
    for source in yaml.safe_load(NODES.read_text(encoding="utf-8")):
        for kind, by_nodes in source.get("us", source.get("gb_per_s")).items():
            for count, figures in by_nodes.items():
                nodes = _joined(f"{count}x{source['cluster']}", source["network"])
                group = strided_group(nodes.num_devices, 1, nodes.devices_per_node)
                for mib, figure in zip(source["mib"], figures, strict=False):
                    size = mib * MIB
                    algorithm = source.get("algorithm")
                    name = "-".join(filter(None, (source["publisher"], f"{count}n", algorithm, kind, f"{mib}MiB")))
                    found.append(
                        Row(name, source["publisher"], f"{nodes.device.name.split('-')[0]} x {count} nodes", kind, size, nodes,
                            group, source["network"], algorithm, figure * 1e-6 if "us" in source else size / (figure * 1e9),
                            guessed=False)
                    )  # fmt: skip
    return found


def _joined(short: str, network: str | None) -> NodeGroup:
    """The nodes of a short form with such a network between them."""
    nodes = resolve(short).groups[0]
    if network is None or nodes.inter_node is None:
        return nodes
    return nodes.model_copy(update={"inter_node": catalogue.with_network(nodes.inter_node, network)})


def _row(raw: Mapping[str, Any], short: str) -> Row:
    hardware = raw["hardware"]
    network = "efa" if "EFA" in f"{hardware} {raw.get('interconnect')}" or "AWS" in hardware else None
    nodes = _joined(short, network)
    if "Gen6" in hardware:
        link = nodes.intra_node.model_copy(update={"bandwidth_bytes_per_s": PCIE_GEN6_BYTES_PER_S})
        nodes = nodes.model_copy(update={"intra_node": link})
    count = raw["gpus"] or nodes.num_devices
    group = strided_group(count, 1, nodes.devices_per_node)
    size = raw["size_bytes"] or PEAK_BYTES
    laps = 2 if raw["collective"] == "all_reduce" else 1
    measured_us = raw["time_us"] or laps * (count - 1) / count * size / (raw["busbw_GBps"] * 1e3)
    text = raw["source"]
    publisher = "NVIDIA slides" if text.startswith("NVIDIA") else text.split("/")[0]
    device = nodes.device.name.split("-")[0] + (" PCIe" if "PCI" in hardware else "")
    if group.nodes > 1:
        device += f" x {group.nodes} nodes"
    return Row(
        name=raw["id"], publisher=publisher, device=device, kind=raw["collective"], num_bytes=size, nodes=nodes,
        group=group, network=network, algorithm=_forced(raw), measured_s=measured_us * 1e-6,
        guessed=any(word in f"{hardware} {raw['note']}" for word in GUESSED),
    )  # fmt: skip


def _forced(raw: Mapping[str, Any]) -> str | None:
    """Sources that switched NVLS off, and slides that show both ways."""
    if "NVLS_ENABLE=0" in raw["source"] or "NVLS off" in (raw["algo"] or ""):
        return "ring"
    if raw["source"].startswith("NVIDIA") and raw["collective"] == "all_reduce":
        return "nvls" if "SHARP" in raw["hardware"] else "ring"
    return None


def forecast_s(row: Row, data: Mapping[str, Any]) -> float:
    """``data``: nccl.yaml's, with ``network_latency_us`` by network among what is derived where it is not the catalogue's."""
    nodes, latency_us = row.nodes, data["derived"].get("network_latency_us", {}).get(row.network)
    if latency_us is not None and nodes.inter_node is not None:
        link = nodes.inter_node.model_copy(update={"latency_s": latency_us * 1e-6})
        nodes = nodes.model_copy(update={"inter_node": link})
    choices = Nccl(nodes, data).choices(row.kind, row.num_bytes, row.group)  # type: ignore[arg-type]
    return min(c.seconds for c in choices if row.algorithm in (None, c.algorithm))


def error(row: Row, data: Mapping[str, Any]) -> float:
    return forecast_s(row, data) / row.measured_s - 1.0


def derive(rows: Sequence[Row]) -> dict[str, Any]:
    """What ``derived`` holds: least squares on log(forecast / measured), every publisher's device with one vote.

    Of rows whose hardware is stated: those within one node first, then those over RDMA. A generation without rows keeps
    NCCL's own share of the link and gets the mean start of the others.
    """
    known = [row for row in rows if not row.guessed and "PCIe" not in row.device]
    within = [row for row in known if row.group.nodes == 1]
    between = [row for row in known if row.group.nodes > 1 and row.num_bytes >= MIB and row.kind != "all_to_all"]
    data = copy.deepcopy(dict(constants()))
    data["derived"] = dict(data["derived"])
    _derive_within(within, data)
    _derive_between(between, data)
    sources = sorted({f"{row.publisher}: {row.device}" for row in (*within, *between)})
    seen = {Nccl(row.nodes, data).generation for row in within}
    return data["derived"] | {"derived_from": sources, "without": sorted(set(data["generations"]) - seen)}


def _least_squares(
    rows: Sequence[Row], data: Mapping[str, Any], fill: Callable[[Sequence[float]], None],
    start: Sequence[float], low: Sequence[float], high: Sequence[float],
) -> None:  # fmt: skip
    """Leave in ``data`` what ``fill`` puts there for the figures that come closest to the rows."""
    from scipy.optimize import least_squares

    votes = Counter((row.publisher, row.device) for row in rows)
    weights = [votes[row.publisher, row.device] ** -0.5 for row in rows]

    def residuals(x: Sequence[float]) -> list[float]:
        fill(x)
        return [w * math.log(forecast_s(row, data) / row.measured_s) for w, row in zip(weights, rows, strict=True)]

    found = least_squares(
        residuals, start, bounds=(low, high), x_scale=start, loss="soft_l1", f_scale=0.05, ftol=1e-5, diff_step=1e-3
    )
    fill([_figure(value) for value in found.x])


def _derive_within(rows: Sequence[Row], data: dict[str, Any]) -> None:
    """What the links of a node carry, and what a collective takes to start and to fill them."""
    generations = list(data["generations"])
    timed = {Nccl(row.nodes, data).generation for row in rows if row.num_bytes < 64 * MIB}

    def fill(x: Sequence[float]) -> None:
        shares, starts, rest = x[:4], x[4:8], x[8:]
        mean = statistics.fmean(s for g, s in zip(generations, starts, strict=True) if g in timed)
        data["derived"] |= {
            "ring_share": dict(zip(generations, shares, strict=True)),
            "start_us": {g: s if g in timed else _figure(mean) for g, s in zip(generations, starts, strict=True)},
            "fill_share": rest[0],
            "fill_us": rest[1] * 1e3,
            "peer_share": rest[2],
        }

    start = [data["generations"][g]["link_share"] for g in generations] + [20.0] * 4 + [0.5, 0.3, 0.7]
    low = [0.3] * 4 + [0.0] * 4 + [0.0, 0.02, 0.3]
    high = [1.0] * 4 + [60.0] * 4 + [2.0, 3.0, 1.0]
    _least_squares(rows, data, fill, start, low, high)


def _derive_between(rows: Sequence[Row], data: dict[str, Any]) -> None:
    """What a hop over each network takes (it stands in the catalogue), and what it takes to fill a ring and a tree over nodes."""
    names = ("network_fill_share", "network_fill_us", "tree_fill_share", "tree_fill_us")
    latencies = data["derived"]["network_latency_us"] = {}

    def fill(x: Sequence[float]) -> None:
        latencies[FILLED_OVER] = x[0]
        data["derived"] |= {name: value * scale for name, value, scale in zip(names, x[1:], scales, strict=True)}

    scales = (1.0, 1e3, 1.0, 1e3)
    start, low, high = [20.0, 0.3, 3.0, 0.3, 2.0], [4.0, 0.0, 0.1, 0.0, 0.1], [60.0, 2.0, 30.0, 3.0, 30.0]
    _least_squares([row for row in rows if row.network in (None, FILLED_OVER)], data, fill, start, low, high)
    for network in sorted({row.network for row in rows if row.network} - {FILLED_OVER}):
        own = [row for row in rows if row.network == network]
        _least_squares(own, data, lambda x, to=network: latencies.update({to: x[0]}), [20.0], [4.0], [60.0])


def _figure(value: float) -> float:
    """Three digits: more is noise."""
    return float(f"{value:.3g}")


def summary(rows: Sequence[Row], errors: Sequence[float], keys: Callable[[Row], str]) -> str:
    groups: dict[str, list[float]] = defaultdict(list)
    for row, one in zip(rows, errors, strict=True):
        groups[keys(row)].append(one)
    lines = []
    for key in sorted(groups):
        found = groups[key]
        sizes = [abs(e) for e in found]
        figures = (statistics.fmean(sizes), statistics.median(sizes), max(found, key=abs), statistics.fmean(found))
        lines.append(
            [key, str(len(found)), *(f"{100 * f:.1f}" for f in figures[:2]), *(f"{100 * f:+.0f}" for f in figures[2:])]
        )
    return table(["", "rows", "mean %", "median %", "worst %", "bias %"], lines)


def report(rows: Sequence[Row], errors: Sequence[float]) -> None:
    def source(row: Row) -> str:
        mark = " (hardware guessed)" if row.guessed else ""
        return f"{row.publisher}, {row.device}, {row.kind}{mark}"

    views: dict[str, Callable[[Row], str]] = {
        "By source and size": lambda row: f"{source(row)}, {'< 1 MiB' if row.num_bytes < MIB else '>= 1 MiB'}",
        "By size": lambda row: row.size + (", guessed" if row.guessed else ""),
        "By device": lambda row: row.device + (", guessed" if row.guessed else ""),
        "By kind": lambda row: row.kind + (", guessed" if row.guessed else ""),
    }
    for title, keys in views.items():
        print(f"\n{title}\n{summary(rows, errors, keys)}")


def leave_one_out(rows: Sequence[Row]) -> list[float]:
    """The error of every row under constants derived from all publishers but its own."""
    data = {}
    for publisher in sorted({row.publisher for row in rows}):
        print(f"deriving without {publisher}", file=sys.stderr)
        derived = derive([row for row in rows if row.publisher != publisher])
        data[publisher] = {**constants(), "derived": derived}
    return [error(row, data[row.publisher]) for row in rows]


def side_by_side(rows: Sequence[Row], errors: Sequence[float], left_out: Sequence[float]) -> str:
    """For the page: messages of 1 MiB and more, both ways."""
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row, both in zip(rows, zip(errors, left_out, strict=True), strict=True):
        if row.num_bytes >= MIB:
            kind = "all-to-all" if row.kind == "all_to_all" else "others"
            groups[f"{row.publisher}, {row.device}, {kind}{', hardware not sure' * row.guessed}"].append(both)
    lines = []
    for key, found in sorted(groups.items()):
        own, left = zip(*found, strict=True)
        means = [f"{100 * statistics.fmean(map(abs, one)):.1f}" for one in (own, left)]
        lines.append([key, str(len(found)), *means, f"{100 * max(own, key=abs):+.0f}"])
    return table(["publisher, device, collective", "rows", "derived", "left out", "worst"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the rows, as JSON")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--derive", action="store_true", help="print the derived constants of these rows")
    parser.add_argument("--leave-one-out", action="store_true", help="derive without each publisher, price its rows")
    parser.add_argument("--markdown", type=Path, help="write both errors into this page, between its markers")
    options = parser.parse_args()
    if options.markdown:
        require(options.markdown, MARKER)
    rows, skipped = read(options.file)
    if options.derive:
        print(yaml.safe_dump({"derived": derive(rows)}, sort_keys=False))
        return
    errors = [error(row, constants()) for row in rows]
    print(f"{len(rows)} of {len(rows) + len(skipped)} rows priced")
    report(rows, errors)
    if options.rows:
        for row, one in zip(rows, errors, strict=True):
            print(f"{row.name:45s} {row.measured_s * 1e6:12.1f} us  {100 * one:+7.1f} %")
    if options.leave_one_out or options.markdown:
        left_out = leave_one_out(rows)
        print("\n# Each publisher priced with constants derived from the others")
        report(rows, left_out)
        if options.markdown:
            write(options.markdown, MARKER, side_by_side(rows, errors, left_out))
    print("\nNot priced")
    for reason in sorted(set(skipped.values())):
        names = [name for name, why in skipped.items() if why == reason]
        print(f"- {reason}: {len(names)} rows ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})")


if __name__ == "__main__":
    main()
