"""``ahp verify``: a plan against one device, step by step."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.table import Table

from ahp.plan import Plan

if TYPE_CHECKING:
    from ahp.runtime.check.verify import Comparison

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclass
class Arguments:
    """Run a plan's layout on workers of this machine, and the same job on one process in plain PyTorch; compare the
    loss and the gradient norm before clipping at every step. Exit code 1 when they differ."""

    plan: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="PLAN")]
    """A plan.yaml, or a run's folder."""
    steps: int = 10
    """Steps to compare."""
    json: Flag = False
    """Print the comparison as JSON."""


def run(argv: list[str]) -> int:
    """Parse, verify, print. Returns 0 when every step is equal within tolerance, else 1."""
    arguments = tyro.cli(Arguments, prog="ahp verify", args=argv)
    from ahp.runtime.check.verify import verify

    file = arguments.plan / "plan.yaml" if arguments.plan.is_dir() else arguments.plan
    plan = Plan.load(file)
    rows = verify(plan, steps=arguments.steps, say=lambda text: print(text, file=sys.stderr))
    equal = all(row.equal for row in rows)
    if arguments.json:
        print(json.dumps({"equal": equal, "steps": [{**asdict(row), "difference": row.difference} for row in rows]}))
    else:
        _print(rows, plan, equal)
        print(f"Next: ahp train {file}" if equal else "Next: ahp verify with --steps 1, to see where it begins")
    return 0 if equal else 1


def _print(rows: list[Comparison], plan: Plan, equal: bool) -> None:
    table = Table(title=f"{plan.parallelism.short()} against one device ({plan.job.precision})", title_justify="left")
    for title in ("step", "loss", "one device", "gradient norm", "one device", "difference", "allowed"):
        table.add_column(title, justify="right")
    for row in rows:
        mark = "" if row.equal else "  <- differs"
        table.add_row(
            str(row.step), f"{row.loss:.6f}", f"{row.loss_one_device:.6f}", f"{row.grad_norm:.6f}",
            f"{row.grad_norm_one_device:.6f}", f"{row.difference:.1e}{mark}", f"{row.tolerance:.1e}",
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    worst = max(row.difference for row in rows)
    print(f"{'equal' if equal else 'NOT EQUAL'}: largest relative difference {worst:.1e} over {len(rows)} steps")
