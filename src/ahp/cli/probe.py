"""``ahp probe``: sense and measure this machine, or several hosts at once, and write cluster.yaml."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ahp.cli.json_alone import print_alone
from ahp.cli.options import options_of
from ahp.cli.probe_lines import lines
from ahp.cli.waiting import progress_bar
from ahp.cli.writable import require_writable
from ahp.errors import bad_input
from ahp.optional import Flag, OptionalFigure, OptionalNumber, OptionalText


@dataclass
class Arguments:
    """Sense and measure this machine: processors, memory, disk, products, streams and collectives.

    For several hosts, run the same command on each: under torchrun, under srun, or with --nodes and --rendezvous. Each host measures itself, pairs
    of hosts measure their link, and the first writes one file."""

    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("cluster.yaml")
    """File to write."""
    quick: Flag = False
    """Fewer shapes and sizes: well under a minute instead of up to three."""
    workers: OptionalNumber = None
    """Devices to measure and to have; by default all GPUs, else all physical cores."""
    inter_node_gbps: OptionalFigure = None
    """Network of one node in a job of several, Gb/s per direction; by default the usual figure, or what the cards report."""
    nodes: Annotated[OptionalNumber, tyro.conf.arg(metavar="N")] = None
    """Hosts that run this command together; under srun the hosts of the step."""
    rendezvous: Annotated[OptionalText, tyro.conf.arg(metavar="HOST[:PORT]")] = None
    """An address of one of the hosts, the same on all: that host writes the file. The port is 29500 if none is given."""
    json: Flag = False
    """Print the cluster as JSON instead of tables."""


def run(argv: list[str]) -> int:
    """Parse, probe, write, print. Returns the exit code."""
    arguments = options_of(Arguments, argv, "ahp probe")
    from ahp.cli import probe_hosts

    if (place := probe_hosts.place(arguments.nodes, arguments.rendezvous)) is not None:
        if arguments.inter_node_gbps is not None:
            rule = "the network of several hosts is measured; leave it out"
            raise bad_input("--inter-node-gbps", arguments.inter_node_gbps, rule)
        return probe_hosts.run(
            place, arguments.output, quick=arguments.quick, workers=arguments.workers, as_json=arguments.json
        )
    require_writable(arguments.output)
    from ahp.cluster.measure import probe

    folder = arguments.output.parent
    with progress_bar() as say:
        cluster = probe(
            quick=arguments.quick,
            workers=arguments.workers,
            progress=say,
            folder=folder,
            inter_node_gbps=arguments.inter_node_gbps,
        )
    cluster.save(arguments.output)
    if arguments.json:
        print_alone(json.dumps(cluster.plain()))
        return 0
    print("\n".join(lines(cluster)))
    print(f"\nWrote {arguments.output}")
    print(f"Next: ahp plan tiny {shlex.quote(str(arguments.output))}")
    return 0
