"""The output of ``ahp check`` for configurations that other projects ship.

    python benchmarks/recipes.py CLONES --markdown docs/plan/check-recipes.md

CLONES is a folder of clones, each as NAME, OWNER/NAME or OWNER+NAME, that have the commits of recipes.yaml. A recipe is judged on as many H100 as
its layout needs, in nodes of 8; on one node where the file leaves it open. Ends with 1 where one is neither judged nor refused with a reason.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import page
import tyro
import yaml

from ahp.cli.check import Arguments, Checked, judged, understood
from ahp.errors import AhpError
from ahp.words import percent, seconds

LIST = Path(__file__).parent / "recipes.yaml"
NODE, DEVICE = 8, "H100-SXM-80GB"
MOST = 190
"""Characters of a row."""
NAMED = 46
"""Characters of a recipe's path, from its end."""


@dataclass(frozen=True)
class Options:
    clones: Annotated[Path, tyro.conf.Positional]
    """Folder of clones."""
    markdown: Path | None = None
    """Page that has the markers <!-- recipes --> and <!-- end of recipes -->."""
    only: str = ""
    """Part of the path of recipes that are read; all without it."""


@dataclass(frozen=True)
class Outcome:
    path: str
    said: tuple[str, ...]
    """Layout, step, fit and what the best changes; or one cell, why it is refused."""
    fault: bool = False


def recipes(project: dict[str, Any]) -> Iterator[tuple[str, str | None, str | None]]:
    """Path, model and cluster of each recipe of a project; None where the file says it."""
    for one in project["recipes"]:
        path, said = (one, "") if isinstance(one, str) else next(iter(one.items()))
        on = said.removeprefix("on ") if said.startswith("on ") else None
        yield path, (None if on else said or None), on and f"{on}x{DEVICE}"


def extract(project: dict[str, Any], clones: Path, into: Path) -> None:
    """Put the project's recipes into a folder, as its commit has them. Raises SystemExit where no clone has it."""
    owner, name = project["project"].split("/")
    places = (clones / f"{owner}+{name}" / "repo", clones / owner / name / ".git", clones / name / ".git")
    place = next((place for place in places if place.is_dir()), None)
    if place is None:
        raise SystemExit(f"{clones}: no clone of {project['project']} (valid: {', '.join(map(str, places))})")
    for path in [*(path for path, _, _ in recipes(project)), *project.get("beside", [])]:
        words = ["git", f"--git-dir={place}", "show", f"{project['commit']}:{path}"]
        (into / path).parent.mkdir(parents=True, exist_ok=True)
        (into / path).write_bytes(subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout)


def judge(file: Path, path: str, model: str | None, on: str | None) -> Outcome:
    """The output of ``ahp check`` for a recipe."""
    try:
        size = on or _size(file, model)
        foreign, plan = understood(Arguments(file=str(file), cluster=size, model=model), {})
        return Outcome(path, _cells(size, judged(foreign, plan)))
    except AhpError as error:
        told = str(error).splitlines()[0]
        return Outcome(
            path, (re.sub(r"^file = '[^']*': ", "", told).replace("|", "\\|").replace(str(file.parent), "."),)
        )
    except Exception as error:  # what this script is there to find
        return Outcome(path, (f"FAULT {type(error).__name__}: {error}",), fault=True)


def _size(file: Path, model: str | None) -> str:
    """A cluster for a recipe's own number of ranks."""
    least = f"1x{NODE}x{DEVICE}"
    _, plan = understood(Arguments(file=str(file), cluster=least, model=model), {})
    ranks = plan.parallelism.world_size
    return f"1x{ranks}x{DEVICE}" if ranks <= NODE else f"{-(-ranks // NODE)}x{NODE}x{DEVICE}"


def _cells(size: str, found: Checked) -> tuple[str, ...]:
    layout, best, today = found.plan.parallelism.short(), found.best.parallelism.short(), found.today
    on = size.partition(f"x{DEVICE}")[0]
    if today is None:
        why = "" if found.current is None else str(found.current.against_best)
        return (f"{layout}, on {on}: {why}",)
    assert found.best.forecast is not None
    step = f"{seconds(today.step_time_s)} ({seconds(today.step_time_low_s)} to {seconds(today.step_time_high_s)})"
    if not today.fits:
        change = f"{best}: {seconds(found.best.forecast.step_time_s)}"
    elif found.saves is not None and not found.is_best:
        change = f"{best}: {percent(found.saves)} less"
    else:
        change = "nothing"
    return (layout, on, step, "yes" if today.fits else "no", change)


def tables(project: dict[str, Any], outcomes: list[Outcome]) -> str:
    """A project's recipes as Markdown: those that were judged, then those that were refused."""
    lines = [f"### {project['project']}", f"At {project['commit'][:8]}, {project['licence']}.", ""]
    judged_ones = [(f"`{_short(one.path)}`", *one.said) for one in outcomes if len(one.said) > 1]
    if judged_ones:
        head = ("recipe", "layout", "H100", "step (nine in ten)", "fits", "it would change")
        lines += [page.table(head, judged_ones), ""]
    refused = [(f"`{_short(one.path)}`", _cut(one.said[0], one.path)) for one in outcomes if len(one.said) == 1]
    if refused:
        lines += [page.table(("recipe", "refused, because"), refused).replace("---:", "---"), ""]
    return "\n".join(lines)


def _short(path: str) -> str:
    """The end of a path, from a folder on."""
    while len(path) > NAMED and "/" in path:
        path = path.partition("/")[2]
    return path


def _cut(text: str, path: str) -> str:
    room = MOST - len(_short(path))
    return text if len(text) <= room else f"{text[: room - 4]} ..."


def main() -> int:
    """Returns the exit code: 1 where a recipe is a fault."""
    options = tyro.cli(Options, description=__doc__)
    if options.markdown is not None:
        page.require(options.markdown, "recipes")
    parts, every = [], []
    for project in yaml.safe_load(LIST.read_text(encoding="utf-8")):
        with tempfile.TemporaryDirectory() as folder:
            extract(project, options.clones, Path(folder))
            outcomes = []
            for path, model, on in recipes(project):
                if options.only in path:
                    outcomes.append(judge(Path(folder) / path, path, model, on))
                    print(path, *outcomes[-1].said, sep="  ", file=sys.stderr, flush=True)
        every += outcomes
        parts.append(tables(project, outcomes))
    count = sum(len(one.said) > 1 for one in every)
    text = f"{len(every)} recipes: {count} judged, {len(every) - count} refused.\n\n" + "\n".join(parts)
    if options.markdown is not None:
        page.write(options.markdown, "recipes", text)
    else:
        print(text)
    return int(any(one.fault for one in every))


if __name__ == "__main__":
    sys.exit(main())
