"""One HTML page about a run: loss, predicted against measured, the plan, memory, the timeline.

RUN is a run's folder (runs/demo); a plan.yaml in it is understood as its folder.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ahp.errors import bad_input


@dataclass(frozen=True)
class Arguments:
    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")] = "runs/demo"
    """A run's folder, or the plan.yaml in it."""
    json: bool = False
    """Print the path of the page as one JSON object."""


def run(argv: list[str]) -> int:
    """``ahp report RUN``. Returns the exit code; raises AhpError."""
    arguments = tyro.cli(Arguments, args=argv, prog="ahp report", description=__doc__)
    folder = Path(arguments.run)
    if folder.is_file():
        folder = folder.parent
    if not (folder / "plan.yaml").is_file():
        raise bad_input("run", arguments.run, "no run's folder: it holds no plan.yaml; start one with: ahp train")
    from ahp.report.page import write

    page = write(folder)
    if arguments.json:
        print(json.dumps({"wrote": str(page)}))
    else:
        print(f"Wrote {page}\nNext: open it in a browser    ahp generate {folder}")
    return 0
