"""From a command to its answer: what the commands that plan take from start to end, and what they import.

    python benchmarks/commands.py             seven turns of each, of a model of the catalogue and of one that is not known yet
    python benchmarks/commands.py --quick     one turn

Each command is a process of its own in an empty folder. A known model is one whose graph ships or was traced before (``graph/kept.py``);
of the others the cache is empty each time. Processor time is that of the process and its children. stdout: the table; stderr: progress.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import options
from machine import machine
from page import require, table

MARKER = "commands"
LARGE = ("torch", "transformers", "scipy")
"""What takes long to import."""

OTHER = {"model_type": "llama", "vocab_size": 32000, "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 24,
         "num_attention_heads": 20, "num_key_value_heads": 20, "max_position_embeddings": 8192}  # fmt: skip
"""A config that is in no catalogue."""

RUN = """
import sys
from ahp.cli.main import main
code = main(sys.argv[1:])
print("imported", len(sys.modules), *[name for name in LARGE if name in sys.modules], file=sys.stderr)
raise SystemExit(code)
""".replace("LARGE", repr(LARGE))


@dataclass(frozen=True)
class Command:
    """What is typed, and whether its model's graph is known before."""

    words: str
    known: bool = True
    before: tuple[str, ...] = ()
    """Commands that make what it reads; not measured."""


PLAN = "plan llama3-8b 8xH100"
COMMANDS = (
    Command("--help"),
    Command(PLAN),
    Command("plan llama3-70b 8x8xH100"),
    Command("simulate plan.yaml", before=(PLAN,)),
    Command("explain plan.yaml", before=(PLAN,)),
    Command("export slurm plan.yaml", before=(PLAN,)),
    Command("plan other.json 8xH100"),
    Command("plan other.json 8xH100", known=False),
)


def measured(command: Command, turns: int) -> dict[str, Any]:
    """Medians of some turns in seconds, and what the last one imported."""
    walls, processors, imported = [], [], []
    with tempfile.TemporaryDirectory(prefix="ahp-commands-") as folder:
        (Path(folder) / "other.json").write_text(json.dumps(OTHER))
        for words in (*command.before, *([command.words] if command.known else [])):
            answer(words, folder, "known")
        for turn in range(turns):
            wall_s, processor_s, imported = answer(command.words, folder, "known" if command.known else f"empty-{turn}")
            walls.append(wall_s)
            processors.append(processor_s)
    return {
        "command": f"ahp {command.words}",
        "known": command.known,
        "wall_s": statistics.median(walls),
        "worst_s": max(walls),
        "processor_s": statistics.median(processors),
        "modules": int(imported[0]),
        "imports": imported[1:],
    }


def answer(words: str, folder: str, cache: str) -> tuple[float, float, list[str]]:
    """Seconds on the clock and of processors, and what was imported. Ends the benchmark where the command fails."""
    environment = {**os.environ, "AHP_CACHE": str(Path(folder) / cache)}
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", RUN, *words.split()], cwd=folder, env=environment, capture_output=True, text=True
    )
    wall_s, after = time.perf_counter() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"ahp {words}: {done.stderr.strip()}")
    line = next(line for line in done.stderr.splitlines() if line.startswith("imported "))
    processor_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall_s, processor_s, line.split()[1:]


def markdown(rows: list[dict[str, Any]], turns: int, where: str, command: str) -> str:
    """The table with what it was measured on."""
    head = [
        "command",
        "the model's graph",
        "seconds, median",
        "worst",
        "of processor time",
        "modules imported",
        "of the large ones",
    ]
    cells = [
        [f"`{row['command']}`", "kept" if row["known"] else "traced", f"{row['wall_s']:.2f}", f"{row['worst_s']:.2f}", f"{row['processor_s']:.2f}",
         str(row["modules"]), ", ".join(row["imports"]) or "none"]
        for row in rows
    ]  # fmt: skip
    return f"`{command}`\n\n{turns} turns of each, start to end.\n\n{where}\n\n{table(head, cells)}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7, help="of each command (default: 7)")
    options.add_output(parser, "one turn of each")
    arguments = parser.parse_args()
    if arguments.turns < 1:
        parser.error("--turns: at least 1")
    turns = 1 if arguments.quick else arguments.turns
    if arguments.markdown:
        require(arguments.markdown, MARKER)
    rows = []
    for command in COMMANDS:
        rows.append(measured(command, turns))
        print(f"{rows[-1]['command']:<34} {rows[-1]['wall_s']:.2f} s", file=sys.stderr, flush=True)
    here = machine(1)
    where = f"{here.cpu}, {here.cores} cores, {here.memory_gib:.0f} GiB; Python {here.python}, torch {here.torch}; {here.date}"
    text = markdown(rows, turns, where, f"python benchmarks/commands.py {' '.join(sys.argv[1:])}".strip())
    options.tell(arguments, MARKER, text, {"rows": rows, "turns": turns})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
