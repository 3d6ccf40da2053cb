"""One HTML page about a run, about a plan alone, or about several runs side by side.

For a run's folder (runs/demo): loss, predicted against measured, the plan, memory, the timeline, in report.html there.
For a plan.yaml: the candidates, the plan and its forecast, in plan.html next to it. For several runs: what each reached, and their curves.
"""

from __future__ import annotations

import json
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ahp.cli.following import RUNS, after, next_words
from ahp.cli.json_alone import print_alone
from ahp.cli.options import options_of
from ahp.cli.writable import require_writable
from ahp.errors import bad_input
from ahp.optional import Flag, OptionalText
from ahp.plan import Plan
from ahp.report.tables import console
from ahp.run_files import Status, judge_status, read_noticed

FOLLOW_S = 10
"""Time between two drawings of a page that follows a run."""


@dataclass(frozen=True)
class Arguments:
    runs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[RUN|PLAN ...]")] = ("runs/demo",)
    """A run's folder, or a plan.yaml; or the folders of several runs."""
    out: Annotated[OptionalText, tyro.conf.arg(aliases=["-o"])] = None
    """The page; without it report.html in the run's folder, plan.html next to plan.yaml, runs.html here for several runs."""
    follow: Flag = False
    """Draw the page again every 10 seconds while the run goes on. An open page loads itself again."""
    json: Flag = False
    """Print the path of the page as one JSON object."""


def run(argv: list[str]) -> int:
    """``ahp report RUN|PLAN ...``. Returns the exit code; raises AhpError."""
    arguments = options_of(Arguments, argv, "ahp report", __doc__)
    sources = [_found(given) for given in arguments.runs or Arguments.runs]
    if len(sources) > 1:
        return _beside(sources, arguments)
    [source] = sources
    from ahp.report.page import place_of, write

    out = place_of(source) if arguments.out is None else Path(arguments.out)
    require_writable(out, "--out")
    if arguments.follow:
        if not source.is_dir():
            raise bad_input("follow", True, "a plan does not change; give a run's folder", [False])
        _follow(source, out)
    page = write(source, out=out)
    status = judge_status(source / "status.json") if source.is_dir() else None
    following = _next(source) if status is None else f"ahp generate {shlex.quote(str(source))}"
    if arguments.json:
        ended = {"state": status.state, "step": status.step, "cause": status.cause} if status is not None else {}
        noticed = read_noticed(source / "status.json") if source.is_dir() else {}
        print_alone(json.dumps({"wrote": str(page), **ended, **noticed, "next": [following]}))
    else:
        text = "" if status is None else f"Run   {status.state}, step {status.step}{_why(status)}\n"
        text += "".join(f"{line}\n" for line in _noticed(source / "status.json"))
        print(f"{text}Wrote {page}\n{next_words(['open it in a browser', following], console().width)}")
    return 0


def _found(given: str) -> Path:
    source = Path(given)
    if source.is_dir() and not (source / "plan.yaml").is_file():
        raise bad_input("run", given, "not a run's folder: it has no plan.yaml; start one with: ahp train")
    if not given or not source.exists():
        raise bad_input("run", given, "neither a run's folder nor a plan; start a run with: ahp train")
    return source


def _beside(sources: list[Path], arguments: Arguments) -> int:
    from ahp.report.page import write_compared

    if plans := [str(source) for source in sources if not source.is_dir()]:
        raise bad_input("run", plans[0], "a plan has no curves to draw beside others'; give the folders of runs")
    if arguments.follow:
        raise bad_input("follow", True, "only one run can be followed", [False])
    out = Path(arguments.out or "runs.html")
    require_writable(out, "--out")
    page = write_compared(sources, out)
    following = f"ahp report {shlex.quote(str(sources[0]))}"
    if arguments.json:
        print_alone(json.dumps({"wrote": str(page), "next": [following]}))
    else:
        print(f"Wrote {page}\nNext: open it in a browser    {following}")
    return 0


def _follow(folder: Path, out: Path) -> None:
    """Draw the page while the run goes on, or until Ctrl-C."""
    from ahp.report.page import write

    try:
        while (status := judge_status(folder / "status.json")) is not None and status.state == "running":
            write(folder, out=out, every_s=FOLLOW_S)
            time.sleep(FOLLOW_S)
    except KeyboardInterrupt:
        return


def _why(status: Status) -> str:
    again = "; the same ahp train goes on from its last checkpoint" if status.state == "dead" else ""
    return f": {status.cause}{again}" if status.cause else ""


def _noticed(status_file: Path) -> list[str]:
    """Lines about slow ranks, and the last steps that were spikes."""
    found = read_noticed(status_file)
    lines = []
    for one in found.get("slow_ranks", []):
        words = f"Slow  rank {one.get('rank')} on {one.get('host')} ({one.get('reason')}), {one.get('ratio')} times its like"
        plan = one.get("plan")
        lines.append(f"{words}; {plan['words']}" if isinstance(plan, dict) and "words" in plan else words)
    if steps := [str(one.get("step")) for one in found.get("loss_spikes", [])]:
        lines.append(f"Spike of loss or gradient norm at step {', '.join(dict.fromkeys(steps))}")
    return lines


def _next(plan: Path) -> str:
    """The command that runs a plan, or shows more of it if its engine is not AHP's own."""
    engine = Plan.load(plan).engine.name
    return (
        after(str(plan), engine)[0] if engine == RUNS else f"ahp simulate {shlex.quote(str(plan))} --trace trace.json"
    )
