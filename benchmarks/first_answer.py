"""How long the commands that plan take until they answer, in processor time, and how much they import.

    python benchmarks/first_answer.py             medians of 5 rounds
    python benchmarks/first_answer.py --quick     one round, of the smallest model

Each command is a process of its own. Its model is a name of the catalogue, whose graph ships with the package; then the same
model as a config.json of one's own, with an empty cache (the first command traces it) and with what that left there.
stdout: the table; stderr: progress.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import options
from machine import machine
from page import require, table

MARKER = "first_answer"
MODEL, CLUSTER = "llama3-8b", "8xH100"
WITHOUT_MODEL = ("--help", "models", "devices")
WITH_MODEL = ("plan MODEL CLUSTER", "simulate plan.yaml", "explain plan.yaml", "export slurm plan.yaml")
"""In this order: the first writes the plan that the others read."""

RUN = """
import resource, sys
from ahp.cli.main import main
code = main(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_SELF)
heavy = [name for name in ("torch", "transformers", "scipy") if name in sys.modules]
print(code, used.ru_utime + used.ru_stime, len(sys.modules), *heavy, file=sys.stderr)
"""


@dataclass(frozen=True)
class Answer:
    """One process: processor time from the start of Python to the answer, modules imported, the heavy ones among them."""

    used_s: float
    modules: int
    heavy: tuple[str, ...]


def answer(words: list[str], folder: Path) -> Answer:
    """Run one command in ``folder``, which has a cache of its own. Raises RuntimeError where it fails."""
    environment = {**os.environ, "AHP_CACHE": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", RUN, *words], cwd=folder, env=environment, capture_output=True, text=True
    )
    last = (done.stderr.splitlines() or [""])[-1].split()
    if done.returncode or not last or last[0] != "0":
        raise RuntimeError(f"ahp {' '.join(words)}: {done.stderr[-2000:]}")
    return Answer(float(last[1]), int(last[2]), tuple(last[3:]))


def measure(model: str) -> dict[str, dict[str, Answer]]:
    """Every command once: by its name, then by how its model is given."""
    from ahp.graph.catalogue import CATALOGUE

    found: dict[str, dict[str, Answer]] = {}
    with tempfile.TemporaryDirectory() as place:
        named, own = Path(place) / "named", Path(place) / "own"
        for folder in (named, own):
            folder.mkdir()
        (own / "config.json").write_text(json.dumps(CATALOGUE[model].config))
        for command in WITHOUT_MODEL:
            found[command] = {"named": answer([command], named)}
        for command in WITH_MODEL:
            of = {"named": model, "own": "config.json"}
            words = {
                key: command.replace("MODEL", name).replace("CLUSTER", CLUSTER).split() for key, name in of.items()
            }
            found[command] = {"named": answer(words["named"], named)}
            if command == WITH_MODEL[0]:
                found[command]["first"] = answer(words["own"], own)
            found[command]["again"] = answer(words["own"], own)
    return found


def rows(rounds: list[dict[str, dict[str, Answer]]]) -> list[dict[str, Any]]:
    """Medians over the rounds. Imports do not vary: those of the last round."""
    return [
        {
            "command": command,
            **{f"{how}_s": statistics.median(one[command][how].used_s for one in rounds) for how in last},
            "modules": last["named"].modules,
            "heavy": last["named"].heavy,
            "first_heavy": last["first"].heavy if "first" in last else (),
        }
        for command, last in rounds[-1].items()
    ]


def markdown(found: list[dict[str, Any]], model: str, rounds: int, where: str, command: str) -> str:
    head = ["command", "model of the catalogue, s", "own config, first time, s", "again, s", "modules", "heavy ones"]

    def cell(row: dict[str, Any], how: str) -> str:
        return f"{row[f'{how}_s']:.2f}" if f"{how}_s" in row else ""

    cells = [
        [f"`ahp {row['command']}`", *(cell(row, how) for how in ("named", "first", "again")), str(row["modules"]),
         ", ".join(row["heavy"]) or "none"]
        for row in found
    ]  # fmt: skip
    about = (
        f"Seconds of processor time from the start of Python to the answer, medians of {rounds} processes; MODEL is {model}, CLUSTER "
        f"{CLUSTER}. Modules: those imported for the model of the catalogue, torch, transformers and scipy being the heavy ones."
    )
    return f"`{command}`\n\n{about}\n\n{where}\n\n{table(head, cells)}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="processes of each command (default: 5)")
    options.add_output(parser, "the smallest model, one round")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds: at least 1")
    if arguments.markdown:
        require(arguments.markdown, MARKER)
    model, rounds = ("tiny", 1) if arguments.quick else (MODEL, arguments.rounds)
    where, measured = machine(1), []
    for number in range(rounds):
        measured.append(measure(model))
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    found = rows(measured)
    command = f"python benchmarks/first_answer.py {' '.join(sys.argv[1:])}".strip()
    words = re.sub(r"; \d+ workers [^;]*", "", where.words())  # no worker has run
    text = markdown(found, model, rounds, words, command)
    options.tell(arguments, MARKER, text, {"machine": asdict(where), "model": model, "rows": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
