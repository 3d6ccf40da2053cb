"""``ahp verify``: compares a plan with one process, step by step."""

from __future__ import annotations

import json
import math
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.table import Table

from ahp.cli.following import show_next
from ahp.cli.json_alone import print_alone
from ahp.cli.options import options_of
from ahp.optional import Flag
from ahp.plan import Plan
from ahp.report.tables import console
from ahp.words import number_of

if TYPE_CHECKING:
    from ahp.runtime.check.verify import Comparison


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
    arguments = options_of(Arguments, argv, "ahp verify")
    from ahp.runtime.check.verify import verify

    file = arguments.plan / "plan.yaml" if arguments.plan.is_dir() else arguments.plan
    plan = Plan.load(file)
    rows = verify(plan, steps=arguments.steps, say=lambda text: print(text, file=sys.stderr))
    equal = all(row.equal for row in rows)
    following = [_following(arguments.plan, equal)]
    if arguments.json:
        print_alone(json.dumps({"equal": equal, "steps": [_plain(row) for row in rows], "next": following}))
    else:
        _print(rows, plan, equal)
        show_next(console(), following)
    return 0 if equal else 1


def _plain(row: Comparison) -> dict[str, float | None]:
    """A step as data; None for what is no number: JSON has no word for a norm that overflowed fp16."""
    figures = {**asdict(row), "difference": row.difference}
    return {key: value if math.isfinite(value) else None for key, value in figures.items()}


def _following(plan: Path, equal: bool) -> str:
    """The next command. At the first step a difference can come only from the forward or backward pass."""
    if not equal:
        return f"ahp verify {shlex.quote(str(plan))} --steps 1"
    return f"ahp {'report' if plan.is_dir() else 'train'} {shlex.quote(str(plan))}"


def _print(rows: list[Comparison], plan: Plan, equal: bool) -> None:
    out = console()
    layout = plan.parallelism
    workers = number_of(layout.world_size, "worker")
    out.print(f"{layout.short()}, {plan.job.precision}", soft_wrap=True)
    out.print(f"loss and gradient norm on {workers}, and on one process in plain PyTorch\n")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("step", "loss", "one process", "gradient norm", "one process", "difference", "allowed"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row.step), f"{row.loss:.6f}", f"{row.loss_one_device:.6f}", f"{row.grad_norm:.6f}",
            f"{row.grad_norm_one_device:.6f}", f"{row.difference:.1e}", f"{row.tolerance:.1e}",
        )  # fmt: skip
    out.print(table)
    worst = max(row.difference for row in rows)
    result = f"largest relative difference {worst:.1e} in {number_of(len(rows), 'step')}"
    if not equal:
        result += f", more than allowed from step {next(row.step for row in rows if not row.equal)} on"
    out.print(f"\n{'Equal' if equal else 'NOT EQUAL'}: {result}")
