"""``ahp probe`` on several hosts at once: how they find each other, and how the result is shown."""

from __future__ import annotations

import json
import shlex
import sys
from typing import TYPE_CHECKING

from ahp.cli import nodes
from ahp.cli.json_alone import print_alone
from ahp.cli.probe_lines import machine
from ahp.cli.waiting import progress_bar
from ahp.cli.writable import require_writable
from ahp.errors import bad_input

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ahp.runtime.probe.hosts import ProbedHosts
    from ahp.runtime.probe.meeting import Place

MOST_SHOWN = 30
"""Links in the table, one per line; if there are more, the slowest."""


def place(given_nodes: int | None, rendezvous: str | None) -> Callable[[], Place | None] | None:
    """A function that finds the other hosts; None if this host is alone. Raises BadInput for options that make no sense.

    The function returns None in a process that is not the first of its host.
    """
    from ahp.runtime.probe import meeting
    from ahp.runtime.ranks import slurm
    from ahp.runtime.ranks.ranks import is_joined

    task = slurm.task()
    asked = nodes.asked(None if given_nodes is None else str(given_nodes), rendezvous, None, task)
    if asked is not None:
        count, _, address, _ = asked
        return None if count == 1 else lambda: meeting.at_rendezvous(count, address)
    if task is not None and not task.is_launcher and task.nodes > 1:
        return lambda: meeting.under_srun(task)
    return meeting.under_launcher if is_joined() else None


def run(find: Callable[[], Place | None], output: Path, *, quick: bool, workers: int | None, as_json: bool) -> int:
    """Meet, measure, write, print. Returns the exit code."""
    from ahp.runtime.probe.hosts import probe_hosts
    from ahp.runtime.probe.meeting import Meeting

    here = find()
    if here is None:  # another process of this host does it
        return 0
    meeting = Meeting(here)
    with progress_bar() as say:
        found = probe_hosts(
            meeting,
            check=lambda: _require_new(output),
            quick=quick,
            workers=workers,
            progress=say,
            folder=output.parent,
        )
    if found is None:
        meeting.leave()
        print("measured; the first host writes the file", file=sys.stderr)
        return 0
    found.cluster.save(output)
    meeting.leave()
    if as_json:
        print("\n".join(found.warnings), file=sys.stderr)
        print_alone(json.dumps(found.cluster.plain()))
        return 0
    print("\n".join(lines(found)))
    print(f"\nWrote {output}")
    print(f"Next: ahp plan tiny {shlex.quote(str(output))}")
    return 0


def _require_new(output: Path) -> None:
    """Refuse to overwrite the measurements of several hosts: a host may be gone."""
    if output.is_file():
        raise bad_input("-o", str(output), "exists already; give another file, or delete it")
    require_writable(output)


def lines(found: ProbedHosts) -> list[str]:
    """Hosts that were probed together, in lines for people."""
    shown = []
    for group, members in zip(found.cluster.groups, found.members, strict=True):
        shown += [
            f"{group.name}: {', '.join(found.names[at] for at in members)}",
            *(f"  {line}" for line in machine(group)),
            "",
        ]
    slowest = sorted(found.directions, key=lambda one: one.bandwidth_bytes_per_s)
    title = "link, one way" if len(slowest) <= MOST_SHOWN else f"the slowest {MOST_SHOWN} of {len(slowest)} links"
    shown.append(f"{title:<50}{'Gb/s':>10}{'us':>10}")
    for one in slowest[:MOST_SHOWN]:
        ends = f"{found.names[one.sender]} to {found.names[one.receiver]}"
        shown.append(f"{ends:<50}{one.bandwidth_bytes_per_s * 8 / 1e9:>10.3g}{one.latency_s * 1e6:>10.0f}")
    all_of_them = "all pairs" if found.rounds >= found.all_rounds else f"{len(slowest) // 2} of the pairs"
    shown += ["", f"{all_of_them} in {found.rounds} of {found.all_rounds} rounds, no host in two pairs at once"]
    shown += [f"note: {warning}" for warning in found.warnings]
    return [*shown, found.cluster.source]
